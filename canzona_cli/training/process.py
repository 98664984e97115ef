"""One rank as a process: signs of life in its result file, and an end that never hangs."""

import faulthandler
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from canzona_cli.config.secrets import RedactingFormatter
from canzona_cli.errors import EnvironmentProblem
from canzona_cli.run.files import RunFiles
from canzona_cli.run.heartbeat import STACKS_SIGNAL
from canzona_cli.run.orphan import die_with_parent
from canzona_cli.run.records import FIRST_STAGE, Ending
from canzona_cli.run.streams import guard
from canzona_cli.run.words import plural
from canzona_cli.training.records import Journal, RankRecord
from canzona_cli.training.requests import StopRequests

IMPORTED_BY_ALL: Final = (
    "canzona_cli.megatron",  # before anything else imports Megatron
    "canzona_cli.training.assemble",
    "canzona_cli.config.compose",
    "torch._dynamo",  # torch's own optimizers import it in their first step
)
"""The slow imports of ranks of every kind, for `canzona_cli.training.agent`."""
Work = Callable[[RunFiles, RankRecord, int], Ending]
"""Given the run's files, this rank's record and its number; how it ended. Slow imports belong into it: they
come after the first sign of life."""


def run_rank(run_dir: Path, work: Work) -> NoReturn:
    """Do this rank's work and exit; the exit code is also in the rank's result file."""
    os.umask(os.umask(0o077) | 0o002)  # nothing of a run is for everybody to write, its logs and traces included
    guard()
    logging.basicConfig(level=logging.WARNING)
    logging.root.handlers[0].setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    die_with_parent()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    requests = StopRequests()
    requests.listen()
    files = RunFiles(run_dir)
    rank = int(os.environ["RANK"])
    record = RankRecord(files, rank)
    record.requests = requests
    try:
        record.running()
    except EnvironmentProblem as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    Journal(files, writes=rank == 0).stage(FIRST_STAGE, plural(int(os.environ["WORLD_SIZE"]), "rank"))
    hush()
    try:
        import canzona_cli.megatron  # noqa: F401 - before anything imports Megatron

        ending = work(files, record, rank)
    except BaseException as error:
        code = record.failed(error)
        logging.getLogger(__name__).exception("rank %d failed", rank)
        # No destructors, no collective shutdown: peers may be waiting in a collective that will never
        # complete.
        sys.stderr.flush()
        os._exit(int(code))
    code = record.ended(ending)
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is on disk and every group is closed; tearing down torch would only keep the terminal for
    # seconds.
    os._exit(code)


def hush() -> None:
    """Silences torch's and Megatron's warnings of optional packages and of their own future: the reader of a
    log cannot act on them, and they would stand above a rank's error."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    for name in ("megatron.core.models.gpt.gpt_model", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
