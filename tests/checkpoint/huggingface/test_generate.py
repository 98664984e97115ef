"""`canzona generate` writes what transformers writes with the same weights, and says what it cannot do."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from canzona_cli.checkpoint.contents import saved_run
from canzona_cli.checkpoint.huggingface.folder import byte_tokenizer, collect_extra_files
from canzona_cli.checkpoint.huggingface.generating import GeneratedText, SamplingSettings, Writer
from canzona_cli.checkpoint.reader import Reader
from canzona_cli.core.setup import ModelConfig
from canzona_cli.records.files import RunFiles
from tests.checkpoint.huggingface.folders import random_folder
from tests.checkpoint.huggingface.test_weights import SHAPE, imported
from tests.cli.commands.support import canzona, canzona_process, imports_none_of
from tests.dist.ranks import run_ranks

PROMPT = "größer: "
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the tokenizer of bytes, and its import in `run`. The tokenizer's last id ends documents."""
    return written(tmp_path_factory.mktemp("generate"), replace(SHAPE, tied_embeddings=False))


def written(folder: Path, shape: ModelConfig) -> Path:
    random_folder(folder, shape)
    (folder / "tokenizer.json").write_text(byte_tokenizer(), encoding="utf-8")
    imported(folder, folder / "run")
    return folder


def by_transformers(folder: Path) -> bytes:
    """Greedily, in bf16, as the run's recipe has it; ids beyond bytes left out, as a tokenizer does."""

    def write() -> list[int]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        given = torch.tensor([list(PROMPT.encode())])
        # With a cache, as models have it by default: in bf16 another order of sums may be another token.
        found = model.generate(given, max_new_tokens=TOKENS, do_sample=False, use_cache=True, pad_token_id=0)
        ids: list[int] = found[0, given.size(1) :].tolist()
        return ids

    [ids] = run_ranks(1, write)
    return bytes(each for each in ids if each < 256)


def test_a_prompt_is_gone_on_from_as_transformers_does(folder: Path) -> None:
    wanted = by_transformers(folder).decode(errors="replace")
    assert len(set(wanted)) > 3, "any model might write it"
    asked = ("--prompt", PROMPT, "--max-new-tokens", str(TOKENS))
    done = canzona("generate", folder / "run", *asked, "--json", code=0)
    found = json.loads(done.stdout)
    assert (found["version"], found["step"], found["prompt"], found["tokens"]) == (1, 0, PROMPT, TOKENS)
    assert (found["text"], found["ended"], found["too_long"]) == (wanted, False, False)
    assert (found["temperature"], found["seed"]) == (0.0, 0)
    lines = f"{PROMPT}\n{PROMPT}".encode()
    spoken = canzona("generate", folder / "run", "--interactive", *asked[2:], stdin=lines, code=0)
    assert spoken.stdout == f"{wanted}\n" * 2
    assert spoken.stderr.startswith("step 0: always the most likely token; --temperature T samples")


@pytest.mark.sweep
def test_a_process_leaks_nothing_and_a_long_text_is_warned_of(folder: Path) -> None:
    asked = ("generate", str(folder / "run"), "--prompt", PROMPT, "--max-new-tokens")
    done = canzona_process(*asked, str(TOKENS))
    wanted = by_transformers(folder).decode(errors="replace")
    assert (done.returncode, done.stdout, "leaked" in done.stderr) == (0, f"{PROMPT}{wanted}\n", False), done.stderr
    long = canzona(*asked, "300")
    assert (long.returncode, "[transformers]" in long.stderr) == (0, False), long.stderr
    assert "longer than the sequences that the model was trained on" in long.stderr


def test_a_seed_draws_the_same_text_and_little_probability_leaves_the_likeliest(folder: Path) -> None:
    run = folder / "run"
    ways = [(0.0, 1.0, 1), (1.5, 1.0, 1), (1.5, 1.0, 1), (1.5, 1.0, 2), (1.5, 1e-3, 3)]

    def write() -> list[GeneratedText]:
        checkpoint = run / "checkpoints" / "step-00000000"
        manifest, config = saved_run(checkpoint)
        with Reader(checkpoint, manifest, config.model) as reader:
            writer = Writer(reader, collect_extra_files(RunFiles(run), None), dtype="fp32", device="cpu", seq_length=64)
        hows = [
            SamplingSettings(max_new_tokens=12, temperature=heat, top_p=share, seed=seed) for heat, share, seed in ways
        ]
        return [writer.continue_text(PROMPT, how) for how in hows]

    [(likeliest, drawn, again, other, certain)] = run_ranks(1, write)
    assert drawn == again
    assert drawn.text != other.text
    assert drawn.text != likeliest.text
    assert certain == likeliest


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [
        ((), 2, "--prompt"),
        (("--prompt", "a", "--interactive"), 2, "--interactive"),
        (("--interactive", "--json"), 2, "--json"),
        (("--prompt", "a", "--top-p", "0.5"), 2, "--top-p = 0.5"),
        (("--prompt", "a", "--step", "7"), 2, "--step = 7"),
        (("--prompt", "a", "--tokenizer", "."), 2, "--tokenizer = ."),
        (("--prompt", "a", "--device", "cuda"), 3, "--device = cuda"),
    ],
)
def test_what_cannot_be_is_refused(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, key: str
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = canzona("generate", folder / "run", *arguments, cwd=tmp_path, code=code)
    assert key in done.stderr
    assert done.stdout == ""


def test_without_transformers_it_says_what_brings_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = canzona("generate", folder / "run", "--prompt", "a", code=3)
    assert "canzona[hf]" in done.stderr


def test_damage_is_found_before_anything_is_read(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(folder / "run", tmp_path / "run")) / "checkpoints" / "step-00000000"
    file = next(copy.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = canzona("generate", copy, "--prompt", "a", code=5)
    assert file.name in done.stderr


def test_its_help_comes_without_torch() -> None:
    imports_none_of(("torch", "transformers", "megatron"), "generate", "--help")
