"""A machine with a GPU, as far as torch tells: for a Python that has this folder on its PYTHONPATH.

    PYTHONPATH=tests/visible_gpu make demo

Python imports a module of this name when it starts. From then on `torch.cuda.is_available()` is true, unless
CUDA_VISIBLE_DEVICES hides the GPU; whoever takes it at its word fails, as there is none.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Cuda(MetaPathFinder):
    """Finds torch.cuda as ever, and changes its answers once it is loaded."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch.cuda":
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def load(module: ModuleType) -> None:
            execute(module)
            module.is_available = _visible  # type: ignore[attr-defined]
            module.device_count = lambda: int(_visible())  # type: ignore[attr-defined]

        spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec


def _visible() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


sys.meta_path.insert(0, _Cuda())
