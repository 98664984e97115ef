"""`canzona plan --from-megatron`: one screen about a run of Megatron-LM, without torch."""

import json
from pathlib import Path

import pytest

from tests.commands.support import canzona, imports_none_of

FILES = Path(__file__).parents[1] / "config" / "megatron"


@pytest.mark.parametrize(
    ("name", "overrides", "in_megatrons_loop"),
    [
        ("llama3-8b.sh", (), True),
        ("muon-621m.sh", ("model.vocab_size=128256",), False),
        ("llama3-70b.txt", (), None),
    ],
)
def test_a_command_line_is_one_screen_that_says_which_loop_trains_the_model(
    name: str, overrides: tuple[str, ...], in_megatrons_loop: bool | None
) -> None:
    """LayerNorm and a learning rate for the embedding exist in Megatron's loop only; the engine needs gated layers
    in both. None: nothing is said about the loop."""
    result = canzona("plan", "--from-megatron", FILES / name, *overrides)
    assert (result.returncode, result.stderr) == (0, "")
    *screen, command = result.stdout.splitlines()
    assert max(map(len, screen)) <= 80
    assert len(screen) + -(-len(command) // 80) <= 25
    assert "\n  layer-wise Muon" in result.stdout
    assert command.startswith("canzona train recipe=") or "cannot train" in result.stdout
    if in_megatrons_loop is not None:
        assert ("use_in_megatron_lm()" in result.stdout) is in_megatrons_loop
        assert ("canzona's own loop cannot train this model:" in result.stdout) is in_megatrons_loop
        assert ("canzona plans this model, but cannot train it:" in result.stdout) is not in_megatrons_loop


def test_the_screen_needs_no_torch() -> None:
    imports_none_of(("torch", "megatron", "numpy"), "plan", "--from-megatron", str(FILES / "llama3-8b.sh"))


def test_json_has_costs_command_and_lists() -> None:
    result = canzona("plan", "--from-megatron", FILES / "qwen3-32b.sh", "--json", "cluster=h200")
    content = json.loads(result.stdout)
    assert content["cluster"] == "h200"
    assert {"adamw", "megatron", "canzona"} == content["costs"].keys()
    assert {"recipe=qwen3-32b", "parallel.tp=8", "cluster=h200"} <= {*content["overrides"]}
    assert "--enable-telemetry" in content["not_understood"]


def test_problems_name_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text((FILES / "llama3-70b.txt").read_text().replace("model-parallel-size 4", "model-parallel-size 3", 1))
    result = canzona("plan", "--from-megatron", path, code=2)
    assert "--tensor-model-parallel-size (parallel.tp) = 3" in result.stderr
    assert "cannot split 64 attention heads" in " ".join(result.stderr.split())


def test_options_of_a_plan_do_not_go_with_it() -> None:
    options = (["--out", "x.json"], ["--layouts"], ["--compare", "alpha"], ["--shapes", "x.yaml"], ["optimizer=soap"])
    for option in options:
        result = canzona("plan", "--from-megatron", FILES / "llama3-8b.sh", *option, code=2)
        assert option[0].partition("=")[0] in result.stderr
