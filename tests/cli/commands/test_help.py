"""Help, version and misuse: quick to import, clear, and with the right exit code."""

import pytest

from canzona_cli import __version__
from canzona_cli.cli.app import COMMANDS
from tests.cli.commands.support import canzona, imports_none_of

HEAVY = ("torch", "megatron", "numpy")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_command_in_full(flag: str) -> None:
    result = canzona(flag, code=0)
    for name, meaning in COMMANDS.items():
        assert f"{name} " in result.stdout
        assert meaning in result.stdout, "not cut off at 80 columns"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = canzona(command, "-h", code=0)
    assert f"Usage: canzona {command}" in result.stdout
    assert "<list[" not in result.stdout, "no Python types"


def test_version() -> None:
    result = canzona("--version")
    assert (result.returncode, result.stdout) == (0, f"canzona {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian"], "write canzona train"),
        (["sweep", "recipe=tiny", "train.seed=1,2"], "write canzona train --sweep recipe=tiny train.seed=1,2"),
        (["compare", "runs/a", "runs/b"], "write canzona report --compare runs/a runs/b"),
        (["recipes", "lst"], "write canzona recipes list"),
        (["data", "list"], "there are canzona data prepare"),
        (["checkpoint", "export", "run"], "write canzona checkpoint export RUN_OR_CHECKPOINT OUT"),
        (["data", "prepare", "a.txt"], "write canzona data prepare INPUT... --output PREFIX"),
        (["checkpoint", "export", "run", "out", "--step", "x"], "--step"),
        (["plan", "--compare", "form", "recipe=tiny"], "use -v for the phases of every strategy"),
        (["plan", "recipe=tiny", "--shapes"], "needs a value"),
        (["report", "--html"], "see canzona report --help"),
        (["finetune", "recipe=tiny"], "canzona does not fine-tune on instructions"),
        (["tune", "recipe=tiny", "--rounds", "3"], "use canzona plan --layouts, then canzona bench"),
        (["bench", "recipe=tiny", "--sweep", "gpus"], "use canzona train with --sweep"),
        (["bench", "--simulate", "--gpus", "8..64"], "use canzona plan recipe=NAME gpus=8,64,256"),
        (["checkpoint", "show", "runs/a"], "use canzona checkpoint list"),
        (["clusters", "list", "--json"], "canzona clusters show NAME"),
        (["recipes", "layouts", "qwen3-8b"], "use canzona plan recipe=NAME gpus=8,64,256"),
        (["train", "recipe=tiny", "--trace", "3-4"], "write run.profile_steps=[FIRST,LAST]"),
        (["train", "recipe=tiny", "--weights-from", "runs/a"], "write init=RUN"),
        (["resume", "nowhere"], "RUN = nowhere"),
        (["--versoin"], "--version"),
        (["validate", "recipe=tiny"], "use canzona train --dry-run"),
        (["slurm", "--x"], "--x"),
    ],
)
def test_misuse_is_exit_code_2_with_a_hint(arguments: list[str], hint: str) -> None:
    result = canzona(*arguments, code=2)
    assert hint in result.stderr
    assert result.stderr.startswith(("Bad usage", "Bad configuration")) or arguments == ["--versoin"]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("typed", "fixes"),
    [
        ("train --recipe qwen3-tiny --dry-run", ["write recipe=qwen3-tiny"]),
        ("train --config f.yaml", ["write recipe=f.yaml"]),
        ("train recipe=tiny -n 4", ["write gpus=4"]),
        ("train --gpus 4 --tp=2 --lr 0.1", ["write gpus=4", "write parallel.tp=2", "write optimizer.lr=0.1"]),
        ("train recipe=tiny --resume runs/A", ["write run.dir=runs/A: a run continues in its directory"]),
        ("train --stesp 3", ["write train.steps=3"]),
        ("train --dryrun", ["did you mean --dry-run?"]),
        ("report --gpus 4", ["see canzona report --help"]),
        ("run recipe=tiny", ["write canzona train recipe=tiny"]),
        ("recipe=tiny gpus=4", ["write canzona train recipe=tiny gpus=4"]),
        ("help train", ["write canzona train --help"]),
        ("finetune recipe=tiny", ["init=DIR starts from the weights of a Hugging Face folder"]),
        ("lora recipe=tiny", ["see canzona --help"]),
        ("version", ["write canzona --version"]),
        ("train recipe=tiny train.steps=20,", ["write train.steps=20"]),
        ("train recipe=tiny schedule=wsd", ["for example schedule.decay=wsd"]),
        ("train recipe=tiny optimizer.schedule=wsd", ["did you mean schedule.decay=wsd?"]),
        ("train recipe=tiny train.tokens=1e9", ["write train.steps=N, with N = tokens / train.batch_tokens"]),
        ("train recipe=tiny model.moe_router=8 run.wandb=true", ["leave it out", "write run.trackers=[wandb]"]),
        ("train recipe=tiny cluster.memory_gb_per_s=0", ["for example cluster.memory_gb_per_s=3350"]),
    ],
)
def test_what_other_programs_would_take_is_answered_with_what_to_write(typed: str, fixes: list[str]) -> None:
    done = canzona(*typed.split(), environment={"COLUMNS": "200"}, code=2)
    told = [line.partition("→ ")[2] for line in done.stderr.splitlines() if "→ " in line]
    assert len(told) == len(fixes)
    assert all(line.startswith(fix) for line, fix in zip(told, fixes, strict=True)), told


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--help"], (*HEAVY, "hydra", "omegaconf", "pydantic", "yaml", "rich.table", "canzona_cli.core.setup")),
        (["train", "--dry-run", "recipe=tiny"], HEAVY[:2]),
        (["slurm", "recipe=tiny"], HEAVY),
    ],
)
def test_imports_only_what_it_needs(arguments: list[str], unneeded: tuple[str, ...]) -> None:
    imports_none_of(unneeded, *arguments)
