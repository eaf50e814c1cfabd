"""Opening a model folder: every tensor found, checked against config.json, and readable: as a view of the mapped file,
or some rows at a time into memory of the caller's."""

import math
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np

from ..config import GenerationDefaults, ModelConfig, load_config, load_generation_defaults
from ..errors import CheckpointError
from ..quants import BLOCK, BLOCK_BYTES, QUANTIZED, dequantize
from .folder import check_folder, read_headers
from .header import Entry
from .layout import Role, TensorSpec, expected_tensors, is_vision, tied_to

#: how many names an error message lists before it only counts
_NAMES_SHOWN = 4
#: elements looked at in one go, to bound memory
_CHUNK = 1 << 22
_ITEM = {"f32": "<f4", "f16": "<f2", "bf16": "<u2", "q40": "u1", "q80": "u1"}
#: all exponent bits set: infinite or not a number
_EXPONENT = {"f32": ("<u4", 0x7F800000), "f16": ("<u2", 0x7C00), "bf16": ("<u2", 0x7F80)}
#: the file cache holds pages of up to this many bytes, which are only dropped whole
_CACHE_PAGE = 2 << 20


class _WeightFile:
    """An open file: mapped for views, which outlive close(), and read at offsets, by several threads if need be."""

    def __init__(self, path: Path):
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
            self.map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path}: cannot be mapped into memory ({e})") from None
        if hasattr(self.map, "madvise"):  # tensors are read from start to end: half as fast again from a cold disk
            self.map.madvise(mmap.MADV_SEQUENTIAL)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fills `buffer` from byte `start` on. Raises EOFError where the file has become shorter, or OSError."""
        while buffer:
            count = os.preadv(self._file.fileno(), [buffer], start)
            if count == 0:
                raise EOFError
            buffer, start = buffer[count:], start + count

    def uncache(self, start: int, stop: int) -> None:
        """Asks the system to drop its copy of bytes start..stop, and of up to _CACHE_PAGE bytes before."""
        if hasattr(os, "posix_fadvise"):
            start = max(start - _CACHE_PAGE, 0)
            os.posix_fadvise(self._file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()
        try:
            self.map.close()
        except BufferError:  # a view lives; it holds the mapping, which goes when the view does
            return

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file. `format`: f32, f16, bf16, q40 or q80; `shape`: the logical one, in elements."""

    name: str
    format: str
    shape: tuple[int, ...]
    file: Path
    role: Role | None  # None: vision
    start: int  # byte offsets in the file
    stop: int
    _opened: _WeightFile = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as a matrix [rows, K], K the last axis."""
        return math.prod(self.shape[:-1])

    def _stored(self, shape: tuple[int, ...]) -> tuple[np.dtype, tuple[int, ...]]:
        """dtype and shape in the file of a part of logical `shape`."""
        if self.format in QUANTIZED:
            shape = (*shape[:-1], shape[-1] // BLOCK, BLOCK_BYTES[self.format])
        return np.dtype(_ITEM[self.format]), shape

    def raw(self) -> np.ndarray:
        """A read-only view of the file's pages, which stay valid after close().

        float32 or float16 of the logical shape; bf16: its bits as uint16; q40 and q80: uint8 [..., K/32, 18 or 34].
        """
        dtype, shape = self._stored(self.shape)
        if not self.nbytes:
            return np.empty(shape, dtype)
        return np.frombuffer(self._opened.map, dtype, self.nbytes // dtype.itemsize, self.start).reshape(shape)

    def read_rows(self, first: int, count: int, keep_cached: bool = True) -> np.ndarray:
        """Rows first..first+count, copied from the file: [count, K], or uint8 [count, K/32, 18 or 34]; dtypes as raw().

        keep_cached: False where the system's file cache had better be free for other things: these rows leave it.
        Several threads may read at once. Raises CheckpointError, naming file and tensor: a NaN or an infinity, a file
        that was cut since it was opened, or one that cannot be read.
        """
        dtype, shape = self._stored((count, *self.shape[-1:]))
        rows = np.empty(shape, dtype)
        start = self.start + first * (self.nbytes // self.rows)
        try:
            self._opened.read_into(rows.reshape(-1).view(np.uint8).data, start)
            if not keep_cached:
                self._opened.uncache(start, start + rows.nbytes)
        except EOFError:
            raise CheckpointError(
                f"{self.file}: was truncated while tensor {self.name} was read; copy it again"
            ) from None
        except OSError as e:
            raise CheckpointError(f"{self.file}: tensor {self.name} cannot be read ({e.strerror})") from None
        if not all_finite(self.format, rows):
            raise self._not_finite()
        return rows

    def float32(self) -> np.ndarray:
        """A copy as float32 of the logical shape, dequantised where needed."""
        return dequantize(self.format, self.raw())

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Gives the pages of bytes start..stop of the tensor (default: all) back to the system.

        Views stay valid and read the file again when touched. Pages read through mmap count as the process's memory
        until then: whoever goes through weights calls this after each tensor.
        """
        stop = self.nbytes if stop is None else stop
        if stop <= start or not hasattr(self._opened.map, "madvise"):
            return
        first = (self.start + start) // mmap.PAGESIZE * mmap.PAGESIZE
        self._opened.map.madvise(mmap.MADV_DONTNEED, first, self.start + stop - first)

    def check_finite(self) -> None:
        """Raises CheckpointError, naming file and tensor, when there is a NaN or an infinity.

        Of quantised tensors only the scales can be such. Reads the tensor once, in bounded memory.
        """
        if not all_finite(self.format, self.raw()):
            raise self._not_finite()

    def _not_finite(self) -> CheckpointError:
        what = "scales" if self.format in QUANTIZED else "values"
        return CheckpointError(
            f"{self.file}: tensor {self.name} has {what} that are NaN or infinite; the file is damaged or the "
            "model's training failed: download it again"
        )


def all_finite(fmt: str, raw: np.ndarray) -> bool:
    """Whether a stored array (as StoredTensor.raw gives it) has no NaN and no infinity."""
    if not raw.size:
        return True
    if fmt in QUANTIZED:
        words, fmt = raw.reshape(-1, BLOCK_BYTES[fmt]).view("<u2")[:, 0], "f16"
    else:
        words = raw.reshape(-1)
    dtype, exponent = _EXPONENT[fmt]
    words = words.view(dtype)
    mask = words.dtype.type(exponent)
    return not any(np.any((words[at : at + _CHUNK] & mask) == mask) for at in range(0, len(words), _CHUNK))


@dataclass(frozen=True)
class Checkpoint:
    """An open model folder; a context manager. Tensors are in the order of the forward pass."""

    path: Path
    config: ModelConfig
    generation_defaults: GenerationDefaults
    tensors: dict[str, StoredTensor]  # the text model, complete
    vision: dict[str, StoredTensor]
    ignored: tuple[str, ...]  # second names of tied tensors
    files: tuple[Path, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, text and vision, in their files."""
        return sum(t.nbytes for t in (*self.tensors.values(), *self.vision.values()))

    def check_finite(self) -> None:
        """StoredTensor.check_finite of every tensor, giving pages back on the way."""
        for tensor in (*self.tensors.values(), *self.vision.values()):
            tensor.check_finite()
            tensor.release()

    def close(self) -> None:
        """Closes the files. Arrays taken from raw() keep theirs open until they are gone."""
        for opened in {t._opened for t in (*self.tensors.values(), *self.vision.values())}:
            opened.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a Hugging Face or converted folder without reading weights.

    Raises CheckpointError or ConfigError in one line: not a model folder, weights missing, damaged, or not those that
    config.json describes. NaN is only seen by check_finite, which has to read everything.
    """
    path = Path(path)
    check_folder(path)
    config = load_config(path)
    return open_weights(path, config, load_generation_defaults(path, config))


def open_weights(path: Path, config: ModelConfig, defaults: GenerationDefaults) -> Checkpoint:
    """open_checkpoint where the configuration is known; `path` needs no config.json."""
    found = read_headers(path)
    expected = expected_tensors(config)
    text, vision, ignored = _sort_names(path, expected, found)
    _check_entries(expected, {name: found[stored] for name, stored in text.items()})
    _check_entries({}, {name: found[name] for name in vision})
    files = tuple(sorted({file for file, _ in found.values()}))
    opened = {file: _WeightFile(file) for file in files}

    def tensor(name: str, stored: str, role: Role | None) -> StoredTensor:
        file, entry = found[stored]
        assert entry.format is not None
        return StoredTensor(name, entry.format, entry.shape, file, role, entry.start, entry.stop, opened[file])

    return Checkpoint(
        path=path,
        config=config,
        generation_defaults=defaults,
        tensors={name: tensor(name, text[name], spec.role) for name, spec in expected.items()},
        vision={name: tensor(name, name, None) for name in vision},
        ignored=tuple(ignored),
        files=files,
    )


def _sort_names(
    path: Path, expected: dict[str, TensorSpec], found: dict[str, tuple[Path, Entry]]
) -> tuple[dict[str, str], list[str], list[str]]:
    """(needed name -> stored name, vision names, ignored names). Raises CheckpointError on unknown or missing names."""
    text = {name: name for name in expected if name in found}
    vision, ignored, unknown = [], [], []
    for name in sorted(found.keys() - text.keys()):
        twin = tied_to(name)
        if is_vision(name):
            vision.append(name)
        elif twin not in expected:
            unknown.append(name)
        elif twin in text:
            ignored.append(name)
        else:
            text[twin] = name
    if unknown:
        raise CheckpointError(f"{path}: holds {_list(unknown, 'unknown tensor')}; is config.json of another model?")
    missing = [name for name in expected if name not in text]
    if missing:
        raise CheckpointError(
            f"{path}: lacks {_list(missing, 'tensor')}; download the weights again, or config.json is of another model"
        )
    return text, vision, ignored


def _list(names: list[str], what: str) -> str:
    """'3 unknown tensors: a, b, c'"""
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''}: {', '.join(names[:_NAMES_SHOWN])}{more}"


def _check_entries(expected: dict[str, TensorSpec], stored: dict[str, tuple[Path, Entry]]) -> None:
    """Shapes and formats; a name that is not expected (vision) may have any shape."""
    for name, (file, entry) in stored.items():
        at = f"{file}: tensor {name}"
        spec = expected.get(name)
        if entry.format is None:
            raise CheckpointError(f"{at} has dtype {entry.dtype}; weights must be F32, F16 or BF16, or converted here")
        if spec is not None and entry.shape != spec.shape:
            raise CheckpointError(f"{at} has shape {list(entry.shape)}; config.json asks for {list(spec.shape)}")
        if entry.format in QUANTIZED and (spec is None or spec.role == "float"):
            raise CheckpointError(
                f"{at} is quantised ({entry.format}), which this tensor must not be; convert it again"
            )
