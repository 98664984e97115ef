"""Reads folders from untrusted authors in Megatron's distributed format `torch_dist`.

The index (`.metadata`) and the arguments (`common.pt`) are pickles. Megatron and torch would import and run
any function that a pickle names. Here only a few names are allowed, which become plain data and are never
imported. What loading costs is limited too: a pickle of 90 bytes can build a tuple whose hash takes 2^40 steps, and
one of 131 kB a tuple whose hash overflows the C stack.
"""

import io
import pickle
import pickletools
import zipfile
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import sub
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from canzona_cli.core.errors import CheckpointInvalid, ConfigError, Problem
from canzona_cli.core.reading import Unreadable, parse_json, read_plain

FORMAT: Final = "metadata.json"
TRACKER: Final = "latest_checkpointed_iteration.txt"
INDEX, COMMON, COMMON_KEY = ".metadata", "common.pt", "common_state/shard_0_1"
DTYPES: Final = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
"""The data types of stored tensors that are supported, by their names in torch's pickles."""
_AGAIN: Final = "copy the folder again, or name another one"
_DCP: Final = "torch.distributed.checkpoint"
_RECORDS: Final = frozenset(
    [
        *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
        *(f"{_DCP}.metadata.{name}" for name in ("ChunkStorageMetadata", "TensorProperties", "MetadataIndex")),
        *(f"{_DCP}.metadata.{name}" for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType")),
        *(f"{_DCP}.planner.{name}" for name in ("TensorWriteData", "BytesIOWriteData")),
        *(f"{_DCP}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        "torch.serialization._get_layout",
    ]
)
"""The names that `.metadata` may contain, in addition to torch.Size, OrderedDict and torch's data types."""
_ARGUMENTS: Final = ("argparse.Namespace", "signal.Signals", "megatron.")
"""The prefixes of the class names that the arguments may contain; Megatron's classes are enumerations."""


class _Record:
    """A stand-in for an object whose class is not imported, with the object's attributes."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


class _SafeUnpickler(pickle.Unpickler):
    """An unpickler that replaces allowed classes by plain data and refuses all other names."""

    def find_class(self, module: str, name: str) -> type:
        full = f"{module}.{name}"
        if full == "torch.Size":
            return tuple
        if full == "collections.OrderedDict":
            return OrderedDict
        if full in _RECORDS or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return type(name, (_Record,), {})
        raise pickle.UnpicklingError(f"{full} is not a class that an index may contain")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A range of bytes in one of the folder's files."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A block of a tensor, stored in one place."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _Place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tensor:
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]

    def chunks_at(self, at: tuple[int, ...]) -> Iterator[_Chunk]:
        """Yields the chunks with elements at these indices of the first axes."""
        places, others = _by_place(self, len(at))
        yield from places[at]
        for chunk in others:
            if all(map(_contains, chunk.offsets, chunk.sizes, at)):
                yield chunk


def _contains(first: int, size: int, index: int) -> bool:
    return first <= index < first + size


@lru_cache(maxsize=8)
def _by_place(tensor: _Tensor, axes: int) -> tuple[Mapping[tuple[int, ...], Sequence[_Chunk]], Sequence[_Chunk]]:
    """Returns the chunks with only one index on each of the first axes, by these indices, and all other chunks. A
    tensor with the experts of all layers has ten thousands of chunks, each of which is read by itself."""
    places: dict[tuple[int, ...], list[_Chunk]] = defaultdict(list)
    others: list[_Chunk] = []
    for chunk in tensor.chunks:
        (places[chunk.offsets[:axes]] if set(chunk.sizes[:axes]) <= {1} else others).append(chunk)
    return places, others


class TorchDistFolder:
    """A distributed checkpoint of Megatron.

    Args:
        path: the folder of a checkpoint, such as `iter_0000004`, or the folder of Megatron's `--save`.
        key: the option or setting that named the folder, for messages.

    Raises:
        ConfigError: the tracker file in `path` does not name a checkpoint in this format.
        CheckpointInvalid: the checkpoint is missing or damaged, or names classes that a checkpoint does not
            need.
    """

    def __init__(self, path: Path, *, key: str) -> None:
        self._key, self.asked, self.path = key, path, _iteration(path, key)
        try:
            settings = parse_json(read_plain(self.path / FORMAT))
            if not isinstance(settings, dict) or settings.get("sharded_backend") != "torch_dist":
                self._refuse(FORMAT, "does not belong to a checkpoint in the format torch_dist")
            content = read_plain(self.path / INDEX)
        except Unreadable as error:
            self._refuse("", f"a file of the checkpoint {error}")
        with self._reading(INDEX):
            check_pickle(content)
            self._tensors, self._objects = _index(_SafeUnpickler(io.BytesIO(content)).load())
        self.common: Mapping[object, object] = self._common()

    @property
    def keys(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all tensors, by key."""
        return {key: tensor.shape for key, tensor in self._tensors.items()}

    @property
    def arguments(self) -> Mapping[str, object]:
        """The arguments of the run that saved the checkpoint."""
        arguments = self.common.get("args")
        if not isinstance(arguments, _Record | Namespace):  # Namespace itself if Megatron has been imported
            self._refuse(COMMON, "has no arguments of Megatron-LM")
        kinds = (bool, int, float, str, list, torch.dtype)
        return {name: value for name, value in vars(arguments).items() if isinstance(value, kinds)}

    def read(self, key: str, at: tuple[int, ...] = ()) -> torch.Tensor:
        """Reads a tensor as fp32, assembled from its chunks.

        Args:
            at: indices on the first axes; only this slice is read, and returned without these axes.

        Raises:
            CheckpointInvalid: a chunk is missing, overlaps another one, or cannot be read.
        """
        stored = self._tensors[key]
        shape = stored.shape[len(at) :]
        whole, covered = torch.empty(shape), torch.zeros(shape, dtype=torch.bool)
        overlaps = False
        for chunk in stored.chunks_at(at):
            data = self._tensor(key, chunk)[tuple(map(sub, at, chunk.offsets))]
            offsets_and_sizes = zip(chunk.offsets[len(at) :], data.shape, strict=True)
            region = tuple(slice(start, start + size) for start, size in offsets_and_sizes)
            overlaps |= bool(covered[region].any())
            whole[region], covered[region] = data, True
        if overlaps or not covered.all():
            self._refuse(INDEX, f"the chunks of {key} overlap, or leave gaps")
        return whole

    def _tensor(self, key: str, chunk: _Chunk) -> torch.Tensor:
        with self._reading(f"{chunk.place.file}: {key}"):
            tensor = _plain(self._bytes(chunk.place))
            if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.shape != chunk.sizes:
                raise ValueError(f"is not a tensor of shape {list(chunk.sizes)}")
            if tensor.dtype not in DTYPES.values():
                raise ValueError(f"is {tensor.dtype}, not one of {', '.join(DTYPES)}")
        return tensor

    def _common(self) -> Mapping[object, object]:
        """Reads the part of the checkpoint that all ranks share, from `common.pt` or from an object in the
        index."""
        with self._reading(COMMON):
            if (self.path / COMMON).exists():
                content = io.BytesIO(read_plain(self.path / COMMON))
            elif (place := self._objects.get(COMMON_KEY)) is not None:
                content = self._bytes(place)
            else:
                raise ValueError("is missing")
            common = _plain(content, _ARGUMENTS)
            [common] = common if isinstance(common, list) else [common]
            if not isinstance(common, dict):
                raise ValueError("is not a dict")
        return common

    def _bytes(self, place: _Place) -> io.BytesIO:
        if place.file != Path(place.file).name or place.file.startswith("."):
            raise ValueError("its file is not in this folder")
        content = read_plain(self.path / place.file, most=None, part=(place.offset, place.length))
        if len(content) < place.length:
            raise ValueError("the file is shorter than its index says: the copy is not complete")
        return io.BytesIO(content)

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Converts any error of the block, which reads a pickle, to CheckpointInvalid."""
        try:
            yield
        except CheckpointInvalid:
            raise
        except OSError as error:
            self._refuse(what, f"cannot be read: {error.strerror or error}")
        except (ValueError, pickle.UnpicklingError) as error:
            self._refuse(what, str(error))
        except Exception as error:  # a damaged pickle may raise anything
            self._refuse(what, f"is damaged: {type(error).__name__}: {error}")

    def _refuse(self, what: str, reason: str) -> NoReturn:
        reason = f"{what} {reason}".split("\n")[0].strip()
        raise CheckpointInvalid(Problem(key=self._key, value=self.path, reason=reason, fix=_AGAIN))


def _plain(content: io.BytesIO, admitted: tuple[str, ...] = ()) -> object:
    """Returns the tensors and the plain data that `torch.save` wrote, with records for objects of other
    classes.

    Args:
        admitted: The prefixes of the names of allowed classes.

    Raises:
        Exception: The data names other classes, costs too much to load, or is damaged; the type depends on the
            damage.
    """
    check_saved(content)
    names = get_unsafe_globals_in_checkpoint(content)
    for name in names:
        if not name.startswith(admitted):
            raise pickle.UnpicklingError(f"{name} is not a class that is allowed here")
    content.seek(0)
    try:
        with safe_globals([(type(name, (_Record,), {}), name) for name in names]):
            return torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its message recommends loading the file without these restrictions
        raise ValueError("is damaged") from None


def is_torch_dist(path: Path) -> bool:
    """Returns True if the path is a distributed checkpoint of Megatron, or a folder of such checkpoints."""
    return (path / FORMAT).is_file() or (path / TRACKER).is_file()


def _iteration(path: Path, key: str) -> Path:
    """Returns the folder of the checkpoint: `path`, or the folder in it that the tracker file names."""
    if not (path / TRACKER).is_file():
        return path
    try:
        text = read_plain(path / TRACKER, most=1 << 10).decode(errors="replace").strip()
    except Unreadable as error:
        raise ConfigError(Problem(key=key, value=path / TRACKER, reason=str(error), fix=_AGAIN)) from None
    folder = path / (f"iter_{int(text):07d}" if text.isdecimal() else "release")
    if not (folder / FORMAT).is_file():
        reason = f"names {text[:20]}, but {folder.name} is not a checkpoint in the format torch_dist"
        raise ConfigError(Problem(key=key, value=path / TRACKER, reason=reason, fix="name the folder of another step"))
    return folder


def _index(metadata: object) -> tuple[dict[str, _Tensor], dict[str, _Place]]:
    """Checks the contents of `.metadata`; returns its tensors, and the places of its objects.

    Raises:
        Exception: The contents are not an index; the type depends on the damage.
    """
    table, storage = vars(metadata)["state_dict_metadata"], vars(metadata)["storage_data"]
    places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
    for index, info in storage.items():
        where = vars(info)
        if where.get("transform_descriptors"):
            raise ValueError("has tensors that are compressed")
        offset = vars(index).get("offset")
        numbers = _numbers((where["offset"], where["length"]))
        place = _Place(file=str(where["relative_path"]), offset=numbers[0], length=numbers[1])
        places[vars(index)["fqn"], None if offset is None else _numbers(offset)] = place
    tensors: dict[str, _Tensor] = {}
    for key, entry in table.items():
        if type(entry).__name__ != "TensorStorageMetadata":
            continue
        shape = _numbers(vars(entry)["size"])
        chunks, listed = [], set[tuple[int, ...]]()
        for chunk in map(vars, vars(entry)["chunks"]):
            offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
            if any(first + size > whole for first, size, whole in zip(offsets, sizes, shape, strict=True)):
                raise ValueError(f"has a chunk outside of {key}")
            if offsets in listed:
                raise ValueError(f"lists chunks of {key} that overlap")
            listed.add(offsets)
            chunks.append(_Chunk(offsets=offsets, sizes=sizes, place=places[key, offsets]))
        tensors[str(key)] = _Tensor(shape=shape, chunks=tuple(chunks))
    return tensors, {key: place for (key, offset), place in places.items() if key not in tensors}


def _numbers(values: object) -> tuple[int, ...]:
    assert isinstance(values, tuple | list)
    if not all(type(value) is int and 0 <= value < 1 << 53 for value in values):
        raise ValueError("has sizes that are not whole numbers")
    return tuple(values)


DEEPEST: Final = 32
"""The maximum number of nested tuples; an index of Megatron has 3 levels."""
MOST_ELEMENTS: Final = 1 << 20
"""The maximum number of elements of a tuple and of the tuples inside it, where one that occurs twice counts twice."""


MOST_HASHED: Final = 1 << 27
"""The maximum number of elements that are hashed as keys of dicts and as members of sets; an index of a thousand ranks
has millions."""


class _Extent(NamedTuple):
    """The depth and the number of elements of a tuple; 0 and 1 for any other object, whose hash does not descend."""

    depth: int
    elements: int


_OTHER: Final = _Extent(0, 1)
_TUPLES: Final = frozenset(["TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"])
_CALLS: Final = frozenset(["REDUCE", "NEWOBJ", "NEWOBJ_EX"])
"""The operations that call a class. The result may be a tuple of the arguments, as torch.Size is."""
_INSERTS: Final = frozenset(["SETITEM", "SETITEMS", "DICT", "ADDITEMS", "FROZENSET"])
_PUTS: Final = frozenset(["PUT", "BINPUT", "LONG_BINPUT"])
_GETS: Final = frozenset(["GET", "BINGET", "LONG_BINGET"])


def check_pickle(content: bytes) -> None:
    """Raises ValueError if a pickle is not complete, builds a tuple that is nested too deeply or has too many
    elements, would hash too many, or needs a table that is larger than itself. Nothing is loaded: the operations are
    read one by one."""
    hashed = 0
    stack: list[_Extent | None] = []  # None is a mark
    memo: dict[int, _Extent | None] = {}
    for operation, argument, _ in pickletools.genops(content):
        name = operation.name
        if name in _PUTS or name == "MEMOIZE":
            place = len(memo) if argument is None else int(argument)
            if place > len(content):  # Python makes room for all places below it
                raise ValueError(f"stores an object at place {place:,} of a table with fewer entries")
            memo[place] = stack[-1]
        elif name in _GETS:
            stack.append(memo[int(argument or 0)])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "MARK":
            stack.append(None)
        else:
            taken = _pop(stack, operation)
            if name in _INSERTS:
                hashed += sum(part.elements for part in taken)
                if hashed > MOST_HASHED:
                    raise ValueError(f"has more than {MOST_HASHED:,} elements in keys")
            stack += [_result(name, taken)] * len(operation.stack_after)


def _pop(stack: list[_Extent | None], operation: pickletools.OpcodeInfo) -> list[_Extent]:
    """Takes an operation's arguments from the stack: those above the last mark if it takes a slice, and the mark."""
    fixed = [kind for kind in operation.stack_before if kind not in (pickletools.markobject, pickletools.stackslice)]
    taken: list[_Extent | None] = []
    if pickletools.markobject in operation.stack_before:
        while (extent := stack.pop()) is not None:
            taken.append(extent)
        fixed = fixed[: operation.stack_before.index(pickletools.markobject)]
    taken += [stack.pop() for _ in fixed]
    return [extent for extent in taken if extent is not None]


def _result(name: str, taken: list[_Extent]) -> _Extent:
    if name not in _TUPLES | _CALLS or not taken:
        return _OTHER
    deeper = name in _TUPLES
    extent = _Extent(
        depth=deeper + max(part.depth for part in taken), elements=deeper + sum(part.elements for part in taken)
    )
    if extent.depth > DEEPEST:
        raise ValueError(f"has tuples that are nested more than {DEEPEST} levels deep")
    if extent.elements > MOST_ELEMENTS:
        raise ValueError(f"has a tuple of more than {MOST_ELEMENTS:,} elements")
    return extent


def check_saved(content: io.BytesIO) -> None:
    """Raises ValueError if the result of `torch.save` is damaged, or its pickle is refused by `check_pickle`.

    `torch.save` writes an uncompressed zip file with a CRC-32 for each member, which torch does not compare when it
    loads the file. All are 0 if they were not computed (`torch.serialization.set_crc32_options`).
    """
    try:
        with zipfile.ZipFile(content) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("is compressed, which no file of torch.save is")
            has_sums = any(member.CRC for member in members)
            for member in members:
                if has_sums:
                    with archive.open(member) as data:  # which compares the sum at its end
                        while data.read(1 << 20):
                            pass
                if member.filename.endswith("/data.pkl"):
                    start = _start_of(content, member)
                    check_pickle(content.getvalue()[start : start + member.file_size])
    except zipfile.BadZipFile as error:
        raise ValueError(f"is damaged: {error}") from None
    finally:
        content.seek(0)


def _start_of(content: io.BytesIO, member: zipfile.ZipInfo) -> int:
    """Returns the offset of a member's data, which follows its header, name and extra field."""
    header = content.getvalue()[member.header_offset : member.header_offset + 30]
    return member.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
