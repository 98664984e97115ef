"""Options of sbatch that a user adds to a job's script by `--sbatch`: none may contradict what canzona sets there."""

import re
from collections.abc import Iterator, Sequence

from canzona_cli.errors import Problem

_RANKS = "canzona starts one task per machine, with the GPUs that gpus=N needs: change gpus, or --nodes"
_WHOLE = "canzona takes machines whole; --cpus-per-task N shares them"
_PATHS = "start canzona in the directory that paths begin from; the log is written there"
_NOT_OF_A_SCRIPT = "is for sbatch's own command line: print the script, without --submit, and submit it by hand"
_OWN_OPTIONS = ("job-name", "time", "partition", "account", "qos", "array", "nodes", "cpus-per-task")
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
_OURS = {
    **{name: f"give it to canzona slurm itself: --{name}" for name in _OWN_OPTIONS},
    "time-min": "write --time: the job saves, and queues again, before its limit",
    "signal": "write --signal-before S",
    **dict.fromkeys(("requeue", "no-requeue"), "write --requeues N; 0: never"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu"), _RANKS),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres"), _RANKS),
    **dict.fromkeys(("cpus-per-gpu", "exclusive", "oversubscribe", *_MEMORY), _WHOLE),
    **dict.fromkeys(("output", "open-mode", "chdir", "input"), _PATHS),
    **dict.fromkeys(("parsable", "wrap", "wait", "test-only", "help", "usage", "version"), _NOT_OF_A_SCRIPT),
}
"""The alternatives to options that canzona sets, by name."""


def directive_problems(directives: Sequence[str], *, shared: bool) -> Iterator[Problem]:
    """Lists options that are no directives, and those that canzona sets itself: of two, sbatch would take the last.

    Args:
        directives: `--constraint=h100`, ...
        shared: whether machines are shared, so that memory is the user's to ask for.
    """
    seen: set[str] = set()
    for directive in directives:
        found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.+)?", directive, re.ASCII)
        name = None if found is None else _meant(found[1])
        if name is None or not directive.isprintable():
            reason, fix = "is not a long option of sbatch on one line", "for example --sbatch '--constraint=h100'"
        elif name in _OURS and not (shared and name in _MEMORY):
            assert found is not None
            value = found[2] or "" if name in _OWN_OPTIONS else ""
            reason, fix = "contradicts what canzona sets", f"{_OURS[name]}{value}"
        elif name in seen:
            reason, fix = "is given twice", "keep one of them"
        else:
            seen.add(name)
            continue
        yield Problem(key="--sbatch", value=directive, reason=reason, fix=fix)


def _meant(name: str) -> str:
    """sbatch takes beginnings of names, too: `--nod=4`."""
    return name if name in _OURS else next((own for own in _OURS if own.startswith(name)), name)
