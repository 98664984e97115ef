"""The corpus of a run, checked before it starts: prepared, intact, and suitable for its model."""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from canzona_cli.config.caches import cache_root
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import problem_with
from canzona_cli.data.build import BuildSettings, Progress, build_pair, disk_errors
from canzona_cli.data.indexed import PairInfo, bin_path, inspect_pair
from canzona_cli.data.locks import exclusive, lock_path
from canzona_cli.data.sidecar import FORMAT, Sidecar, load_sidecar, saved_tokenizer_path
from canzona_cli.data.sources import stdlib_digest, stdlib_sources
from canzona_cli.data.tokenizers import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    bytes_by_id,
    load_json_tokenizer,
    tokenizer_file,
)
from canzona_cli.errors import CanzonaError, ConfigError, Problem, gathered, refuse
from canzona_cli.run.corpus import PreparedCorpus, PreparedSet
from canzona_cli.run.files import write_text_atomic

_PREPARE = "prepare the text with canzona data prepare, which keeps the tokenizer beside the tokens"
ReportProgress = Callable[[str, float], None]

_CONFIG_KEYS = {
    "--tokenizer": "data.tokenizer",
    "--vocab-size": "data.tokenizer_vocab_size",
    "--output": "data.cache_dir",
    "INPUT": "data.source",
}
"""The configuration key for an option of `canzona data prepare`."""


def ensure_corpus(config: RunConfig, on_progress: ReportProgress | None = None) -> PreparedCorpus:
    """The corpus of `config.data`, prepared and cached where it is the built-in one.

    Args:
        config: the run; the model's vocabulary and the sequence length are checked against the data.
        on_progress: receives what is being done and the share that is done, 0 to 1.

    Raises:
        ConfigError: missing or damaged data, token ids beyond the vocabulary, too few tokens; all problems at
            once.
        EnvironmentProblem: the cache cannot be written, or this Python has no library sources.
    """
    report = on_progress or (lambda what, share: None)
    data, share = config.data, _held_out(config)
    pairs: list[tuple[PairInfo, Sidecar | None]]
    if data.source == "stdlib":
        weights, pairs = {"stdlib": 1.0}, [_cached_stdlib(config, report)]
    else:
        weights = data.blend or {str(data.path): 1.0}
        pairs = _pairs([*weights], blended=bool(data.blend))
    largest = [sidecar.max_token_id if sidecar else _scanned_max(pair, config, report) for pair, sidecar in pairs]
    sets = []
    for name, weight, (pair, _) in zip(_names([*weights]), weights.values(), pairs, strict=True):
        train_tokens, validation_tokens = pair.split_tokens(share)
        sets.append(
            PreparedSet(
                name=name,
                prefix=pair.prefix,
                share=weight / sum(weights.values()),
                tokens=pair.tokens,
                documents=pair.documents,
                train_tokens=train_tokens,
                validation_tokens=validation_tokens,
            )
        )
    first = pairs[0][1]
    corpus = PreparedCorpus(
        sets=tuple(sets),
        tokenizer=first.tokenizer if first else "unknown",
        vocab_size=first.vocab_size if first else max(largest) + 1,
        max_token_id=max(largest),
        eod=first.eod if first else None,
    )
    problems = [*_disagreements(pairs), *_vocabulary_problems(config, corpus)]
    for one, (pair, _) in zip(corpus.sets, pairs, strict=True):
        problems += _length_problems(config, pair, one, blended=len(pairs) > 1)
    problems += _sample_problems(config, corpus)
    refuse(problems)
    return corpus


def tokenizer_of(corpus: PreparedCorpus) -> Tokenizer:
    """Returns the tokenizer that made the tokens of a corpus.

    Raises:
        ConfigError: another tool did, and its files do not say how; or the tokenizer has gone.
    """
    from tokenizers import Tokenizer as RustTokenizer

    if corpus.tokenizer == ByteTokenizer.name:
        return ByteTokenizer()
    path = saved_tokenizer_path(corpus.prefix)
    if corpus.eod is None or not path.is_file():
        reason = f"its tokenizer is not known: there is no {path.name} that canzona data prepare has written"
        raise ConfigError(Problem(key="data.path", value=str(corpus.prefix), reason=reason, fix=_PREPARE))
    backend = RustTokenizer.from_file(str(path))
    return JsonTokenizer(kind="huggingface", name=corpus.tokenizer, eod=corpus.eod, backend=backend)


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes of text per token id of one tokenizer."""

    values: npt.NDArray[np.float64]
    """Shape [vocab_size]; the token that ends a document stands for none."""
    counted: bool
    """False: each is the corpus' mean, because the tokenizer does not tell."""


def token_bytes(corpus: PreparedCorpus) -> TokenBytes | None:
    """Count the bytes behind each token of a corpus; None where its tokenizer is not known.

    Raises:
        ConfigError: the corpus is damaged.
    """
    try:
        tokenizer = tokenizer_of(corpus)
    except ConfigError:
        return None
    if (values := bytes_by_id(tokenizer)) is not None:
        return TokenBytes(values=values, counted=True)
    sidecars = [sidecar for each in corpus.sets if (sidecar := load_sidecar(inspect_pair(each.prefix))) is not None]
    if len(sidecars) < len(corpus.sets):
        return None
    mean = sum(sidecar.text_bytes for sidecar in sidecars) / sum(sidecar.tokens for sidecar in sidecars)
    return TokenBytes(values=np.full(corpus.vocab_size, mean), counted=False)


def _pairs(paths: Sequence[str], *, blended: bool) -> list[tuple[PairInfo, Sidecar | None]]:
    """The pairs at these prefixes, all of them intact."""
    pairs, problems = [], list[Problem]()
    for path in paths:
        with gathered(problems):
            pair = inspect_pair(Path(path).expanduser().absolute())
            pairs.append((pair, load_sidecar(pair)))
    if blended:
        problems = [replace(each, key="data.blend", fix=each.fix.replace("data.path=", "")) for each in problems]
    refuse(problems)
    return pairs


def _names(paths: Sequence[str]) -> list[str]:
    """The last part of each path, or the paths themselves where these are not different."""
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else [*paths]


def _disagreements(pairs: Sequence[tuple[PairInfo, Sidecar | None]]) -> Iterator[Problem]:
    """Sets of another tokenizer than the first one's: the same id would be another word."""
    (first, known), *others = pairs
    for pair, sidecar in others:
        both = [
            None if each is None else (each.tokenizer_sha256, each.vocab_size, each.eod) for each in (sidecar, known)
        ]
        if both[0] == both[1]:
            continue
        ours, theirs = (f"{one.tokenizer} ({one.vocab_size:,} ids)" if one else "unknown" for one in (sidecar, known))
        reason = f"its tokenizer is {ours}, that of {first.prefix} is {theirs}: the same id would be another word"
        saved = saved_tokenizer_path(first.prefix)
        fix = f"canzona data prepare ... --tokenizer {saved if saved.exists() else 'byte'}, the same for all sets"
        yield Problem(key="data.blend", value=str(pair.prefix), reason=reason, fix=fix)


def look_at_data(config: RunConfig, on_progress: ReportProgress | None = None) -> PreparedCorpus | None:
    """Check all of a run's data that is there before the run is: somebody's own corpus as the run checks it,
    and of the built-in one, which the first run that needs it prepares, the tokenizer.

    Returns:
        The corpus; None for the built-in one.

    Raises:
        ConfigError: as `ensure_corpus`; or the tokenizer is missing or none.
    """
    if config.data.source == "prepared":
        return ensure_corpus(config, on_progress)
    if config.data.tokenizer not in ("byte", "bpe"):
        try:
            load_json_tokenizer(config.data.tokenizer)
        except ConfigError as error:
            raise ConfigError(*map(_in_config_words, error.problems)) from error
    return None


def _cached_stdlib(config: RunConfig, report: ReportProgress) -> tuple[PairInfo, Sidecar]:
    data = config.data
    try:
        sources = stdlib_sources()
        settings = BuildSettings(tokenizer=data.tokenizer, vocab_size=data.tokenizer_vocab_size)
        prefix = _cache_prefix(config, stdlib_digest(sources))
        if cached := _intact(prefix):
            return cached
        waiting = "waiting for another run that prepares the same corpus"
        with disk_errors(prefix):
            prefix.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(lock_path(prefix), on_wait=lambda: report(waiting, 0.0)):
                if cached := _intact(prefix):  # the run we waited for has made it
                    return cached
                build_pair(sources, prefix, settings, lambda progress: report(*_in_words(progress)))
        cached = _intact(prefix)
        assert cached is not None, prefix
        return cached
    except CanzonaError as error:
        raise type(error)(*map(_in_config_words, error.problems)) from error


def _cache_prefix(config: RunConfig, content: str) -> Path:
    """A name that changes with everything that changes the tokens, readable at its beginning."""
    kind, size, tokenizer = config.data.tokenizer, 0, ""
    if kind == "bpe":
        size = config.data.tokenizer_vocab_size
    elif kind != "byte":
        tokenizer = hashlib.sha256(tokenizer_file(kind).read_bytes()).hexdigest()
        kind = "tokenizer"
    key = json.dumps([FORMAT, platform.python_version(), kind, size, tokenizer, content])
    name = "-".join(["stdlib", platform.python_version(), kind, *([str(size)] if size else [])])
    return cache_root(config) / "corpora" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _intact(prefix: Path) -> tuple[PairInfo, Sidecar] | None:
    """The cached corpus; None where there is none or it is damaged, because the cache can be made again."""
    try:
        pair = inspect_pair(prefix)
        sidecar = load_sidecar(pair)
    except ConfigError:
        return None
    return None if sidecar is None else (pair, sidecar)


def _in_words(progress: Progress) -> tuple[str, float]:
    share = min(1.0, progress.done / progress.total) if progress.total else 0.0
    if progress.stage == "write":
        return "writing the corpus", 1.0
    doing = "learning a vocabulary from" if progress.stage == "learn vocabulary" else "tokenising"
    return f"{doing} the Python standard library", share


def _in_config_words(problem: Problem) -> Problem:
    """The same problem, worded for a run's configuration instead of the options of `canzona data prepare`."""
    fix = problem.fix
    if problem.key == "--output":
        fix = "use data.cache_dir=FOLDER or CANZONA_CACHE=FOLDER with a writable folder that has room"
    elif "--eod" in fix:
        fix = f"canzona data prepare stdlib --output PREFIX --tokenizer {problem.value}: {fix}"
    return replace(problem, key=_CONFIG_KEYS.get(problem.key, problem.key), fix=fix)


def _scanned_max(pair: PairInfo, config: RunConfig, report: ReportProgress) -> int:
    """The largest id of a pair without a sidecar; cached, because reading all of it may take minutes."""
    status = bin_path(pair.prefix).stat()
    key = f"{bin_path(pair.prefix)}\0{status.st_size}\0{status.st_mtime_ns}\0{pair.dtype}"
    memo = cache_root(config) / "scans" / hashlib.sha256(key.encode()).hexdigest()[:24]
    with suppress(OSError):
        return int(memo.read_text())
    largest = pair.scan_max_token_id(lambda share: report("looking for the largest token id", share))
    with suppress(OSError):  # only the next scan would gain from it
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(memo, str(largest))
    return largest


def _vocabulary_problems(config: RunConfig, corpus: PreparedCorpus) -> Iterator[Problem]:
    least = corpus.max_token_id + 1
    if least > config.model.vocab_size:
        where = ", ".join(f"{one.prefix}.bin" for one in corpus.sets)
        reason = f"{where} has token ids up to {corpus.max_token_id}, more than the embedding has"
        fix = f"model.vocab_size={padded_vocab_size(least)} (at least {least}; multiples of 128 divide well)"
        yield problem_with(config, "model.vocab_size", reason, fix)


def padded_vocab_size(least: int) -> int:
    """The next multiple of 128, Megatron's habit: an embedding that divides over any usual tensor-parallel size."""
    return -(-least // 128) * 128


def _held_out(config: RunConfig) -> float:
    validates = config.train.eval_interval > 0 and config.train.eval_batches > 0
    return config.data.validation_fraction if validates else 0.0


def _length_problems(config: RunConfig, pair: PairInfo, held: PreparedSet, *, blended: bool) -> Iterator[Problem]:
    """A sample is `seq_length` tokens and the one after them; each split needs at least one of its own."""
    needed = config.train.seq_length + 1
    data = held.name if blended else "the data"
    if held.tokens < needed:
        reason = f"{data} has only {held.tokens:,} tokens, less than one sample"
        fix = "prepare more text, or use a shorter train.seq_length"
        yield problem_with(config, "train.seq_length", reason, fix)
    elif held.train_tokens < needed or (_held_out(config) > 0 and held.validation_tokens < needed):
        which = "training" if held.train_tokens < needed else "validation"
        left = min(held.train_tokens, held.validation_tokens)
        of = f" of {held.name}" if blended else ""
        reason = f"leaves {left:,} tokens{of} for {which}, but a sample needs {needed:,}"
        yield problem_with(config, "data.validation_fraction", reason, _better_fraction(pair, needed))


def _sample_problems(config: RunConfig, corpus: PreparedCorpus) -> Iterator[Problem]:
    """Lists what keeps the model from continuing `train.sample_prompt`."""
    prompt = config.train.sample_prompt
    if config.train.sample_every == 0:
        return
    try:
        tokens = len(tokenizer_of(corpus).encode_batch([(prompt or "").encode()])[0])
    except ConfigError as error:
        yield from (replace(each, fix=f"{each.fix}; or train.sample_every=0") for each in error.problems)
        return
    if tokens >= config.train.seq_length:
        reason = f"is {tokens} tokens, and nothing fits behind them: train.seq_length={config.train.seq_length}"
        yield problem_with(config, "train.sample_prompt", reason, "use a shorter prompt")


def usable_fraction(pair: PairInfo, needed: int, *, at_least: float = 0.01) -> float | None:
    """The smallest share for validation, in hundredths, that leaves both splits `needed` tokens;
    None if none does."""
    shares = [percent / 100 for percent in range(round(at_least * 100), 51)]
    return next((share for share in shares if min(pair.split_tokens(share)) >= needed), None)


def _better_fraction(pair: PairInfo, needed: int) -> str:
    share = usable_fraction(pair, needed)
    if share is None:
        return "train.eval_interval=0 for no validation, or more documents (canzona data prepare --document line)"
    return f"data.validation_fraction={share:g}, or train.eval_interval=0 for no validation"
