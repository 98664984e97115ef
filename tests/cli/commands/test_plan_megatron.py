"""`canzona plan --from-megatron`: one screen about a run of Megatron-LM, without torch."""

import json
from pathlib import Path

import pytest

from tests.cli.commands.support import canzona, imports_none_of

FILES = Path(__file__).parents[2] / "config" / "megatron"
VOCABULARY = "model.vocab_size=151936"


@pytest.mark.parametrize(
    ("name", "overrides", "in_own_loop"),
    [
        ("llama3-8b.txt", (), False),
        ("muon-621m.txt", ("model.vocab_size=128256",), False),
        ("llama3-70b.txt", (), True),
        ("qwen3-30b-a3b.txt", (VOCABULARY,), True),
    ],
)
def test_a_command_line_is_one_screen_that_says_which_loop_trains_the_model(
    name: str, overrides: tuple[str, ...], in_own_loop: bool
) -> None:
    """Zero-centred norms, squared ReLU, and a learning rate for the embedding exist in Megatron's loop only."""
    result = canzona("plan", "--from-megatron", FILES / name, *overrides)
    assert (result.returncode, result.stderr) == (0, "")
    *screen, command = result.stdout.splitlines()
    assert max(map(len, screen)) <= 80
    assert len(screen) + -(-len(command) // 80) <= 25
    assert "\n  layer-wise Muon" in result.stdout
    assert command.startswith("canzona train recipe=") or "cannot train" in result.stdout
    assert "use_in_megatron_lm()" in result.stdout
    assert ("canzona's own loop cannot train this model:" in result.stdout) is not in_own_loop


def test_the_screen_needs_no_torch() -> None:
    imports_none_of(("torch", "megatron", "numpy"), "plan", "--from-megatron", str(FILES / "llama3-8b.txt"))


def test_json_has_costs_command_and_lists() -> None:
    result = canzona("plan", "--from-megatron", FILES / "qwen3-32b.txt", "--json", "cluster=h200", VOCABULARY)
    content = json.loads(result.stdout)
    assert content["cluster"] == "h200"
    assert {"adamw", "megatron", "canzona"} == content["costs"].keys()
    assert {"recipe=qwen3-32b", "parallel.tp=8", "cluster=h200"} <= {*content["overrides"]}
    assert (content["not_understood"], content["assumed"]) == ([], [])


def test_problems_name_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text((FILES / "llama3-70b.txt").read_text().replace("model-parallel-size 4", "model-parallel-size 3", 1))
    result = canzona("plan", "--from-megatron", path, code=2)
    assert "--tensor-model-parallel-size (parallel.tp) = 3" in result.stderr
    assert "cannot split 64 attention heads" in " ".join(result.stderr.split())


def test_the_arguments_may_be_typed() -> None:
    """The words before `--from-megatron` are options and overrides of this command; those after it are Megatron's."""
    words = (FILES / "llama3-70b.txt").read_text().split()
    of_file = canzona("plan", "--from-megatron", FILES / "llama3-70b.txt", "--json", "name=x", code=0)
    typed = canzona("plan", "--json", "name=x", "--from-megatron", "--", *words, code=0)
    file, command = json.loads(of_file.stdout), json.loads(typed.stdout)
    assert {**file, "file": ""} == {**command, "file": ""}
    arguments = words[words.index("pretrain_gpt.py") + 1 :]
    missing = canzona("plan", "--from-megatron", "--", *arguments, code=2)
    assert [line for line in missing.stderr.splitlines() if line.startswith("  ") and line[2] != " "] == [
        "  program",
        "  gpus",
    ]
    given = canzona("plan", "--json", "program=gpt", "gpus=64", "name=x", "--from-megatron", "--", *arguments, code=0)
    assert json.loads(given.stdout)["costs"] == command["costs"]


def test_options_of_a_plan_do_not_go_with_it() -> None:
    options = (["--out", "x.json"], ["--layouts"], ["--shapes", "x.yaml"], ["optimizer=soap"])
    for option in options:
        result = canzona("plan", "--from-megatron", FILES / "llama3-8b.txt", *option, code=2)
        assert option[0].partition("=")[0] in result.stderr
