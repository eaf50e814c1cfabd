"""Conversion of a checkpoint of any size to Q40: pieces of tensors stream from the source to the target's shards."""

import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import CheckpointError, InputError
from ..quants import BLOCK, QUANTIZED, dequantize
from ..tokenizer import Tokenizer
from .quantizer import COMPILE_FROM, quantize
from .reader import Checkpoint, StoredTensor, all_finite, open_checkpoint
from .writer import PIECE_BYTES, Piece, PlannedTensor, ProgressCallback, write_model

EMBEDDING_FORMATS = ("q80", "q40", "f16")
#: small files that belong to a model and are copied as they are
TEXTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "LICENSE", "NOTICE",
)  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """What a conversion came to. Sizes in bytes, time in seconds."""

    path: Path
    source_bytes: int
    target_bytes: int
    shards: int
    formats: dict[str, int]  # format -> tensors stored in it
    kept: tuple[str, ...]  # matrices left as stored, since their rows are not whole blocks
    resumed: int  # tensors that an earlier, interrupted run had written
    restarted: bool  # an earlier run's remains were thrown away: its source or options were others
    seconds: float


def convert(
    source: str | Path,
    target: str | Path,
    *,
    embedding: str = "q80",
    progress: ProgressCallback | None = None,
    threads: int = 2,
) -> Conversion:
    """Converts the model folder `source` into a new folder `target`, which appears complete or not at all.

    Matrices become Q40, the embedding q80, q40 or f16, router, norms and scalars float32; vision stays as stored. A run
    that was interrupted is continued. Raises DdllmError in one line: source unusable, NaN, target exists, not writable.
    """
    if embedding not in EMBEDDING_FORMATS:
        raise InputError(f"embedding must be one of {', '.join(EMBEDDING_FORMATS)}, not {embedding!r}")
    began = time.monotonic()
    with open_checkpoint(source) as checkpoint:
        stored = checkpoint.tensors | checkpoint.vision
        Tokenizer.from_folder(checkpoint.path)  # without one the result could not be loaded: say so before the work
        already = next((t for t in stored.values() if t.format in QUANTIZED), None)
        if already is not None:
            raise CheckpointError(
                f"{source}: is converted already ({already.name} is {already.format}); use it as it is"
            )
        plan = [PlannedTensor(t.name, _target_format(t, embedding), t.shape, t.nbytes) for t in stored.values()]
        weights = sum(math.prod(t.shape) for t in plan if t.format == "q40")
        texts = _read_texts(checkpoint.path)
        written = write_model(
            target,
            plan,
            lambda t: _pieces(stored[t.name], t.format, compiled=weights >= COMPILE_FROM),
            texts,
            {"convert": 1, "source": _identity(checkpoint), "texts": [*texts]},
            progress=progress,
            threads=threads,
        )
        kept = [t.name for t in plan if stored[t.name].role == "matrix" and t.format not in QUANTIZED]
        return Conversion(
            path=written.path,
            source_bytes=checkpoint.total_bytes,
            target_bytes=written.nbytes,
            shards=written.shards,
            formats=dict(Counter(t.format for t in plan)),
            kept=tuple(kept),
            resumed=written.resumed,
            restarted=written.restarted,
            seconds=time.monotonic() - began,
        )


def _target_format(tensor: StoredTensor, embedding: str) -> str:
    if tensor.role is None:
        return tensor.format
    if tensor.role == "float":
        return "f32"
    wanted = "q40" if tensor.role == "matrix" else embedding
    return wanted if wanted not in QUANTIZED or tensor.shape[-1] % BLOCK == 0 else tensor.format


def _pieces(tensor: StoredTensor, fmt: str, compiled: bool) -> Iterator[Piece]:
    """Groups of whole rows, so that no block crosses a piece; a fused expert tensor is many rows like any other."""
    if not tensor.nbytes:
        return
    rows = tensor.raw().reshape(-1, tensor.shape[-1] if tensor.shape else 1)
    step = max(1, PIECE_BYTES // (4 * rows.shape[1]))
    for start in range(0, len(rows), step):
        yield partial(_piece, tensor, fmt, rows[start : start + step], start * rows.shape[1] * rows.itemsize, compiled)


def _piece(tensor: StoredTensor, fmt: str, rows: np.ndarray, offset: int, compiled: bool) -> np.ndarray:
    """rows as stored -> the same in `fmt`; gives the source's pages back. Raises CheckpointError when not finite."""
    result = rows.copy() if fmt == tensor.format else quantize(fmt, dequantize(tensor.format, rows), compiled)
    if not all_finite(fmt, result):
        tensor.check_finite()
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has values too large for {fmt}")
    tensor.release(offset, offset + rows.nbytes)
    return result


def _read_texts(folder: Path) -> dict[str, bytes]:
    texts = {}
    for name in TEXTS:
        try:
            texts[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as e:
            raise CheckpointError(f"{folder / name}: cannot be read ({e.strerror})") from None
    return texts


def _identity(checkpoint: Checkpoint) -> list[list[str | int]]:
    """What tells one source from another without reading it all: names, sizes, times and headers of weight files."""
    identity: list[list[str | int]] = []
    for file in checkpoint.files:
        stat = os.stat(file)
        with open(file, "rb") as f:
            header = f.read(8 + int.from_bytes(f.read(8), "little"))
        identity.append([file.name, stat.st_size, stat.st_mtime_ns, hashlib.sha256(header).hexdigest()])
    return identity
