"""Prepares and checks the corpus of a run before the run starts."""

import hashlib
import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from canzona_cli.config.schema import DataConfig, RunConfig
from canzona_cli.core.errors import CanzonaError, ConfigError, Problem, collect_problems, problem_with, refuse
from canzona_cli.core.reading import expanded
from canzona_cli.core.writing import exclusive_lock, write_text_atomic
from canzona_cli.data.build import BuildSettings, Progress, build_pair, disk_problem
from canzona_cli.data.indexed import (
    FORMAT,
    PairInfo,
    Sidecar,
    inspect_pair,
    load_sidecar,
    lock_path,
    saved_tokenizer_path,
)
from canzona_cli.data.order import ReportProgress, split_tokens
from canzona_cli.data.sources import stdlib_digest, stdlib_sources
from canzona_cli.data.tokenizers import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    bytes_by_id,
    load_json_tokenizer,
    read_backend,
    tokenizer_file,
)
from canzona_cli.records.corpus import DataPlan, Division, PreparedCorpus, PreparedSet
from canzona_cli.records.files import cache_root

NO_VALIDATION = "train.eval_interval=0 data.validation_fraction=0"
"""The settings of a run that holds no documents out."""
_HOLD_OUT = "use other text, or data.validation=null, which holds out documents of the data that is trained on"
_Pair = tuple[PairInfo, Sidecar | None]

_CONFIG_KEYS = {
    "--tokenizer": "data.tokenizer",
    "--vocab-size": "model.vocab_size",
    "--output": "CANZONA_CACHE",
    "INPUT": "data.source",
}
"""The setting that corresponds to each option of `canzona data prepare`."""


def ensure_corpus(
    config: RunConfig, on_progress: ReportProgress | None = None, *, saved: DataPlan | None = None
) -> PreparedCorpus:
    """Returns the corpus of `config.data` after checking it. The built-in corpus is prepared and cached if
    necessary.

    Args:
        config: the run. Its model's vocabulary and its sequence length are checked against the data.
        on_progress: called with a description of the current work and the finished share, 0 to 1.
        saved: the data of the checkpoint that the run starts from, whose sets stay divided as they are there.

    Raises:
        ConfigError: data sets are missing or damaged (lists all of them), or they do not suit the run (lists
            every reason): their tokenizers differ, token ids exceed the vocabulary, or there are too few tokens.
        EnvironmentProblem: the built-in corpus cannot be prepared: the cache is not writable, or this Python has
            no library sources.
    """
    report = on_progress or (lambda what, share: None)
    data = config.data
    pairs: list[_Pair]
    validation: list[_Pair] = []
    if data.source == "stdlib":
        weights, pairs = {"stdlib": 1.0}, [_stdlib_pair(config, report)]
    else:
        weights = data.blend or {str(data.path): 1.0}
        unreadable: list[Problem] = []
        pairs = _pairs([*weights], "data.blend" if data.blend else "data.path", unreadable)
        validation = _pairs([data.validation] if data.validation else [], "data.validation", unreadable)
        refuse(unreadable)
    all_pairs = [*pairs, *validation]
    largest = [sidecar.max_token_id if sidecar else _largest_token_id(pair, report) for pair, sidecar in all_pairs]
    sets = []
    for name, weight, (pair, _) in zip(_set_names([*weights]), weights.values(), pairs, strict=True):
        whole = _whole_set(pair, name, share=weight / sum(weights.values()))
        division = _division(data, whole, saved)
        train_tokens, validation_tokens = split_tokens(pair, division, data, report)
        sets.append(replace(whole, train_tokens=train_tokens, validation_tokens=validation_tokens, division=division))
    first_sidecar = pairs[0][1]
    corpus = PreparedCorpus(
        sets=tuple(sets),
        tokenizer=first_sidecar.tokenizer if first_sidecar else "unknown",
        vocab_size=first_sidecar.vocab_size if first_sidecar else max(largest) + 1,
        max_token_id=max(largest),
        eod=first_sidecar.eod if first_sidecar else None,
        tokenizer_sha256=(first_sidecar.tokenizer_sha256 or first_sidecar.tokenizer) if first_sidecar else "",
        validation=next((_whole_set(pair, Path(str(data.validation)).name) for pair, _ in validation), None),
    )
    problems = [*_disagreements(pairs, "data.blend"), *_disagreements([pairs[0], *validation], "data.validation")]
    problems += [*_repetitions(corpus), *_vocabulary_problems(config, corpus), *_validation_problems(config, corpus)]
    for part, (pair, _) in zip(corpus.sets, pairs, strict=True):
        problems += _length_problems(config, pair, part, blended=len(pairs) > 1)
    refuse(problems)
    return corpus


def saved_tokenizer(prefix: Path, name: str, eod: int | None) -> Tokenizer | None:
    """Returns the tokenizer that made the tokens of a prepared pair; None if it is unknown.

    Args:
        name: the tokenizer's name in the sidecar.
        eod: the id that ends a document; None for data from other tools.

    Raises:
        ConfigError: the tokenizer's file is damaged.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    path = saved_tokenizer_path(prefix)
    if eod is None or not path.is_file():
        return None
    try:
        return JsonTokenizer(kind="huggingface", name=name, eod=eod, backend=read_backend(path))
    except ConfigError as error:
        fix = "restore this file, or prepare the data again with --overwrite"
        raise ConfigError(*(replace(problem, key="data.path", fix=fix) for problem in error.problems)) from error


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """The number of bytes of text for each token id of a tokenizer."""

    values: npt.NDArray[np.float64]
    """The bytes of each token, shape [vocab_size]. If `counted`, special tokens have 0 bytes."""
    counted: bool
    """True if the bytes of each token were counted; False if every value is the corpus's mean bytes per
    token."""


def token_bytes(corpus: PreparedCorpus) -> TokenBytes | None:
    """Returns the number of bytes of text for each token of a corpus; None if its tokenizer is unknown.

    Raises:
        ConfigError: the corpus is damaged.
    """
    if (tokenizer := saved_tokenizer(corpus.prefix, corpus.tokenizer, corpus.eod)) is None:
        return None
    if (values := bytes_by_id(tokenizer)) is not None:
        return TokenBytes(values=values, counted=True)
    sidecars = [sidecar for part in corpus.sets if (sidecar := load_sidecar(inspect_pair(part.prefix))) is not None]
    if len(sidecars) < len(corpus.sets):
        return None
    mean = sum(sidecar.text_bytes for sidecar in sidecars) / sum(sidecar.tokens for sidecar in sidecars)
    return TokenBytes(values=np.full(corpus.vocab_size, mean), counted=False)


def _pairs(paths: Sequence[str], key: str, problems: list[Problem]) -> list[_Pair]:
    """Returns the pairs at these prefixes with their sidecars; adds a problem for each that is missing or damaged.

    Args:
        key: the setting that names them.
    """
    pairs, found = [], list[Problem]()
    for path in paths:
        with collect_problems(found):
            pair = inspect_pair(expanded(path).absolute())
            pairs.append((pair, load_sidecar(pair)))
    in_fix = "" if key == "data.blend" else f"{key}="
    problems += [replace(problem, key=key, fix=problem.fix.replace("data.path=", in_fix)) for problem in found]
    return pairs


def _whole_set(pair: PairInfo, name: str, *, share: float = 1.0) -> PreparedSet:
    """Returns a set of which all tokens are for validation."""
    return PreparedSet(
        name=name,
        prefix=pair.prefix,
        share=share,
        tokens=pair.tokens,
        documents=pair.documents,
        train_tokens=0,
        validation_tokens=pair.tokens,
        fingerprint=pair.fingerprint(),
    )


def _division(data: DataConfig, part: PreparedSet, saved: DataPlan | None) -> Division:
    """Returns how the documents of a set are divided: as in the checkpoint, if it has this set."""
    place = None if saved is None else saved.place_of(part)
    if saved is not None and place is not None:
        return saved.corpus.sets[place].division
    return "tail" if data.source == "stdlib" else "drawn"


def _set_names(paths: Sequence[str]) -> list[str]:
    """Returns the last part of each path, or the full paths if the last parts are not unique."""
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else [*paths]


def _disagreements(pairs: Sequence[_Pair], key: str) -> Iterator[Problem]:
    """Yields a problem for every set whose tokenizer differs from the first set's, because the same id would
    mean different text.

    Args:
        key: the setting that names the sets.
    """
    (first, first_sidecar), *others = pairs
    for pair, sidecar in others:
        if _tokenizer_key(sidecar) == _tokenizer_key(first_sidecar):
            continue
        tokenizer, expected = _tokenizer_words(sidecar), _tokenizer_words(first_sidecar)
        reason = f"its tokenizer is {tokenizer}, but {first.prefix} has {expected}: the same id means different text"
        saved = saved_tokenizer_path(first.prefix)
        fix = f"canzona data prepare ... --tokenizer {saved if saved.exists() else 'byte'}, the same for all sets"
        yield Problem(key, reason, fix, value=str(pair.prefix))


def _repetitions(corpus: PreparedCorpus) -> Iterator[Problem]:
    """Yields a problem for every set with the same contents as an earlier set of the blend, because these
    would be read more often than the weights say."""
    first_with: dict[str, PreparedSet] = {}
    for part in corpus.sets:
        first = first_with.setdefault(part.fingerprint, part)
        if first is not part:
            reason = f"has the same contents as {first.prefix}, so its samples would be read twice"
            yield Problem("data.blend", reason, "list it once, with the sum of both weights", value=str(part.prefix))
    if corpus.validation is not None and corpus.validation.fingerprint in first_with:
        reason = f"has the same contents as {first_with[corpus.validation.fingerprint].prefix}, which is trained on"
        yield Problem("data.validation", reason, _HOLD_OUT, value=str(corpus.validation.prefix))


def _validation_problems(config: RunConfig, corpus: PreparedCorpus) -> Iterator[Problem]:
    """Yields a problem if the run validates on a set that has too few tokens for one sample."""
    part, needed = corpus.validation, config.train.seq_length + 1
    if part is not None and config.train.eval_interval > 0 and part.tokens < needed:
        reason = f"has {part.tokens:,} tokens, but a sample needs {needed:,}"
        yield Problem("data.validation", reason, _HOLD_OUT, value=str(part.prefix))


def _tokenizer_words(sidecar: Sidecar | None) -> str:
    return f"{sidecar.tokenizer} ({sidecar.vocab_size:,} ids)" if sidecar else "an unknown one"


def _tokenizer_key(sidecar: Sidecar | None) -> tuple[str | None, int, int] | None:
    """Returns a key that is equal for equal tokenizers; None for a pair without a sidecar."""
    return None if sidecar is None else (sidecar.tokenizer_sha256, sidecar.vocab_size, sidecar.eod)


def check_data(
    config: RunConfig, on_progress: ReportProgress, *, saved: DataPlan | None = None
) -> PreparedCorpus | None:
    """Checks a run's data as far as this is possible without preparing the built-in corpus.

    Prepared data are checked completely. For the built-in corpus only the tokenizer file is checked, because
    the corpus is prepared by the first run that needs it. For arguments see `ensure_corpus`.

    Returns:
        The corpus; None for the built-in corpus.

    Raises:
        ConfigError: see `ensure_corpus`; or the tokenizer file is missing or not valid.
    """
    if config.data.source == "prepared":
        return ensure_corpus(config, on_progress, saved=saved)
    if config.data.tokenizer not in ("byte", "bpe"):
        try:
            load_json_tokenizer(config.data.tokenizer)
        except ConfigError as error:
            raise ConfigError(*map(_as_settings_problem, error.problems)) from error
    return None


def _stdlib_pair(config: RunConfig, report: ReportProgress) -> tuple[PairInfo, Sidecar]:
    """Returns the built-in corpus from the cache. If it is missing or damaged, it is prepared first."""
    data = config.data
    try:
        sources = stdlib_sources()
        settings = BuildSettings(tokenizer=data.tokenizer, vocab_size=config.bpe_ids)
        prefix = _cache_prefix(config, stdlib_digest(sources))
        if cached := _load_intact(prefix):
            return cached
        try:
            prefix.parent.mkdir(parents=True, exist_ok=True)
            waiting = "waiting for another run that is preparing the same corpus"
            with exclusive_lock(lock_path(prefix), on_wait=lambda: report(waiting, 0.0)):
                if cached := _load_intact(prefix):  # another run prepared it while this one waited
                    return cached
                build_pair(sources, prefix, settings, lambda progress: report(*_progress_words(progress)))
        except OSError as error:
            raise disk_problem(prefix, error) from error
        cached = _load_intact(prefix)
        assert cached is not None, prefix
        return cached
    except CanzonaError as error:
        raise type(error)(*map(_as_settings_problem, error.problems)) from error


def _cache_prefix(config: RunConfig, content: str) -> Path:
    """Returns the prefix of the cached corpus: a readable name and a hash of everything that its tokens
    depend on."""
    kind = config.data.tokenizer
    vocab_size = 0
    tokenizer_hash = ""
    if kind == "bpe":
        vocab_size = config.bpe_ids
    elif kind != "byte":
        tokenizer_hash = hashlib.sha256(tokenizer_file(kind).read_bytes()).hexdigest()
        kind = "tokenizer"
    key = json.dumps([FORMAT, platform.python_version(), kind, vocab_size, tokenizer_hash, content])
    name = "-".join(["stdlib", platform.python_version(), kind, *([str(vocab_size)] if vocab_size else [])])
    return cache_root() / "corpora" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _load_intact(prefix: Path) -> tuple[PairInfo, Sidecar] | None:
    """Returns the cached corpus; None if it is missing or damaged, so that it is prepared again."""
    try:
        pair = inspect_pair(prefix)
        sidecar = load_sidecar(pair)
    except ConfigError:
        return None
    return None if sidecar is None else (pair, sidecar)


def _progress_words(progress: Progress) -> tuple[str, float]:
    share = min(1.0, progress.done / progress.total) if progress.total else 0.0
    if progress.stage == "learn vocabulary":
        # The share covers only the reading, which is short; the training itself reports no progress.
        return "learning a vocabulary from the Python standard library", share
    if progress.stage == "write":
        return "writing the corpus", 1.0
    return "tokenising the Python standard library", share


def _as_settings_problem(problem: Problem) -> Problem:
    """Rewrites a problem of `canzona data prepare` for a run, which has settings instead of options."""
    fix = problem.fix
    if problem.key == "--output":
        fix = "set CANZONA_CACHE=FOLDER in the environment, with a writable folder that has room"
    elif "--eod" in fix:
        fix = f"canzona data prepare stdlib --output PREFIX --tokenizer {problem.value}: {fix}"
    return replace(problem, key=_CONFIG_KEYS.get(problem.key, problem.key), fix=fix)


def _largest_token_id(pair: PairInfo, report: ReportProgress) -> int:
    """Returns the largest token id in a pair without a sidecar. The result is cached, because the scan may
    take minutes."""
    memo = pair.scan_path(cache_root(), "largest id")
    with suppress(OSError, ValueError):
        return int(memo.read_text())
    largest = pair.scan_max_token_id(lambda share: report("looking for the largest token id", share))
    with suppress(OSError):  # without the cache, the next run scans again
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(memo, str(largest))
    return largest


def _vocabulary_problems(config: RunConfig, corpus: PreparedCorpus) -> Iterator[Problem]:
    needed = corpus.max_token_id + 1
    if needed > config.model.vocab_size:
        files = ", ".join(f"{part.prefix}.bin" for part in {*corpus.sets, *corpus.validation_sets})
        reason = f"{files} has token ids up to {corpus.max_token_id}, beyond the embedding"
        fix = f"model.vocab_size={padded_vocab_size(needed)} (at least {needed}; multiples of 128 divide well)"
        yield problem_with(config, "model.vocab_size", reason, fix)


def padded_vocab_size(least: int) -> int:
    """Rounds up to a multiple of 128, Megatron's default, so that all common TP sizes divide the embedding."""
    return -(-least // 128) * 128


def _length_problems(config: RunConfig, pair: PairInfo, part: PreparedSet, *, blended: bool) -> Iterator[Problem]:
    """Yields a problem if the training or validation split of a set has too few tokens for one sample.

    A sample is `seq_length` tokens and the token after them.
    """
    needed = config.train.seq_length + 1
    data = part.name if blended else "the data"
    if part.tokens < needed:
        reason = f"{data} has only {part.tokens:,} tokens, less than one sample"
        fix = "prepare more text, or use a shorter train.seq_length"
        yield problem_with(config, "train.seq_length", reason, fix)
    elif part.train_tokens < needed or (
        config.train.eval_interval > 0 and not config.data.validation_set and part.validation_tokens < needed
    ):
        split, available = "training", part.train_tokens
        if available >= needed:
            split, available = "validation", part.validation_tokens
        of_set = f" of {part.name}" if blended else ""
        reason = f"leaves {available:,} tokens{of_set} for {split}, but a sample needs {needed:,}"
        yield problem_with(
            config, "data.validation_fraction", reason, _better_fraction(pair, part.division, config.data, needed)
        )


def usable_fraction(
    pair: PairInfo, division: Division, data: DataConfig, needed: int, *, at_least: float = 0.01
) -> float | None:
    """Returns the smallest validation share, from `at_least` to 0.5 in steps of 0.01, with at least `needed`
    tokens in both splits; None if there is no such share."""
    shares = [percent / 100 for percent in range(round(at_least * 100), 51)]
    settings = {share: replace(data, validation_fraction=share) for share in shares}
    return next((share for share in shares if min(split_tokens(pair, division, settings[share])) >= needed), None)


def _better_fraction(pair: PairInfo, division: Division, data: DataConfig, needed: int) -> str:
    share = usable_fraction(pair, division, data, needed)
    if share is None:
        return f"{NO_VALIDATION} (no validation), or more documents (canzona data prepare --document line)"
    return f"data.validation_fraction={share:g}, or {NO_VALIDATION} (no validation)"
