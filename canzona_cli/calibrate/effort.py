"""How much time a calibration gives each number. No torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from canzona_cli.run.files import RunFiles, write_json_atomic


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Budgets in seconds; a number is measured again and again until its budget is spent."""

    item_s: float = 0.3
    """One product, one decomposition, one collective of one size, one update of one shape."""
    largest_item_s: float = 40.0
    """An update expected to take longer than this to measure is left to the cost model."""
    end_s: float = 70.0
    """Since the start; of what is then left only what is quick is measured."""
    sizes: tuple[int, ...] = (8, 64 << 10, 1 << 20, 8 << 20)
    """Bytes of collectives."""
    large: int | None = 32 << 20
    """A further size, where it is quick enough."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the ranks read beside configuration and layout."""

    effort: Effort
    workers: int
    """Ranks that compute at the same time."""

    def write(self, files: RunFiles) -> None:
        write_json_atomic(_path(files), asdict(self))

    @classmethod
    def read(cls, files: RunFiles) -> "Orders":
        content = json.loads(_path(files).read_text(encoding="utf-8"))
        effort = content["effort"]
        return cls(effort=Effort(**{**effort, "sizes": tuple(effort["sizes"])}), workers=content["workers"])


def _path(files: RunFiles) -> Path:
    return files.root / "orders.json"


FULL = Effort()
QUICK = Effort(item_s=0.08, largest_item_s=1.5, end_s=30.0, sizes=(8, 64 << 10, 1 << 20), large=None)
