"""A check that torch.compile can make GPU kernels here."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def compiling_lacks() -> str | None:
    """Says what is missing for it; None if nothing is.

    torch.compile writes Triton, which builds what launches its kernels in C on every machine, once: with $CC, gcc or
    clang, against Python's headers (`triton.runtime.build`).
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not any(map(shutil.which, (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang"))):
        return "a C compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's header files"
    return None
