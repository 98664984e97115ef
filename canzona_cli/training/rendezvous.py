"""A torchrun rendezvous that can only be reached from this machine.

torchrun's own backends (`static`, `c10d`) let their TCPStore listen on every interface whatever address they are
given, and the elastic one unpickles what it reads from it: anybody on the network may talk to a laptop's training run.
This backend hands the store a socket that is already bound to 127.0.0.1. Binding it ourselves also lets the kernel
choose a free port, so two launches can never race for one.

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


class LoopbackRendezvous(StaticTCPRendezvous):
    """Torchrun's static rendezvous of one machine, its store listening on 127.0.0.1 alone."""

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server((_HOST, 0), backlog=2048)
        port: int = listener.getsockname()[1]
        super().__init__(_HOST, port, rank=0, world_size=1, run_id=run_id, timeout=_TIMEOUT_S)
        self._loopback_store = TCPStore(
            _HOST,
            port,
            world_size=1,
            is_master=True,
            timeout=timedelta(seconds=_TIMEOUT_S),
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return "canzona-loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = self._loopback_store  # the base class makes one only where there is none
        return super().next_rendezvous()


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    if parameters.max_nodes != 1:
        raise ValueError("the canzona-loopback rendezvous is for one machine: use `--rdzv-backend static`")
    return LoopbackRendezvous(parameters.run_id)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun calls to learn how to make the rendezvous."""
    return _create
