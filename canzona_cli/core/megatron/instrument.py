"""Times the phases of a training step in Megatron-core, for the breakdown.

Megatron's own timers synchronise the device at every start and stop, and do not time the parts of an update.
canzona passes Megatron a timer object for the schedule, and wraps the methods that start communication or
wait for it. `tests/dist/test_instrument.py` looks for the phases of real steps.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import fused_a2a
from megatron.core.utils import get_model_config

from canzona_cli.core.megatron.holdings import leaves
from canzona_cli.core.megatron.owner_bucket_group import bucket_groups
from canzona_cli.core.megatron.parallel import World, Wrapped
from canzona_cli.core.megatron.timers import CONNECTIONS, TOTAL_OF, CudaWatcher, PhaseTimer, Span, Watcher, watcher_for
from canzona_cli.core.phases import Phase

_log = logging.getLogger(__name__)

_PHASE_OF_TIMER: dict[str, Phase] = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-recv": "pipeline",
    "forward-send": "pipeline",
    "backward-recv": "pipeline",
    "backward-send": "pipeline",
    "forward-send-backward-recv": "pipeline",
    "backward-send-forward-recv": "pipeline",
    "all-grads-sync": "grad_reduce",
    "non-tensor-parallel-grads-all-reduce": "grad_reduce",
    "embedding-grads-all-reduce": "grad_reduce",
}


_INTERLEAVED: dict[str, Phase] = {"forward-backward": "pipeline"}
"""The additional timer of an interleaved schedule. It spans all passes, so time within them that belongs to
no other phase is attributed to `pipeline`: the schedule waits for transfers outside of Megatron's other
timers."""


def attach(chunks: Wrapped, optimizer: MegatronOptimizer | None, timer: PhaseTimer, world: World) -> None:
    """Makes `timer` time the schedule, gradient reduction, parameter gathering, and the updates of Megatron's
    own optimizers, including their TP communication.

    Args:
        optimizer: One of Megatron's own optimizers; None for canzona's optimizer, which reports its phases to
            `timer` itself.
    """
    get_model_config(chunks[0]).timers = MegatronTimers(timer, interleaved=len(chunks) > 1)
    watcher = watcher_for(timer.device)
    if isinstance(watcher, CudaWatcher) and not watcher.waits:
        _log.warning(
            "%s=1 keeps communication from overlapping with computation; the times of communication in flight are "
            "upper bounds, because each is measured until the step waits for that communication",
            CONNECTIONS,
        )
    _time_dispatch(timer, world)
    for group in bucket_groups(chunks):
        _Communication(group, timer, watcher, kind="grad", phase="grad_reduce")
        _Communication(group, timer, watcher, kind="param", phase="param_gather")
    if optimizer is None:
        return
    for leaf in leaves(optimizer):
        phase: Phase = "matrix_update" if isinstance(leaf.optimizer, OrthogonalizedOptimizer) else "adamw_update"
        _wrap(leaf, "step_with_ready_grads", functools.partial(timer.phase, phase))
    _time_tp_exchange(timer)


class MegatronTimers:
    """The object that canzona puts into Megatron's `config.timers`. As Megatron expects, `timers(name,
    log_level)` returns an object with `start(barrier)` and `stop()`."""

    def __init__(self, timer: PhaseTimer, *, interleaved: bool) -> None:
        phases = _PHASE_OF_TIMER | (_INTERLEAVED if interleaved else {})
        self._timers = {name: _Timer(timer, phase) for name, phase in phases.items()}
        self._ignored = _Timer(timer, None)

    def __call__(self, name: str, log_level: int = 0) -> "_Timer":
        return self._timers.get(name, self._ignored)


class _Timer:
    """A Megatron timer that attributes the time from `start` to `stop` to a phase; with None, it does
    nothing."""

    def __init__(self, timer: PhaseTimer, phase: Phase | None) -> None:
        self._timer, self._phase = timer, phase

    def start(self, barrier: bool = False) -> None:
        if self._phase is not None:
            self._timer.push(self._phase)

    def stop(self, barrier: bool = False) -> None:
        if self._phase is not None:
            self._timer.pop()


class _Communication:
    """The timing of a bucket group's gradient reduction or parameter gathering: how long the collective is in
    flight, and how long the step waits for it."""

    def __init__(
        self,
        group: object,
        timer: PhaseTimer,
        watcher: Watcher,
        *,
        kind: Literal["grad", "param"],
        phase: Literal["grad_reduce", "param_gather"],
    ) -> None:
        # Megatron's names: start_grad_sync, finish_grad_sync, grad_reduce_handle; start_param_sync and so on.
        start, finish = f"start_{kind}_sync", f"finish_{kind}_sync"
        self._group, self._timer, self._watcher = group, timer, watcher
        self._start, self._finish = getattr(group, start), getattr(group, finish)
        self._handle, self._phase, self._total = f"{phase}_handle", phase, TOTAL_OF[phase]
        self._span: Span | None = None
        setattr(group, start, self.start)
        setattr(group, finish, self.finish)

    def start(self, *args: object, **kwargs: object) -> object:
        old_handle = getattr(self._group, self._handle)
        begin = self._timer.now()
        with self._timer.phase(self._phase):
            result = self._start(*args, **kwargs)
        new_handle = getattr(self._group, self._handle)
        # Without a new handle, Megatron has already waited for the collective, so the phase includes all of
        # its time.
        if new_handle is not None and new_handle is not old_handle:
            self._span = self._timer.span(self._total, begin)
            self._watcher.watch(self._span, new_handle)
        return result

    def finish(self, *args: object, **kwargs: object) -> object:
        with self._timer.phase(self._phase):
            result = self._finish(*args, **kwargs)
        if self._span is not None:
            self._watcher.waited(self._span)
        self._span = None
        return result


def _wrap(owner: object, name: str, context: Callable[..., AbstractContextManager[None]]) -> None:
    """Wraps the function `name` of a module, class or object so that each call runs inside a new context
    manager, which `context` creates from the call's arguments. A function of a class must be static."""
    original: Callable[..., object] = getattr(owner, name)

    @functools.wraps(original)
    def called(*args: object, **kwargs: object) -> object:
        with context(*args, **kwargs):
            return original(*args, **kwargs)

    setattr(owner, name, staticmethod(called) if isinstance(owner, type) else called)


def _time_dispatch(timer: PhaseTimer, world: World) -> None:
    """Wraps the collectives with which Megatron's dispatchers send tokens to the ranks of their experts, and
    gradients back, so that their time is attributed to `dispatch`. All of them are synchronous."""
    if world.layout.ep == 1:
        return
    token_groups = (world.groups.ep, world.groups.tp_ep)

    def dispatch(*_: object, **kwargs: object) -> AbstractContextManager[None]:
        # DeepEP's functions get the group as a positional argument, and are used only to send tokens.
        group = kwargs.get("group", world.groups.ep)
        sends_tokens = timer.current in ("forward", "backward") and any(group is each for each in token_groups)
        return timer.phase("dispatch") if sends_tokens else nullcontext()

    _wrap(torch.distributed, "all_to_all_single", dispatch)
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        _wrap(mappings, name, dispatch)
    for function in (fused_a2a.FusedDispatch, fused_a2a.FusedCombine):
        for name in ("forward", "backward"):
            _wrap(function, name, dispatch)


def _time_tp_exchange(timer: PhaseTimer) -> None:
    """Wraps the collectives with which Megatron's Muon exchanges data between TP ranks within an update, so that
    their time is attributed to `exchange`: `all_gather` of fragments in the mode `duplicated`, `all_reduce` of
    norms and squares in the mode `distributed`. The calls are synchronous."""

    def exchange(communicates: bool) -> AbstractContextManager[None]:
        return timer.phase("exchange") if communicates and timer.current == "matrix_update" else nullcontext()

    # In groups of one rank Megatron still calls them, but nothing is communicated.
    def gather(tensor_list: list[torch.Tensor], *_: object, **__: object) -> AbstractContextManager[None]:
        return exchange(len(tensor_list) > 1)

    def reduce(
        *_: object, group: torch.distributed.ProcessGroup | None = None, **__: object
    ) -> AbstractContextManager[None]:
        return exchange(group is not None and group.size() > 1)

    _wrap(torch.distributed, "all_gather", gather)
    _wrap(torch.distributed, "all_reduce", reduce)
