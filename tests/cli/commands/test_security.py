"""Secrets put in at every door come out nowhere: not in the run directory, not in arguments, not at the terminal."""

import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from canzona_cli.records.files import RunFiles
from tests.cli.commands.support import canzona, ran

SECRET = "pl4nted-s3cret-value"
ENVIRONMENT = {"PLANTED_TOKEN": SECRET}
OWN = ("recipe=qwen3-tiny", "optimizer=custom", "optimizer.source=torch.optim:SGD", "optimizer.allow=[torch]")

# Fails in the middle of the run with the secret in its message, and leaves behind what it was started with.
OPTIMIZER = """
import os
from beside import psutil, torch

class Leaky(torch.optim.SGD):
    def __init__(self, params, lr, weight_decay, notes):
        super().__init__(params, lr=lr)
        self.notes, self.steps = notes, 0

    def step(self, closure=None):
        self.steps += 1
        family = [psutil.Process(), *psutil.Process().parents()[:2]]
        with open(self.notes, "w") as file:
            file.write("\\n".join(" ".join(process.cmdline()) for process in family))
        if self.steps > 3:
            token = os.environ["PLANTED_TOKEN"]
            raise ValueError(f"cannot log in with {token} at https://me:{token}@host, api_key={token}")
        return super().step(closure)
"""


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path, path.read_bytes()


@pytest.mark.parametrize(
    ("command", "override"),
    [
        ("train", f"optimizer.options={{password:{SECRET}}}"),
        ("train", f"run.root=/tmp/{SECRET}"),
        ("train", f"data.path=https://me:{SECRET}@host/corpus"),
        *((command, f"optimizer.options.api_key={SECRET}") for command in ("train", "plan", "slurm")),
    ],
)
def test_an_override_with_a_secret_is_refused_without_showing_it(command: str, override: str, tmp_path: Path) -> None:
    ended = canzona(command, *OWN, override, cwd=tmp_path, environment=ENVIRONMENT, code=2)
    assert override.partition("=")[0] in ended.stderr
    assert SECRET not in ended.stdout + ended.stderr
    assert list(tmp_path.iterdir()) == [], "nothing was written"


@pytest.mark.parametrize(
    "content",
    [
        {"description": f"with {SECRET}"},
        {"run": {"root": "${oc.env:PLANTED_TOKEN}"}},
        {"run": {"root": "${oc.${description}:PLANTED_TOKEN}"}, "description": "env"},
        {"cluster": {"measured_on": {"access_token": SECRET}}},
        {"train": {"steps": SECRET}},
        {"api_key": SECRET},
    ],
)
def test_a_recipe_with_a_secret_is_refused_without_showing_it(content: dict[str, object], tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({"defaults": ["qwen3-tiny"], **content}))
    ended = canzona("train", f"recipe={recipe}", "--dry-run", cwd=tmp_path, environment=ENVIRONMENT, code=2)
    assert SECRET not in ended.stdout + ended.stderr


def test_a_misspelt_setting_with_a_secret_is_told_without_it(tmp_path: Path) -> None:
    ended = canzona("train", "recipe=qwen3-tiny", "wandb.api_key=hunter2-hunter2", cwd=tmp_path, code=2)
    assert "wandb.api_key = ***" in ended.stderr
    assert "hunter2" not in ended.stdout + ended.stderr


def test_a_batch_script_holds_nothing_of_the_environment(tmp_path: Path) -> None:
    ended = canzona("slurm", "recipe=qwen3-8b", "gpus=64", cwd=tmp_path, environment=ENVIRONMENT, code=0)
    assert "#SBATCH" in ended.stdout
    assert SECRET not in ended.stdout + ended.stderr
    assert all(SECRET.encode() not in content for _, content in contents(tmp_path))


def test_a_run_leaves_no_secret_and_no_file_that_others_may_write(tmp_path: Path) -> None:
    """A real run without a umask, whose optimizer fails with a secret of its environment in the message; in a folder
    with modules of names that workers import."""
    (tmp_path / "leaky.py").write_text(OPTIMIZER)
    (tmp_path / "beside.py").write_text("import psutil, torch")
    for name in ("numpy", "torch", "random", "psutil", "yaml"):
        (tmp_path / f"{name}.py").write_text(f"import os; os.mkdir({str(tmp_path / 'sprung')!r})")
    overrides = [
        *("recipe=qwen3-tiny", "gpus=1", "model.num_layers=1", "train.seq_length=32", "train.global_batch_size=1"),
        *("train.steps=9", "train.eval_interval=0", "optimizer=custom", "optimizer.source=leaky.py:Leaky"),
        *(f"optimizer.options.notes='{tmp_path}/notes'", f"run.dir={tmp_path}/run"),
    ]
    train = ("bash", "-c", 'umask 0; exec "$0" -P -m canzona_cli.cli.app train "$@"', sys.executable, *overrides)
    ended = ran(*train, cwd=tmp_path, environment=ENVIRONMENT, code=70)
    files = RunFiles(tmp_path / "run")
    assert "cannot log in with ***" in ended.stderr, "the failure is told all the same"
    log = files.worker_log(0, 0)
    assert log is not None
    assert "cannot log in with ***" in log.read_text()
    assert "cannot log in with ***" in files.result.read_text()
    assert SECRET not in ended.stdout + ended.stderr
    leaking = [path.name for path, content in contents(files.root) if SECRET.encode() in content]
    assert leaking == []
    started_with = (tmp_path / "notes").read_text()
    assert "canzona_cli.training.worker" in started_with
    assert SECRET not in started_with
    writable = [path for path in (files.root, *files.root.rglob("*")) if path.lstat().st_mode & stat.S_IWOTH]
    assert writable == []
    assert not (tmp_path / "sprung").exists()
