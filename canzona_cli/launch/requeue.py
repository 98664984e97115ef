"""Tells the script of a Slurm job (`scripts/train.sbatch`) that a run failed in a way that a machine may have caused.

The script gives each start of the job a file, named by `VARIABLE`. The launchers write the failed machine's name into
it, and the script requeues the job without this machine. The script counts the files, because Slurm's own count of
restarts includes preemptions.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from canzona_cli.core.writing import write_text_atomic
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.restarts import may_be_the_machine, signature

VARIABLE: Final = "CANZONA_FAILURE"


def note_failure(outcome: Outcome, environment: Mapping[str, str] = os.environ) -> str:
    """Asks the job's script to requeue the job. Does nothing outside of such a job, or if no machine can have caused
    the outcome. Every machine of the run calls this, because any of them may be the one that is gone.

    Returns:
        The reason why the job is not requeued, if an earlier start failed in the same way; otherwise empty.
    """
    if VARIABLE not in environment or not may_be_the_machine(outcome):
        return ""
    file, failure = Path(environment[VARIABLE]), json.dumps(signature(outcome))
    with suppress(OSError):  # a full disk: the job ends, as it would without the file
        earlier = [path for path in file.parent.glob(f"{file.name.rpartition('-')[0]}-*") if path != file]
        if any(failure in path.read_text(encoding="utf-8").splitlines() for path in earlier):
            return f"this job already failed this way at step {outcome.step:,}, and is not requeued"
        file.parent.mkdir(parents=True, exist_ok=True)
        # The cause of a lost connection may be on another machine.
        machine = None if outcome.secondary else outcome.machine
        write_text_atomic(file, f"{machine or ''}\n{failure}\n")
    return ""
