"""Verifies a checkpoint before a command exports or uses its weights."""

from pathlib import Path

from canzona_cli.checkpoint.commit import bytes_written
from canzona_cli.checkpoint.contents import saved_run
from canzona_cli.checkpoint.manifest import Manifest
from canzona_cli.checkpoint.store import StoredCheckpoint
from canzona_cli.checkpoint.verify import limit_problems, verify
from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import CheckpointInvalid, refuse
from canzona_cli.huggingface.folder import ExtraFiles, collect_extra_files
from canzona_cli.report.checkpoint import bar_of_bytes
from canzona_cli.run.files import RunFiles


def verify_run(checkpoint: StoredCheckpoint, tokenizer: Path | None) -> tuple[Manifest, RunConfig, ExtraFiles]:
    """Verifies every byte of a checkpoint; returns its manifest, the configuration of its run, and the
    tokenizer files.

    Args:
        tokenizer: a folder with the tokenizer to use; None for the run's tokenizer.

    Raises:
        CheckpointInvalid: the checkpoint is damaged.
        ConfigError: there is no such tokenizer.
    """
    refuse(checkpoint.problems, CheckpointInvalid)
    tokenizer_files = collect_extra_files(RunFiles(checkpoint.path.parent.parent), tokenizer)
    with bar_of_bytes("hashing", bytes_written(checkpoint.path)) as on_bytes:
        refuse(limit_problems(verify(checkpoint.path, on_bytes=on_bytes)[1]), CheckpointInvalid)
    return *saved_run(checkpoint.path), tokenizer_files
