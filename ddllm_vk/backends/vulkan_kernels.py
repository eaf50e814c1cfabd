"""What each operation of VulkanOps dispatches: shaders, operands, sizes. Results and temporaries come from scratch."""

from typing import Any

import numpy as np

from ..errors import GpuError
from ..gpu.buffers import Buffer, Slice
from ..gpu.passes import Passes
from ..gpu.program import Program
from ..gpu.runtime import Runtime
from ..gpu.weights import DeviceWeight
from ..quants import BLOCK, QUANTIZED
from .vulkan_arrays import DeviceArray

_RECORD_BYTES = 48  #: of a block of quantised activations: quantize_rows.comp
_ELEMENTS = 4096  #: numbers that a workgroup of an elementwise shader is meant to have
_NO_LIMIT = 2**31 - 1
_SOFTWARE_LOOPS = 65_000  #: iterations of all loops of one invocation that lavapipe allows: 65,535


def ceil(a: int, b: int) -> int:
    return -(-a // b)


class Kernels:
    """Tiles: on a software device few invocations with many registers are best, and on every device a subgroup's
    invocations share the rows they read, where it can shuffle and is large enough."""

    def __init__(self, runtime: Runtime, passes: Passes):
        self.runtime, self.passes = runtime, passes
        software = runtime.device.type == "cpu"
        self.workgroup = 32 if software else 64
        self.tile_rows, self.tile_columns = 8, 4
        shares = {"subgroup_basic", "subgroup_shuffle"} <= runtime.features
        self.variant = "_subgroup" if shares and runtime.device.subgroup_size >= self.tile_rows else ""
        self._no_limit = runtime.allocate(4)
        runtime.upload(self._no_limit, np.array([_NO_LIMIT], np.int32))

    def take(self, *shape: int) -> Slice:
        return self.passes.scratch.take(4 * int(np.prod(shape)))

    # Rows

    def embedding_rows(self, p: Program, table: DeviceWeight, rows: int, scale: float) -> tuple[Slice, np.ndarray]:
        result = self.take(rows, table.columns)
        ids, where = self.passes.parameter(np.int32, (rows,))
        for part in table.parts:
            operands = {"weight": part.slice, "ids": ids, "result": result}
            push = {"columns": table.columns, "first": part.first, "count": part.count, "scale": scale}
            p.dispatch(self.runtime.pipeline(f"embedding_rows_{table.format}"), operands, push, (rows,))
        return result, where

    def rms_norm(self, p: Program, x: DeviceArray, weight: Slice | None, eps: float) -> Slice:
        rows, columns = x.shape
        operands = {"x": x.slice, "result": self.take(rows, columns)}
        if weight is not None:
            operands["weight"] = weight
        shader = "rms_norm_no_weight" if weight is None else "rms_norm"
        p.dispatch(self.runtime.pipeline(shader), operands, {"columns": columns, "eps": eps}, (rows,))
        return operands["result"]

    def add_rms_norm(
        self, p: Program, x: DeviceArray, y: DeviceArray, weight: Slice, eps: float, scale: float, out: Slice | None
    ) -> Slice:
        rows, columns = x.shape
        result = self.take(rows, columns) if out is None else out
        operands = {"x": x.slice, "y": y.slice, "weight": weight, "result": result}
        push = {"columns": columns, "eps": eps, "scale": scale}
        p.dispatch(self.runtime.pipeline("add_rms_norm"), operands, push, (rows,))
        return result

    def add(self, p: Program, x: DeviceArray, y: DeviceArray) -> Slice:
        count = int(np.prod(x.shape))
        operands = {"x": x.slice, "y": y.slice, "result": self.take(count)}
        p.dispatch(self.runtime.pipeline("add"), operands, {"count": count}, self._shared(count))
        return operands["result"]

    def scale(self, p: Program, x: Slice, result: Slice, factor: float) -> None:
        count = result.nbytes // 4
        push = {"count": count, "factor": factor}
        p.dispatch(self.runtime.pipeline("scale"), {"x": x, "result": result}, push, self._shared(count))

    def append_row(self, p: Program, x: DeviceArray, row: int) -> Slice:
        rows, columns = x.shape
        result = self.take(rows + 1, columns)
        push = {"rows": rows, "columns": columns, "row": row}
        groups = self._shared(rows * columns)
        p.dispatch(self.runtime.pipeline("append_row"), {"x": x.slice, "result": result}, push, groups)
        return result

    def gelu_mul(self, p: Program, gate: DeviceArray, up: DeviceArray) -> Slice:
        rows, columns = gate.shape
        return self._gelu_mul(p, gate.slice, up.slice, rows, columns, columns)

    def _gelu_mul(self, p: Program, gate: Slice, up: Slice, rows: int, columns: int, stride: int) -> Slice:
        result = self.take(rows, columns)
        push = {"columns": columns, "stride": stride, "count": rows * columns}
        operands = {"gate": gate, "up": up, "result": result}
        p.dispatch(self.runtime.pipeline("gelu_mul"), operands, push, self._shared(rows * columns))
        return result

    def head_norm_rope(
        self, p: Program, x: DeviceArray, heads: int, weight: Slice | None, rope: Slice | None, eps: float
    ) -> Slice:
        rows, size = x.shape[0], x.shape[1] // heads
        operands, push = {"x": x.slice, "result": self.take(*x.shape)}, {"heads": heads, "size": size, "eps": eps}
        shader = "head_norm" if rope is None else "head_norm_rope"
        if rope is not None:
            operands["rope"], push["rows"] = rope, rows
        if weight is None:
            shader += "_no_weight"
        else:
            operands["weight"] = weight
        p.dispatch(self.runtime.pipeline(shader), operands, push, (heads, rows))
        return operands["result"]

    def _shared(self, count: int) -> tuple[int]:
        return (min(max(ceil(count, _ELEMENTS), 1), 4096),)

    # Products

    def quantize_rows(self, p: Program, x: Slice, shape: tuple[int, ...]) -> Slice:
        blocks = shape[0] * shape[1] // BLOCK
        result = self.passes.scratch.take(blocks * _RECORD_BYTES)
        groups = (ceil(blocks, 64),)
        p.dispatch(self.runtime.pipeline("quantize_rows"), {"x": x, "result": result}, {"blocks": blocks}, groups)
        return result

    def linear(
        self, p: Program, x: DeviceArray, weights: tuple[DeviceWeight, ...], quantized: bool
    ) -> tuple[Slice, ...]:
        rows = x.shape[0]
        results = tuple(self.take(rows, weight.rows) for weight in weights)
        with self.passes.temporaries():
            integer = [quantized and weight.format in QUANTIZED for weight in weights]
            codes = self.quantize_rows(p, x.slice, x.shape) if any(integer) else x.slice
            for weight, result, as_integer in zip(weights, results, integer, strict=True):
                inputs = codes if as_integer else x.slice
                for part in weight.parts:
                    first, count = part.first, part.count
                    self.multiply(
                        p, inputs, rows, weight, part.slice, count, first, weight.rows, result, as_integer, None
                    )
        return results

    def multiply(
        self,
        p: Program,
        x: Slice,
        rows: int,
        weight: DeviceWeight,
        part: Slice,
        count: int,
        first: int,
        stride: int,
        result: Slice,
        integer: bool,
        limit: Buffer | None,
    ) -> None:
        """Columns first..first+count of `result` [rows, stride] from `part`, which holds as many rows of `weight`."""
        shader = f"linear_{weight.format}" + ("_int" if integer else "") + self.variant
        operands = {"x": x, "weight": part, "result": result, "limit": (limit or self._no_limit).slice(0, 4)}
        push = {"columns": weight.columns, "first": first, "count": count, "stride": stride, "rows": rows}
        groups = (ceil(rows, self.tile_rows), self._column_groups(count))
        p.dispatch(self._product(shader), operands, push, groups)

    def _product(self, shader: str) -> Any:
        tiles = {"WORKGROUP_X": self.workgroup, "TILE_ROWS": self.tile_rows, "TILE_COLUMNS": self.tile_columns}
        return self.runtime.pipeline(shader, tiles)

    def _column_groups(self, count: int) -> int:
        return ceil(count, self.workgroup * self.tile_columns)

    # Attention

    def store_rows(self, p: Program, x: DeviceArray, cache: DeviceArray) -> np.ndarray:
        heads, capacity, size = cache.shape
        slot, where = self.passes.parameter(np.uint32, (1,))
        push = {"rows": x.shape[0], "heads": heads, "size": size, "capacity": capacity}
        operands = {"x": x.slice, "slot": slot, "cache": cache.slice}
        shader = f"store_rows_{_half(cache)}"
        p.dispatch(self.runtime.pipeline(shader), operands, push, self._shared(int(np.prod(x.shape))))
        return where

    def copy_slots(
        self,
        p: Program,
        source: Slice,
        destination: Slice,
        heads: int,
        words: int,
        capacities: tuple[int, int],
        first: int,
        count: int,
    ) -> None:
        push = {"heads": heads, "words": words, "from": first, "count": count}
        push |= {"source_capacity": capacities[0], "destination_capacity": capacities[1]}
        operands = {"source": source, "destination": destination}
        p.dispatch(self.runtime.pipeline("copy_slots"), operands, push, self._shared(heads * words * count))

    def attention(
        self, p: Program, q: DeviceArray, heads: int, k: DeviceArray, v: DeviceArray
    ) -> tuple[Slice, np.ndarray]:
        rows, (kv_heads, capacity, size) = q.shape[0], k.shape
        result = self.take(*q.shape)
        ranges, where = self.passes.parameter(np.int32, (2, rows))
        workgroup = 64 if size > 128 * (self.workgroup // 32) else 32
        self._check_loops(capacity, size, workgroup)
        constants = {"WORKGROUP_X": workgroup, "TILE_ROWS": 8, "QUADS": ceil(size, 4 * workgroup)}
        pipeline = self.runtime.pipeline(f"attention_{_half(k)}{self.variant}", constants)
        operands = {"q": q.slice, "k": k.slice, "v": v.slice, "ranges": ranges, "result": result}
        push = {"rows": rows, "heads": heads, "kv_heads": kv_heads, "capacity": capacity, "size": size}
        p.dispatch(pipeline, operands, push, (ceil(rows, 8), heads))
        return result, where

    def _check_loops(self, capacity: int, size: int, workgroup: int) -> None:
        """lavapipe ends loops without a word: attention.comp's, for so many keys, must stay below its bound."""
        iterations = ceil(capacity, 4 * workgroup) * (size // 4 + 2 * workgroup)
        if self.runtime.device.type == "cpu" and iterations > _SOFTWARE_LOOPS:
            raise GpuError(
                f"{self.runtime.device.title} is a software device, which cannot attend to {capacity} positions at head"
                f" size {size}; shorten the prompt or use backend='cpu'"
            )

    # Experts

    def router(
        self,
        p: Program,
        h: DeviceArray,
        norm: Slice,
        proj: DeviceWeight,
        per_expert_scale: Slice,
        top_k: int,
        eps: float,
    ) -> tuple[Slice, Slice]:
        """norm: the router's scale times H^-0.5."""
        rows, experts = h.shape[0], proj.rows
        ids, weights = self.take(rows, top_k), self.take(rows, top_k)
        with self.passes.temporaries():
            normed = self.rms_norm(p, h, norm, eps)
            (logits,) = self.linear(p, DeviceArray(None, normed, h.shape, h.dtype), (proj,), False)
            pipeline = self.runtime.pipeline("router", {"EXPERTS": experts, "TOP_K": top_k})
            operands = {"logits": logits, "scale": per_expert_scale, "ids": ids, "weights": weights}
            p.dispatch(pipeline, operands, {}, (rows,))
        return ids, weights

    def experts(
        self,
        p: Program,
        x: DeviceArray,
        ids: DeviceArray,
        weights: DeviceArray,
        gate_up: DeviceWeight,
        down: DeviceWeight,
        integer: bool,
    ) -> Slice:
        (rows, hidden), top_k, experts = x.shape, ids.shape[1], gate_up.shape[0]
        pairs, width = rows * top_k, down.columns
        most = min(pairs, pairs // self.tile_rows + experts)  # tiles
        result = self.take(rows, hidden)
        with self.passes.temporaries():
            order, places, work = self.take(pairs), self.take(pairs), self.take(1 + 3 * most)
            constants = {"EXPERTS": experts, "TILE_ROWS": self.tile_rows}
            operands = {"ids": ids.slice, "pairs": order, "places": places, "work": work}
            p.dispatch(self.runtime.pipeline("group_experts", constants), operands, {"pair_count": pairs}, (1,))

            codes = self.quantize_rows(p, x.slice, x.shape) if integer else x.slice
            both = self._multiply_experts(p, codes, gate_up, work, order, top_k, integer)
            up = Slice(both.buffer, both.offset + 4 * width, both.nbytes - 4 * width)
            active = self._gelu_mul(p, both, up, pairs, width, 2 * width)
            codes = self.quantize_rows(p, active, (pairs, width)) if integer else active
            y = self._multiply_experts(p, codes, down, work, order, 0, integer)

            operands = {"y": y, "places": places, "weights": weights.slice, "result": result}
            push = {"columns": hidden, "top_k": top_k}
            p.dispatch(self.runtime.pipeline("combine_experts"), operands, push, (ceil(hidden, 64), rows))
        return result

    def _multiply_experts(
        self, p: Program, x: Slice, weight: DeviceWeight, work: Slice, order: Slice, top_k: int, integer: bool
    ) -> Slice:
        """Rows by expert, [pairs, weight.rows]; top_k: row r takes row order[r] / top_k of x; 0: its own."""
        pairs, most = order.nbytes // 4, (work.nbytes // 4 - 1) // 3
        result = self.take(pairs, weight.rows)
        shader = f"experts_linear_{weight.format}" + ("_int" if integer else "") + self.variant
        for part in weight.parts:
            operands = {"x": x, "weight": part.slice, "result": result, "work": work, "pairs": order}
            push = {"columns": weight.columns, "first": 0, "count": weight.rows, "stride": weight.rows}
            push |= {"first_expert": part.first, "experts": part.count, "top_k": top_k}
            p.dispatch(self._product(shader), operands, push, (most, self._column_groups(weight.rows)))
        return result


def _half(cache: DeviceArray) -> str:
    return "f16" if cache.dtype == np.float16 else "f32"
