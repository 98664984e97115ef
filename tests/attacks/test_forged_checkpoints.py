"""A checkpoint that was forged with all its hashes right is refused whole, by all ranks together, with exit code 5."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from canzona_cli.checkpoint.manifest import Scalar
from canzona_cli.checkpoint.restore import restore, state_mismatch, verify_together
from canzona_cli.checkpoint.store import CheckpointStore, choose
from canzona_cli.checkpoint.verify import read_manifest
from canzona_cli.cli.views.checkpoint import verify_all
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import CheckpointInvalid
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Layout
from canzona_cli.launch.resume import choose_resumption
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.attacks import forge
from tests.attacks.test_odd_files import LAUGHS as BOMB
from tests.checkpoint.checkpoints import save as save_small
from tests.cli.commands.support import canzona
from tests.dist.jobs import build, planned
from tests.dist.ranks import run_ranks
from tests.dist.samples import samples_of
from tests.dist.saved import FIXED, resolve, save
from tests.dist.synthetic import finish_gathering

REFUSED_HEADER = "a header that the library refuses"
RUN = ("gpus=2", "optimizer=soap", "parallel.pp=1")


def _attacked(config: RunConfig, layout: Layout, plan: Plan | None, root: Path) -> dict[str, str]:
    """One rank that saves after a step, and is then given each of the forgeries; what it said to each."""
    trainee = build(config, layout, plan)
    samples = samples_of(config.setup, layout.global_batch_size)
    train_step(trainee, BatchStream(samples, trainee.world))
    finish_gathering(trainee)
    save(config, trainee, root / "honest", 1)
    honest = root / "honest" / "step-00000001"
    if trainee.world.rank == 0:
        for kind, (change, _) in forge.KINDS.items():
            forge.forged(honest, root / kind, change)
        forge.odd_header(forge.copied(honest, root / REFUSED_HEADER / honest.name))
    torch.distributed.barrier()
    said = {}
    for kind in (*forge.KINDS, REFUSED_HEADER, "honest"):
        folder = root / kind / honest.name
        try:
            restore(trainee, folder, verify_together(trainee.world, folder))
            said[kind] = ""
        except CheckpointInvalid as error:
            said[kind] = str(error)
    return said


def test_whatever_is_forged_all_ranks_refuse_it_and_take_the_honest_one(tmp_path: Path) -> None:
    config, layout = resolve(*RUN)
    first, second = run_ranks(2, partial(_attacked, config, layout, planned(config, layout), tmp_path))
    assert first.pop("honest") == second.pop("honest") == ""
    assert "its header cannot be read" in first.pop(REFUSED_HEADER)
    missing = {kind: said for kind, said in first.items() if kind in forge.KINDS and forge.KINDS[kind][1] not in said}
    assert missing == {}
    assert first.keys() == forge.KINDS.keys()
    assert {kind: said for kind, said in second.items() if kind in first and said != first[kind]} == {}
    honest = tmp_path / "honest" / "step-00000001"
    begins = replace(config, checkpoint=replace(config.checkpoint, resume=str(honest)))
    assert (found := choose_resumption(begins, layout)) is not None
    assert found.checkpoint == honest
    assert verify_all(choose(honest)).problems == []
    late = set()
    for kind in (*forge.KINDS, REFUSED_HEADER):
        folder = tmp_path / kind / honest.name
        try:
            choose_resumption(replace(begins, checkpoint=replace(config.checkpoint, resume=str(folder))), layout)
        except CheckpointInvalid as error:
            said = str(error)
            assert (forge.KINDS[kind][1] if kind in forge.KINDS else "header") in said, (kind, said)
            assert verify_all(choose(folder)).problems, kind
        else:
            late.add(kind)
    assert late == IN_TENSORS | MISSING | OF_SOAP, "all else is refused before a worker starts, and by verify"
    resumed = f"checkpoint.resume={tmp_path / 'a master that is turned' / honest.name}"
    for command in (("train", "--dry-run"), ("train", f"run.root={tmp_path}/runs")):
        done = canzona(*command, *FIXED, *RUN, resumed)
        assert (done.returncode, "the model's is" in done.stderr) == (5, True), (command, done.stderr)
    assert not (tmp_path / "runs").exists()


IN_TENSORS = {kind for kind, (_, said) in forge.KINDS.items() if said.startswith(("1 of ", "state position"))}
"""Seen by whoever reads the tensors."""
MISSING = {
    *("a master that is missing", "a basis that is missing", "a step that is missing"),
    *("a rank without generators", "a generator of another length"),
}
"""The changes that only the ranks that read these parts can detect."""
OF_SOAP = {"a factor of another shape", "state that no optimizer has"}
"""The changes to state other than moments, which only the optimizer itself knows."""


class _Counting(torch.optim.SGD):
    """Somebody's own, which counts in its group."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0].update(k=0, mode="plain", betas=(0.9, 0.95))


@pytest.mark.parametrize(
    ("shared", "wrong"),
    [
        ({}, ""),
        ({"k": 3, "mode": "other"}, ""),
        ({"k": 0.5, "new": 1}, ""),
        ({"k": "3"}, "k of a parameter group cannot be a str"),
        ({"mode": 3}, "mode of a parameter group cannot be a int"),
        ({"betas": 3}, "betas of a parameter group cannot be a int"),
    ],
)
def test_what_comes_into_a_parameter_group_is_of_the_kind_that_is_there(shared: dict[str, Scalar], wrong: str) -> None:
    master = torch.nn.Parameter(torch.zeros(2, 3))
    assert state_mismatch(_Counting([master]), master, {}, {}, shared) == wrong


def test_a_manifest_of_no_time_and_a_bomb_for_settings_are_told_apart(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    root.parent.mkdir()
    for step in (10, 20):
        save_small(root, step)
    folder = root / "step-00000020"
    forge.rewrite(folder, "config.yaml", lambda _: BOMB.encode())
    for command in ("list", "verify"):
        done = canzona("checkpoint", command, str(folder.parents[1]), code=0)
    with pytest.raises(CheckpointInvalid, match="expands to more than") as refused:
        choose_resumption(resolve("gpus=1", f"run.dir={root.parent}")[0], resolve("gpus=1")[1])
    assert "checkpoint.resume=step-00000010" in refused.value.problems[0].fix
    manifest = read_manifest(folder)
    for created in (math.nan, -1.0):
        forge.seal(folder, replace(manifest, created=created))
        for command, code in (("list", 0), ("verify", 5)):
            done = canzona("checkpoint", command, str(folder.parents[1]), code=code)
            assert "Traceback" not in done.stderr + done.stdout


def test_verifying_a_run_that_goes_on_leaves_out_what_it_removes_meanwhile(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    root.parent.mkdir()
    for step in (10, 20, 30):
        save_small(root, step)
    chosen = choose(root.parent)
    assert CheckpointStore(root).retain(2, None) == ("step-00000010",)
    verified = verify_all(chosen)
    assert verified.problems == []
    assert [one.checkpoint.step for one in verified.verified] == [20, 30]
    assert verified.removed == ("step-00000010",)
    gone = choose(root / "step-00000020")
    CheckpointStore(root).retain(1, None)
    with pytest.raises(CheckpointInvalid, match="removed while"):
        verify_all(gone)
