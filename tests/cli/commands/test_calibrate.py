"""`canzona calibrate` with what cannot work: refused at once, with a fix, before any rank starts."""

from pathlib import Path

import pytest

from tests.cli.commands.support import canzona


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["recipe=tiny", "gpus=1"], 2, ["gpus = 1", "gpus=4"]),
        (["recipe=tiny", "gpsu=2", "train.steps=many"], 2, ["2 problems", "did you mean", "train.steps"]),
        (["recipe=tiny", "cluster=./abacus.yaml"], 2, ["cluster = ./abacus.yaml", "canzona calibrate"]),
        (["recipe=tiny", "--out", "there.yaml"], 2, ["already exists", "--force"]),
        (["recipe=tiny", "--out", "there.yaml/x.yaml"], 3, ["cannot be written"]),
        (["recipe=8b", "gpus=1"], 3, ["no GPU is visible here"]),
    ],
)
def test_is_refused(arguments: list[str], code: int, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("name: mine\n")
    result = canzona("calibrate", *arguments, cwd=tmp_path, environment={"CUDA_VISIBLE_DEVICES": ""}, code=code)
    for words in said:
        assert words in result.stderr
    assert not result.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["there.yaml"]
