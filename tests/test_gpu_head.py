"""What is behind the last layer, on the GPU, against float64 arithmetic on full logits and against sampler.py."""

import numpy as np
import pytest
from distributions import check_sampled, entropy, softmax

from ddllm_vk import quants
from ddllm_vk.backends import vulkan_head
from ddllm_vk.backends.vulkan_head import VulkanHead
from ddllm_vk.cpu.kernels import ThreadPool, head_statistics
from ddllm_vk.cpu.kernels import pack as pack_cpu
from ddllm_vk.errors import GpuError
from ddllm_vk.gpu.program import Program
from ddllm_vk.gpu.weights import DeviceWeight, Part, pack

F32 = np.float32
SOFTCAP, TEMPERATURE = 30.0, 0.7
TILE = 256


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=F32)


def make_table(runtime, fmt: str, values: np.ndarray, part_rows: int | None = None) -> tuple[DeviceWeight, np.ndarray]:
    """The table on the device, in parts of `part_rows` tokens, and its values in float64."""
    vocab, columns = values.shape
    raw = quants.quantize(fmt, values)
    parts = []
    for first in range(0, vocab, part_rows or vocab):
        count = min(part_rows or vocab, vocab - first)
        data = pack(fmt, raw[first : first + count])
        weight = runtime.allocate(data.nbytes + 256).slice(256, data.nbytes)
        runtime.upload(weight, data)
        parts.append(Part(weight, first, count))
    return DeviceWeight(fmt, (vocab, columns), tuple(parts)), quants.dequantize(fmt, raw).astype(np.float64)


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


class LinearProducts:
    """A Product of the linear shaders."""

    def __init__(self, runtime, shader: str, rows: int, columns: int):
        self.pipeline, self.rows, self.columns = runtime.pipeline(shader), rows, columns
        self.everything = runtime.allocate(4)
        runtime.upload(self.everything, np.array([rows], np.int32))

    def __call__(self, program, x, weight, count, result, limit) -> None:
        operands = {"x": x, "weight": weight, "result": result}
        operands["limit"] = limit.slice(0, 4) if limit else self.everything
        push = {"columns": self.columns, "first": 0, "count": count, "stride": count, "rows": self.rows}
        width = self.pipeline.workgroup[0] * self.pipeline.constants["TILE_COLUMNS"]
        groups = (-(-self.rows // self.pipeline.constants["TILE_ROWS"]), -(-count // width))
        program.dispatch(self.pipeline, operands, push, groups)


def run_head(runtime, table, x, product, uniforms, scale, *, forbidden=(), row=-1, integer=False, **options):
    """One whole step: the head, its record, and the self-conditioning embedding. product: float products, or what makes
    a Product."""
    rows = len(x)
    head = VulkanHead(runtime, table, rows, **options)
    head.set_head(SOFTCAP, TEMPERATURE, row, forbidden)
    head.set_sampler(0.1, 1, 0.005, True)
    head.set_noise(uniforms, np.arange(rows, dtype=np.int32))
    inputs, gathered = (runtime.allocate(x.nbytes).slice() for _ in range(2))
    result = runtime.allocate(4 * rows * table.columns)
    runtime.upload(inputs, x)
    if isinstance(product, np.ndarray):
        product = GivenProducts(runtime, product, head)
    program = Program()
    head.record_statistics(program, inputs, product)
    head.record_selection(program, vulkan_head.ALLOWED_INT8 if integer else vulkan_head.ALLOWED_F32)
    head.record_sampling(program, inputs, integer)
    head.record_decisions(program)
    head.record_soft(program, inputs, x.nbytes // 4 // rows, gathered, product, scale, result.slice())
    runtime.record(program).run()
    return head, head.read(), runtime.download(result, F32).reshape(rows, table.columns)


#: rows, tokens, columns, format, tokens of a part of the table, workgroup, candidates
SIZES = [
    (5, 512, 64, "q80", 512, 64, 1024),
    (19, 4096, 96, "q40", 1536, 64, 1024),
    (3, 1003, 32, "f32", 400, 24, 32),
    (4, 70, 37, "bf16", 70, 64, 16),
    (1, 16, 32, "f16", 16, 7, 1024),
    (257, 700, 64, "q80", 304, 64, 100),
]


@pytest.mark.parametrize("gain", [0.05, 0.5, 4.0])
@pytest.mark.parametrize(("rows", "vocab", "hidden", "fmt", "part", "workgroup", "capacity"), SIZES)
def test_a_step_behind_the_last_layer(runtime, rows, vocab, hidden, fmt, part, workgroup, capacity, gain):
    table, values = make_table(runtime, fmt, random(1, vocab, hidden), part)
    x = F32(gain) * random(2, rows, hidden)
    products = x @ values.T
    uniforms = np.random.default_rng(3).random(rows)
    forbidden, row = [3, 5, vocab - 1], rows // 2
    head, step, soft = run_head(
        runtime, table, x, products, uniforms, 8.0, forbidden=forbidden, row=row, guard=False,
        capacity=capacity, workgroup=workgroup, chunk_bytes=4 * rows * 600,
    )  # fmt: skip
    p = probabilities(products, row, forbidden)
    check_step(step, p, uniforms)
    check_soft(runtime, head, step, soft / 8, p, values, vulkan_head.ALLOWED_F32)


def check_soft(runtime, head, step, soft, p, values, allowed: float) -> np.ndarray:
    """bool [rows]: which rows' embeddings are sparse. What they leave out is small, and their error no larger."""
    kept, sparse = kept_tokens(head, runtime)
    assert step.dense_rows == (~sparse).sum()
    rest = np.linalg.norm(np.where(kept, 0, p), axis=1)
    assert np.all(rest[sparse] <= 1.01 * allowed + 1e-6)
    # the mean row stands for what was left out: an error of its 2-norm in the directions of the rows around it
    spread = np.linalg.norm(values - values.mean(axis=0), ord=2)
    tolerance = 2e-5 * np.abs(values).max() + np.where(sparse, rest, 0) * spread
    assert np.all(np.abs(soft - p @ values) <= tolerance[:, None])
    return sparse


def probabilities(products: np.ndarray, row: int = -1, forbidden=()) -> np.ndarray:
    z = SOFTCAP * np.tanh(products / SOFTCAP) / TEMPERATURE
    if row >= 0:
        z[row, forbidden] = -np.inf
    return softmax(z)


def check_step(step, p: np.ndarray, uniforms: np.ndarray) -> None:
    assert np.array_equal(step.argmax, p.argmax(axis=-1))
    check_sampled(step.sampled, p, uniforms)
    assert np.abs(step.entropy - entropy(p)).max() < 2e-5
    assert np.array_equal(step.entropy * 2.0**32 % 1, np.zeros(len(p)))
    assert not step.broken


def kept_tokens(head: VulkanHead, runtime) -> tuple[np.ndarray, np.ndarray]:
    """bool [rows, vocab]: the tokens of the sparse embeddings; bool [rows]: which are sparse."""
    soft = runtime.download(head.soft, np.uint32).reshape(head.rows, 3)
    ids = runtime.download(head.candidates, np.uint32).reshape(head.rows, head.capacity, 2)[..., 0]
    kept = np.zeros((head.rows, head.table.rows), bool)
    for row, count in enumerate(soft[:, 1]):
        assert np.all(np.diff(ids[row, :count].astype(np.int64)) > 0)  # in id order, once each
        kept[row, ids[row, :count]] = True
    return kept, soft[:, 2] == vulkan_head.NO_ROW


def test_a_large_vocabulary_and_a_guarded_row(runtime):
    """Rows from certain to flat; the ids forbidden at row 0 count in its sampling only."""
    vocab, hidden, rows = 20_000, 64, 6
    table, values = make_table(runtime, "q80", random(1, vocab, hidden), 8000)
    gains = np.array([[1], [8], [2], [0.5], [0.1], [0]], F32)
    x = gains * values[[5, 900, 70, 71, 72, 73]].astype(F32) / 8
    products = x @ values.T
    uniforms = np.random.default_rng(3).random(rows)
    p = probabilities(products)
    likely = np.argsort(-p[0])[:40].tolist()
    head, step, soft = run_head(runtime, table, x, products, uniforms, 1.0, forbidden=likely, row=rows)
    guarded = p.copy()
    guarded[0] = probabilities(products, 0, likely)[0]
    check_step(step, guarded, uniforms)
    assert np.array_equal(head.read().canvas, runtime.download(head.canvas, np.int32))
    sparse = check_soft(runtime, head, step, soft, p, values, vulkan_head.ALLOWED_F32)
    assert sparse[1]
    assert not sparse[3:].any()
    error = np.linalg.norm(soft - p @ values, axis=1) / np.linalg.norm(values, axis=1).mean()
    assert error.max() < 1e-4


def test_a_long_tail_of_improbable_tokens_is_no_reason_for_a_dense_product(runtime):
    # one token of probability near 1 and thousands that share the rest, as at a late denoising step
    vocab, hidden = 8192, 256
    table, values = make_table(runtime, "f32", random(1, vocab, hidden) / 16)
    x = 16 * values[[5, 900]].astype(F32)
    _, step, soft = run_head(runtime, table, x, x @ values.T, np.full(2, 0.5), 1.0, capacity=512)
    p = probabilities(x @ values.T)
    assert step.dense_rows == 0
    assert np.linalg.norm(soft - p @ values, axis=1).max() < 1e-4 * np.linalg.norm(values, axis=1).mean()


@pytest.mark.parametrize("fmt", ["q40", "q80", "f32", "bf16"])
@pytest.mark.parametrize("integer", [False, True])
def test_with_the_linear_shaders(runtime, fmt, integer):
    if integer and fmt not in quants.QUANTIZED:
        return
    rows, vocab, hidden = 11, 1300, 96
    table, values = make_table(runtime, fmt, random(1, vocab, hidden), 608)
    x = np.geomspace(0.1, 1.5, rows, dtype=F32)[:, None] * random(2, rows, hidden)
    inputs, exact = quantised_rows(x) if integer else (x, x.astype(np.float64))
    uniforms = np.random.default_rng(3).random(rows)
    product = LinearProducts(runtime, f"linear_{fmt}" + "_int" * integer, rows, hidden)
    head, step, soft = run_head(
        runtime, table, inputs, product, uniforms, 2.0, integer=integer, chunk_bytes=4 * rows * 512, guard=True
    )
    p = probabilities(exact @ values.T)
    check_step(step, p, uniforms)
    allowed = vulkan_head.ALLOWED_INT8 if integer else vulkan_head.ALLOWED_F32
    sparse = check_soft(runtime, head, step, soft / 2, p, values, allowed)
    assert 0 < sparse.sum() < rows


def test_the_same_tokens_as_on_the_cpu(runtime):
    """With the same products: every choice, and entropies to float32."""
    vocab, hidden, rows = 3000, 64, 64
    table, values = make_table(runtime, "q80", random(1, vocab, hidden), 1024)
    x = np.geomspace(0.1, 3, rows, dtype=F32)[:, None] * random(2, rows, hidden)
    uniforms = np.random.default_rng(4).random(rows)
    pool = ThreadPool(2)
    cpu = head_statistics(
        pool, x, pack_cpu("q80", quants.quantize("q80", random(1, vocab, hidden)), (vocab, hidden), pool),
        SOFTCAP, TEMPERATURE, uniforms, quantized=False,
    )  # fmt: skip
    _, step, _ = run_head(runtime, table, x, x @ values.T, uniforms, 1.0)
    assert np.array_equal(step.argmax, cpu.argmax)
    assert np.array_equal(step.sampled, cpu.sampled)
    assert np.abs(step.entropy - cpu.entropy).max() < 5e-6


def pick(runtime, products: np.ndarray, uniforms: np.ndarray) -> tuple[VulkanHead, np.ndarray]:
    """Tokens sampled from given logits, the products of each row's tile given too."""
    rows, vocab = products.shape
    table, _ = make_table(runtime, "f32", np.zeros((vocab, 4), F32))
    head = VulkanHead(runtime, table, rows, guard=False)
    head.set_head(0.0, 1.0)
    head.set_noise(uniforms, np.zeros(rows, np.int32))
    program = Program()
    nothing = runtime.allocate(4 * rows).slice()
    head.record_statistics(program, nothing, GivenProducts(runtime, products, head), soft=False)
    runtime.record(program).run()
    tiles = runtime.download(head.row_stats, np.uint32).reshape(rows, 8)[:, 5]
    wide = np.full((rows, -(-vocab // TILE) * TILE), -np.inf, F32)
    wide[:, :vocab] = products
    runtime.upload(head.tile_products, wide.reshape(rows, -1, TILE)[np.arange(rows), tiles])
    operands = {"products": head.tile_products, "settings": head.settings, "rows": head.row_stats}
    operands |= {"tile_begin": head.tile_begin, "sampled": head.sampled}
    program = Program()
    program.dispatch(runtime.pipeline("sample_in_tile"), operands, {"row_count": rows}, (-(-rows // 32),))
    runtime.record(program).run()
    return head, runtime.download(head.sampled, np.int32)


def test_every_uniform_picks_its_token(runtime):
    """u at, just below and just above every step of the cumulative distribution, and at both ends."""
    vocab = TILE + 40
    count = (vocab + 1) // 2
    logits = np.zeros((3 * count + 2, vocab), F32)
    logits[:, 1::2] = -np.inf  # only even tokens, all equally likely
    picks = np.tile(np.arange(count), 3)
    offsets = np.repeat([1e-6, 0.5, 1 - 1e-6], count)
    uniforms = np.append((picks + offsets) / count, [0.0, np.nextafter(1.0, 0.0)])
    _, sampled = pick(runtime, logits, uniforms)
    np.testing.assert_array_equal(sampled, [*(2 * picks), 0, 2 * (count - 1)])


def test_a_uniform_has_more_bits_than_a_float32(runtime):
    # the last of 1000 tokens begins at 1 - 1e-9: one float32 above the largest below 1, and 1 itself, cannot say it
    logits = np.full((2, 1000), -np.inf, F32)
    logits[:, 0], logits[:, 999] = 0, np.log(1e-9)
    _, sampled = pick(runtime, logits, np.array([1 - 2e-9, 1 - 0.5e-9]))
    assert sampled.tolist() == [0, 999]


def test_ties_of_the_maximum_go_to_the_lowest_id(runtime):
    products = np.zeros((3, 3 * TILE + 7), F32)
    products[0, [700, 300, 301]] = 5
    products[2, -1] = 1e-3
    head, _ = pick(runtime, products, np.zeros(3))
    argmax = runtime.download(head.row_stats, np.int32).reshape(3, 8)[:, 3]
    assert argmax.tolist() == [300, 0, 3 * TILE + 6]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_do_not_look_certain(runtime, value):
    products = random(16, 4, 2 * TILE)
    products[1, 400] = value
    products[2] = np.nan
    products[3] = -np.inf
    head, _ = pick(runtime, products, np.full(4, 0.5))
    entropies = runtime.download(head.row_stats, F32).reshape(4, 8)[:, 4]
    assert np.isfinite(entropies).tolist() == [True, False, False, False]


@pytest.mark.parametrize("fmt", ["q40", "q80", "f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("rows", "vocab", "hidden", "workgroup"), [(1, 16, 32, 48), (5, 333, 64, 20), (41, 1100, 96, 48)]
)
def test_soft_embedding_of_logits_and_the_mean_row(runtime, fmt, rows, vocab, hidden, workgroup):
    hidden += 5 if fmt in ("f32", "bf16") else 0
    table, values = make_table(runtime, fmt, 1 + random(7, vocab, hidden), 304)
    head = VulkanHead(runtime, table, rows, chunk_bytes=4 * rows * 600, workgroup=workgroup)
    assert np.abs(runtime.download(head.mean, F32) - values.mean(axis=0)).max() < 1e-5
    z = 5 * random(8, rows, vocab)
    result = runtime.allocate(4 * rows * hidden)
    head.soft_embedding_of_logits(z, 2.0, result.slice())
    soft = runtime.download(result, F32).reshape(rows, hidden)
    assert np.abs(soft - 2 * softmax(z.astype(np.float64)) @ values).max() < 3e-5


@pytest.mark.parametrize("fmt", ["q40", "q80", "f32", "f16", "bf16"])
@pytest.mark.parametrize("integer", [False, True])
def test_tile_products(runtime, fmt, integer):
    if integer and fmt not in quants.QUANTIZED:
        return
    rows, vocab, hidden = 9, 1003, 96 if fmt in quants.QUANTIZED else 91
    table, values = make_table(runtime, fmt, random(1, vocab, hidden), 432)
    head = VulkanHead(runtime, table, rows)
    x = random(2, rows, hidden)
    tiles = np.random.default_rng(3).integers(0, head.tile_count, rows + 1)
    tiles[:2] = 0, head.tile_count - 1
    stats = np.zeros((rows + 1, 8), np.uint32)
    stats[:, 5] = tiles
    runtime.upload(head.row_stats, stats)
    words, dequantised = quantised_rows(x) if integer else (x, x.astype(np.float64))
    inputs = runtime.allocate(words.nbytes + 4)
    runtime.upload(inputs.slice(4, words.nbytes), words)
    program = Program()
    head.record_sampling(program, inputs.slice(4, words.nbytes), integer)
    runtime.record(program).run()
    found = runtime.download(head.tile_products, F32).reshape(rows + 1, TILE)
    begins = runtime.download(head.tile_begin, np.uint32)
    for row, tile in enumerate(tiles):
        tokens = slice(begins[tile], begins[tile + 1])
        expected = dequantised[row % rows] @ values[tokens].T  # beyond the rows: row 0 again
        assert np.abs(found[row, : len(expected)] - expected).max() < 2e-5


def quantised_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What quantize_rows.comp makes of x, uint32 [rows, columns/32, 12], and the values that stands for."""
    blocks = x.reshape(len(x), -1, 32)
    scale = np.abs(blocks).max(axis=-1) / F32(127)
    y = blocks / scale[..., None]
    codes = np.trunc(y + np.copysign(F32(0.5), y)).astype(np.int64)
    words = np.zeros((*scale.shape, 12), np.uint32)
    biased = (codes + 128).astype(np.uint8).reshape(*scale.shape, 8, 4)
    words[..., :8] = np.ascontiguousarray(biased[..., [2, 3, 0, 1]]).view(np.uint32)[..., 0]
    words[..., 8] = scale.view(np.uint32)
    words[..., 9] = biased.sum(axis=(-1, -2))
    return words, (codes * scale[..., None].astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("count", [1, 100, 257])
def test_gather_rows(run_shader, count):
    source = random(1, 300, 33)
    rows = np.random.default_rng(2).permutation(300)[:count]
    dense = np.zeros(301, np.int32)
    dense[0], dense[1 : 1 + count] = count, rows
    operands = {"source": source, "dense": dense, "result": np.full_like(source, 7)}
    found = run_shader("gather_rows", operands, {"words": 33}, (300,))["result"]
    assert np.array_equal(found[:count], source[rows])
    assert np.all(found[count:] == 7)


def test_softcap(run_shader):
    x = np.concatenate([random(1, 1000) * F32(s) for s in (0.01, 1, 30, 1000)])
    found = run_shader("softcap", {"x": x}, {"count": x.size, "softcap": SOFTCAP}, (3,))["x"]
    np.testing.assert_allclose(found, SOFTCAP * np.tanh(x.astype(np.float64) / SOFTCAP), rtol=4e-7, atol=0)


def test_sizes_the_shaders_cannot_take_are_refused(runtime):
    table, _ = make_table(runtime, "f32", np.zeros((16, 4), F32))
    with pytest.raises(GpuError, match="up to 1024"):
        VulkanHead(runtime, table, 1025)
    head = VulkanHead(runtime, table, 1)
    with pytest.raises(GpuError, match="forbidden"):
        head.set_head(30.0, 1.0, 0, range(49))
    before = runtime.allocated
    head.free()
    assert before - runtime.allocated == head.nbytes
