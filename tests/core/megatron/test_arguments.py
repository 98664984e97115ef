"""The arguments that canzona knows are those of the installed Megatron, by its own parser and its own print."""

import argparse
import enum
from pathlib import Path

import pytest
import torch
from megatron.training import arguments as theirs

from canzona_cli.config.compose import compose_run
from canzona_cli.config.megatron_arguments import meaning, table
from canzona_cli.config.megatron_arguments import parser as rebuilt
from canzona_cli.config.megatron_translation import MegatronRun, read_megatron_run
from canzona_cli.config.schema import RunConfig

FILES = Path(__file__).parents[2] / "config" / "megatron"
MADE_LATER = {
    "world_size",
    "virtual_pipeline_model_parallel_size",
    "use_layer_wise_distributed_optimizer",
    "use_custom_fsdp",
}
"""The arguments that `validate_args` makes, and that are printed."""
COMPUTED = {"local_rank", "initial_loss_scale", "min_offloaded_tensor_size", "inprocess_active_world_size"}
"""The arguments without effect on a plan whose defaults are expressions."""
OPTIONAL = {"kitchen_config_file", "kitchen_recipe_number"}
"""The arguments that Megatron has only beside a package that is not installed."""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = theirs.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser


def test_the_parser_that_is_rebuilt_from_the_sources_is_megatrons(parser: argparse.ArgumentParser) -> None:
    """Every option by its flags, kind, number of values, constant, default and, where canzona checks it, type."""

    def options(of: argparse.ArgumentParser) -> dict[str, tuple[object, ...]]:
        return {
            action.option_strings[0]: (
                (type(action), action.option_strings, action.dest, action.nargs, action.const),
                None if action.dest in COMPUTED else default_of(action),
                action.type if action.type in (int, float, bool) else None,
            )
            for action in of._actions
            if action.dest not in ("help", *OPTIONAL) and not isinstance(action, argparse.BooleanOptionalAction)
        }

    def default_of(action: argparse.Action) -> object:
        return action.default.name if isinstance(action.default, enum.Enum) else action.default

    def optional(of: argparse.ArgumentParser) -> set[tuple[str, object]]:
        actions = (action for action in of._actions if isinstance(action, argparse.BooleanOptionalAction))
        return {(flag, action.default) for action in actions for flag in action.option_strings}

    theirs_by_flag, ours = options(parser), options(rebuilt())
    assert ours.keys() == theirs_by_flag.keys()
    assert {flag: (ours[flag], kind) for flag, kind in theirs_by_flag.items() if ours[flag] != kind} == {}
    assert optional(rebuilt()) == optional(parser)
    assert all(meaning(name) == "no_effect" for name in COMPUTED)


def test_every_argument_of_the_table_is_megatrons(parser: argparse.ArgumentParser) -> None:
    names = {action.dest for action in parser._actions} | MADE_LATER
    ours = {name for section, entries in table().items() if section != "no_effect" for name in entries}
    assert ours - names == set()


def test_every_argument_of_megatron_is_understood(parser: argparse.ArgumentParser) -> None:
    names = {action.dest for action in parser._actions if action.dest != "help"}
    assert {name for name in names if meaning(name) is None} == set()


@pytest.mark.parametrize(
    ("name", "gpus", "vocabulary"),
    [
        ("llama3-8b.txt", 8, 128256),
        ("qwen3-30b-a3b.txt", 16, 151936),
        ("llama3-70b.txt", 64, 128512),
        ("left-to-megatron.txt", 8, 20480),
    ],
)
def test_what_megatron_prints_is_read_as_the_command_line_is(
    name: str,
    gpus: int,
    vocabulary: int,
    parser: argparse.ArgumentParser,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron parses, checks and prints the arguments; only questions about a GPU are answered for it."""
    words = (FILES / name).read_text().replace("\\\n", " ").replace("'", "").split()
    given = parser.parse_args(words[words.index("pretrain_gpt.py") + 1 :])
    given.rank, given.local_rank, given.world_size = 0, 0, gpus
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(theirs, "get_device_arch_version", lambda: 9)
    monkeypatch.setattr(theirs, "is_te_min_version", lambda *_, **__: True)
    theirs.validate_args(given)
    log = (tmp_path / name).with_suffix(".log")
    log.write_text("\n".join(f"[rank0]: {line}" for line in capsys.readouterr().out.splitlines()))

    typed = ("program=gpt", f"model.vocab_size={vocabulary}")
    printed, listed = read_megatron_run(str(log), typed), read_megatron_run(str(FILES / name), typed[1:])
    assert len(printed.no_effect) > 400
    assert (printed.not_understood, printed.assumed) == ((), ())
    assert config_of(printed) == config_of(listed)
    for what in ("optimizer", "distributed", "tp_mode", "tp_overlap", "dispatch_overlap"):
        assert getattr(printed, what) == getattr(listed, what)
    assert len(printed.left_out) == len(listed.left_out)
    assert len(printed.plans_only) == len(listed.plans_only)


def config_of(run: MegatronRun) -> RunConfig:
    return compose_run([f"{key}={value}" for key, value in run.overrides.items()], training=False).config
