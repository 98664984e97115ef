"""Whatever is sent to the ports that a run listens on, it trains on."""

import random
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.faults.support import LaunchedRun, alive

Address = tuple[str, int]
GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\nHost: run\r\n\r\n",
    bytes(64),
    b"\xff" * 4096,
    (1 << 62).to_bytes(8, "little") * 8,
)


def throw(listening: Sequence[Address]) -> list[socket.socket]:
    """Garbage to each; half of the connections stay open."""
    seeded, opened = random.Random(15), list[socket.socket]()
    for address in listening:
        for garbage in (*GARBAGE, seeded.randbytes(100), seeded.randbytes(70_000)):
            connection = socket.create_connection(address, timeout=5)
            connection.settimeout(1)
            with suppress(OSError):
                connection.sendall(garbage)
            opened.append(connection)
    for connection in opened[::2]:
        connection.close()
    return opened[1::2]


def listened_on(processes: Sequence[psutil.Process]) -> list[Address]:
    """Returns the addresses that any of the processes listens on."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def test_garbage_to_every_listening_port_stops_nothing(tmp_path: Path) -> None:
    with LaunchedRun(tmp_path / "run", "endless") as run:
        run.wait_for_steps(2)
        family = run.family()
        listening = listened_on(family)
        assert {ip for ip, _ in listening} == {"127.0.0.1"}, "another machine could reach it"
        assert len(listening) >= 3, "torchrun's store, and each rank"
        opened = throw(listening)
        run.wait_for_steps(run.steps + 5)
        run.process.send_signal(signal.SIGINT)
        code, output = run.finish()
    assert code == 130, output
    assert run.result()["step"] == run.steps
    assert not alive(family)
    for connection in opened:
        connection.close()
