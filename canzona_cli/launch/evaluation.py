"""The launcher's side of `canzona eval`: checks the checkpoint, the documents and the layout, then starts the
ranks. This module does not import torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.checkpoint.contents import saved_data, saved_run
from canzona_cli.checkpoint.store import StoredCheckpoint
from canzona_cli.config.changes import shape_problems
from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import key_of, text_value
from canzona_cli.config.resolve import fill
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.gpus import with_layers_here
from canzona_cli.core.costs.memory import GIB
from canzona_cli.core.errors import CheckpointInvalid, ConfigError, DoesNotFit, Problem, problem_with, refuse
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate.search import candidates
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.launch import preflight, torchrun
from canzona_cli.launch.resumed_data import check_tokenizer, other_text
from canzona_cli.launch.supervisor import run_ranks
from canzona_cli.launch.view import TrainView
from canzona_cli.records.codec import save
from canzona_cli.records.corpus import DataPlan, PreparedCorpus
from canzona_cli.records.records import Documents, Evaluation, Note, ResumePoint, StageEvent, read_evaluation

WORKER_MODULE = "canzona_cli.training.evaluation"
ROOT = "evals"
"""The default `run.root` of evaluations, which leave the directory of the evaluated run unchanged."""
_REPLACED_SETTINGS = (
    *("optimizer=adamw", "optimizer.lr=0.001", "checkpoint.resume=auto", "checkpoint.weights_from=null"),
    *("run.dir=null", f"run.root={ROOT}", "run.trackers=[]", "run.restarts=0"),
    *("run.profile_steps=null", "train.recompute=full"),
)
"""The settings that replace settings of the saved run. An evaluation needs no optimizer, and must not run the code of a
custom optimizer; the learning rate is set so that nobody is told that AdamW has another. An evaluation saves no
activations for a backward pass, and `train.recompute=full` is the setting with the fewest in the memory estimate."""


@dataclass(frozen=True, kw_only=True)
class PreparedEvaluation:
    """An evaluation that is ready to run. It has no run directory yet, and nothing was started."""

    config: RunConfig
    layout: Layout
    corpus: PreparedCorpus
    checkpoint: StoredCheckpoint
    notes: tuple[str, ...]


def prepare(
    checkpoint: StoredCheckpoint,
    overrides: Sequence[str],
    *,
    recipes_dirs: Sequence[Path] = (),
    documents: Documents | None = None,
    all_sequences: bool = False,
    on_progress: Callable[[str, float], None] | None = None,
) -> PreparedEvaluation:
    """Prepares an evaluation: resolves its configuration, and checks everything that can be checked before
    the ranks start.

    Args:
        overrides: changes to the settings of the run that saved the checkpoint.
        documents: the documents to read; None for held-out ones of the run's data, or all of other data.
        all_sequences: read every sequence once, not only `train.eval_sequences` of them.

    Raises:
        ConfigError: settings or data are not valid, the model is not the checkpoint's, the run held out no
            data, or the ranks need more than one machine.
        CheckpointInvalid: the checkpoint cannot be used.
        DoesNotFit: no layout fits in memory.
        EnvironmentProblem: this machine lacks something that the evaluation needs.
    """
    if checkpoint.manifest is None:
        raise CheckpointInvalid(*checkpoint.problems)
    manifest, saved = saved_run(checkpoint.path)
    saved_plan = saved_data(checkpoint.path, manifest)
    overridden = {key_of(argument) for argument in overrides}
    composed = compose_run(_arguments(checkpoint, overrides, overridden), recipes_dirs=recipes_dirs)
    refuse(shape_problems(saved, composed.config, str(checkpoint.path)))
    config, layout = _with_layout(composed.config)
    if (nodes := torchrun.node_count(config)) > 1:
        per_node = config.cluster.gpus_per_node
        reason = f"need {nodes} machines, but an evaluation runs on a single machine, which has {per_node} at most"
        raise ConfigError(Problem("gpus", reason, f"add gpus={per_node} or fewer", value=config.gpus))
    preflight.check_machine(config, layout, training=False)
    documents = documents or ("all" if _replaces_data(overridden) else "held-out")
    corpus = _corpus(config, documents, saved_plan, on_progress)
    check_tokenizer(saved_plan, str(checkpoint.path), config, corpus)
    if all_sequences:
        longest = max(data.validation_tokens // config.train.seq_length for data in corpus.sets)
        config = replace(config, train=replace(config.train, eval_sequences=max(1, longest)))
    notes = (*composed.warnings, *other_text(saved_plan, corpus))
    return PreparedEvaluation(config=config, layout=layout, corpus=corpus, checkpoint=checkpoint, notes=notes)


def _arguments(checkpoint: StoredCheckpoint, overrides: Sequence[str], overridden: set[str]) -> list[str]:
    """Returns the saved settings with those of an evaluation and the user's overrides, in this order."""
    recipe = f"recipe={text_value(str(checkpoint.path / 'config.yaml'))}"
    other = ("data.validation=null",) if _replaces_data(overridden) else ()
    replaced = [setting for setting in (*_REPLACED_SETTINGS, *other) if key_of(setting) not in overridden]
    return [recipe, *replaced, *overrides]


def _replaces_data(overridden: set[str]) -> bool:
    """Returns True if these settings name other data than the run's to train on."""
    others = overridden - {"data.validation"}
    return any(key == "data" or key.startswith("data.") for key in others)


def run(prepared: PreparedEvaluation, say: Callable[[str], None]) -> tuple[Evaluation, Path]:
    """Launches the ranks; returns the evaluation and its run directory, which has the logs of the ranks.

    Raises:
        KeyboardInterrupt: somebody stopped the evaluation.
        CanzonaError: a rank failed, with the rank's own error.
    """
    checkpoint, config = prepared.checkpoint, prepared.config
    path = str(checkpoint.path)
    resume_point = ResumePoint(checkpoint=path, step=checkpoint.step, validate=True, asked=path, weights_only=True)
    files = run_ranks(
        config,
        prepared.layout,
        prepared.corpus,
        module=WORKER_MODULE,
        view=_LineView(say),
        say=say,
        write_more=lambda files: save(files.resume, resume_point),
        grace_s=0.0,  # there is nothing to save
        hang_timeout_s=config.run.hang_timeout_s,
    )
    return read_evaluation(files), files.root


def _with_layout(config: RunConfig) -> tuple[RunConfig, Layout]:
    """Chooses a layout and fills it into the configuration: of the layouts whose forward pass fits in
    memory, the one with the most data-parallel ranks.

    Raises:
        DoesNotFit: the forward pass fits in no layout.
    """
    config = replace(config, cluster=with_layers_here(config.cluster))
    possible = candidates(config.setup)
    fitting = [candidate for candidate in possible if candidate.memory.forward <= candidate.memory.capacity]
    if not fitting:
        smallest = min(possible, key=lambda candidate: candidate.memory.forward).memory
        reason = (
            f"a forward pass of {config.model.name} needs at least {smallest.forward / GIB:.1f} "
            f"GiB per rank, but {config.cluster.name} offers {smallest.capacity / GIB:.1f} GiB"
        )
        raise DoesNotFit(problem_with(config, "gpus", reason, "use more ranks, or train.micro_batch_size=1"))
    best = min(fitting, key=lambda candidate: (-candidate.layout.dp, candidate.layout.vpp, candidate.memory.forward))
    return fill(config, best.layout), best.layout


def _corpus(
    config: RunConfig,
    documents: Documents,
    saved: DataPlan | None,
    on_progress: Callable[[str, float], None] | None,
) -> PreparedCorpus:
    """Prepares the data. If all documents are read, all of their tokens become validation tokens.

    Args:
        saved: the data plan of the checkpoint; None if it has none.
    """
    if documents == "held-out":
        if config.data.validation_fraction == 0 and not config.data.validation_set:
            reason = "the run held out no data: it trained on all of it"
            fix = "--documents all, or other data: data.validation=PREFIX"
            raise ConfigError(problem_with(config, "data.validation_fraction", reason, fix))
        # Evaluated documents must suffice for a sample, even if the run itself does not validate.
        validating = replace(config, train=replace(config.train, eval_interval=1))
        corpus = ensure_corpus(validating, on_progress, saved=saved)
        return replace(corpus, sets=corpus.validation_sets, validation=None)
    whole = replace(config.data, validation_fraction=0.0, validation=None)
    no_validation = replace(config, data=whole, train=replace(config.train, eval_interval=0))
    corpus = ensure_corpus(no_validation, on_progress)
    sets = [replace(data, train_tokens=0, validation_tokens=data.tokens) for data in corpus.sets]
    return replace(corpus, sets=tuple(sets))


class _LineView(TrainView):
    """A view that prints a line for each stage and each note."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def stage(self, event: StageEvent) -> None:
        self._say(f"{event.stage}: {event.detail}" if event.detail else event.stage)

    def note(self, note: Note) -> None:
        self._say(note.text)
