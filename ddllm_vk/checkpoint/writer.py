"""Writing a model folder: tensors are planned into shards, computed in pieces by a few threads, written, read back.

Used by conversion and by synthetic models, which say what the tensors are and how to compute the pieces. Memory is
bounded by the pieces in flight, not by tensors.
"""

import hashlib
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import CheckpointError
from ..quants import BLOCK, BLOCK_BYTES, QUANTIZED, tensor_bytes
from .folder import INDEX, SINGLE
from .header import FORMAT_VERSION, QUANTIZED_KEY, VERSION_KEY
from .reader import open_checkpoint
from .staging import Staging, staging, writing

#: bytes a shard may have, header included
SHARD_BYTES = 4_000_000_000
#: bytes of a tensor computed in one piece
PIECE_BYTES = 2 << 20
_ALIGNMENT = 64
#: more than a tensor takes in the header
_HEADER_BYTES = 1024
#: pieces computed ahead of the one being written
_AHEAD = 8
_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q40": "U8", "q80": "U8"}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: format and logical shape as in StoredTensor; `work`: bytes of progress it counts for."""

    name: str
    format: str
    shape: tuple[int, ...]
    work: int

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.format, self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.format in QUANTIZED:
            return (*self.shape[:-1], self.shape[-1] // BLOCK, BLOCK_BYTES[self.format])
        return self.shape


@dataclass(frozen=True)
class Progress:
    """How far a write is. Bytes are of the source while converting, of the target otherwise."""

    phase: Literal["write", "verify"]
    tensors: int
    tensors_total: int
    bytes: int
    bytes_total: int


@dataclass(frozen=True)
class Written:
    """What a write came to. `resumed`: tensors an earlier run wrote; `restarted`: its remains were another job's."""

    path: Path
    nbytes: int
    shards: int
    resumed: int
    restarted: bool


#: computes one piece of a tensor: consecutive bytes of it, as an array
Piece = Callable[[], np.ndarray]
ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class _Shard:
    name: str
    header: bytes
    offsets: dict[str, int]  # tensor -> where it starts in the file
    size: int


def plan_shards(tensors: list[PlannedTensor], limit: int | None = None) -> list[_Shard]:
    """Tensors dealt into files of at most `limit` bytes (default SHARD_BYTES); a larger tensor gets one of its own."""
    limit = SHARD_BYTES if limit is None else limit
    # wide elements first: each tensor then starts at a multiple of its element size
    wide_first = sorted(tensors, key=lambda t: -(BLOCK_BYTES[t.format] // BLOCK if t.format not in QUANTIZED else 1))
    groups: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in wide_first:
        need = tensor.nbytes + _HEADER_BYTES
        if groups[-1] and size + need > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += need
    if len(groups) == 1:
        return [_shard(SINGLE, groups[0])]
    return [_shard(f"model-{i:05}-of-{len(groups):05}.safetensors", group) for i, group in enumerate(groups, 1)]


def _shard(name: str, tensors: list[PlannedTensor]) -> _Shard:
    entries: dict[str, Any] = {}
    quantized = {t.name: {"format": t.format, "shape": t.shape} for t in tensors if t.format in QUANTIZED}
    entries["__metadata__"] = {VERSION_KEY: FORMAT_VERSION, QUANTIZED_KEY: json.dumps(quantized)}
    at = 0
    for t in tensors:
        entries[t.name] = {"dtype": _DTYPES[t.format], "shape": t.stored_shape, "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    start = 8 + len(text)
    offsets = {t.name: start + entries[t.name]["data_offsets"][0] for t in tensors}
    return _Shard(name, len(text).to_bytes(8, "little") + text, offsets, start + at)


def write_model(
    target: str | Path,
    tensors: list[PlannedTensor],
    pieces: Callable[[PlannedTensor], Iterable[Piece]],
    texts: dict[str, bytes],
    job: dict[str, Any],
    *,
    verify: bool = True,
    progress: ProgressCallback | None = None,
    threads: int = 2,
) -> Written:
    """Writes a model folder at `target`, which appears there complete or not at all.

    pieces: the pieces of a tensor, in order; they are computed by `threads` threads. texts: small files by name,
    config.json among them. job: everything JSON that decides the result; a killed run of the same job is continued.
    verify: read everything back from the disk and compare. Raises CheckpointError in one line, leaving nothing behind.
    """
    shards = plan_shards(tensors)
    by_name = {t.name: t for t in tensors}
    order = [by_name[name] for shard in shards for name in shard.offsets]
    plan = [[t.name, t.format, t.shape] for t in order]
    digest = hashlib.sha256(json.dumps([job, plan, [s.size for s in shards]], sort_keys=True).encode()).hexdigest()
    with staging(Path(target)) as stage:
        stage.begin(digest)
        resumed = set(stage.done)
        stage.require_space(_missing_bytes(stage, shards) + sum(map(len, texts.values())))
        _write_headers(stage, shards)
        _write_tensors(stage, shards, order, pieces, progress, threads)
        _sync(stage, shards)
        while verify and (lost := _lost(stage, shards, by_name, progress)):
            # what an earlier run wrote may be lost, by a power cut; what this one wrote must be there
            if not resumed.issuperset(lost):
                name = next(name for name in lost if name not in resumed)
                raise CheckpointError(f"{stage.target}: {name} reads back differently; the disk or memory is faulty")
            for name in lost:
                del stage.done[name]
            resumed.difference_update(lost)
            _write_tensors(stage, shards, order, pieces, progress, threads)
            _sync(stage, shards)
        _finish(stage, shards, texts)
        total = sum(s.size for s in shards)
        return Written(stage.target, total, len(shards), len(resumed), stage.restarted)


def _missing_bytes(stage: Staging, shards: list[_Shard]) -> int:
    """Bytes the shards will take on the disk beyond what they have."""
    files = [(stage.model / s.name, s.size) for s in shards]
    return sum(size - (file.stat().st_blocks * 512 if file.exists() else 0) for file, size in files)


def _write_headers(stage: Staging, shards: list[_Shard]) -> None:
    for shard in shards:
        file = stage.model / shard.name
        with writing(stage.target):
            fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _write_at(fd, shard.header, 0)
            finally:
                os.close(fd)


def _write_tensors(
    stage: Staging,
    shards: list[_Shard],
    order: list[PlannedTensor],
    pieces: Callable[[PlannedTensor], Iterable[Piece]],
    progress: ProgressCallback | None,
    threads: int,
) -> None:
    """Writes every tensor that is not done; the pieces of the next are computed while one is written."""
    todo = [t for t in order if t.name not in stage.done]
    if not todo:
        return
    place = {name: (shard.name, at) for shard in shards for name, at in shard.offsets.items()}
    total = sum(t.work for t in order)
    done = total - sum(t.work for t in todo)
    count = len(order) - len(todo)

    def report(bytes_done: int) -> None:
        if progress is not None:
            progress(Progress("write", count, len(order), bytes_done, total))

    pool = ThreadPoolExecutor(threads, thread_name_prefix="ddllm-write")
    files = _Files(stage.model)
    try:
        report(done)
        computed = _ahead(pool, ((t, piece) for t in todo for piece in pieces(t)))
        for tensor in todo:
            shard, start = place[tensor.name]
            written = crc = 0
            while written < tensor.nbytes:
                of, array = next(computed)
                assert of is tensor
                view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                with writing(stage.target):
                    fd = files.get(shard)
                    _write_at(fd, view, start + written)
                    _start_writeback(fd, start + written, len(view))
                crc = zlib.crc32(view, crc)
                written += len(view)
                report(done + tensor.work * written // tensor.nbytes)
            assert written == tensor.nbytes
            stage.record(tensor.name, crc)
            done += tensor.work
            count += 1
            report(done)
    finally:
        pool.shutdown(cancel_futures=True)
        files.close()


def _ahead(
    pool: ThreadPoolExecutor, jobs: Iterator[tuple[PlannedTensor, Piece]]
) -> Iterator[tuple[PlannedTensor, np.ndarray]]:
    """The results of the pieces in order, a bounded number of them computed ahead."""
    running: deque[tuple[PlannedTensor, Future[np.ndarray]]] = deque()
    for tensor, piece in jobs:
        running.append((tensor, pool.submit(piece)))
        if len(running) > _AHEAD:
            first, future = running.popleft()
            yield first, future.result()
    while running:
        first, future = running.popleft()
        yield first, future.result()


class _Files:
    """The shard being written, open; tensors come shard by shard."""

    def __init__(self, folder: Path):
        self.folder, self.name, self.fd = folder, "", -1

    def get(self, name: str) -> int:
        if name != self.name:
            self.close()
            self.fd, self.name = os.open(self.folder / name, os.O_RDWR), name
        return self.fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.name = -1, ""


def _write_at(fd: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, at)
        view, at = view[n:], at + n


def _start_writeback(fd: int, at: int, size: int) -> None:
    """Lets the disk work on these bytes now, while the next are computed, instead of at the end."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)


def _sync(stage: Staging, shards: list[_Shard]) -> None:
    """Makes the shards durable and drops them from the page cache, so that reading back means reading the disk."""
    for shard in shards:
        with writing(stage.target), open(stage.model / shard.name, "rb") as f:
            os.fsync(f.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _lost(
    stage: Staging, shards: list[_Shard], by_name: dict[str, PlannedTensor], progress: ProgressCallback | None
) -> list[str]:
    """Tensors whose bytes on the disk are not those that were written."""
    lost = []
    total, done, count = sum(t.nbytes for t in by_name.values()), 0, 0
    for shard in shards:
        file = stage.model / shard.name
        with writing(stage.target), open(file, "rb", buffering=0) as f:
            if f.read(len(shard.header)) != shard.header:
                raise CheckpointError(
                    f"{stage.target}: {shard.name} reads back differently; the disk or memory is faulty"
                )
            for name in shard.offsets:
                crc, left = 0, by_name[name].nbytes
                while left and (block := f.read(min(left, PIECE_BYTES))):
                    crc = zlib.crc32(block, crc)
                    left -= len(block)
                if left or crc != stage.done[name]:
                    lost.append(name)
                done += by_name[name].nbytes
                count += 1
                if progress is not None:
                    progress(Progress("verify", count, len(by_name), done, total))
    return lost


def _finish(stage: Staging, shards: list[_Shard], texts: dict[str, bytes]) -> None:
    """The small files, config.json last since it makes the folder a model; a look at the whole; the rename."""
    small = dict(texts)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(s.size - len(s.header) for s in shards)},
            "weight_map": {name: s.name for s in shards for name in s.offsets},
        }
        small[INDEX] = json.dumps(index, indent=1).encode()
    small["config.json"] = small.pop("config.json")
    for name, content in small.items():
        with writing(stage.target), open(stage.model / name, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
    open_checkpoint(stage.model).close()
    stage.publish()
