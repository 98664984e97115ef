"""Provides a torchrun rendezvous that can only be reached from this machine.

With torchrun's backends (`static`, `c10d`) the TCPStore listens on all interfaces, whatever address it is
given, and `c10d` unpickles the values that it reads from the store. So with these backends, anyone on the
network could interfere with a training run on a laptop. This backend gives the store a socket that is already
bound to 127.0.0.1. The kernel chooses a free port, so two launches never race for the same port.

The backend is registered as `canzona-loopback` in the entry point group `torchrun.handlers`.
"""

import socket
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # torch.distributed.TCPStore, from the module with its types
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_HOST = "127.0.0.1"
_TIMEOUT_S = 600
"""The rendezvous timeout for several agents, in seconds. They may be started by hand, one after another."""
_SINGLE_TIMEOUT_S = 60
"""The rendezvous timeout for a single agent, in seconds."""


class LoopbackRendezvous(StaticTCPRendezvous):
    """A static torchrun rendezvous for agents on one machine, whose store listens only on 127.0.0.1.

    Args:
        port: the store's port. With a single agent it may be 0, and the kernel chooses a port.
        agents: the number of agents.
    """

    def __init__(self, run_id: str, *, port: int = 0, rank: int = 0, agents: int = 1) -> None:
        listener = socket.create_server((_HOST, port), backlog=2048) if rank == 0 else None
        if listener is not None:
            port = listener.getsockname()[1]
        timeout_s = _SINGLE_TIMEOUT_S if agents == 1 else _TIMEOUT_S
        super().__init__(_HOST, port, rank=rank, world_size=agents, run_id=run_id, timeout=timeout_s)
        self._loopback_store = TCPStore(
            _HOST,
            port,
            world_size=agents,
            is_master=listener is not None,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )

    def get_backend(self) -> str:
        return "canzona-loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = self._loopback_store  # the base class makes a store only if there is none
        return super().next_rendezvous()


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Creates the rendezvous; raises ValueError if the endpoint is on another machine."""
    host, _, port = parameters.endpoint.rpartition(":")
    if host not in ("localhost", "") and not host.startswith("127."):
        raise ValueError("the canzona-loopback rendezvous is for one machine: use `--rdzv-backend static`")
    rank = parameters.get_as_int("rank", 0)
    assert rank is not None
    return LoopbackRendezvous(parameters.run_id, port=int(port or 0), rank=rank, agents=parameters.max_nodes)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the function that creates the rendezvous. torchrun calls this entry point."""
    return _create
