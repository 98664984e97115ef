"""Whether a profile was measured on this machine."""

from dataclasses import replace

from canzona_cli.cluster.machine import fingerprint, machine_facts, profile_gaps, profile_mismatches
from canzona_cli.config.schema import ClusterConfig
from canzona_cli.run.machine import cores
from tests.sizes import CPU, H100


def here(**changed: str | int) -> ClusterConfig:
    return replace(CPU, measured_on={**machine_facts("cpu"), "base": "cpu", **changed})


def test_a_profile_of_this_machine_and_one_by_hand_are_silent() -> None:
    assert profile_mismatches(here()) == profile_mismatches(CPU) == ()


def test_how_torch_was_built_makes_no_other_machine() -> None:
    assert profile_mismatches(here(torch=f"{machine_facts('cpu')['torch']}".partition("+")[0] + "+other")) == ()


def test_each_difference_is_named() -> None:
    [said] = profile_mismatches(here(processor="Abacus", cores=99, torch="0.1"))
    for part in ("processor Abacus there", f"cores 99 there, {cores()} here", "torch 0.1 there", "canzona calibrate"):
        assert part in said


def test_a_gpus_profile_is_about_the_gpu() -> None:
    gpu = replace(H100, measured_on={"gpu": "NVIDIA Abacus", "processor": "Abacus", "cores": 99})
    [said] = profile_mismatches(gpu)
    assert "gpu NVIDIA Abacus there" in said
    assert "processor" not in said


def test_a_calibration_that_was_cut_off_says_what_it_lacks() -> None:
    [said] = profile_gaps(replace(here(), not_measured=("model", "updates")))
    assert "model, updates come from profile cpu" in said
    assert not profile_gaps(here())


def test_the_fingerprint_names_no_machine() -> None:
    assert len(fingerprint()) == 8
    assert int(fingerprint(), 16) >= 0
    assert fingerprint() == fingerprint()
