"""A torchrun rendezvous that can only be reached from this machine.

torchrun's own backends (`static`, `c10d`) let their TCPStore listen on every interface whatever address they
are given, and the elastic one unpickles what it reads from it: anybody on the network may talk to a laptop's
training run. This backend hands the store a socket that is already bound to 127.0.0.1. Binding it ourselves
also lets the kernel choose a free port, so two launches can never race for one.

Registered under the entry point group `torchrun.handlers` as `canzona-loopback`.
"""

import socket
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # where its type lives; the same class as torch.distributed.TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_HOST = "127.0.0.1"
_TIMEOUT_S = 600
"""Seconds for agents that are started by hand, one after the other."""
_OWN_TIMEOUT_S = 60
"""Seconds for an agent that only has to reach itself."""


class LoopbackRendezvous(StaticTCPRendezvous):
    """Torchrun's static rendezvous of agents on one machine, its store listening on 127.0.0.1 alone.

    Args:
        port: Where the agents meet; 0 lets the kernel choose, for one agent.
        rank: This agent's among `agents`.
    """

    def __init__(self, run_id: str, *, port: int = 0, rank: int = 0, agents: int = 1) -> None:
        listener = socket.create_server((_HOST, port), backlog=2048) if rank == 0 else None
        if listener is not None:
            port = listener.getsockname()[1]
        timeout_s = _OWN_TIMEOUT_S if agents == 1 else _TIMEOUT_S
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
        self._store = self._loopback_store  # the base class makes one only where there is none
        return super().next_rendezvous()


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, _, port = parameters.endpoint.rpartition(":")
    if host not in ("localhost", "") and not host.startswith("127."):
        raise ValueError("the canzona-loopback rendezvous is for one machine: use `--rdzv-backend static`")
    rank = parameters.get_as_int("rank", 0)
    assert rank is not None
    return LoopbackRendezvous(parameters.run_id, port=int(port or 0), rank=rank, agents=parameters.max_nodes)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the function by which torchrun makes the rendezvous."""
    return _create
