"""Owns GGUF models split over several files: what the files are called, and their headers joined into one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from mzd.errors import FormatError
from mzd.formats.gguf import GgufFile, TensorInfo, quoted

PARTS_MAX = 512  # all are open during an import, below the usual limit of 1024; published models have < 200

_PART_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_PREFIX = "split."


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of the model that a file of this name belongs to, in order.

    `NAME-00002-of-00003.gguf` belongs to a model in three files; any other name is a whole model's.

    Raises:
        FormatError: there is no part of that number, or more parts than `PARTS_MAX`.
    """
    match = _PART_NAME.fullmatch(name)
    if match is None:
        return (name,)
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count <= PARTS_MAX:
        raise FormatError(
            f"{name}: called part {number} of {count}; parts count from 1, and there are at most {PARTS_MAX}",
            path=name,
        )
    return numbered_names(stem, count)


def numbered_names(stem: str, count: int) -> tuple[str, ...]:
    """What the `count` files of a split model are called."""
    return tuple(f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))


def model_stem(name: str) -> str:
    """A file's name without `.gguf`, and without the number of a part."""
    match = _PART_NAME.fullmatch(name)
    return name.removesuffix(".gguf") if match is None else match[1]


def joined(parts: Sequence[GgufFile]) -> GgufFile:
    """One header for the files of a model, as if they lay end to end.

    Args:
        parts: headers of the files that `part_names` gives, in that order: one for a whole model.

    Returns:
        The first file's name and metadata without `split.*`, the tensors of all files with offsets from
        the start of the first file, and the sum of sizes.

    Raises:
        FormatError: `invalid_model`, naming the file, for one that is not the part that its name says,
            that is of another model, that repeats a tensor, or that knows of another number of tensors.
            A part of another model is not noticed if it has the same tensors and no metadata of its own.
    """
    for place, part in enumerate(parts):
        _check_place(part, place, len(parts))
        if part is not parts[0]:  # a NaN is not even itself
            _check_kin(part, parts[0])
    tensors = _joined_tensors(parts)
    for part in parts:
        _check_tensor_count(part, len(tensors))
    own = {key: value for key, value in parts[0].metadata.items() if not key.startswith(_PREFIX)}
    size_bytes = sum(part.size_bytes for part in parts)
    return replace(parts[0], size_bytes=size_bytes, metadata=own, tensors=tensors)


def _check_place(part: GgufFile, place: int, num_parts: int) -> None:
    """The file's own numbers are those of its name, by which the others were found."""
    count = _number(part, "split.count", 0) or 1  # tools that merge parts leave a 0
    place_told = _number(part, "split.no", 0)  # from 0, where names count from 1
    if (count, place_told) == (num_parts, place):
        return
    told = "a whole model" if count == 1 else f"part {place_told + 1} of a model in {count} files"
    if num_parts == 1:
        raise _invalid(
            part, f"it is {told}; call them NAME-00001-of-{count:05d}.gguf and so on, in one directory"
        )
    raise _invalid(part, f"it is called part {place + 1} of {num_parts}, but is {told}")


def _check_kin(part: GgufFile, first: GgufFile) -> None:
    """Later parts need no metadata of their own; what they repeat must be the same."""
    for key, value in part.metadata.items():
        if not key.startswith(_PREFIX) and first.metadata.get(key, value) != value:
            raise _invalid(part, f"its {quoted(key)} is not that of {first.name}: a part of another model")


def _joined_tensors(parts: Sequence[GgufFile]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    start_bytes = 0
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                owner = next(other.name for other in parts if name in other.tensors)
                raise _invalid(part, f"tensor {quoted(name)} is in {owner} too")
            tensors[name] = replace(tensor, offset_bytes=start_bytes + tensor.offset_bytes)
        start_bytes += part.size_bytes
    return tensors


def _check_tensor_count(part: GgufFile, num_tensors: int) -> None:
    expected = _number(part, "split.tensors.count", num_tensors)
    if expected != num_tensors:
        raise _invalid(part, f"it is of a model of {expected} tensors, all files together hold {num_tensors}")


def _number(part: GgufFile, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise _invalid(part, f"{key} is {value!a:.60}, not a number")
    return value


def _invalid(part: GgufFile, reason: str) -> FormatError:
    return FormatError(f"{part.name}: {reason}", path=part.name)
