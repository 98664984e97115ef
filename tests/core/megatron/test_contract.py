"""The installed Megatron-core is as canzona needs it, and `verify` would say so if it were not."""

import importlib
from pathlib import Path

import pytest

from canzona_cli.core.megatron import contract
from canzona_cli.core.megatron.contract import LOOP, PINNED, Pinned, source_digest, verify, verify_loop

EVERY = (*PINNED, *LOOP)
NAMES = sorted({pin.name for pin in EVERY})


def _parent(name: str) -> tuple[object, str]:
    path, _, last = name.rpartition(".")
    return contract._resolve(path), last


def _reported(name: str) -> list[str]:
    return [problem.reason for problem in (*verify(), *verify_loop()) if problem.key == name]


def test_nothing_is_wrong_with_the_installed_release() -> None:
    assert verify() == []
    assert verify_loop() == []


# Every class has a constructor, at least its parent's.
@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("__init__")])
def test_a_removed_name_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, last = _parent(name)
    monkeypatch.delattr(parent, last)
    reasons = _reported(name)
    assert len(reasons) == sum(pin.name == name for pin in EVERY)
    assert all("it is missing" in reason for reason in reasons)


@pytest.mark.parametrize("name", sorted({pin.name for pin in EVERY if pin.check is not contract.exists}))
def test_a_changed_name_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(something: int) -> int:
        return something

    parent, last = _parent(name)
    monkeypatch.setattr(parent, last, other)
    assert len(_reported(name)) == sum(pin.name == name for pin in EVERY)


def test_a_problem_says_what_is_relied_on_what_was_found_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    group = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")._ParamAndGradBucketGroup

    def finish_param_sync(self: object) -> None:
        """Waits and starts: param_gather_handle, next_param_gather_bucket_group."""

    monkeypatch.setattr(group, "finish_param_sync", finish_param_sync)
    problem = verify()[-1]
    assert problem.key.endswith("_ParamAndGradBucketGroup.finish_param_sync")
    assert (
        problem.reason
        == "it can be told not to start the next group, but it has no parameter skip_next_bucket_dispatch"
    )
    assert problem.fix == "install megatron-core 0.19.2"


def test_a_package_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "PINNED", (Pinned(name="megatron.nowhere.thing", relied_on="it is there"),))
    [problem] = verify()
    assert problem.reason.startswith("it is there, but it is missing")


def test_a_digest_sees_statements_and_blocks_but_no_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def digest(module: str, source: str) -> str:
        (tmp_path / f"{module}.py").write_text(source)
        return source_digest(importlib.import_module(module).step)

    plain = digest("digest_plain", "def step(x):\n    if x:\n        x += 1\n    return x\n")
    assert digest("digest_commented", "def step(x):\n\n  # Why.\n  if x:\n    x += 1  # one\n  return x\n") == plain
    assert digest("digest_nested", "def step(x):\n    if x:\n        x += 1\n        return x\n") != plain
    assert digest("digest_other", "def step(x):\n    if x:\n        x += 2\n    return x\n") != plain
