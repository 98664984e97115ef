"""`canzona checkpoint show`: what one checkpoint holds, for people."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from blake3 import blake3
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from canzona_cli.checkpoint.manifest import Manifest
from canzona_cli.checkpoint.shard_file import tensor_bytes
from canzona_cli.checkpoint.store import Found
from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import CanzonaError
from canzona_cli.report.checkpoints import optimizer_words, saved_layout
from canzona_cli.report.header import describe_layout, header_rows
from canzona_cli.report.text import wrapped
from canzona_cli.run.words import clean, duration, guarded, plural, size

VERSION = 1
_CONFIG = "config.yaml"
_BIGGEST = 5


@dataclass(frozen=True, kw_only=True)
class Content:
    """A rich renderable, and the stable form of `canzona checkpoint show --json`."""

    found: Found
    manifest: Manifest

    def as_json(self) -> dict[str, object]:
        """Additions keep `version`, anything else raises it."""
        manifest, layout = self.manifest, saved_layout(self.found)
        return {
            "version": VERSION,
            "name": self.found.name,
            "path": str(self.found.path),
            "created": manifest.created,
            "canzona": manifest.canzona,
            "progress": asdict(manifest.progress),
            "optimizer": manifest.optimizer,
            "strategy": manifest.strategy,
            "splitting": manifest.splitting,
            "world_size": manifest.world_size,
            "layout": None if layout is None else asdict(layout),
            "bytes": manifest.bytes,
            "files": {name: asdict(file) for name, file in manifest.files.items()},
            "kinds": {kind: {"tensors": len(sizes), "bytes": sum(sizes)} for kind, sizes in self._kinds().items()},
            "tensors": {
                name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "file": tensor.file}
                for name, tensor in manifest.tensors.items()
            },
            "scalars": dict(manifest.scalars),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for label, value in self._rows(ascii_only=options.ascii_only):
            first = f"  {label:<11}"
            for line in wrapped(Text(clean(value)), console, options, first=first, rest=" " * len(first)):
                line.stylize("dim", 0, len(first))
                yield line
        yield Text()
        yield self._table(options)
        yield Text()
        biggest = sorted(self._sizes(), key=lambda item: (-item[1], item[0]))[:_BIGGEST]
        for place, (name, held) in enumerate(biggest):
            tensor = self.manifest.tensors[name]
            shape = (" x " if options.ascii_only else " × ").join(f"{edge:,}" for edge in tensor.shape)
            line = Text(clean(f"{name}  {tensor.dtype} {shape}, {size(held)}"))
            yield from wrapped(line, console, options, first=f"  {'biggest' if not place else '':<11}", rest=" " * 15)
        note = "manifest and sizes are in order; `canzona checkpoint verify` reads the content"
        yield from wrapped(Text(note, style="dim"), console, options, first="  ", rest="  ")

    def _rows(self, *, ascii_only: bool) -> Iterator[tuple[str, str]]:
        manifest = self.manifest
        progress, config = manifest.progress, self._config()
        yield "checkpoint", f"{self.found.name}, {self.found.path}"
        age = duration(max(0.0, time.time() - manifest.created))
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
        yield "saved", f"{age} ago ({saved}), by canzona {manifest.canzona}"
        planned = "" if config is None else f" of {config.train.steps:,}"
        yield "progress", f"step {progress.step:,}{planned}, {progress.samples:,} sequences, {progress.tokens:,} tokens"
        for said in guarded(progress.skipped, progress.fallbacks):
            yield "guards", said
        yield "size", f"{size(manifest.bytes)} in {plural(len(manifest.files), 'file')}"
        layout = saved_layout(self.found)
        if config is not None and layout is not None:
            rows = header_rows(config, layout, self.found.path, None, ascii_only=ascii_only)
            yield from (row for row in rows if row[0] != "run")
            return
        yield "optimizer", optimizer_words(manifest)
        if layout is not None:
            yield "layout", describe_layout(layout, "rank", times="x" if ascii_only else "×")

    def _config(self) -> RunConfig | None:
        """The settings it was written with; None where they cannot be read or are not those of the manifest."""
        from canzona_cli.config.compose import load_resolved

        path, entry = self.found.path / _CONFIG, self.manifest.files.get(_CONFIG)
        try:
            if entry is None or blake3(path.read_bytes()).hexdigest() != entry.blake3:
                return None
            return load_resolved(path)
        except (CanzonaError, OSError):
            return None

    def _sizes(self) -> list[tuple[str, int]]:
        return [(name, tensor_bytes(t.dtype, t.shape)) for name, t in self.manifest.tensors.items()]

    def _kinds(self) -> dict[str, list[int]]:
        """Sizes of tensors by what they are: master, exp_avg, momentum_buffer, random."""
        kinds: dict[str, list[int]] = {}
        for name, held in self._sizes():
            unit, _, kind = name.rpartition("/")
            kinds.setdefault("random states" if unit.startswith("random") else kind, []).append(held)
        return dict(sorted(kinds.items(), key=lambda item: -sum(item[1])))

    def _table(self, options: ConsoleOptions) -> Table:
        style = box.ASCII if options.ascii_only else box.SIMPLE_HEAD
        table = Table(box=style, padding=(0, 1, 0, 2), pad_edge=True, show_edge=False, header_style="bold")
        table.add_column("kind", overflow="fold")
        for title in ("tensors", "size", "share"):
            table.add_column(title, justify="right", no_wrap=True)
        total = sum(held for _, held in self._sizes())
        for kind, sizes in self._kinds().items():
            share = f"{sum(sizes) / total:.1%}" if total else "-"
            table.add_row(Text(clean(kind)), f"{len(sizes):,}", size(sum(sizes)), share)
        table.add_row("scalars", f"{len(self.manifest.scalars):,}", "", "")
        return table
