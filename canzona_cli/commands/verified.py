"""A checkpoint whose weights a command hands on."""

from pathlib import Path

from canzona_cli.checkpoint.commit import bytes_written
from canzona_cli.checkpoint.contents import saved_run
from canzona_cli.checkpoint.manifest import Manifest
from canzona_cli.checkpoint.store import StoredCheckpoint
from canzona_cli.checkpoint.verify import shortened, verify
from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import CheckpointInvalid, refuse
from canzona_cli.huggingface.folder import Beside, beside
from canzona_cli.report.checkpoint import bar_of_bytes
from canzona_cli.run.files import RunFiles


def verified_run(checkpoint: StoredCheckpoint, tokenizer: Path | None) -> tuple[Manifest, RunConfig, Beside]:
    """Reads a checkpoint, the run it is of, and what goes with its weights; every byte is verified.

    Args:
        tokenizer: a folder whose tokenizer goes with them; None: the run's.

    Raises:
        CheckpointInvalid: it is damaged.
        ConfigError: there is no such tokenizer.
    """
    refuse(checkpoint.problems, CheckpointInvalid)
    with_it = beside(RunFiles(checkpoint.path.parent.parent), tokenizer)
    with bar_of_bytes("hashing", bytes_written(checkpoint.path)) as on_bytes:
        refuse(shortened(verify(checkpoint.path, on_bytes=on_bytes)[1]), CheckpointInvalid)
    return *saved_run(checkpoint.path), with_it
