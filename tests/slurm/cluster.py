"""A real Slurm of three nodes on this machine: own daemons, own configuration, own munge key, gone when the tests are.

Needs Debian's packages slurm-wlm and munge (`make test-slurm` installs them where it may) and root, because slurmd
starts jobs as their users. Nothing of an installed Slurm is read or changed: every file lies in one temporary folder,
and all ports are free ones on loopback.
"""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import PATIENCE_S

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("n1", "n2", "n3")
_END_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")

_CONF = """\
ClusterName=canzona
# A job looks for the port of its rendezvous from its number on: those of another cluster of tests look elsewhere.
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A requeued job waits as long as its old credential is good: two minutes unless said otherwise.
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 Features=fast
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=2 RealMemory=4000
PartitionName=main Nodes=n1,n2,n3 Default=YES MaxTime=60 DefaultTime=10 State=UP
PartitionName=other Nodes=n1,n2 MaxTime=60 DefaultTime=10 State=UP
"""


class Slurm:
    """The running cluster. Its commands run with its own configuration, in a clean environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
        self.environment["SLURM_CONF"] = str(root / "slurm.conf")

    def command(
        self, *argv: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run any command as a user of this cluster would."""
        return subprocess.run(
            argv,
            cwd=cwd or self.root,
            env=self.environment | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def ask(self, *argv: str) -> str:
        """Returns the output of a command, which must succeed."""
        done = self.command(*argv)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job_id: int | str) -> dict[str, str]:
        """The fields that `scontrol show job` prints for one job."""
        words = self.ask("scontrol", "--oneliner", "show", "job", str(job_id)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job_id: int | str, *states: str) -> dict[str, str]:
        """The job's fields once it is in one of `states` (default: ended)."""
        wanted = states or _END_STATES
        deadline = time.monotonic() + PATIENCE_S
        while (job := self.job(job_id))["JobState"] not in wanted:
            ended = job["JobState"] in _END_STATES
            if ended or time.monotonic() > deadline:
                log = Path(job.get("StdOut", ""))
                said = log.read_text() if log.is_file() else "(no output)"
                raise AssertionError(f"job {job_id} is {job['JobState']}, not {' or '.join(wanted)}; it said:\n{said}")
            time.sleep(0.1)
        return job

    def cancel_all(self) -> None:
        """No job is left, running or waiting."""
        self.command("scancel", "--full", "--user=root")
        deadline = time.monotonic() + PATIENCE_S
        while self.ask("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.1)


def missing() -> str | None:
    """Returns the parts of a real Slurm that are missing here, in words; None if nothing is."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "slurmd has to run as root"
    return None


@contextmanager
def running(root: Path) -> Iterator[Slurm]:
    """Start munged, slurmctld and three slurmd; stop them and their jobs whatever happens.

    Args:
        root: an empty folder.
    """
    ports = _free_ports(4)
    for name in ("munge", "state", "log"):
        (root / name).mkdir()
    for folder in (root, *root.parents):  # munge's clients refuse sockets below folders they cannot see into
        if folder.stat().st_uid == os.geteuid() and folder != folder.parent:
            folder.chmod(folder.stat().st_mode | 0o055)
    key = root / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    (root / "slurm.conf").write_text(
        _CONF.format(root=root, ports=ports, host=socket.gethostname(), first_job=1 + secrets.randbelow(60_000))
    )
    slurm = Slurm(root)
    munge = root / "munge"
    commands = [
        (
            *("munged", "--foreground", "--socket", str(munge / "socket"), "--key-file", str(key)),
            *("--pid-file", str(munge / "pid"), "--log-file", str(munge / "log"), "--seed-file", str(munge / "seed")),
        ),
        ("slurmctld", "-D"),
        *(("slurmd", "-D", "-N", node) for node in NODES),
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (root / "log" / f"{number}-{command[0]}.out").open("wb") as log:
                daemons.append(
                    subprocess.Popen(
                        command,
                        preexec_fn=_die_with_the_tests,
                        env=slurm.environment | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            if number == 0:
                _wait(lambda: (munge / "socket").exists(), "munged", root)
        _wait(lambda: _idle(slurm), "three idle nodes", root)
        yield slurm
    finally:
        if len(daemons) == len(commands) and all(daemon.poll() is None for daemon in daemons):
            slurm.cancel_all()
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _die_with_the_tests() -> None:
    """Makes a daemon that is about to start end, with its jobs, when the tests are killed."""
    pdeathsig = 1
    ctypes.CDLL(None).prctl(pdeathsig, signal.SIGTERM, 0, 0, 0)


def _idle(slurm: Slurm) -> bool:
    done = slurm.command("sinfo", "--noheader", "--partition=main", "--format=%D %t")
    return done.stdout.split() == [str(len(NODES)), "idle"]


def _wait(condition: Callable[[], bool], what: str, root: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}:\n{log.read_text()}" for log in sorted((root / "log").iterdir()))
            raise AssertionError(f"{what} did not come up\n{logs}")
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on at this moment, below those of outgoing connections."""
    found: list[int] = []
    while len(found) < count:
        port = 15_000 + secrets.randbelow(17_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                found.append(port)
        except OSError:
            continue
    return list(dict.fromkeys(found)) if len(set(found)) == count else _free_ports(count)
