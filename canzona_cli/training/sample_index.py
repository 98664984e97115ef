"""Builds Megatron's datasets of samples, with their indices in a cache that every launch can trust.

An index belongs to the contents of its data: the key of its folder contains a hash of them. Rank 0 builds the
index in a hidden folder, adds the hashes of its files, and renames the folder, so that an index is whole or
absent even if the build is killed. An index whose files do not match their hashes is built again.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from canzona_cli.config.schema import DataConfig
from canzona_cli.core.errors import EnvironmentProblem, Problem, refuse, write_error
from canzona_cli.core.megatron.parallel import gather
from canzona_cli.core.writing import exclusive_lock
from canzona_cli.data.indexed import inspect_pair
from canzona_cli.data.order import Mask, held_out
from canzona_cli.records.corpus import PreparedCorpus, PreparedSet

_HASHES: Final = "files.json"
"""The file of an index with the hashes of its other files. It is written last."""


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """A stand-in for a tokenizer, with the attributes that `GPTDataset` requires. They suffice, because
    `GPTDataset` reads token ids, never text."""

    vocab_size: int
    eod: int | None
    contents: tuple[str, ...]
    """The hashes of the data, because Megatron identifies an index by the path of the data, not by what is
    there."""

    @property
    def pad(self) -> int:
        return -1

    @property
    def unique_identifiers(self) -> dict[str, str]:
        return {"class": "canzona", "vocab_size": str(self.vocab_size), "contents": ", ".join(self.contents)}


@dataclass(frozen=True, kw_only=True)
class SampleIndex:
    """A builder of datasets whose samples have `seq_length` tokens and the tokens that follow them."""

    corpus: PreparedCorpus
    vocab_size: int
    seq_length: int
    seed: int
    data: DataConfig
    cache: Path
    """The folder of all indices."""

    def training_set(self, part: PreparedSet, samples: int) -> GPTDataset:
        """Returns at least `samples` samples of a set's training documents. Collective."""
        return self._dataset(part, ~self._held_out(part), samples, Split.train)

    def validation_set(self, part: PreparedSet) -> GPTDataset:
        """Returns each sample of a set's validation tokens once. Collective."""
        return self._dataset(part, self._held_out(part), None, Split.valid)

    def _held_out(self, part: PreparedSet) -> Mask:
        pair = inspect_pair(part.prefix)
        return held_out(pair, part.division, self.data) if part.train_tokens else np.ones(pair.sequences, np.bool_)

    def blend(self, sets: list[GPTDataset], shares: list[float], samples: int) -> BlendedDataset:
        """Returns samples of several sets in fixed shares. Collective."""
        key = {"sets": [data.unique_description for data in sets], "shares": shares, "samples": samples}
        settings = self._settings(self.corpus.sets)
        return self._built(key, settings, lambda where: BlendedDataset(sets, shares, samples, where))

    def _dataset(self, part: PreparedSet, sequences: Mask, samples: int | None, split: Split) -> GPTDataset:
        settings = self._settings([part])
        indices = np.flatnonzero(sequences).astype(np.int32)
        documents = hashlib.sha256(indices.data).hexdigest()
        # A name for Megatron's description; the documents are passed below.
        settings.split_matrix = [documents if name is split else None for name in Split]
        tokens = GPTDataset.build_low_level_dataset(str(part.prefix), settings)
        key = {
            "contents": part.fingerprint,
            "path": str(part.prefix),
            "documents": documents,
            "samples": samples,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "vocab_size": self.vocab_size,
            "eod": self.corpus.eod,
        }
        return self._built(
            key, settings, lambda where: GPTDataset(tokens, str(part.prefix), indices, samples, split, where)
        )

    def _settings(self, sets: Sequence[PreparedSet]) -> GPTDatasetConfig:
        return GPTDatasetConfig(
            random_seed=self.seed,
            sequence_length=self.seq_length,
            blend=([str(part.prefix) for part in sets], None),
            split="1",
            tokenizer=_Facts(
                vocab_size=self.vocab_size,
                eod=self.corpus.eod,
                contents=tuple(part.fingerprint for part in sets),
            ),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            # The attention layers apply the causal mask themselves; a mask for each sample would take
            # seq_length^2 bytes.
            create_attention_mask=False,
        )

    def _built[T](
        self, key: Mapping[str, object], settings: GPTDatasetConfig, build: Callable[[GPTDatasetConfig], T]
    ) -> T:
        """Returns a dataset whose index is in the cache, after rank 0 has built the index if necessary.
        Collective.

        Raises:
            EnvironmentProblem: on every rank together, if the index cannot be written.
        """
        folder = self.cache / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

        def build_in(where: Path) -> None:
            settings.path_to_cache = str(where)
            build(settings)

        problems: list[Problem] = []
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            try:
                _make_whole(folder, build_in)
            except OSError as error:
                if error.filename is not None and not Path(str(error.filename)).is_relative_to(self.cache):
                    raise
                problems += _as_problems(self.cache, error)
        if torch.distributed.is_initialized():
            problems = gather(problems, list[Problem])[0]
        refuse(problems, EnvironmentProblem)
        settings.path_to_cache = str(folder)
        return build(settings)


def _as_problems(cache: Path, error: OSError) -> tuple[Problem, ...]:
    if error.errno is None:  # numpy does not name the reason when a disk becomes full
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fix = "make room there, or set CANZONA_CACHE=FOLDER in the environment"
    return write_error("CANZONA_CACHE", str(cache), error, fix=fix, what="the index of samples").problems


def _make_whole(folder: Path, build: Callable[[Path], None]) -> None:
    """Makes sure that an index is in the cache and undamaged; builds it if it is not.

    Raises:
        OSError: the index cannot be written.
    """
    if _is_whole(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder.with_name(f".{folder.name}.lock"), on_wait=lambda: None):
        if _is_whole(folder):  # another run built it while this one waited
            return
        partial = folder.with_name(f".{folder.name}.partial")
        for left_over in (folder, partial):
            shutil.rmtree(left_over, ignore_errors=True)
        try:
            partial.mkdir()
            build(partial)
            hashes = {path.name: _hash(path) for path in sorted(partial.iterdir())}
            for name in hashes:
                _sync(partial / name)
            (partial / _HASHES).write_text(json.dumps(hashes))
            _sync(partial / _HASHES)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _is_whole(folder: Path) -> bool:
    """Returns True if the files of an index have the hashes that were recorded when it was built."""
    try:
        hashes = json.loads((folder / _HASHES).read_text())
        return bool(hashes) and all(_hash(folder / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
