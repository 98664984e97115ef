"""`canzona data prepare`: check everything first, then build one pair while holding its lock."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from canzona_cli.config.overrides import text_value
from canzona_cli.data.build import (
    DEFAULT_VOCAB_SIZE,
    BuildSettings,
    Built,
    OnProgress,
    build_pair,
    disk_errors,
    pair_files,
)
from canzona_cli.data.corpus import padded_vocab_size, usable_fraction
from canzona_cli.data.indexed import inspect_pair
from canzona_cli.data.locks import Busy, exclusive, lock_path
from canzona_cli.data.sources import InputFormat, Source, find_sources
from canzona_cli.data.tokenizers import MIN_VOCAB_SIZE, load_json_tokenizer
from canzona_cli.errors import ConfigError, Problem, gathered, refuse

_TRIED_WITH = ("qwen3-tiny", 256)
"""The recipe to try new data with first, and its sequence length."""
_USUAL_FRACTION = 0.02


@dataclass(frozen=True, kw_only=True)
class PrepareRequest(BuildSettings):
    """The arguments of `canzona data prepare`: how to make a pair, of what and where."""

    inputs: tuple[str, ...]
    """Files, globs, folders, `-` for standard input, `stdlib`."""
    output: str
    """The pair's path without extension."""
    format: InputFormat = "auto"
    overwrite: bool = False


def prepare(request: PrepareRequest, on_progress: OnProgress) -> Built:
    """Turn text into a pair of Megatron files.

    Raises:
        ConfigError: everything wrong with the arguments at once, or bad input while reading.
        EnvironmentProblem: the output cannot be written or the disk is full.
    """
    prefix = Path(request.output).expanduser()
    sources, problems = find_sources(request.inputs, request.format)
    problems += _tokenizer_problems(request)
    problems += _output_problems(prefix, sources, request)
    refuse(problems)
    with disk_errors(prefix):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        try:
            with exclusive(lock_path(prefix)):
                return build_pair(sources, prefix, request, on_progress)
        except Busy:
            reason, fix = "another canzona process is writing it", "wait for it, or choose another --output"
            raise ConfigError(Problem(key="--output", value=str(prefix), reason=reason, fix=fix)) from None


def train_command(built: Built) -> str:
    """A shell line that trains on the pair."""
    recipe, seq_length = _TRIED_WITH
    words = ["canzona", "train", f"recipe={recipe}", "data=prepared", f"data.path={text_value(str(built.prefix))}"]
    words.append(f"model.vocab_size={padded_vocab_size(built.sidecar.vocab_size)}")
    # With few documents the usual share would hold out nothing, and the run would be refused.
    share = usable_fraction(inspect_pair(built.prefix), seq_length + 1, at_least=_USUAL_FRACTION)
    if share is None:
        words.append("train.eval_interval=0")
    elif share != _USUAL_FRACTION:
        words.append(f"data.validation_fraction={share:g}")
    return shlex.join(words)


def _tokenizer_problems(request: PrepareRequest) -> Iterator[Problem]:
    is_file = request.tokenizer not in ("byte", "bpe")
    size = request.vocab_size
    if size is not None and request.tokenizer != "bpe":
        reason = f"only a bpe is trained to a chosen size; {request.tokenizer} has its own"
        yield Problem(key="--vocab-size", value=size, reason=reason, fix="leave it out, or --tokenizer bpe")
    elif size is not None and size < MIN_VOCAB_SIZE:
        reason = f"a byte-level bpe has at least {MIN_VOCAB_SIZE} entries (256 bytes and the end of a document)"
        yield Problem(key="--vocab-size", value=size, reason=reason, fix=f"use --vocab-size {DEFAULT_VOCAB_SIZE}")
    if request.eod is not None and not is_file:
        reason = f"the {request.tokenizer} tokenizer has its own end-of-document id"
        yield Problem(key="--eod", value=request.eod, reason=reason, fix="leave it out")
    elif is_file:
        problems: list[Problem] = []
        with gathered(problems):
            load_json_tokenizer(request.tokenizer, request.eod)
        yield from problems


def _output_problems(prefix: Path, sources: Sequence[Source], request: PrepareRequest) -> Iterator[Problem]:
    there = [path for path in pair_files(prefix) if path.exists()] if prefix.name else []
    inputs = {source.path.resolve() for source in sources if source.path is not None}
    clash = [path for path in there if path.resolve() in inputs]
    if not request.output or request.output.endswith("/") or prefix.name in ("", "..") or prefix.is_dir():
        reason = "is a folder; the output is a prefix that several file names share"
        fix = f"--output {prefix / 'corpus'}"
    elif prefix.suffix in (".bin", ".idx"):
        reason = "has an extension; the output is a prefix to which .bin and .idx are added"
        fix = f"--output {prefix.with_suffix('')}"
    elif clash:
        reason, fix = f"would replace the input {clash[0]}", f"--output {prefix}-tokens"
    elif there and not request.overwrite:
        reason = f"already exists: {', '.join(path.name for path in there)}"
        fix = "--overwrite to replace it, or choose another --output"
    else:
        return
    yield Problem(key="--output", value=request.output, reason=reason, fix=fix)
