"""Implements `canzona data prepare`: checks all arguments first, then builds one pair of .bin and
.idx files while holding the lock of the pair."""

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from canzona_cli.config.overrides import text_value
from canzona_cli.config.schema import DataConfig
from canzona_cli.core.errors import ConfigError, EnvironmentProblem, Problem, refuse
from canzona_cli.core.host import existing_folder
from canzona_cli.core.reading import expanded
from canzona_cli.core.writing import Busy, exclusive_lock
from canzona_cli.data.build import (
    DEFAULT_VOCAB_SIZE,
    BuildSettings,
    BuiltPair,
    OnProgress,
    build_pair,
    disk_problem,
    pair_files,
)
from canzona_cli.data.corpus import NO_VALIDATION, padded_vocab_size, usable_fraction
from canzona_cli.data.indexed import inspect_pair, lock_path
from canzona_cli.data.reading import package_problem, template_problem
from canzona_cli.data.sources import InputFormat, Source, find_sources
from canzona_cli.data.tokenizers import MIN_VOCAB_SIZE, load_json_tokenizer

_MAX_VOCAB_SIZE = 1 << 20
_FIRST_RECIPE = ("qwen3-tiny", 256)
"""The recipe suggested for a first run with new data, and its sequence length."""


@dataclass(frozen=True, kw_only=True)
class PrepareRequest(BuildSettings):
    """The arguments of `canzona data prepare`."""

    inputs: tuple[str, ...]
    """The inputs: files, globs, folders, `-` for standard input, `stdlib`."""
    output: str
    """The pair's path without extension."""
    format: InputFormat = "auto"
    overwrite: bool = False


def prepare(request: PrepareRequest, on_progress: OnProgress) -> BuiltPair:
    """Converts text to a pair of Megatron files, `.bin` and `.idx`.

    Raises:
        ConfigError: arguments are not valid (all problems at once), an input cannot be used, or another
            process is writing the output.
        EnvironmentProblem: the output cannot be written, the disk is full, or a package is not installed.
    """
    prefix = expanded(request.output)
    sources, problems = find_sources(request.inputs, request.format)
    if not request.inputs:
        problems.append(Problem("INPUT", "there are no inputs", "name files, folders, - or stdlib"))
    problems += _setting_problems(request)
    problems += _output_problems(prefix, sources, request)
    if request.tokenizer == "bpe" and any(source.size is None for source in sources):
        reason, fix = "a bpe reads its text twice, which a pipe cannot", "name files, or use an existing tokenizer.json"
        problems.append(Problem("INPUT", reason, fix, value="-"))
    environment = [*_disk_problems(prefix, sources, request), *_package_problems(sources)]
    if problems:
        raise ConfigError(*problems, *environment)
    refuse(environment, EnvironmentProblem)
    with _output_folder(prefix):
        try:
            with exclusive_lock(lock_path(prefix)):
                return build_pair(sources, prefix, request, on_progress)
        except Busy:
            reason = "another canzona process is writing it"
            fix = "wait for it, or choose another --output"
            raise ConfigError(Problem("--output", reason, fix, value=str(prefix))) from None


def train_command(built: BuiltPair) -> str:
    """Returns a shell command that trains on a prepared pair."""
    recipe, seq_length = _FIRST_RECIPE
    path = text_value(str(built.prefix))
    words = ["canzona", "train", f"recipe={recipe}", "data=prepared", f"data.path={path}"]
    words.append(f"model.vocab_size={padded_vocab_size(built.sidecar.vocab_size)}")
    # With few documents the default share may hold out too few tokens, and the run would be refused.
    default = DataConfig(source="prepared")
    at_least = default.validation_fraction
    share = usable_fraction(inspect_pair(built.prefix), "drawn", default, seq_length + 1, at_least=at_least)
    if share is None:
        words += NO_VALIDATION.split()
    elif share != at_least:
        words.append(f"data.validation_fraction={share:g}")
    return shlex.join(words)


def _setting_problems(request: PrepareRequest) -> Iterator[Problem]:
    is_file = request.tokenizer not in ("byte", "bpe")
    size = request.vocab_size
    if size is not None and request.tokenizer != "bpe":
        reason = f"only a bpe lets you choose the vocabulary size; {request.tokenizer} has a fixed one"
        yield Problem("--vocab-size", reason, "leave it out, or use --tokenizer bpe", value=size)
    elif size is not None and not MIN_VOCAB_SIZE <= size <= _MAX_VOCAB_SIZE:
        entries = f"{MIN_VOCAB_SIZE} to {_MAX_VOCAB_SIZE} entries"
        reason = f"a byte-level bpe can have {entries} (it always has 256 bytes and the end-of-document token)"
        yield Problem("--vocab-size", reason, f"use --vocab-size {DEFAULT_VOCAB_SIZE}", value=size)
    if request.eod is not None and not is_file:
        reason = f"the {request.tokenizer} tokenizer has its own end-of-document id"
        yield Problem("--eod", reason, "leave it out", value=request.eod)
    elif is_file:
        try:
            load_json_tokenizer(request.tokenizer, request.eod)
        except ConfigError as error:
            yield from error.problems
    if request.template and (reason := template_problem(request.template)):
        fix = "for example --template '{role}: {content}\\n' --text-key messages"
        yield Problem("--template", reason, fix, value=request.template)
    if request.max_bad < 0:
        yield Problem("--max-bad", "must be at least 0", "use --max-bad 0", value=request.max_bad)
    if request.workers is not None and request.workers < 1:
        yield Problem("--workers", "must be at least 1", "use --workers 1", value=request.workers)


def _output_problems(prefix: Path, sources: Sequence[Source], request: PrepareRequest) -> Iterator[Problem]:
    existing = [path for path in pair_files(prefix) if path.exists()] if prefix.name else []
    inputs = {source.path.resolve() for source in sources if source.path is not None}
    replaced_inputs = [path for path in existing if path.resolve() in inputs]
    if not request.output or request.output.endswith("/") or prefix.name in ("", "..") or prefix.is_dir():
        reason = "is a folder, but the output is the common prefix of several files"
        fix = f"--output {prefix / 'corpus'}"
    elif prefix.suffix in (".bin", ".idx"):
        reason = "has an extension, but the output is a prefix to which .bin and .idx are added"
        fix = f"--output {prefix.with_suffix('')}"
    elif replaced_inputs:
        reason, fix = f"would replace the input {replaced_inputs[0]}", f"--output {prefix}-tokens"
    elif existing and not request.overwrite:
        reason = f"already exists: {', '.join(path.name for path in existing)}"
        fix = "--overwrite to replace it, or choose another --output"
    else:
        return
    yield Problem("--output", reason, fix, value=request.output)


def _disk_problems(prefix: Path, sources: Sequence[Source], request: PrepareRequest) -> Iterator[Problem]:
    folder = existing_folder(prefix.parent)
    # The byte tokenizer turns every byte into a two-byte id. With other tokenizers the size is unknown in
    # advance.
    input_bytes = sum(source.size or 0 for source in sources)
    needed = 2 * input_bytes if request.tokenizer == "byte" else 0
    disk = shutil.disk_usage(folder)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        problem = "is not writable" if folder.is_dir() else "is not a folder"
        reason, fix = f"cannot be written: {folder} {problem}", "choose a writable folder"
    elif disk.total > 0 and needed > disk.free:  # file systems without a disk report 0
        reason = f"the disk is too full: {needed / 2**20:,.0f} MiB needed, {disk.free / 2**20:,.0f} MiB free"
        fix = "make room, or choose another disk"
    else:
        return
    yield Problem("--output", reason, fix, value=str(prefix))


def _package_problems(sources: Sequence[Source]) -> Iterator[Problem]:
    labels = [source.label for source in sources if source.format == "parquet" or source.label.endswith(".zst")]
    if labels and find_spec("pyarrow") is None:
        yield package_problem(labels[0])


@contextmanager
def _output_folder(prefix: Path) -> Iterator[None]:
    """Creates the folders of the output that are missing. If the block fails, removes these folders again,
    unless they contain files, and converts an OSError to an error for the user."""
    missing = [folder for folder in prefix.parents if not folder.exists()]
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        # The message states the free space of the disk, so it is made before the folders are removed.
        problem = disk_problem(prefix, error) if isinstance(error, OSError) else None
        for folder in missing:
            with suppress(OSError):  # another process may have put something into the folder
                folder.rmdir()
        if problem is not None:
            raise problem from error
        raise
