"""Odd surroundings: paths, limits, environments and networks in which canzona works, or says in a sentence why not."""

import fcntl
import json
import os
import pwd
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from canzona_cli.launch.doctor import network
from canzona_cli.records.files import RunFiles
from tests.attacks.victim import TINY, Attack, Streams, Victim, attacked

LONG = "x" * 300
NOT_UTF8 = os.fsdecode(b"caf\xe9")
SWEEP = pytest.mark.sweep


@dataclass(frozen=True)
class Heard:
    """Streams that end in a file."""

    streams: Streams
    path: Path

    @property
    def text(self) -> str:
        """All on one line."""
        return " ".join(self.path.read_text().split())


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    path, nothing = tmp_path / "said", os.open(os.devnull, os.O_RDONLY)
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield Heard(Streams(stdin=nothing, stdout=output, stderr=output), path)
    os.close(output)
    os.close(nothing)


def refused(heard: Heard, victim: Victim, code: int, *words: str) -> None:
    """Asserts that the command refuses with every one of these words, written for a person."""
    assert victim.finish() == code, heard.text
    assert "This is a bug" not in heard.text
    assert "Traceback" not in heard.text
    for word in words:
        assert word in heard.text


def limited(what: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def at_home_here() -> None:
    """Makes the working directory the home of the password database, which counts where HOME is not set."""
    entry = pwd.getpwuid(os.getuid())
    here = pwd.struct_passwd((*entry[:5], str(Path.cwd()), *entry[6:]))
    pwd.getpwuid = lambda _: here


def ascii_only() -> None:
    sys.stdout, sys.stderr = (open(number, "w", encoding="ascii", closefd=False) for number in (1, 2))  # noqa: SIM115


@pytest.mark.parametrize(
    ("attack", "environment", "before"),
    [
        ("umask 000", {}, lambda: os.umask(0) and None),
        ("HOME is not set", {"HOME": None, "CANZONA_CACHE": None, "USER": None}, at_home_here),
        pytest.param("HOME is no directory", {"HOME": "/dev/null", "CANZONA_CACHE": None}, lambda: None, marks=SWEEP),
        pytest.param("TMPDIR is no directory", {"TMPDIR": "/dev/null/no"}, lambda: None, marks=SWEEP),
        ("an output of ASCII alone", {"LC_ALL": "C"}, ascii_only),
    ],
)
def test_odd_environments_train_as_ever(
    train: Attack,
    files: RunFiles,
    heard: Heard,
    attack: str,
    environment: dict[str, str | None],
    before: Callable[[], None],
) -> None:
    victim = train(heard.streams, ending="done@3", environment=environment, before=before)
    assert victim.finish() == 0, heard.text
    for path in (files.root, *files.root.rglob("*")):
        assert not path.stat().st_mode & 0o002, f"everybody may write {path}"
    assert "done, 3 steps" in heard.text


@pytest.mark.parametrize(
    ("attack", "overrides", "before", "code", "words"),
    [
        ("a run.dir of 300 bytes", (f"run.dir={LONG}",), None, 3, ("File name too long",)),
        ("a run.dir that is not UTF-8", (f"run.dir={NOT_UTF8}",), None, 2, ("run.dir", "is not UTF-8")),
        ("ulimit -n 7", (), limited(resource.RLIMIT_NOFILE, 7), 3, ("oo many open files",)),
        ("ulimit -f 0", (), limited(resource.RLIMIT_FSIZE, 0), 3, ()),
        ("ulimit -f 1", (), limited(resource.RLIMIT_FSIZE, 1024), 3, ("run.dir",)),
        ("a place without folders", ("run.dir=null", "run.root=/proc/canzona"), None, 3, ("run.root",)),  # root's too
    ],
)
def test_what_cannot_work_is_told_in_a_sentence(
    train: Attack,
    files: RunFiles,
    heard: Heard,
    attack: str,
    overrides: tuple[str, ...],
    before: Callable[[], None] | None,
    code: int,
    words: tuple[str, ...],
) -> None:
    refused(heard, train(heard.streams, *overrides, before=before or (lambda: None)), code, *words)
    assert not list(files.root.parent.rglob("rank-*")), "no worker was started"


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path, files: RunFiles, heard: Heard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        run = ("recipe=qwen3-tiny", "gpus=4", "cluster.nodes=2", "cluster.node_rank=0", f"run.dir={files.root}")
        victim = attacked("train", *run, f"cluster.rdzv_endpoint={endpoint}", streams=heard.streams, cwd=tmp_path)
        told = ("cluster.rdzv_endpoint", "another program on this machine uses this port", f"process {os.getpid()}")
        refused(heard, victim, 3, *told)
    assert not files.root.exists()


def test_in_a_deleted_working_directory_each_command_says_so(tmp_path: Path, heard: Heard) -> None:
    def before() -> None:
        shutil.rmtree(tmp_path / "gone")

    for words in (("train", *TINY), ("plan", *TINY, "--dry-run")):
        (tmp_path / "gone").mkdir()
        victim = attacked(*words, streams=heard.streams, cwd=tmp_path / "gone", before=before)
        refused(heard, victim, 3, "working directory")


def without_network() -> None:
    """A network of this process alone, its loopback interface down."""
    os.unshare(os.CLONE_NEWNET if os.geteuid() == 0 else os.CLONE_NEWUSER | os.CLONE_NEWNET)


def without_ports() -> None:
    """A network whose loopback interface is up and has two ports."""
    without_network()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40001")


def may_unshare() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            without_network()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(not may_unshare(), reason="needs a network of its own, which this system does not allow")
@pytest.mark.parametrize(("attack", "before"), [("no loopback", without_network), ("no free port", without_ports)])
def test_ranks_that_cannot_meet_are_found_before_they_start(
    train: Attack, files: RunFiles, heard: Heard, attack: str, before: Callable[[], None]
) -> None:
    refused(heard, train(heard.streams, before=before), 3, "network = 127.0.0.1", "its ranks cannot meet there")
    assert not files.root.exists()

    def doctor() -> None:
        before()
        found = {finding.name: finding for finding in network()}
        os.write(1, json.dumps(found["loopback"].status).encode())
        os._exit(0)

    heard.path.write_text("")
    attacked("doctor", streams=heard.streams, cwd=heard.path.parent, before=doctor).finish()
    assert json.loads(heard.path.read_text()) == "fail"
