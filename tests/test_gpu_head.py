"""What is behind the last layer, on the GPU, against float64 arithmetic on full logits and against sampler.py."""

import numpy as np
import pytest

from ddllm_vk import quants, sampler
from ddllm_vk.backends import vulkan_head
from ddllm_vk.backends.vulkan_head import Table, TablePart, VulkanHead
from ddllm_vk.gpu.program import Program

F32 = np.float32
SOFTCAP, TEMPERATURE = 30.0, 0.7
TILE = 256


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=F32)


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def entropy_of(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)


def packed(fmt: str, raw: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Bytes of a matrix in the order of shaders/weights.glsl, from those of a file."""
    tiles = -(-rows // 16)
    width = {"f32": 4, "f16": 8, "bf16": 8, "q40": 32, "q80": 32}[fmt]
    if fmt in quants.QUANTIZED:
        blocks = np.zeros((tiles * 16, columns // 32, quants.BLOCK_BYTES[fmt]), np.uint8)
        blocks[:rows] = raw.reshape(rows, columns // 32, -1)
        blocks = blocks.reshape(tiles, 16, columns // 32, -1).transpose(0, 2, 1, 3)
        parts = [blocks[..., :2], *(blocks[..., at : at + 16] for at in range(2, blocks.shape[-1], 16))]
        return np.concatenate([np.ascontiguousarray(p).reshape(tiles, columns // 32, -1) for p in parts], axis=-1)
    steps = -(-columns // width)
    values = np.zeros((tiles * 16, steps * width), raw.dtype)
    values[:rows, :columns] = raw
    return np.ascontiguousarray(values.reshape(tiles, 16, steps, width).transpose(0, 2, 1, 3))


def make_table(runtime, fmt: str, values: np.ndarray, part_rows: int | None = None) -> tuple[Table, np.ndarray]:
    """The table on the device, in parts of `part_rows` tokens, and its values in float64."""
    vocab, columns = values.shape
    raw = quants.quantize(fmt, values)
    parts = []
    for first in range(0, vocab, part_rows or vocab):
        count = min(part_rows or vocab, vocab - first)
        data = packed(fmt, raw[first : first + count], count, columns)
        weight = runtime.allocate(data.nbytes + 256).slice(256, data.nbytes)
        runtime.upload(weight, data)
        parts.append(TablePart(weight, first, count))
    return Table(fmt, vocab, columns, parts), quants.dequantize(fmt, raw).astype(np.float64)


class GivenProducts:
    """A Product that copies what the host computed: x is not looked at, but for which rows it holds."""

    def __init__(self, runtime, products: np.ndarray, head: VulkanHead):
        self.runtime, self.rows = runtime, len(products)
        self.chunks = []
        for chunk in head.chunks:
            part = np.ascontiguousarray(products[:, chunk.first : chunk.first + chunk.count], F32)
            self.chunks.append(runtime.allocate(part.nbytes))
            runtime.upload(self.chunks[-1], part)
        self.everything = runtime.allocate(4 * (1 + self.rows))
        runtime.upload(self.everything, np.array([self.rows, *range(self.rows)], np.int32))
        self.next = 0

    def __call__(self, program, x, weight, count, result, limit) -> None:
        source = self.chunks[self.next % len(self.chunks)]
        self.next += 1
        operands = {"source": source, "dense": limit or self.everything, "result": result}
        program.dispatch(self.runtime.pipeline("gather_rows"), operands, {"words": count}, (self.rows,))


def run_head(runtime, table, x, products, uniforms, scale, *, forbidden=(), row=-1, dense=False, **options):
    """One whole step: the head, its record, and the self-conditioning embedding."""
    rows, columns = x.shape
    head = VulkanHead(runtime, table, rows, **options)
    head.set_head(SOFTCAP, TEMPERATURE, row, forbidden)
    head.set_sampler(0.1, 1, 0.005, True)
    head.set_noise(uniforms, np.arange(rows, dtype=np.int32))
    rows_x, gathered, result = (runtime.allocate(x.nbytes) for _ in range(3))
    runtime.upload(rows_x, x)
    product = GivenProducts(runtime, products, head)
    program = Program()
    head.record_statistics(program, rows_x.slice(), product)
    head.record_selection(program, 0.0 if dense else vulkan_head.ALLOWED_F32)
    head.record_sampling(program, rows_x.slice())
    head.record_decisions(program)
    head.record_soft(program, rows_x.slice(), columns, gathered.slice(), product, scale, result.slice())
    runtime.record(program).run()
    return head, head.read(), runtime.download(result, F32).reshape(rows, columns)


def check_sampled(sampled: np.ndarray, p: np.ndarray, uniforms: np.ndarray) -> None:
    """Inverse CDF over the tokens in id order, up to float32 rounding of the logits at the edges."""
    rows = np.arange(len(p))
    end = np.cumsum(p, axis=-1)[rows, sampled]
    assert np.all(p[rows, sampled] > 0)
    assert np.all(uniforms < end + 2e-6)
    assert np.all(uniforms >= end - p[rows, sampled] - 2e-6)
    assert np.mean(sampled == (np.cumsum(p, axis=-1) <= uniforms[:, None]).sum(axis=-1)) > 0.8


SIZES = [(5, 512, 64), (19, 4096, 96), (3, 1003, 32), (4, 70, 32), (1, 16, 32), (257, 700, 64)]


@pytest.mark.parametrize("workgroup", [24, 64])
@pytest.mark.parametrize("gain", [0.05, 0.5, 4.0])
@pytest.mark.parametrize(("rows", "vocab", "hidden"), SIZES)
def test_a_step_behind_the_last_layer(runtime, rows, vocab, hidden, gain, workgroup):
    fmt = {64: "q80", 96: "q40", 32: "f32"}[hidden]
    capacity = 32 if workgroup == 24 else 1024
    table, values = make_table(runtime, fmt, random(1, vocab, hidden), 1536)
    x = F32(gain) * random(2, rows, hidden)
    products = x @ values.T
    uniforms = np.random.default_rng(3).random(rows)
    forbidden, row = [3, 5, vocab - 1], rows // 2
    head, step, soft = run_head(
        runtime, table, x, products, uniforms, 8.0, forbidden=forbidden, row=row, guard=False,
        capacity=capacity, workgroup=workgroup, chunk_bytes=4 * rows * 600,
    )  # fmt: skip
    z = SOFTCAP * np.tanh(products / SOFTCAP) / TEMPERATURE
    z[row, forbidden] = -np.inf
    p = softmax(z)
    assert np.array_equal(step.argmax, p.argmax(axis=-1))
    check_sampled(step.sampled, p, uniforms)
    assert np.abs(step.entropy - entropy_of(p)).max() < 2e-5
    assert np.array_equal(step.entropy * 2.0**32 % 1, np.zeros(rows))
    assert not step.broken
    # the mean row stands for what was left out: an error of its 2-norm in the directions of the rows around it
    kept, decided = kept_tokens(head, runtime)
    assert step.dense_rows == (~decided).sum()
    rest = np.where(kept, 0, p)
    assert np.all(np.linalg.norm(rest[decided], axis=1) <= 1.01 * vulkan_head.ALLOWED_F32 + 1e-6)
    spread = np.linalg.norm(values - values.mean(axis=0), ord=2)
    tolerance = 2e-5 * np.abs(values).max() + np.where(decided, np.linalg.norm(rest, axis=1), 0) * spread
    assert np.all(np.abs(soft - 8 * p @ values) <= 8 * tolerance[:, None])


def kept_tokens(head: VulkanHead, runtime) -> tuple[np.ndarray, np.ndarray]:
    """bool [rows, vocab]: the tokens of the sparse embeddings; bool [rows]: which are sparse."""
    soft = runtime.download(head.soft, np.uint32).reshape(head.rows, 3)
    ids = runtime.download(head.candidates, np.uint32).reshape(head.rows, head.capacity, 2)[..., 0]
    kept = np.zeros((head.rows, head.table.vocab), bool)
    for row, count in enumerate(soft[:, 1]):
        assert np.all(np.diff(ids[row, :count].astype(np.int64)) > 0)  # in id order, once each
        kept[row, ids[row, :count]] = True
    return kept, soft[:, 2] == vulkan_head.NO_ROW
