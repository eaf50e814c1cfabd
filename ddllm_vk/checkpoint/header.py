"""The header of a safetensors file, every field checked against the file: a bad file is an error, never a bad read.

Layout: eight bytes with the header's length, little endian; the header, JSON; the tensors' data. Converted files also
say in `__metadata__` which of their uint8 tensors are quantised blocks.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..quants import BLOCK, BLOCK_BYTES, QUANTIZED

#: the limit of the format's own implementation
MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 8
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
FLOAT_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
FORMAT_VERSION = "1"
VERSION_KEY = "ddllm_vk.format_version"
QUANTIZED_KEY = "ddllm_vk.quantized"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. `format` is f32, f16, bf16, q40, q80, or None for a dtype that no weight may have.

    `shape` is the logical one, in elements; `start` and `stop` are byte offsets in the file.
    """

    dtype: str
    format: str | None
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file by name. Raises CheckpointError naming the file and what is wrong with it."""
    try:
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            prefix = f.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{file}: is truncated: it has {size} bytes; copy it again")
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{file}: is not a safetensors file (its header would have {length} bytes)")
            if 8 + length > size:
                raise CheckpointError(f"{file}: is truncated: needs over {8 + length} bytes, has {size}; copy it again")
            text = f.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: file not found; download it again") from None
    except IsADirectoryError:
        raise CheckpointError(f"{file}: is a folder, not a safetensors file") from None
    except OSError as e:
        raise CheckpointError(f"{file}: cannot be read ({e.strerror})") from None
    header = parse_json(text, file, "its header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file}: the header's __metadata__ is not an object of strings; copy the file again")
    entries = {name: _entry(file, name, field, 8 + length) for name, field in header.items()}
    _check_extent(file, entries, 8 + length, size)
    return entries | _quantized(file, entries, metadata)


def parse_json(text: str | bytes, file: Path, what: str) -> dict[str, Any]:
    """A JSON object that came from `file`; duplicate keys are errors. Raises CheckpointError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise CheckpointError(f"{file}: {what} names {twice!a} twice; copy the file again")
        return result

    try:
        data = json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{file}: {what} is not valid JSON ({e}); copy the file again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: {what} must be a JSON object; copy the file again")
    return data


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(file: Path, name: str, field: Any, data_start: int) -> Entry:
    if not name.isprintable():
        raise CheckpointError(f"{file}: a tensor has the malformed name {name!a}; copy the file again")
    at = f"{file}: tensor {name}"
    if not isinstance(field, dict):
        raise CheckpointError(f"{at} has a malformed header entry; copy the file again")
    dtype, shape, offsets = (field.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{at} has the unknown dtype {dtype!r}; expected F32, F16 or BF16")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(map(_is_size, shape)):
        raise CheckpointError(f"{at} has a malformed shape; copy the file again")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        raise CheckpointError(f"{at} has malformed data_offsets; copy the file again")
    need, have = math.prod(shape) * ITEM_BYTES[dtype], offsets[1] - offsets[0]
    if need != have:
        raise CheckpointError(f"{at} has {have} bytes, but {dtype} {shape} needs {need}; copy the file again")
    return Entry(dtype, FLOAT_FORMATS.get(dtype), tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _check_extent(file: Path, entries: dict[str, Entry], data_start: int, size: int) -> None:
    end, last = data_start, None
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < end and entry.stop > entry.start:
            raise CheckpointError(f"{file}: tensors {last} and {name} overlap; copy the file again")
        if entry.stop > end:
            end, last = entry.stop, name
    if end > size:
        raise CheckpointError(f"{file}: is truncated: needs {end} bytes, has {size}; copy it again")
    if end < size:
        raise CheckpointError(
            f"{file}: has {size} bytes, {size - end} more than its header accounts for; copy it again"
        )


def _quantized(file: Path, entries: dict[str, Entry], metadata: dict[str, str]) -> dict[str, Entry]:
    """The entries that the metadata declares as blocks, with their format and logical shape."""
    version = metadata.get(VERSION_KEY)
    if version is None:
        return {}
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{file}: has format version {version!r}, this program reads {FORMAT_VERSION}; update it")
    declared = parse_json(metadata.get(QUANTIZED_KEY, "{}"), file, f"the metadata {QUANTIZED_KEY}")
    result = {}
    for name, field in declared.items():
        fmt, shape = (field.get("format"), field.get("shape")) if isinstance(field, dict) else (None, None)
        entry = entries.get(name)
        good = fmt in QUANTIZED and isinstance(shape, list) and bool(shape) and all(map(_is_size, shape))
        if entry is None or not good or not isinstance(fmt, str) or not isinstance(shape, list):
            raise CheckpointError(
                f"{file}: the metadata {QUANTIZED_KEY} is malformed at {name!a}; convert the model again"
            )
        stored = (*shape[:-1], shape[-1] // BLOCK, BLOCK_BYTES[fmt])
        if shape[-1] % BLOCK or entry.dtype != "U8" or entry.shape != stored:
            raise CheckpointError(
                f"{file}: tensor {name} is stored as {entry.dtype} {list(entry.shape)}, but {fmt} {shape} needs "
                f"U8 {list(stored)}; convert the model again"
            )
        result[name] = Entry(entry.dtype, fmt, tuple(shape), entry.start, entry.stop)
    return result
