"""VulkanOps: the Ops on compute shaders. Weights, caches and activations stay on the device.

Operations are collected and run as one recorded program a pass (gpu/passes.py); what each of them dispatches is in
vulkan_kernels.py, what is behind the last layer in vulkan_head.py.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import GpuError, InputError
from ..gpu.buffers import Arena, Buffer, Slice
from ..gpu.passes import Passes
from ..gpu.program import Program
from ..gpu.runtime import Runtime
from ..gpu.weights import DeviceWeight, device_bytes, upload_weight
from ..ops import HeadStatistics, ReadRows
from ..quants import QUANTIZED
from .vulkan_arrays import CacheArray, DeviceArray
from .vulkan_head import ALLOWED_F32, ALLOWED_INT8, VulkanHead
from .vulkan_kernels import Kernels

F32, I32 = np.float32, np.int32
_CACHE_DTYPES = {"f16": np.float16, "f32": F32}


class VulkanOps:
    """Activations are float32, quantised to Q80 where `activations` is "q80" and the weight is quantised. Takes over
    `runtime` and closes it. One pass at a time (Session holds the model's lock)."""

    def __init__(self, runtime: Runtime, eps: float, activations: str = "q80"):
        self.runtime, self.eps = runtime, eps
        self.quantized = activations == "q80"
        self.passes = Passes(runtime)
        self.kernels = Kernels(runtime, self.passes)
        self._arena = Arena(runtime, 0)
        self._depth = 0
        self._dropped: deque[Buffer] = deque()  # of arrays that Python let go
        self._router_scales: dict[Slice, Slice] = {}
        self._ropes: dict[bytes, tuple[Buffer, Any]] = {}
        self._heads: dict[tuple[int, int], tuple[VulkanHead, Slice, DeviceWeight]] = {}

    # Memory

    def expect(self, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        nbytes = sum(device_bytes(fmt, shape) for fmt, shape in tensors)
        self.runtime.require(nbytes, "the model")
        self._arena = Arena(self.runtime, nbytes)

    def upload(self, fmt: str, read: ReadRows, shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:
            taken = self._arena.take(4 * shape[0])
            self.runtime.upload(taken, np.asarray(read(0, 1), F32))
            return taken
        return upload_weight(self.runtime, self._arena, fmt, read, shape)

    def weight_bytes(self, weight: Any) -> int:
        return weight.nbytes

    @contextmanager
    def scope(self) -> Iterator[None]:
        if self._depth == 0:
            self._collect()
        top = self.passes.scratch.top
        self._depth += 1
        try:
            yield
        except BaseException:
            self.passes.discard()
            raise
        finally:
            self._depth -= 1
            self.passes.scratch.top = top
        if self._depth == 0 and not self._deferred:
            self.passes.flush()

    _deferred = False  # what is pending may wait for the next pass, to be submitted with it

    def new_cache(self, fmt: str, kv_heads: int, capacity: int, head_dim: int) -> CacheArray:
        if head_dim % 4:
            raise GpuError(f"head_dim {head_dim}: the GPU backend takes multiples of 4; use backend='cpu'")
        if fmt not in _CACHE_DTYPES:
            raise InputError(f"kv_cache={fmt!r}: the GPU backend has {' and '.join(_CACHE_DTYPES)}")
        dtype = np.dtype(_CACHE_DTYPES[fmt])
        buffer = self.runtime.allocate(kv_heads * capacity * head_dim * dtype.itemsize)
        return CacheArray(self, buffer.slice(), (kv_heads, capacity, head_dim), dtype, self._dropped)

    def cache_bytes(self, cache: CacheArray) -> int:
        return cache.slice.nbytes

    def cache_to_host(self, cache: CacheArray) -> np.ndarray:
        return np.asarray(cache, dtype=F32)

    def resize_cache(self, cache: CacheArray, capacity: int, first: int, count: int) -> CacheArray:
        heads, old, size = cache.shape
        fmt = next(f for f, dtype in _CACHE_DTYPES.items() if cache.dtype == dtype)
        target = cache if capacity == old else self.new_cache(fmt, heads, capacity, size)
        if count == 0:
            return target
        program = Program()
        words = size * cache.dtype.itemsize // 4
        temporary = None
        if target is cache:  # by way of other memory: the slots overlap
            temporary = self.runtime.allocate(4 * heads * count * words)
            self.kernels.copy_slots(program, cache.slice, temporary.slice(), heads, words, (old, count), first, count)
            self.kernels.copy_slots(program, temporary.slice(), cache.slice, heads, words, (count, old), 0, count)
        else:
            self.kernels.copy_slots(program, cache.slice, target.slice, heads, words, (old, capacity), first, count)
        self._run(program)
        if temporary is not None:
            self.runtime.free(temporary)
        return target

    def to_host(self, x: DeviceArray) -> np.ndarray:
        return np.asarray(x, dtype=F32)

    def read(self, x: DeviceArray) -> np.ndarray:
        """A copy of an array, after running what is pending."""
        self.passes.flush()
        return self.runtime.download(x.slice, x.dtype).reshape(x.shape)

    def close(self) -> None:
        self.runtime.close()

    # A layer

    def store_rows(self, x: DeviceArray | np.ndarray, cache: CacheArray, slot: int) -> None:
        if isinstance(x, np.ndarray):  # of the host, outside of a pass
            buffer = self.runtime.allocate(x.nbytes)
            self.runtime.upload(buffer, x)
            with self.scope():
                self.store_rows(CacheArray(self, buffer.slice(), x.shape, x.dtype, self._dropped), cache, slot)
            return
        key = ("store_rows", x.slice, cache.slice, x.shape, cache.shape)
        self._operation(key, lambda p: self.kernels.store_rows(p, x, cache))[...] = slot

    def embedding_rows(self, table: DeviceWeight, ids: np.ndarray, scale: float) -> DeviceArray:
        result, where = self._operation(
            ("embedding_rows", table, len(ids), scale), lambda p: self.kernels.embedding_rows(p, table, len(ids), scale)
        )
        where[...] = ids
        return self._array(result, (len(ids), table.columns))

    def rms_norm(self, x: DeviceArray, weight: Slice | None) -> DeviceArray:
        key = ("rms_norm", x.slice, x.shape, weight)
        return self._array(self._operation(key, lambda p: self.kernels.rms_norm(p, x, weight, self.eps)), x.shape)

    def add(self, x: DeviceArray, y: DeviceArray) -> DeviceArray:
        return self._array(self._operation(("add", x.slice, y.slice), lambda p: self.kernels.add(p, x, y)), x.shape)

    def add_rms_norm(
        self, x: DeviceArray, y: DeviceArray, weight: Slice, scale: float = 1.0, out: DeviceArray | None = None
    ) -> DeviceArray:
        target = None if out is None else out.slice
        key = ("add_rms_norm", x.slice, y.slice, x.shape, weight, scale, target)
        result = self._operation(key, lambda p: self.kernels.add_rms_norm(p, x, y, weight, self.eps, scale, target))
        return self._array(result, x.shape)

    def linear(self, x: DeviceArray, *weights: DeviceWeight) -> tuple[DeviceArray, ...]:
        key = ("linear", x.slice, x.shape, weights)
        results = self._operation(key, lambda p: self.kernels.linear(p, x, weights, self.quantized))
        return tuple(self._array(r, (x.shape[0], w.rows)) for r, w in zip(results, weights, strict=True))

    def gelu_mul(self, gate: DeviceArray, up: DeviceArray) -> DeviceArray:
        key = ("gelu_mul", gate.slice, up.slice, gate.shape)
        return self._array(self._operation(key, lambda p: self.kernels.gelu_mul(p, gate, up)), gate.shape)

    def rope_tables(self, start: int, rows: int, inv_freq: np.ndarray) -> Slice:
        """In host memory, kept from pass to pass: of a canvas it changes with the canvas only."""
        name, nbytes = inv_freq.tobytes(), 8 * rows * len(inv_freq)
        buffer, held = self._ropes.get(name, (None, None))
        if buffer is None or buffer.nbytes < nbytes:
            if buffer is not None:
                self._dropped.append(buffer)
            buffer, held = self.runtime.allocate(nbytes, host=True), None
        if held != (start, rows):
            angles = np.arange(start, start + rows, dtype=F32)[:, None] * inv_freq
            buffer.array(F32)[: nbytes // 4] = np.stack([np.cos(angles), np.sin(angles)]).reshape(-1)
        self._ropes[name] = buffer, (start, rows)
        return buffer.slice(0, nbytes)

    def head_norm_rope(self, x: DeviceArray, heads: int, weight: Slice | None, rope: Slice | None) -> DeviceArray:
        key = ("head_norm_rope", x.slice, x.shape, heads, weight, rope)
        result = self._operation(key, lambda p: self.kernels.head_norm_rope(p, x, heads, weight, rope, self.eps))
        return self._array(result, x.shape)

    def attention(
        self, q: DeviceArray, heads: int, k: CacheArray, v: CacheArray, lo: np.ndarray, hi: np.ndarray
    ) -> DeviceArray:
        key = ("attention", q.slice, q.shape, heads, k.slice, v.slice, k.shape)
        result, ranges = self._operation(key, lambda p: self.kernels.attention(p, q, heads, k, v))
        ranges[0], ranges[1] = lo, hi
        return self._array(result, q.shape)

    def router(
        self, h: DeviceArray, scale: Slice, proj: DeviceWeight, per_expert_scale: Slice, top_k: int
    ) -> tuple[DeviceArray, DeviceArray]:
        if scale not in self._router_scales:  # norm, scale and H^-0.5 in one
            weight = self.runtime.allocate(scale.nbytes).slice()
            self.runtime.upload(weight, self.runtime.download(scale, F32) * F32(h.shape[1] ** -0.5))
            self._router_scales[scale] = weight
        norm = self._router_scales[scale]
        key = ("router", h.slice, h.shape, norm, proj, per_expert_scale, top_k)
        ids, weights = self._operation(
            key, lambda p: self.kernels.router(p, h, norm, proj, per_expert_scale, top_k, self.eps)
        )
        shape = (h.shape[0], top_k)
        return self._array(ids, shape, I32), self._array(weights, shape)

    def experts(
        self, x: DeviceArray, ids: DeviceArray, weights: DeviceArray, gate_up: DeviceWeight, down: DeviceWeight
    ) -> DeviceArray:
        # one of the two may be unquantised, where a width is no multiple of 32
        integer = self.quantized and all(w.format in QUANTIZED for w in (gate_up, down))
        key = ("experts", x.slice, x.shape, ids.slice, weights.slice, gate_up, down)
        result = self._operation(key, lambda p: self.kernels.experts(p, x, ids, weights, gate_up, down, integer))
        return self._array(result, x.shape)

    def append_row(self, x: DeviceArray, row: int) -> DeviceArray:
        key = ("append_row", x.slice, x.shape, row)
        result = self._operation(key, lambda p: self.kernels.append_row(p, x, row))
        return self._array(result, (x.shape[0] + 1, x.shape[1]))

    # The head

    def head_logits(self, x: DeviceArray, table: DeviceWeight, softcap: float) -> np.ndarray:
        self.passes.flush()
        rows, out = x.shape[0], np.empty((x.shape[0], table.rows), F32)
        head, _, _ = self._head(table, rows)
        with self.passes.temporaries():
            for chunk in head.chunks:
                program = Program()
                product, inputs = self._head_product(program, x, table)
                result = head.products.slice(0, 4 * rows * chunk.count)
                product(program, inputs, chunk.weight, chunk.count, result, None)
                self._run(program)
                logits = self.runtime.download(result, F32).reshape(rows, chunk.count)
                out[:, chunk.first : chunk.first + chunk.count] = logits
        return np.multiply(np.tanh(np.divide(out, F32(softcap), out=out), out=out), F32(softcap), out=out)

    def head_statistics(
        self,
        x: DeviceArray,
        table: DeviceWeight,
        softcap: float,
        temperature: float,
        uniforms: np.ndarray,
        forbidden_row: int,
        forbidden_ids: Sequence[int],
    ) -> HeadStatistics:
        """The self-conditioning embedding is made in the same program, unscaled: one submission a step."""
        rows = x.shape[0]
        head, soft, _ = self._head(table, rows)
        key = ("head_statistics", x.slice, x.shape, table)
        self._operation(key, lambda p: self._record_head(p, head, soft, x, table))
        head.set_head(softcap, temperature, forbidden_row, forbidden_ids)
        head.set_sampler(0.0, 0, 0.0, True)  # acceptance is decided by the caller
        head.set_noise(uniforms, np.zeros(rows, I32))
        self.passes.flush()
        record = head.read()
        return HeadStatistics(record.argmax, record.sampled, record.entropy, (soft, table))

    def soft_embedding(
        self, statistics: HeadStatistics, rows: int, scale: float, out: DeviceArray | None = None
    ) -> DeviceArray:
        """Pending until the next pass, whose program it begins."""
        soft, table = statistics.soft
        if out is None or out.shape != (rows, table.columns):
            buffer = self.runtime.allocate(4 * rows * table.columns)
            out = CacheArray(self, buffer.slice(), (rows, table.columns), np.dtype(F32), self._dropped)
        target, part = out.slice, Slice(soft.buffer, soft.offset, out.slice.nbytes)
        self._operation(("scale", part, target, scale), lambda p: self.kernels.scale(p, part, target, scale))
        self._deferred = True
        return out

    def soft_embedding_of_logits(self, z: np.ndarray, table: DeviceWeight, scale: float) -> DeviceArray:
        self.passes.flush()
        head, _, _ = self._head(table, len(z))
        result = self.passes.scratch.take(4 * len(z) * table.columns)
        head.soft_embedding_of_logits(z, scale, result)
        return self._array(result, (len(z), table.columns))

    def _head(self, table: DeviceWeight, rows: int) -> tuple[VulkanHead, Slice, DeviceWeight]:
        """What is behind the last layer for so many rows, and where it leaves the soft embedding."""
        key = (id(table), rows)
        if key not in self._heads:
            head = VulkanHead(self.runtime, table, rows, guard=False)
            self._heads[key] = head, self.runtime.allocate(4 * rows * table.columns).slice(), table
        return self._heads[key]

    def _head_product(self, program: Program, x: DeviceArray, table: DeviceWeight) -> tuple[Any, Slice]:
        """The Product of VulkanHead for x, and x as it takes it."""
        integer = self.quantized and table.format in QUANTIZED
        inputs = self.kernels.quantize_rows(program, x.slice, x.shape) if integer else x.slice

        def product(p: Program, rows: Slice, weight: Slice, count: int, result: Slice, limit: Buffer | None) -> None:
            part = DeviceWeight(table.format, (count, table.columns), ())
            self.kernels.multiply(p, rows, x.shape[0], part, weight, count, 0, count, result, integer, limit)

        return product, inputs

    def _record_head(self, p: Program, head: VulkanHead, soft: Slice, x: DeviceArray, table: DeviceWeight) -> None:
        with self.passes.temporaries():
            product, inputs = self._head_product(p, x, table)
            integer = self.quantized and table.format in QUANTIZED
            gathered = self.passes.scratch.take(inputs.nbytes)
            head.record_statistics(p, inputs, product)
            head.record_selection(p, ALLOWED_INT8 if integer else ALLOWED_F32)
            head.record_sampling(p, inputs, integer)
            head.record_decisions(p)
            words = inputs.nbytes // 4 // head.rows
            head.record_soft(p, inputs, words, gathered, product, 1.0, soft)

    # Inside

    def _operation(self, key: tuple[Any, ...], build: Any) -> Any:
        self._deferred = False
        return self.passes.operation(key, build)

    def _array(self, where: Slice, shape: tuple[int, ...], dtype: Any = F32) -> DeviceArray:
        return DeviceArray(self, where, shape, np.dtype(dtype))

    def _run(self, program: Program) -> None:
        recording = self.runtime.record(program)
        recording.run()
        recording.free()

    def _collect(self) -> None:
        """Frees the memory of arrays that nobody holds any more."""
        if self._dropped:
            self.passes.flush()
            buffers = {self._dropped.popleft() for _ in range(len(self._dropped))}
            self.passes.drop(buffers)
            for buffer in buffers:
                self.runtime.free(buffer)
