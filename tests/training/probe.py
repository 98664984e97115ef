"""Says, as JSON, what a process has that was started as `python -m tests.training.probe CODE`, and exits with CODE."""

import json
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    found = {
        "arguments": sys.argv[1:],
        "module": Path(sys.argv[0]).name,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "leads a session": os.getsid(0) == os.getpid(),
        "open files": [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")],
        "signals": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "blocked": [str(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    print(json.dumps(found))
    print("a last word", file=sys.stderr)
    code = sys.argv[1]
    if code == "raise":
        raise ValueError("as asked")
    if code.startswith("signal "):
        os.kill(os.getpid(), int(code.removeprefix("signal ")))
    sys.exit(int(code))
