"""Everything of a denoising step behind the last layer, as dispatches of a Vulkan program: the head's statistics,
sampling, entropy-bound acceptance and stopping, the self-conditioning embedding (docs/MODEL.md).

The vocabulary goes by in chunks: the logits are never held. Per step the host writes a few parameters (`set_step`) and
reads one small record (`StepRecord`). What each buffer holds is said where VulkanHead allocates it; the structures in
them are those of shaders/head.glsl.

Choices are those of the CPU path: z, exp and tanh are its arithmetic, sums over the vocabulary are carried in two
floats, a uniform number of float64 is passed as two floats (an error below 2^-48). A token can differ only where its
uniform number lies within rounding, about 1e-6, of an edge of the distribution. Acceptance and stopping are exactly
sampler.py's, applied to the record's entropies (shaders/entropy_bound.comp).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import GpuError
from ..gpu.buffers import Buffer, Slice
from ..gpu.program import Program
from ..gpu.runtime import Runtime
from ..gpu.weights import TILE as WEIGHT_TILE
from ..gpu.weights import DeviceWeight, tile_bytes

TILE = 256  #: tokens of a sampling tile, at most (shaders/head.glsl)
CANDIDATES = 1024  #: tokens a row's sparse self-conditioning embedding is made of, at most
CHUNK_BYTES = 16 * 2**20  #: products of one chunk of the vocabulary, about
SETTINGS_WORDS = 64
FORBIDDEN = SETTINGS_WORDS - 16  #: ids that can be forbidden, at most
TILE_BYTES, ROW_BYTES, LIST_BYTES, SOFT_BYTES, CANDIDATE_BYTES = 16, 32, 12, 12, 8
NO_ROW = 2**32 - 1
DENSE_ROWS = 8  #: rows of the dense product that one invocation makes
#: Bounds of the 2-norm of the probabilities that a sparse embedding leaves to the vocabulary's mean: cpu/head.py
WANTED, ALLOWED_F32, ALLOWED_INT8 = 1e-5, 3e-5, 2e-4
#: lavapipe ends a shader's loops, without a word, after 65,535 iterations of one invocation in all: what bounds the
#: rows (entropy_bound compares each with each) and the tokens of a chunk (soft_accumulate). Sums of so many entropies,
#: multiples of 2^-32 below 32, are exact in float64.
MOST_ROWS, MOST_TOKENS = 1024, 2**15

_LIMIT_64 = 2**64 - 1


class Product(Protocol):
    """Appends to `program`: result[i, :count] = x[i] @ weight.T, result float32 [rows, count] without gaps.

    x: rows as the linear shaders take them; weight: `count` rows of the table, whole tiles of them. limit: None, or a
    buffer whose first word (int) is how many rows matter: the others may be left as they are.
    """

    def __call__(
        self, program: Program, x: Slice, weight: Slice, count: int, result: Slice, limit: Buffer | None
    ) -> None: ...


@dataclass(frozen=True)
class Chunk:
    """Tokens that are multiplied at once: whole sampling tiles, of one part of the table."""

    weight: Slice
    first: int  #: token
    count: int
    first_tile: int

    @property
    def tiles(self) -> int:
        return -(-self.count // TILE)


def split(table: DeviceWeight, rows: int, chunk_bytes: int) -> tuple[list[Chunk], np.ndarray]:
    """The chunks of the vocabulary for `rows` rows, and the first token of every sampling tile, uint32 [tiles + 1]."""
    step = min(max(1, chunk_bytes // (4 * rows * TILE)) * TILE, MOST_TOKENS)
    row_tile = tile_bytes(table.format, table.columns)
    chunks, begins = [], []
    for part in table.parts:
        for at in range(0, part.count, step):
            count = min(step, part.count - at)
            offset = part.slice.offset + at // WEIGHT_TILE * row_tile
            weight = Slice(part.slice.buffer, offset, -(-count // WEIGHT_TILE) * row_tile)
            chunks.append(Chunk(weight, part.first + at, count, len(begins)))
            begins += range(part.first + at, part.first + at + count, TILE)
    return chunks, np.array([*begins, table.rows], np.uint32)


def bound_limit(entropy_bound: float) -> int:
    """The least sum of entropies, in units of 2^-32 nats, that is above the bound."""
    if entropy_bound >= 2.0**32:
        return _LIMIT_64
    return math.floor(math.ldexp(max(entropy_bound, 0.0), 32)) + 1


def mean_limit(confidence_threshold: float, rows: int) -> int:
    """The least sum of `rows` entropies, in units of 2^-32 nats, whose mean in float64 is not below the threshold."""
    low, high = 0, 2**53  # high: more than any sum
    if math.ldexp(float(high), -32) / rows < confidence_threshold:
        return _LIMIT_64
    while low < high:
        middle = (low + high) // 2
        if math.ldexp(float(middle), -32) / rows < confidence_threshold:
            low = middle + 1
        else:
            high = middle
    return low


def as_two_floats(values: np.ndarray) -> np.ndarray:
    """float64 [n] -> float32 [n, 2]: high and low part, whose sum is the value to 48 bits."""
    high = values.astype(np.float32)
    return np.stack([high, (values - high).astype(np.float32)], axis=-1)


@dataclass(frozen=True, eq=False)
class StepRecord:
    """What a step sends back; arrays have one entry a canvas row."""

    argmax: np.ndarray  #: int32
    sampled: np.ndarray  #: int32
    canvas: np.ndarray  #: int32, accepted and renoised
    entropy: np.ndarray  #: float64, nats; NaN where the logits are no numbers
    accepted: np.ndarray  #: bool
    settled: bool  #: the adaptive stop fired
    broken: bool  #: some logits are no numbers
    dense_rows: int  #: rows whose self-conditioning embedding takes the dense product


class VulkanHead:
    """The buffers behind the last layer for canvases of `rows` rows over one table, and what is dispatched on them.

    A step's program, in order: record_statistics, record_selection, record_sampling, record_decisions, record_soft.
    With guard, row 0 has statistics of its own with the forbidden ids left out, as row `rows`; sampling and decisions
    take those for canvas row 0, the self-conditioning embedding takes the others (Session.canvas_step).

    GpuError for sizes the shaders cannot take. Memory: nbytes, for 256 rows of 262,144 tokens about 30 MB.
    """

    def __init__(
        self,
        runtime: Runtime,
        table: DeviceWeight,
        rows: int,
        *,
        guard: bool = True,
        capacity: int = CANDIDATES,
        chunk_bytes: int = CHUNK_BYTES,
        workgroup: int = 64,
    ):
        if not 0 < rows <= MOST_ROWS:
            raise GpuError(f"a canvas of {rows} rows; the head takes up to {MOST_ROWS}")
        self.runtime, self.table, self.rows, self.guard = runtime, table, rows, guard
        self.all_rows = rows + 1 if guard else rows  #: rows with statistics
        self.capacity, self.workgroup = capacity, workgroup
        self.chunks, begins = split(table, rows, chunk_bytes)
        self.tile_count = len(begins) - 1
        largest = max(chunk.count for chunk in self.chunks)

        # of subgroups, the last one of a workgroup included, that have an invocation for each of DENSE_ROWS
        whole = workgroup % DENSE_ROWS == 0 and runtime.device.subgroup_size >= DENSE_ROWS
        self._subgroups = whole and "subgroup_shuffle" in runtime.features

        held = len(runtime.buffers)
        # written by the host
        self.settings = runtime.allocate(4 * SETTINGS_WORDS, host=True)  # see set_step
        self.uniforms = runtime.allocate(8 * rows, host=True)  # float [rows, 2]
        self.renoise = runtime.allocate(4 * rows, host=True)  # int [rows]
        # read by the host: 4 + 5 * rows words, the first the number of dense rows, then `record` of entropy_bound.comp
        self.record = runtime.allocate(4 * (4 + 5 * rows), host=True)
        # between the shaders
        self.products = runtime.allocate(4 * rows * largest)  # float [rows, tokens of a chunk]
        self.tiles = runtime.allocate(TILE_BYTES * self.all_rows * self.tile_count)  # Tile [all_rows, tile_count]
        self.tile_begin = runtime.allocate(begins.nbytes)  # uint [tile_count + 1]
        self.row_stats = runtime.allocate(ROW_BYTES * self.all_rows)  # Row [all_rows]
        self.tile_products = runtime.allocate(4 * TILE * self.all_rows)  # float [all_rows, TILE]
        self.sampled = runtime.allocate(4 * self.all_rows)  # int [all_rows]
        self.canvas = runtime.allocate(4 * rows)  # int [rows]: the ids of the next step
        self.state = runtime.allocate(4 * (1 + rows))  # int [1 + rows]: see entropy_bound.comp
        self.candidates = runtime.allocate(CANDIDATE_BYTES * rows * capacity)  # uint [rows, capacity, 2]
        self.lists = runtime.allocate(LIST_BYTES * rows)  # List [rows]
        self.soft = runtime.allocate(SOFT_BYTES * rows)  # Soft [rows]
        self.dense = runtime.allocate(4 * (1 + rows))  # int [1 + rows]: how many, which
        self.sums = runtime.allocate(4 * rows * table.columns)  # float [rows, columns]
        self.mean = runtime.allocate(4 * table.columns)  # float [columns]
        self._buffers = runtime.buffers[held:]

        runtime.upload(self.tile_begin, begins)
        runtime.upload(self.state, np.zeros(1 + rows, np.int32))
        self.settings.array()[:] = 0
        self._compute_mean()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def free(self) -> None:
        for buffer in self._buffers:
            self.runtime.free(buffer)

    # What the host writes and reads

    def set_head(
        self, softcap: float, temperature: float, forbidden_row: int = -1, forbidden: Sequence[int] = ()
    ) -> None:
        """For the next run: z = softcap * tanh(product / softcap) / temperature (softcap 0: none), and the ids that
        have probability zero in row forbidden_row (-1: in none)."""
        if len(forbidden) > FORBIDDEN:
            raise GpuError(f"{len(forbidden)} forbidden ids; the GPU backend takes up to {FORBIDDEN}")
        words, floats = self.settings.array(np.uint32), self.settings.array(np.float32)
        floats[:2] = softcap, 1.0 / temperature
        words[2:4] = NO_ROW if forbidden_row < 0 else forbidden_row, len(forbidden)
        words[16 : 16 + len(forbidden)] = forbidden

    def set_sampler(
        self, entropy_bound: float, stability_threshold: int, confidence_threshold: float, first_step: bool
    ) -> None:
        """For the next run: the bounds of sampler.accept and is_settled; first_step: of a canvas."""
        bound, mean = bound_limit(entropy_bound), mean_limit(confidence_threshold, self.rows)
        words = self.settings.array(np.uint32)
        words[4:8] = bound & 0xFFFFFFFF, bound >> 32, mean & 0xFFFFFFFF, mean >> 32
        words[8:10] = min(stability_threshold, 2**31), first_step

    def set_noise(self, uniforms: np.ndarray, renoise: np.ndarray) -> None:
        """For the next run: float64 [rows] for sampling, int32 [rows] ids for rows that are not accepted."""
        self.uniforms.array(np.float32)[:] = as_two_floats(uniforms).reshape(-1)
        self.renoise.array(np.int32)[:] = renoise

    def read(self) -> StepRecord:
        """The record of the last run."""
        words = self.record.array(np.int32).copy()
        dense_rows, settled, broken, _ = (int(w) for w in words[:4])
        argmax, sampled, canvas, entropy, accepted = words[4:].reshape(5, self.rows)
        wide = entropy.view(np.float32).astype(np.float64)
        return StepRecord(argmax, sampled, canvas, wide, accepted != 0, settled != 0, broken != 0, dense_rows)

    # What is recorded

    def record_statistics(self, program: Program, x: Slice, product: Product, soft: bool = True) -> None:
        """The statistics of every row of x; with soft, the candidates of its self-conditioning embedding too."""
        for chunk in self.chunks:
            products = self._products(chunk)
            product(program, x, chunk.weight, chunk.count, products, None)
            self._record_chunk(program, chunk, products, soft)
        self._record_finish(program)

    def _record_chunk(self, program: Program, chunk: Chunk, products: Slice, soft: bool) -> None:
        push = {"columns": chunk.count, "tokens": chunk.count, "first_token": chunk.first}
        push |= {"first_tile": chunk.first_tile, "tile_count": self.tile_count}
        operands = {"products": products, "settings": self.settings, "tiles": self.tiles}
        self._dispatch(
            program, "head_tiles", operands, push | {"product_rows": self.rows}, (chunk.tiles, self.all_rows)
        )
        if soft:
            operands |= {"candidates": self.candidates, "lists": self.lists}
            self._dispatch(program, "head_candidates", operands, push, (self.rows,), CAPACITY=self.capacity)

    def _record_finish(self, program: Program) -> None:
        operands = {"tiles": self.tiles, "uniforms": self.uniforms, "result": self.row_stats}
        push = {"tile_count": self.tile_count, "uniform_rows": self.rows}
        self._dispatch(program, "head_finish", operands, push, (self.all_rows,))

    def record_selection(self, program: Program, allowed: float) -> None:
        """Which rows' self-conditioning embedding is sparse, and of what; allowed: ALLOWED_*. After the statistics."""
        operands = {"rows": self.row_stats, "lists": self.lists, "candidates": self.candidates, "soft": self.soft}
        push = {"wanted": WANTED, "allowed": allowed}
        self._dispatch(program, "soft_select", operands, push, (self.rows,), CAPACITY=self.capacity)
        self._record_dense_rows(program, "soft_dense_rows")

    def _record_dense_rows(self, program: Program, shader: str) -> None:
        operands = {"soft": self.soft, "dense": self.dense, "count": self.record.slice(0, 4)}
        self._dispatch(program, shader, operands, {"row_count": self.rows}, (1,))

    def record_sampling(self, program: Program, x: Slice, integer: bool = False) -> None:
        """A token of every row, at the uniform numbers. integer: x is what quantize_rows wrote."""
        shader = f"tile_products_{self.table.format}" + ("_int" if integer else "")
        operands = {"x": x, "rows": self.row_stats, "tile_begin": self.tile_begin, "result": self.tile_products}
        for part in self.table.parts:
            push = {"columns": self.table.columns, "x_rows": self.rows}
            push |= {"part_first": part.first, "part_count": part.count}
            groups = (-(-TILE // self.workgroup), self.all_rows)
            self._dispatch(program, shader, operands | {"weight": part.slice}, push, groups)
        operands = {"products": self.tile_products, "settings": self.settings, "rows": self.row_stats}
        operands |= {"tile_begin": self.tile_begin, "sampled": self.sampled}
        groups = (-(-self.all_rows // self.workgroup),)
        self._dispatch(program, "sample_in_tile", operands, {"row_count": self.all_rows}, groups)

    def record_decisions(self, program: Program) -> None:
        """Acceptance, renoising, stopping, the record. After sampling."""
        operands = {"settings": self.settings, "rows": self.row_stats, "sampled": self.sampled, "state": self.state}
        operands |= {"renoise": self.renoise, "canvas": self.canvas, "record": self.record.slice(4)}
        push = {"row_count": self.rows, "first_row": self.rows if self.guard else 0}
        self._dispatch(program, "entropy_bound", operands, push, (1,))

    def record_soft(
        self, program: Program, x: Slice, words: int, gathered: Slice, product: Product, scale: float, result: Slice
    ) -> None:
        """result[r] = scale * softmax(z[r]) @ table: float32 [rows, columns]. After the selection.

        x: the rows again, `words` 32-bit words each; gathered: room for as many, for those that take the dense product.
        """
        operands = {"source": x, "dense": self.dense, "result": gathered}
        self._dispatch(program, "gather_rows", operands, {"words": words}, (self.rows,))
        for chunk in self.chunks:
            products = self._products(chunk)
            product(program, gathered, chunk.weight, chunk.count, products, self.dense)
            self._record_dense_chunk(program, chunk, products)
        self._record_soft_rows(program, scale, result)

    def _record_dense_chunk(self, program: Program, chunk: Chunk, products: Slice) -> None:
        operands = {"products": products, "settings": self.settings, "rows": self.row_stats, "dense": self.dense}
        push = {"columns": chunk.count, "tokens": chunk.count, "first_token": chunk.first}
        groups = (-(-chunk.count // self.workgroup), self.rows)
        self._dispatch(program, "soft_probabilities", operands, push, groups)
        self._record_accumulate(program, chunk, products, self.sums, self.rows)

    def _record_accumulate(self, program: Program, chunk: Chunk, p: Slice, sums: Buffer, rows: int) -> None:
        operands = {"p": p, "weight": chunk.weight, "dense": self.dense, "sums": sums}
        push = {"stride": chunk.count, "tokens": chunk.count, "columns": self.table.columns}
        shader = f"soft_accumulate_{self.table.format}" + ("_subgroup" if self._subgroups and rows > 1 else "")
        tile_rows = DENSE_ROWS if rows > 1 else 1
        groups = (self._column_groups, -(-rows // tile_rows))
        self._dispatch(program, shader, operands, push | {"first_token": chunk.first}, groups, TILE_ROWS=tile_rows)

    def _record_soft_rows(self, program: Program, scale: float, result: Slice) -> None:
        operands = {"candidates": self.candidates, "soft": self.soft, "mean": self.mean, "sums": self.sums}
        for part in self.table.parts:
            push = {"columns": self.table.columns, "capacity": self.capacity, "scale": scale}
            push |= {"part_first": part.first, "part_count": part.count}
            groups = (self._column_groups, self.rows)
            bound = operands | {"weight": part.slice, "result": result}
            self._dispatch(program, f"soft_rows_{self.table.format}", bound, push, groups)

    # What is computed at once

    def soft_embedding_of_logits(self, z: np.ndarray, scale: float, result: Slice) -> None:
        """result = scale * softmax(z) @ table, for float32 z [rows, vocab] of the host: for tests and small models."""
        self.set_head(0.0, 1.0)
        self.uniforms.array(np.float32)[:] = 0
        for chunk in self.chunks:
            self._upload_products(chunk, z)
            program = Program()
            self._record_chunk(program, chunk, self._products(chunk), soft=False)
            self._run(program)
        program = Program()
        self._record_finish(program)
        self._record_dense_rows(program, "soft_dense_rows_all")
        self._run(program)
        for chunk in self.chunks:
            self._upload_products(chunk, z)
            program = Program()
            self._record_dense_chunk(program, chunk, self._products(chunk))
            self._run(program)
        program = Program()
        self._record_soft_rows(program, scale, result)
        self._run(program)

    def _compute_mean(self) -> None:
        """The table's mean row: every token with the probability 1 / vocab."""
        self.runtime.upload(self.dense, np.array([1], np.int32))
        largest = max(chunk.count for chunk in self.chunks)
        self.runtime.upload(self.products, np.full(largest, 1 / self.table.rows, np.float32))
        program = Program()
        for chunk in self.chunks:
            self._record_accumulate(program, chunk, self._products(chunk), self.mean, rows=1)
        self._run(program)

    def _upload_products(self, chunk: Chunk, z: np.ndarray) -> None:
        self.runtime.upload(self.products, z[:, chunk.first : chunk.first + chunk.count])

    def _run(self, program: Program) -> None:
        recording = self.runtime.record(program)
        recording.run()
        recording.free()

    def _products(self, chunk: Chunk) -> Slice:
        return self.products.slice(0, 4 * self.rows * chunk.count)

    @property
    def _column_groups(self) -> int:
        return -(-self.table.columns // (4 * self.workgroup))

    def _dispatch(self, program: Program, shader: str, operands, push, groups: tuple[int, ...], **constants) -> None:
        pipeline = self.runtime.pipeline(shader, {"WORKGROUP_X": self.workgroup, **constants})
        program.dispatch(pipeline, operands, push, groups)
