"""Compares the data of a resumed run with the data of its checkpoint: the tokenizer, the text, the shares of
its sets, and the order of the samples. This module does not import torch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from canzona_cli.checkpoint.huggingface.folder import TOKENIZER
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import override_text
from canzona_cli.core.errors import ConfigError, Problem, value_of
from canzona_cli.core.setup import Layout
from canzona_cli.data.indexed import saved_tokenizer_path
from canzona_cli.data.order import (
    Order,
    about_by_share,
    continue_plan,
    order_of,
    set_sizes,
)
from canzona_cli.data.tokenizers import read_backend
from canzona_cli.launch.resume import Resumption
from canzona_cli.records.corpus import DataPlan, PreparedCorpus, PreparedSet, samples_needed
from canzona_cli.records.words import clean

_ORDER_SETTINGS: Final = (
    *("train.steps", "train.global_batch_size", "train.batch_rampup", "train.seq_length", "train.seed"),
    *("data.validation", "data.validation_fraction", "data.blend"),
)


def check_tokenizer(saved: DataPlan | None, weights: str, config: RunConfig, corpus: PreparedCorpus) -> None:
    """Checks that the data has the tokenizer with which a checkpoint was trained.

    Args:
        saved: the data plan of the checkpoint; None if it has none.
        weights: the path of the checkpoint or of a Hugging Face folder. Prepared data is compared with the
            tokenizer of such a folder.

    Raises:
        ConfigError: the data has another tokenizer, so that the same id means other text.
    """
    if not corpus.tokenizer_sha256:
        return
    if saved is not None and saved.corpus.tokenizer_sha256:
        same = saved.corpus.tokenizer_sha256 == corpus.tokenizer_sha256 and saved.corpus.eod == corpus.eod
        theirs = _tokenizer(saved.corpus)
    elif config.data.source == "prepared" and (file := Path(weights) / TOKENIZER).is_file():
        ours = saved_tokenizer_path(corpus.prefix)
        same = ours.is_file() and read_backend(ours).get_vocab() == read_backend(file).get_vocab()
        theirs = str(file)
    else:
        return
    if same:
        return
    stdlib = config.data.source == "stdlib"
    key = "data.tokenizer" if stdlib else "data.blend" if config.data.blend else "data.path"
    value = config.data.tokenizer if stdlib else ", ".join(str(part.prefix) for part in corpus.sets)
    reason = f"its tokenizer is {_tokenizer(corpus)}, but {weights} was trained on ids of {theirs}"
    fix = "use data with that tokenizer (canzona data prepare ... --tokenizer FILE), or start without these weights"
    raise ConfigError(Problem(key, f"{reason}: the same id means other text", fix, value=value))


def _tokenizer(corpus: PreparedCorpus) -> str:
    digest = "" if corpus.tokenizer_sha256 == corpus.tokenizer else f", {corpus.tokenizer_sha256[:8]}"
    return f"{clean(corpus.tokenizer)} ({corpus.vocab_size:,} ids{digest})"


def data_changes(resumption: Resumption, config: RunConfig, layout: Layout, corpus: PreparedCorpus) -> list[str]:
    """Returns warnings about the differences between the data of a resumed run and of its checkpoint.

    Raises:
        ConfigError: the data has another tokenizer.
    """
    check_tokenizer(resumption.data, resumption.origin, config, corpus)
    before = resumption.saved
    if resumption.weights_only or before is None:
        return []
    step, done = resumption.step, resumption.progress.samples
    saved = replace(
        resumption.data or DataPlan(corpus=corpus, samples=0),
        samples=samples_needed(before.train, resumption.batch_before, step=step, samples=done),
    )
    needed = resumption.samples_needed(config, layout)
    plan = continue_plan(saved, corpus, samples=needed, done=done, count=about_by_share)
    return [
        *_text_warnings(resumption, saved, corpus),
        *_blend_warnings(resumption, saved, plan),
        *_order_warnings(resumption, before, config, saved, plan),
    ]


def _text_warnings(resumption: Resumption, saved: DataPlan, corpus: PreparedCorpus) -> Iterator[str]:
    """Yields a warning for each set whose text is no longer that of the checkpoint."""
    for part in corpus.sets:
        before = _before(saved, part)
        if before is not None and _differ(before, part):
            yield (
                f"{part.prefix} has other text than up to step {resumption.step:,}: {_counts(part, before)}. The run "
                "reads the new text from here on; text that it has already read may come again"
            )
    now, before = corpus.validation, saved.corpus.validation
    if now is not None and before is not None and now.prefix == before.prefix and _differ(before, now):
        yield (
            f"{now.prefix} has other text than up to step {resumption.step:,}: {_counts(now, before)}. Validation "
            "losses before and after are of different text"
        )


def other_text(saved: DataPlan | None, corpus: PreparedCorpus) -> Iterator[str]:
    """Yields a warning for each evaluated set whose text is not that of the checkpoint's run.

    Args:
        saved: the data plan of the checkpoint; None if it has none.
    """
    if saved is None or not all(known.fingerprint for known in saved.corpus.sets):
        return
    own_set = saved.corpus.validation
    for part in corpus.sets:
        before = _before(saved, part)
        if before is None and own_set is not None and own_set.prefix == part.prefix:
            before = own_set
        if before is None:
            yield f"{part.prefix} is none of the run's data, so its loss is not that of the run's own validation"
        elif _differ(before, part):
            yield (
                f"{part.prefix} has other text than when the checkpoint was saved ({_counts(part, before)}), so its "
                "loss is not that of the run's own validation, and documents that were trained on may be in it"
            )


def _counts(now: PreparedSet, before: PreparedSet) -> str:
    new, old = (f"{each.tokens:,} tokens in {each.documents:,} documents" for each in (now, before))
    return f"{new} now, {old} before" if new != old else f"also {new}"


def _blend_warnings(resumption: Resumption, saved: DataPlan, plan: DataPlan) -> Iterator[str]:
    """Yields a warning if the sets, or their shares, are no longer those of the checkpoint."""
    if plan.blend_start != saved.blend_start or plan.set_starts != saved.set_starts:
        about = "about " if len(saved.corpus.sets) > 1 else ""
        starts = [
            f"{clean(part.name)} with its sample {about if start else ''}{start + 1:,}"
            for part, start in zip(plan.corpus.sets, plan.set_starts, strict=True)
        ]
        one = len(starts) == 1
        verb = "the set begins" if one else "each set continues with its own next sample"
        yield f"from step {resumption.step + 1:,} on, {verb}: {', '.join(starts)}"


def _order_warnings(
    resumption: Resumption, before: RunConfig, config: RunConfig, saved: DataPlan, plan: DataPlan
) -> Iterator[str]:
    """Yields a warning for each set whose samples have another order than in the checkpoint's run."""
    for number, part in enumerate(plan.corpus.sets):
        known = _before(saved, part)
        if known is None or _differ(known, part):
            continue
        place = saved.corpus.sets.index(known)
        old = _order(before, known, set_sizes(saved)[place])
        new = _order(config, part, set_sizes(plan)[number])
        if old == new:
            continue
        data = "the data" if len(plan.corpus.sets) == 1 else clean(part.name)
        causes = [
            f"{key}={override_text(value_of(config, key))}"
            for key in _ORDER_SETTINGS
            if value_of(config, key) != value_of(before, key)
        ]
        yield (
            f"{', '.join(causes) or 'the resumed run'} changes the order of {data} from step {resumption.step + 1:,} "
            f"on: {_epochs(new)} instead of {_epochs(old)}. Some text is then read again, and other text not at all"
        )


def _epochs(order: Order) -> str:
    epochs = "1 epoch" if order.epochs == 1 else f"{order.epochs} epochs"
    return f"{epochs}, the last by itself" if order.separate_last else epochs


def _order(config: RunConfig, part: PreparedSet, samples: int) -> Order:
    return order_of(
        tokens=max(1, part.train_tokens),
        samples=samples,
        seq_length=config.train.seq_length,
        seed=config.train.seed,
    )


def _before(saved: DataPlan, part: PreparedSet) -> PreparedSet | None:
    """Returns the set as it was in the checkpoint; None if the checkpoint does not know it."""
    place = saved.place_of(part)
    return None if place is None else saved.corpus.sets[place]


def _differ(before: PreparedSet, now: PreparedSet) -> bool:
    return bool(before.fingerprint and now.fingerprint) and before.fingerprint != now.fingerprint
