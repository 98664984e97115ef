"""Checks pickles and `torch.save` files from untrusted authors before they are loaded.

Which classes a pickle may name is up to the unpickler that loads it. This module limits what loading costs: a pickle of
90 bytes can build a tuple whose hash takes 2^40 steps, and one of 131 kB a tuple whose hash overflows the C stack.
"""

import io
import pickletools
import zipfile
from typing import Final, NamedTuple

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
