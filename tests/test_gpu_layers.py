"""The layer shaders against cpu/reference.py, on both runtimes, under synchronization validation (gpu_fixtures.py)."""

import functools

import numpy as np
import pytest

from ddllm_vk import quants
from ddllm_vk.cpu import reference
from ddllm_vk.gpu.weights import pack

F32 = np.float32
EPS = 1e-6
FORMATS = ["f32", "f16", "bf16", "q40", "q80"]
VARIANTS = ["", "_subgroup"]
EVERY_ROW = np.array([2**31 - 1], np.int32)


@pytest.fixture
def run_shader(run_shader):
    """Operands begin where vec4 may: at multiples of 16 bytes."""
    return functools.partial(run_shader, offset=304)


def rows(rng, shape, scale=1.0):
    return rng.standard_normal(shape, dtype=F32) * F32(scale)


def weight(rng, fmt, n, k):
    """Packed for the device, and dequantised."""
    raw = quants.quantize(fmt, rows(rng, (n, k)))
    return pack(fmt, raw), quants.dequantize(fmt, raw)


def ceil(a, b):
    return -(-a // b)


def quantized_records(x):
    """What quantize_rows.comp is to write: uint32 [rows, blocks, 12]."""
    blocks = x.reshape(len(x), -1, 32)
    raw = quants.quantize_q80(x)
    codes = raw[..., 2:].view(np.int8).astype(np.int32) + 128
    out = np.zeros((*blocks.shape[:2], 12), np.uint32)
    order = codes.astype(np.uint8).reshape(*blocks.shape[:2], 8, 4)[..., [2, 3, 0, 1]]
    out[..., :8] = np.ascontiguousarray(order).view(np.uint32)[..., 0]
    out[..., 8] = (np.abs(blocks).max(axis=-1) / F32(127)).view(np.uint32)
    out[..., 9] = codes.sum(axis=-1)
    return out


@pytest.mark.parametrize(("m", "k"), [(1, 32), (3, 96), (5, 2816), (67, 64)])
def test_quantize_rows(run_shader, m, k):
    rng = np.random.default_rng(k)
    x = rows(rng, (m, k), 3)
    x[0, :32] = 0
    expected = quantized_records(x)
    blocks = m * k // 32
    found = run_shader(
        "quantize_rows", {"x": x, "result": np.zeros_like(expected)}, {"blocks": blocks}, (ceil(blocks, 64),)
    )["result"]
    assert np.array_equal(found[..., 8], expected[..., 8])
    # a reciprocal that is rounded otherwise may move a value across the middle of two codes, seldom
    assert (found[..., :8] != expected[..., :8]).mean() < 1e-3
    codes = found[..., :8].copy().view(np.uint8)
    assert np.array_equal(found[..., 9], codes.astype(np.uint32).sum(axis=-1))


LINEAR_SIZES = [(1, 1, 32), (9, 17, 64), (7, 130, 96), (20, 48, 160)]


def run_linear(run_shader, shader, x, packed, m, n, k, first=3, limit=EVERY_ROW, **tiles):
    constants = {"WORKGROUP_X": 32, "TILE_ROWS": 8, "TILE_COLUMNS": 4} | tiles
    stride = n + 5
    groups = (ceil(m, constants["TILE_ROWS"]), ceil(n, constants["WORKGROUP_X"] * constants["TILE_COLUMNS"]))
    operands = {"x": x, "weight": packed, "result": np.full((m, stride), -1, F32), "limit": limit}
    push = {"columns": k, "first": first, "count": n, "stride": stride, "rows": m}
    found = run_shader(shader, operands, push, groups, constants)["result"]
    untouched = np.delete(found, np.s_[first : first + n], axis=1)
    assert (untouched == -1).all()
    return found[:, first : first + n]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), LINEAR_SIZES)
def test_linear(run_shader, fmt, variant, m, n, k):
    rng = np.random.default_rng(n)
    k = k if fmt in quants.QUANTIZED else k - 3
    x = rows(rng, (m, k))
    packed, values = weight(rng, fmt, n, k)
    found = run_linear(run_shader, f"linear_{fmt}{variant}", x, packed, m, n, k)
    expected = reference.linear(x, values)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6 * np.abs(expected).max() * k**0.5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fmt", quants.QUANTIZED)
@pytest.mark.parametrize(("m", "n", "k"), LINEAR_SIZES)
def test_linear_int(run_shader, fmt, variant, m, n, k):
    rng = np.random.default_rng(n)
    x = rows(rng, (m, k))
    packed, values = weight(rng, fmt, n, k)
    found = run_linear(run_shader, f"linear_{fmt}_int{variant}", quantized_records(x), packed, m, n, k)
    expected = reference.linear(reference.quantize_dequantize_rows(x), values)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("fmt", quants.QUANTIZED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_integer_products_are_exact(run_shader, fmt, variant):
    """Codes and weights at their extremes, scales of one: every product is the integer itself."""
    rng = np.random.default_rng(0)
    m, n, k = 11, 37, 256
    codes = rng.choice(np.array([-127, -1, 0, 1, 127], np.int32), (m, k))
    codes[:2] = [[-127], [127]]
    codes[:, ::32] = 127  # so that the scale is one
    low, high = (-8, 7) if fmt == "q40" else (-128, 127)
    w = rng.integers(low, high + 1, (n, k))
    w[0], w[1], w[2] = low, high, 0
    raw = np.empty((n, k // 32, quants.BLOCK_BYTES[fmt]), np.uint8)
    raw[..., :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    blocks = w.reshape(n, -1, 32)
    if fmt == "q40":
        raw[..., 2:] = (blocks[..., :16] + 8) | (blocks[..., 16:] + 8) << 4
    else:
        raw[..., 2:] = blocks.astype(np.int8).view(np.uint8)
    x = quantized_records(codes.astype(F32))
    found = run_linear(run_shader, f"linear_{fmt}_int{variant}", x, pack(fmt, raw), m, n, k)
    assert np.array_equal(found, (codes @ w.T).astype(F32))


@pytest.mark.parametrize(("tile_rows", "tile_columns", "workgroup"), [(1, 1, 64), (4, 8, 16), (8, 2, 48), (16, 4, 32)])
def test_linear_takes_other_tiles(run_shader, tile_rows, tile_columns, workgroup):
    rng = np.random.default_rng(1)
    m, n, k = 19, 45, 64
    x = rows(rng, (m, k))
    packed, values = weight(rng, "q40", n, k)
    tiles = {"TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns, "WORKGROUP_X": workgroup}
    found = run_linear(run_shader, "linear_q40_int", quantized_records(x), packed, m, n, k, **tiles)
    expected = reference.linear(reference.quantize_dequantize_rows(x), values)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_linear_stops_at_the_limit(run_shader):
    rng = np.random.default_rng(1)
    m, n, k = 19, 20, 32
    x = rows(rng, (m, k))
    packed, values = weight(rng, "q40", n, k)
    found = run_linear(run_shader, "linear_q40_subgroup", x, packed, m, n, k, limit=np.array([10], np.int32))
    np.testing.assert_allclose(found[:10], reference.linear(x, values)[:10], rtol=0, atol=1e-4)
    assert (found[10:] == -1).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("vocabulary", "columns", "m"), [(1, 32, 1), (39, 96, 5), (50, 160, 33)])
def test_embedding_rows(run_shader, fmt, vocabulary, columns, m):
    rng = np.random.default_rng(vocabulary)
    columns = columns if fmt in quants.QUANTIZED else columns - 5
    packed, values = weight(rng, fmt, vocabulary, columns)
    ids = rng.integers(0, 3 * vocabulary, m, dtype=np.int32)
    first = vocabulary  # the table's middle third
    operands = {"weight": packed, "ids": ids, "result": np.full((m, columns), -1, F32)}
    push = {"columns": columns, "first": first, "count": vocabulary, "scale": 53.0}
    found = run_shader(f"embedding_rows_{fmt}", operands, push, (m,))["result"]
    inside = (ids >= first) & (ids < first + vocabulary)
    np.testing.assert_allclose(found[inside], values[ids[inside] - first] * F32(53), rtol=3e-7, atol=0)
    assert (found[~inside] == -1).all()


@pytest.mark.parametrize(("m", "columns", "groups"), [(1, 1, 1), (3, 65, 2), (7, 704, 5)])
def test_elementwise(run_shader, m, columns, groups):
    rng = np.random.default_rng(columns)
    both = rows(rng, (m, 2 * columns), 4)
    both[0, 0] = -60
    gate, up = both[:, :columns], both[:, columns:]
    result = np.zeros((m, columns), F32)
    operands = {"gate": both, "up": np.roll(both, -columns, axis=1), "result": result}
    push = {"columns": columns, "stride": 2 * columns, "count": m * columns}
    found = run_shader("gelu_mul", operands, push, (groups,))["result"]
    np.testing.assert_allclose(found, reference.gelu_mul(gate, up), rtol=4e-6, atol=4e-6)

    x, y = np.ascontiguousarray(gate), np.ascontiguousarray(up)
    found = run_shader("add", {"x": x, "y": y, "result": result}, {"count": x.size}, (groups,))["result"]
    assert np.array_equal(found, x + y)

    longer = np.zeros((m + 1, columns), F32)
    push = {"rows": m, "columns": columns, "row": m // 2}
    found = run_shader("append_row", {"x": x, "result": longer}, push, (groups,))["result"]
    assert np.array_equal(found, np.concatenate([x, x[m // 2 : m // 2 + 1]]))


@pytest.mark.parametrize("workgroup", [8, 32])
@pytest.mark.parametrize(("m", "heads", "size"), [(1, 1, 2), (3, 2, 20), (5, 3, 66), (2, 2, 256)])
def test_head_norm_rope(run_shader, m, heads, size, workgroup):
    rng = np.random.default_rng(size)
    x, w = rows(rng, (m, heads, size), 3), rows(rng, size)
    angles = rows(rng, (m, size // 2), 5)
    rope = np.stack([np.cos(angles), np.sin(angles)])
    operands = {"x": x, "result": np.zeros_like(x), "weight": w, "rope": rope}
    push = {"heads": heads, "size": size, "eps": EPS}
    for name, weighted, rotated in [
        ("head_norm_rope", True, True),
        ("head_norm_rope_no_weight", False, True),
        ("head_norm", True, False),
        ("head_norm_no_weight", False, False),
    ]:
        left_out = set() if weighted else {"weight"}
        left_out |= set() if rotated else {"rope"}
        some = {key: value for key, value in operands.items() if key not in left_out}
        more = {"rows": m} if rotated else {}
        found = run_shader(name, some, push | more, (heads, m), {"WORKGROUP_X": workgroup})["result"]
        expected = reference.head_norm_rope(x, w if weighted else None, EPS, *(rope if rotated else (None, None)))
        np.testing.assert_allclose(found, expected, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("fmt", ["f32", "f16"])
@pytest.mark.parametrize(
    ("m", "heads", "size", "capacity", "slot"), [(1, 1, 4, 1, 0), (5, 3, 12, 11, 4), (9, 2, 68, 30, 21)]
)
def test_store_rows(run_shader, fmt, m, heads, size, capacity, slot):
    rng = np.random.default_rng(size)
    x = rows(rng, (m, heads, size))
    dtype = F32 if fmt == "f32" else np.float16
    cache = rows(rng, (heads, capacity, size)).astype(dtype)
    expected = cache.copy()
    expected[:, slot : slot + m] = x.transpose(1, 0, 2)
    operands = {"x": x, "slot": np.array([slot], np.uint32), "cache": cache}
    push = {"rows": m, "heads": heads, "size": size, "capacity": capacity}
    found = run_shader(f"store_rows_{fmt}", operands, push, (2,))["cache"]
    assert np.abs(found.astype(F32) - expected.astype(F32)).max() <= (0 if fmt == "f32" else 2e-3)


def test_copy_slots(run_shader):
    rng = np.random.default_rng(0)
    source, destination = rng.integers(0, 99, (3, 11, 5), np.uint32), rng.integers(0, 99, (3, 7, 5), np.uint32)
    push = {"heads": 3, "words": 5, "source_capacity": 11, "destination_capacity": 7, "from": 4, "count": 6}
    found = run_shader("copy_slots", {"source": source, "destination": destination}, push, (2,))["destination"]
    expected = destination.copy()
    expected[:, :6] = source[:, 4:10]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fmt", ["f32", "f16"])
@pytest.mark.parametrize(
    ("m", "heads", "kv_heads", "size", "capacity", "workgroup", "quads"),
    [(1, 1, 1, 4, 1, 8, 1), (11, 4, 2, 20, 70, 8, 1), (17, 6, 1, 68, 150, 16, 2), (5, 2, 2, 256, 300, 32, 2)],
)
def test_attention(run_shader, fmt, variant, m, heads, kv_heads, size, capacity, workgroup, quads):
    rng = np.random.default_rng(size)
    q = rows(rng, (m, heads, size), size**-0.5 * 3)
    k, v = (rows(rng, (kv_heads, capacity, size)).astype(F32 if fmt == "f32" else np.float16) for _ in range(2))
    lo = rng.integers(0, capacity, m, dtype=np.int32)
    hi = np.array([rng.integers(a + 1, capacity + 1) for a in lo], np.int32)
    lo[0], hi[0] = 0, capacity
    operands = {"q": q, "k": k, "v": v, "ranges": np.stack([lo, hi]), "result": np.zeros_like(q)}
    push = {"rows": m, "heads": heads, "kv_heads": kv_heads, "capacity": capacity, "size": size}
    constants = {"WORKGROUP_X": workgroup, "TILE_ROWS": 8, "QUADS": quads}
    found = run_shader(f"attention_{fmt}{variant}", operands, push, (ceil(m, 8), heads), constants)["result"]
    expected = reference.attention(q, k.astype(F32), v.astype(F32), lo, hi)
    np.testing.assert_allclose(found.reshape(m, -1), expected, rtol=0, atol=1e-5)


def test_attention_of_scores_far_apart(run_shader):
    """The running maximum: early blocks are as nothing beside late ones, and the other way round."""
    size, capacity = 4, 200
    q = np.ones((2, 1, size), F32)
    k = np.linspace(-300, 300, capacity, dtype=F32)[None, :, None] * np.ones((1, 1, size), F32)
    k = np.concatenate([k, k[:, ::-1]])
    v = np.arange(2 * capacity * size, dtype=F32).reshape(2, capacity, size)
    q = np.repeat(q, 2, axis=1)
    ranges = np.array([[0, 3], [capacity, capacity - 7]], np.int32)
    operands = {"q": q, "k": k, "v": v, "ranges": ranges, "result": np.zeros_like(q)}
    push = {"rows": 2, "heads": 2, "kv_heads": 2, "capacity": capacity, "size": size}
    constants = {"WORKGROUP_X": 8, "TILE_ROWS": 8, "QUADS": 1}
    found = run_shader("attention_f32", operands, push, (1, 2), constants)["result"]
    expected = reference.attention(q, k, v, *ranges)
    np.testing.assert_allclose(found.reshape(2, -1), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("m", "experts", "top_k", "workgroup"), [(1, 1, 1, 8), (5, 8, 2, 8), (9, 128, 8, 64), (3, 77, 5, 32)]
)
def test_router(run_shader, m, experts, top_k, workgroup):
    rng = np.random.default_rng(experts)
    logits, scale = rows(rng, (m, experts)), np.abs(rows(rng, experts))
    if experts > 3:
        logits[0, [1, 3]] = 4.0  # a tie
    p = reference.softmax(logits)
    ids = np.argsort(-p, axis=-1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(p, ids, axis=-1)
    weights = chosen / chosen.sum(axis=-1, keepdims=True) * scale[ids]
    operands = {"logits": logits, "scale": scale}
    operands |= {"ids": np.zeros((m, top_k), np.int32), "weights": np.zeros((m, top_k), F32)}
    constants = {"WORKGROUP_X": workgroup, "EXPERTS": experts, "TOP_K": top_k}
    found = run_shader("router", operands, {}, (m,), constants)
    assert np.array_equal(found["ids"], ids)
    np.testing.assert_allclose(found["weights"], weights, rtol=4e-6)


def grouped(run_shader, ids, experts, tile_rows):
    count = ids.size
    most = min(count, count // tile_rows + experts)
    operands = {"ids": ids, "pairs": np.zeros(count, np.uint32), "places": np.zeros(count, np.uint32)}
    operands |= {"work": np.zeros(1 + 3 * most, np.uint32)}
    constants = {"WORKGROUP_X": 32, "EXPERTS": experts, "TILE_ROWS": tile_rows}
    found = run_shader("group_experts", operands, {"pair_count": count}, (1,), constants)
    return found["pairs"], found["places"], found["work"]


@pytest.mark.parametrize(("m", "experts", "top_k", "tile_rows"), [(1, 1, 1, 8), (50, 8, 2, 8), (3, 128, 8, 4)])
def test_group_experts(run_shader, m, experts, top_k, tile_rows):
    rng = np.random.default_rng(m)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(m)]).astype(np.int32)
    pairs, places, work = grouped(run_shader, ids, experts, tile_rows)
    flat = ids.reshape(-1)
    assert np.array_equal(np.sort(pairs), np.arange(flat.size))
    assert np.array_equal(places[pairs], np.arange(flat.size))
    assert np.array_equal(flat[pairs], np.sort(flat))
    tiles = work[1 : 1 + 3 * work[0]].reshape(-1, 3)
    covered = [place for _, first, count in tiles for place in range(first, first + count)]
    assert covered == list(range(flat.size))
    for expert, first, count in tiles:
        assert 0 < count <= tile_rows
        assert (flat[pairs[first : first + count]] == expert).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fmt", [*FORMATS, "q40_int", "q80_int"])
def test_experts(run_shader, fmt, variant):
    """Grouping, both products (the experts split over two buffers), activation and combination, against the whole."""
    rng = np.random.default_rng(3)
    fmt, integer = fmt.removesuffix("_int"), fmt.endswith("_int")
    m, experts, top_k, hidden, width = 13, 6, 3, 64, 32
    gate_up = [weight(rng, fmt, 2 * width, hidden) for _ in range(experts)]
    down = [weight(rng, fmt, hidden, width) for _ in range(experts)]
    x = rows(rng, (m, hidden))
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(m)]).astype(np.int32)
    weights = np.abs(rows(rng, (m, top_k)))
    pairs, places, work = grouped(run_shader, ids, experts, 8)
    shader = f"experts_linear_{fmt}" + ("_int" if integer else "") + variant

    def multiply(inputs, matrices, n, k, top_k):
        result = np.full((ids.size, n), np.nan, F32)
        for first, count in ((0, 4), (4, 2)):
            packed = np.concatenate([data for data, _ in matrices[first : first + count]])
            operands = {"x": quantized_records(inputs) if integer else inputs, "weight": packed, "result": result}
            operands |= {"work": work, "pairs": pairs}
            push = {"columns": k, "first": 0, "count": n, "stride": n, "top_k": top_k}
            push |= {"first_expert": first, "experts": count}
            groups = ((len(work) - 1) // 3, ceil(n, 32 * 4))
            result = run_shader(shader, operands, push, groups)["result"]
        return result

    both = multiply(x, gate_up, 2 * width, hidden, top_k)
    active = reference.gelu_mul(both[:, :width], both[:, width:])
    y = multiply(active, down, hidden, width, 0)
    operands = {"y": y, "places": places, "weights": weights, "result": np.zeros_like(x)}
    found = run_shader("combine_experts", operands, {"columns": hidden, "top_k": top_k}, (1, m))["result"]
    stacks = [np.stack([values for _, values in matrices]) for matrices in (gate_up, down)]
    expected = reference.experts(x, ids, weights, *stacks, quantized=integer)
    # a hidden value near the middle of two codes may be rounded otherwise
    tolerance = 2e-3 if integer else 2e-5
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
