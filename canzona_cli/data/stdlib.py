"""The default corpus: the sources of the running Python's standard library, about 11 MB of real text on every machine.

Its tests are left out: they are half of the bytes where they are installed, and distributions often omit them. So are
installed packages and the build's generated configuration, which differ between machines.
"""

import hashlib
import sysconfig
from pathlib import Path

from canzona_cli.data.sources import Source
from canzona_cli.errors import EnvironmentProblem, Problem

_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_GENERATED = "_sysconfigdata"


def stdlib_sources() -> list[Source]:
    """Every module's source file, in an order that looks random and is always the same.

    Validation is cut from the end of a corpus. Ordered by the hash of its name, a document's place says nothing about
    its content, while by name the held-out part would be all `xml*` to `zip*`.

    Raises:
        EnvironmentProblem: this Python comes without readable sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not _LEFT_OUT.intersection(path.relative_to(root).parts) and not path.name.startswith(_GENERATED)
    ]
    names.sort(key=lambda name: (hashlib.sha256(name.as_posix().encode()).digest(), name.as_posix()))
    sources = [
        Source(label=f"stdlib:{name.as_posix()}", path=root / name, format="text", size=(root / name).stat().st_size)
        for name in names
        if _is_utf8(root / name)
    ]
    if not sources:
        raise EnvironmentProblem(
            Problem(
                key="INPUT",
                value="stdlib",
                reason=f"this Python has no standard library sources in {root}",
                fix="install them (Debian: libpython3-stdlib), or prepare text of your own with canzona data prepare",
            )
        )
    return sources


def stdlib_digest(sources: list[Source]) -> str:
    """Hash of names, order and contents: what a cached corpus is valid for."""
    digest = hashlib.sha256()
    for source in sources:
        assert source.path is not None
        digest.update(f"{source.label}\0".encode() + hashlib.sha256(source.path.read_bytes()).digest())
    return digest.hexdigest()


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True
