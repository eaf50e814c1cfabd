"""The CPU kernels at the sizes of the 26B-A4B model against the measured peaks, torch and numpy's BLAS, as Markdown.

Each number is the best of many runs on random data; an operation is a multiplication or an addition. See README.md.
"""

import argparse
import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import competitors
import numpy as np
from timing import Table, best

from ddllm_vk import quants
from ddllm_vk.cpu import isa, kernels, peak
from ddllm_vk.cpu.cache_rows import KEYS, CacheRows
from ddllm_vk.cpu.kernels import ThreadPool, Weight, pack
from ddllm_vk.cpu.peak import Peaks

ROWS, HIDDEN, MLP, INNER, VOCAB = 256, 2816, 2112, 704, 262144
EXPERTS, TOP_K = 128, 8
SECTIONS = ("linear", "experts", "attention", "head", "others")

rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def random_weight(pool: ThreadPool, fmt: str, *shape: int) -> Weight:
    """A weight of random blocks with scales near 0.01, without a float copy of it."""
    return pack(fmt, random_blocks(fmt, *shape), shape, pool)


def random_blocks(fmt: str, *shape: int) -> np.ndarray:
    count, size = int(np.prod(shape)) // quants.BLOCK, quants.BLOCK_BYTES[fmt]
    raw = np.frombuffer(rng.bytes(count * size), np.uint8).reshape(count, size).copy()
    raw[:, :2] = (0.01 * rng.uniform(0.5, 1.5, count)).astype(np.float16).view(np.uint8).reshape(count, 2)
    return raw


def giga(amount: float, seconds: float | None) -> float | None:
    """Billions a second."""
    return None if seconds is None else amount / seconds / 1e9


def peaks_table(pool: ThreadPool) -> tuple[Peaks, Table]:
    table = Table(
        "Measured peaks, GOP/s", "threads", "int8 dot products", "float32 multiply-adds", "bfloat16", "memory, GB/s"
    )
    found = {}
    for threads in dict.fromkeys((1, pool.threads)):
        found[threads] = p = peak.measure(ThreadPool(threads))
        table.row(str(threads), p.dot / 1e9, p.fma / 1e9, p.narrow / 1e9, p.read / 1e9)
    return found[pool.threads], table


def linear_table(pool: ThreadPool, peaks: Peaks) -> Table:
    table = Table(
        f"Products of {ROWS} rows with N x {HIDDEN} weights, GOP/s",
        "N", "q40 x q80", "of peak (q40)", "q80 x q80", "of peak (q80)", "f32 x f32", "of peak (f32)",
        *competitors.NAMES,
    )  # fmt: skip
    x = normal(ROWS, HIDDEN)
    packed = kernels.quantize_rows(pool, x)
    for n in (MLP, 2816, 4096, 8192, 32768):
        out = np.empty((ROWS, n), np.float32)
        functions = competitors.linear(x, n, HIDDEN, rng)
        for fmt in ("q40", "q80"):
            functions[fmt] = partial(kernels.linear, pool, packed, random_weight(pool, fmt, n, HIDDEN), out)
        dense = pack("f32", competitors.floats(rng, n, HIDDEN), (n, HIDDEN), pool)
        functions["f32"] = partial(kernels.linear, pool, x, dense, out)
        rates = {name: 2 * ROWS * n * HIDDEN / s for name, s in best(functions, pool.threads).items()}
        ours = []
        for fmt, most in (("q40", peaks.dot), ("q80", peaks.dot), ("f32", peaks.fma)):
            ours += [rates[fmt] / 1e9, rates[fmt] / most]
        table.row(str(n), *ours, *(rates[name] / 1e9 if name in rates else None for name in competitors.NAMES))
    return table


def experts_table(pool: ThreadPool, peaks: Peaks) -> Table:
    table = Table(
        f"{EXPERTS} experts of {INNER} x {HIDDEN}, q40 x q80, more weights than any cache holds",
        "rows an expert", "ms", "GOP/s", "of the peak", "weights, GB/s", "of the memory's peak",
        "torch f32, GOP/s", "torch bf16, GOP/s",
    )  # fmt: skip
    gate_up = random_weight(pool, "q40", EXPERTS, 2 * INNER, HIDDEN)
    down = random_weight(pool, "q40", EXPERTS, HIDDEN, INNER)
    for each in (16, 4, 1):
        tokens = each * EXPERTS // TOP_K
        # every expert gets `each` rows
        ids = np.stack([(np.arange(TOP_K) * (EXPERTS // TOP_K) + t) % EXPERTS for t in range(tokens)]).astype(np.int32)
        factors = np.full((tokens, TOP_K), 1 / TOP_K, np.float32)
        x = normal(tokens, HIDDEN)
        out = np.empty_like(x)
        # torch's weights are eight times as large: half of the experts, for each the same rows
        half = EXPERTS // 2
        functions = competitors.experts(x[: tokens // 2], ids[: tokens // 2] % half, half, INNER, rng)
        functions["ours"] = lambda x=x, i=ids, f=factors, o=out: kernels.experts(pool, x, i, f, gate_up, down, o, True)
        seconds = best(functions, pool.threads)
        operations = 2 * ids.size * 3 * INNER * HIDDEN
        rate, nbytes = operations / seconds["ours"], (gate_up.nbytes + down.nbytes) / seconds["ours"]
        table.row(
            str(each), seconds["ours"] * 1e3, rate / 1e9, rate / peaks.dot, nbytes / 1e9, nbytes / peaks.read,
            *(giga(operations / 2, seconds.get(n)) for n in (competitors.TORCH_F32, competitors.TORCH_BF16)),
        )  # fmt: skip
    return table


def attention_table(pool: ThreadPool, peaks: Peaks) -> Table:
    """A canvas after 0, 1,024, 8,192 and 32,768 tokens; a sliding layer sees its window and the canvas."""
    table = Table(
        f"Attention of {ROWS} rows over all slots, GOP/s by the format of the KV cache",
        "heads, KV heads, head size, slots", "ms (f16)", "f16", "of the bfloat16 peak", "q80",
        "f32", "of the float32 peak", competitors.TORCH_F32, competitors.TORCH_BF16,
    )  # fmt: skip
    sliding, full = (16, 8, 256), (16, 2, 512)
    for (heads, kv, size), slots in (
        (sliding, 256), (sliding, 1279), (full, 256), (full, 1280), (full, 8448), (full, 33024),
    ):  # fmt: skip
        q, k, v = normal(ROWS, heads, size) * 0.1, normal(kv, slots, size), normal(kv, slots, size)
        lo, hi = np.zeros(ROWS, np.int32), np.full(ROWS, slots, np.int32)
        out = np.empty((ROWS, heads * size), np.float32)
        functions = competitors.attention(q, k, v)
        for fmt in ("f16", "q80", "f32"):
            stored = [stored_cache(pool, fmt, values) for values in (k, v)]
            functions[fmt] = partial(kernels.attention, pool, q, *stored, lo, hi, out)
        seconds = best(functions, pool.threads, 0.5, 2)
        rates = {name: 4 * ROWS * heads * size * slots / s for name, s in seconds.items()}
        table.row(
            f"{heads}, {kv}, {size}, {slots:,}", seconds["f16"] * 1e3, rates["f16"] / 1e9, rates["f16"] / peaks.narrow,
            rates["q80"] / 1e9, rates["f32"] / 1e9, rates["f32"] / peaks.fma,
            *(rates[n] / 1e9 if n in rates else None for n in (competitors.TORCH_F32, competitors.TORCH_BF16)),
        )  # fmt: skip
    return table


def stored_cache(pool: ThreadPool, fmt: str, values: np.ndarray) -> CacheRows:
    """values: float32 [kv, slots, hd]"""
    kv, slots, size = values.shape
    cache = kernels.empty_cache(fmt, kv, -(-slots // KEYS) * KEYS, size)
    kernels.store_rows(pool, np.ascontiguousarray(values.transpose(1, 0, 2)), cache, 0)
    return cache


def head_table(pool: ThreadPool, peaks: Peaks) -> Table:
    """Rows that point at one token each, and rows with nearly flat logits: both ways to the self-conditioning."""
    table = Table(f"The head over {VOCAB:,} tokens, {ROWS} rows, q80 x q80", "", "ms", "GOP/s", "of the peak")
    weight = random_weight(pool, "q80", VOCAB, HIDDEN)
    uniforms = rng.random(ROWS)
    mean = kernels.table_mean(pool, weight)
    out = np.empty((ROWS, HIDDEN), np.float32)
    certain, flat = np.empty((ROWS, HIDDEN), np.float32), normal(ROWS, HIDDEN) * np.float32(0.01)
    kernels.embedding_rows(pool, weight, np.arange(ROWS, dtype=np.int32), 0.016, certain)  # products of about 25

    def row(name: str, operations: float, function: Callable, most: float) -> None:
        seconds = best({name: function}, pool.threads, 2.0, 2)[name]
        table.row(name, seconds * 1e3, operations / seconds / 1e9, operations / seconds / most)

    for name, y in (("certain", certain), ("undecided", flat)):
        statistics = partial(kernels.head_statistics, pool, y, weight, 30.0, 0.6, uniforms)
        row(f"statistics, {name} rows", 2 * ROWS * VOCAB * HIDDEN, statistics, peaks.dot)
        found = statistics()
        dense, tokens = len(found.undecided), int(found.soft_counts.sum())
        row(
            f"self-conditioning, {tokens / ROWS:.0f} tokens a row, {dense} rows dense",
            2 * tokens * HIDDEN + 4 * dense * VOCAB * HIDDEN,
            partial(kernels.soft_embedding, pool, found, weight, mean, 1.0, out),
            peaks.dot if dense else peaks.fma,
        )
    return table


def others_table(pool: ThreadPool, peaks: Peaks) -> Table:
    """What touches each number once; the numbers read and written, of which some may be in a cache."""
    table = Table(f"Row by row and packing, {ROWS} rows", "", "ms", "GB/s", "of the memory's peak")

    def row(name: str, nbytes: float, function: Callable) -> None:
        seconds = best({name: function}, pool.threads, 0.5)[name]
        table.row(name, seconds * 1e3, nbytes / seconds / 1e9, nbytes / seconds / peaks.read)

    x, y, out, ones = normal(ROWS, HIDDEN), normal(ROWS, HIDDEN), normal(ROWS, HIDDEN), np.ones(HIDDEN, np.float32)
    packed = kernels.quantize_rows(pool, x)
    row(f"quantize_rows {HIDDEN}", x.nbytes * 5 / 4, partial(kernels.quantize_rows, pool, x, packed))
    row(f"rms_norm {HIDDEN}", 2 * x.nbytes, partial(kernels.rms_norm, pool, x, ones, 1e-6, out))
    row(f"add_rms_norm {HIDDEN}", 3 * x.nbytes, partial(kernels.add_rms_norm, pool, x, y, ones, 1e-6, out))
    row(f"add {HIDDEN}", 3 * x.nbytes, partial(kernels.add, pool, x, y, out))
    gate, up, active = normal(ROWS, MLP), normal(ROWS, MLP), normal(ROWS, MLP)
    row(f"gelu_mul {MLP}", 3 * gate.nbytes, partial(kernels.gelu_mul, pool, gate, up, active))
    heads, cos, sin = normal(ROWS, 16, 256), normal(ROWS, 128), normal(ROWS, 128)
    run = partial(kernels.head_norm_rope, pool, heads, ones[:256], 1e-6, cos, sin, np.empty_like(heads))
    row("head_norm_rope 16 x 256", 2 * heads.nbytes, run)
    proj = pack("f32", normal(EXPERTS, HIDDEN), (EXPERTS, HIDDEN), pool)
    ids, chosen = np.empty((ROWS, TOP_K), np.int32), np.empty((ROWS, TOP_K), np.float32)
    run = partial(kernels.router, pool, x, ones, proj, ones[:EXPERTS], TOP_K, 1e-6, ids, chosen)
    row(f"router {EXPERTS} x {HIDDEN}", x.nbytes + proj.nbytes, run)
    weight = random_weight(pool, "q80", 32768, HIDDEN)
    tokens = rng.integers(0, 32768, ROWS, dtype=np.int32)
    row(f"embedding_rows q80 {HIDDEN}", out.nbytes, partial(kernels.embedding_rows, pool, weight, tokens, 53.0, out))
    for fmt in ("q40", "q80"):
        shape = (32768, HIDDEN)
        raw = random_blocks(fmt, *shape)
        run = partial(pack, fmt, raw, shape, pool, pack(fmt, raw, shape, pool))
        row(f"pack {fmt} {shape[0]} x {HIDDEN}", 2 * raw.nbytes, run)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=None, help="default: physical cores")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    args = parser.parse_args()
    pool = ThreadPool(args.threads)
    threads = "1 thread, in its processor time" if pool.threads == 1 else f"{pool.threads} threads"
    machine = [f"{platform.processor() or platform.machine()}, {isa.ACTIVE.name}, {threads}"]
    machine += competitors.use_threads(pool.threads)
    print("\n".join(machine))
    peaks, table = peaks_table(pool)
    tables = [table]
    for name in args.only or SECTIONS:
        tables.append(globals()[f"{name}_table"](pool, peaks))
    if args.json:
        figures = {"machine": machine, "isa": isa.ACTIVE.name, "threads": pool.threads}
        figures["tables"] = [{"title": t.title, "rows": t.rows} for t in tables]
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
