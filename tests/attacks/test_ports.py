"""A run listens on this machine alone; whatever is sent to its ports, it trains on until it is asked to stop."""

import random
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from canzona_cli.core.errors import ConfigError
from canzona_cli.launch.run_dir import RunDirectory
from canzona_cli.launch.torchrun import LOOPBACK_BACKEND
from tests.faults.support import LaunchedRun, alive, run_config

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


def test_garbage_to_every_port_stops_nothing_and_one_ctrl_c_everything_after_a_step(tmp_path: Path) -> None:
    with LaunchedRun(tmp_path / "run", "endless") as run:
        run.wait_for_steps(2)
        family = run.family()
        assert len(family) == 3, "torchrun and two workers"
        assert {p.name() for p in family} >= {"rank 0", "rank 1"}

        # Installed, as by `make test`, canzona's rendezvous listens on 127.0.0.1; torchrun's own listens everywhere.
        assert LOOPBACK_BACKEND in run.files.command.read_text(), "canzona is not installed here: `make setup`"
        listening = listened_on(family)
        assert {ip for ip, _ in listening} == {"127.0.0.1"}, "another machine could reach it"
        assert len(listening) >= 3, "torchrun's store, and each rank"
        opened = throw(listening)
        run.wait_for_steps(run.steps + 5)

        with pytest.raises(ConfigError, match="already") as refused:
            RunDirectory.create(run_config(run_dir=run.files.root))
        assert "unfinished or still running" in refused.value.problems[0].reason

        run.process.send_signal(signal.SIGINT)
        code, output = run.finish()
    assert code == 130, output
    assert "stopping after this step, 60 s at most (press Ctrl-C again to stop at once)" in output
    assert not alive(family)
    assert [run.record(rank)["status"] for rank in range(2)] == ["interrupted", "interrupted"]
    result = run.result()
    assert (result["status"], result["exit_code"]) == ("interrupted", 130)
    assert result["step"] == run.steps, "a step was lost"
    for connection in opened:
        connection.close()
