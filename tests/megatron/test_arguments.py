"""The arguments that canzona knows are those of the installed Megatron, by its own parser and its own print."""

import argparse
from pathlib import Path

import pytest
import torch
from megatron.training import arguments as theirs

from canzona_cli.config.compose import compose_run
from canzona_cli.config.megatron_arguments import argument_of, default, meaning, table
from canzona_cli.config.megatron_run import MegatronRun
from canzona_cli.config.megatron_translation import read_megatron_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.shell_script import read_script

FILES = Path(__file__).parents[1] / "config" / "megatron"
MADE_LATER = {
    "world_size",
    "virtual_pipeline_model_parallel_size",
    "use_layer_wise_distributed_optimizer",
    "use_custom_fsdp",
}
"""The arguments that `validate_args` makes, and that are printed."""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = theirs.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser


def test_every_argument_of_the_table_is_megatrons(parser: argparse.ArgumentParser) -> None:
    names = {action.dest for action in parser._actions} | MADE_LATER
    ours = {name for section, entries in table().items() if section not in ("flags", "no_effect") for name in entries}
    assert ours - names == set()
    flags = {option for action in parser._actions for option in action.option_strings}
    older = {"muon_use_nesterov"}
    assert {f"--{flag.replace('_', '-')}" for flag in table()["flags"] if flag not in older} - flags == set()


def test_every_argument_of_megatron_is_understood(parser: argparse.ArgumentParser) -> None:
    names = {action.dest for action in parser._actions if action.dest != "help"}
    assert {name for name in names if meaning(name) is None} == set()


def test_flags_set_the_argument_that_they_set_in_megatron(parser: argparse.ArgumentParser) -> None:
    wrong = {}
    for action in parser._actions:
        for flag in action.option_strings:
            name, value = argument_of(flag)
            if meaning(name) in (None, "no_effect") and meaning(action.dest) in (None, "no_effect"):
                continue
            constant = getattr(action, "const", None)
            expected = str(constant).lower() if isinstance(constant, bool) else None
            if name != action.dest or (value or ("true" if expected == "true" else None)) != expected:
                wrong[flag] = (name, value, action.dest, expected)
    rewritten = {"--use-rotary-position-embeddings", "--recompute-activations"}
    assert {flag: found for flag, found in wrong.items() if flag not in (*rewritten, "-h", "--help")} == {}


def test_defaults_are_megatrons(parser: argparse.ArgumentParser) -> None:
    wrong = {}
    for action in parser._actions:
        if meaning(action.dest) in (None, "no_effect"):
            continue
        ours, real = default(action.dest), action.default
        if isinstance(real, list) and len(real) == 1:
            (real,) = real
        if ours != real and str(ours) != str(getattr(real, "name", real)):
            wrong[action.dest] = (ours, real)
    assert wrong == {}


@pytest.mark.parametrize(
    ("name", "gpus"),
    [("llama3-8b.sh", 8), ("qwen3-30b-a3b.sh", 16), ("llama3-70b.txt", 64), ("left-to-megatron.txt", 8)],
)
def test_what_megatron_prints_is_read_as_the_script_is(
    name: str,
    gpus: int,
    parser: argparse.ArgumentParser,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron parses, checks and prints the arguments; only questions about a GPU are answered for it."""
    longest = max(read_script((FILES / name).read_text()).commands, key=lambda words: len(" ".join(words)))
    words = [word.strip("'") for word in " ".join(longest).split()]
    given = parser.parse_args(words[next(n for n, word in enumerate(words) if word.endswith(".py")) + 1 :])
    given.rank, given.local_rank, given.world_size = 0, 0, gpus
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(theirs, "get_device_arch_version", lambda: 9)
    monkeypatch.setattr(theirs, "is_te_min_version", lambda *_, **__: True)
    theirs.validate_args(given)
    log = (tmp_path / name).with_suffix(".log")
    log.write_text("\n".join(f"[rank0]: {line}" for line in capsys.readouterr().out.splitlines()))

    printed, script = read_megatron_run(log, ()), read_megatron_run(FILES / name, ())
    assert len(printed.no_effect) > 400
    assert printed.not_understood == ()
    assert config_of(printed) == config_of(script)
    for what in ("optimizer", "distributed", "tp_mode", "tp_overlap", "dispatch_overlap"):
        assert getattr(printed, what) == getattr(script, what)
    assert len(printed.left_out) == len(script.left_out)
    assert len(printed.plans_only) == len(script.plans_only)


def config_of(run: MegatronRun) -> RunConfig:
    return compose_run([f"{key}={value}" for key, value in run.overrides.items()], training=False).config
