"""Memory of the micro-group pipeline, allocated once: messages in two sets, because two exchanges are in flight."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from canzona_cli.planner.exchange import Route

SETS = 2
"""While group i is updated, gradients of i + 1 travel in and weights of i - 1 out: of each direction two are in use."""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """One direction's send and receive buffers, each flat and as long as the largest micro-group needs."""

    sends: tuple[torch.Tensor, ...]
    receives: tuple[torch.Tensor, ...]
    last: list[torch.distributed.Work | None]
    """By set: the last exchange."""

    @classmethod
    def for_routes(cls, routes: Sequence[Route], dtype: torch.dtype, device: torch.device) -> "Messages":
        """Large enough for every route; no memory where nothing is sent or received."""
        sent = max((route.sent for route in routes), default=0)
        received = max((route.received for route in routes), default=0)
        sets = min(SETS, len(routes))
        return cls(
            sends=tuple(torch.zeros(sent, dtype=dtype, device=device) for _ in range(sets)),
            receives=tuple(torch.zeros(received, dtype=dtype, device=device) for _ in range(sets)),
            last=[None] * sets,
        )

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.sends, *self.receives))


class AllToAll:
    """One all-to-all of one micro-group over the TP group, on its part of the message buffers.

    Args:
        number: of the micro-group; even and odd ones use different buffers.
    """

    def __init__(
        self, route: Route, messages: Messages, number: int, group: torch.distributed.ProcessGroup | None
    ) -> None:
        self.route, self._group = route, group
        self._work: torch.distributed.Work | None = None
        self._last, self._place = messages.last, number % max(1, len(messages.sends))
        if not messages.sends:
            self.send = self.receive = torch.empty(0)
            return
        self.send = messages.sends[self._place][: route.sent]
        self.receive = messages.receives[self._place][: route.received]

    def start(self) -> torch.distributed.Work | None:
        """Sends the packed messages; the handle to watch, None where nothing travels."""
        if self.route.travels:
            self._work = torch.distributed.all_to_all_single(
                self.receive,
                self.send,
                list(self.route.receive_splits),
                list(self.route.send_splits),
                group=self._group,
                async_op=True,
            )
            self._last[self._place] = self._work
        return self._work

    def wait(self) -> None:
        """Until everything has arrived (on a GPU: the current stream waits, the host does not)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
