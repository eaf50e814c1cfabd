"""Times of the CPU kernels at the sizes of the 26B-A4B model: python benchmarks/kernels.py [--threads N] [--repeat N]

Each line is the best of several runs on random data. An operation is a multiplication or an addition.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from ddllm_vk import quants
from ddllm_vk.cpu import isa, kernels, soft
from ddllm_vk.cpu.kernels import ThreadPool, Weight, pack

rng = np.random.default_rng(0)


def best(repeat: int, function: Callable[[], object]) -> float:
    """Seconds of the fastest of `repeat` runs, after one that compiles."""
    function()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def random_weight(pool: ThreadPool, fmt: str, *shape: int) -> Weight:
    """A weight of random blocks with scales near 0.01, without a float copy of it."""
    count = int(np.prod(shape)) // quants.BLOCK
    raw = rng.integers(0, 256, (count, quants.BLOCK_BYTES[fmt]), dtype=np.uint8)
    raw[:, :2] = (0.01 * rng.uniform(0.5, 1.5, count)).astype(np.float16).view(np.uint8).reshape(count, 2)
    return pack(fmt, raw, shape, pool)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=None, help="default: physical cores")
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    pool = ThreadPool(args.threads)
    repeat = args.repeat
    print(f"{isa.ACTIVE.name}, {pool.threads} threads, best of {repeat}")

    def line(name: str, seconds: float, amount: float, unit: str) -> None:
        print(f"{name:<44} {seconds * 1e3:10.3f} ms {amount / seconds / 1e9:10.1f} {unit}", flush=True)

    rows, hidden = 256, 2816
    x = normal(rows, hidden)
    out = np.empty((rows, hidden), np.float32)
    for fmt in ("q40", "q80"):
        weight = random_weight(pool, fmt, hidden, hidden)
        packed = kernels.quantize_rows(pool, x)
        operations = 2 * rows * hidden * hidden
        seconds = best(repeat, lambda p=packed, w=weight: kernels.linear(pool, p, w, out))
        line(f"linear {fmt} x q80, 256 x 2816 x 2816", seconds, operations, "GOP/s")
        seconds = best(repeat, lambda w=weight: kernels.linear(pool, x, w, out))
        line(f"linear {fmt} x f32, 256 x 2816 x 2816", seconds, operations, "GOP/s")
    seconds = best(repeat, lambda: kernels.quantize_rows(pool, x, out=packed))
    line("quantize_rows 256 x 2816", seconds, x.nbytes, "GB/s")
    weight = np.ones(hidden, np.float32)
    seconds = best(repeat, lambda: kernels.rms_norm(pool, x, weight, 1e-6, out))
    line("rms_norm 256 x 2816", seconds, 2 * x.nbytes, "GB/s")
    up = normal(rows, 2112)
    seconds = best(repeat, lambda: kernels.gelu_mul(pool, up, up, np.empty_like(up)))
    line("gelu_mul 256 x 2112", seconds, 3 * up.nbytes, "GB/s")

    gate_up, down = random_weight(pool, "q40", 64, 1408, hidden), random_weight(pool, "q40", 64, hidden, 704)
    raw = rng.integers(0, 256, (64 * 1408, hidden // 32, 18), dtype=np.uint8)
    seconds = best(3, lambda: pack("q40", raw, (64, 1408, hidden), pool, out=gate_up))
    line("pack q40 64 x 1408 x 2816", seconds, raw.nbytes, "GB/s")

    for each in (16, 4, 1):
        # every expert gets `each` rows, the weights (233 MB) are far larger than any cache
        tokens = each * 64 // 8
        ids = np.stack([(np.arange(8) * 8 + t) % 64 for t in range(tokens)]).astype(np.int32)
        factors = np.full((tokens, 8), 0.125, np.float32)
        y = normal(tokens, hidden)
        result = np.empty_like(y)
        seconds = best(
            max(3, repeat // 4),
            lambda y=y, i=ids, f=factors, r=result: kernels.experts(pool, y, i, f, gate_up, down, r, True),
        )
        line(f"experts 64 x 3 x 704 x 2816, {each} rows each", seconds, 2 * tokens * 8 * 3 * 704 * hidden, "GOP/s")

    # a canvas after 0, 1,024, 8,192 and 32,768 tokens; a sliding layer sees its window and the canvas
    sliding, full = (16, 8, 256), (16, 2, 512)
    shapes = [(*sliding, 256), (*sliding, 1279), *((*full, n + 256) for n in (0, 1024, 8192, 32768))]
    for fmt in ("f16", "q80", "f32"):
        for heads, kv, size, slots in shapes:
            q, new = normal(rows, heads, size) / np.float32(size**0.5), normal(rows, kv, size)
            k, v = (kernels.empty_cache(fmt, kv, -(-slots // 256) * 256, size) for _ in "kv")
            for cache in (k, v):
                for slot in range(0, cache.capacity, rows):
                    kernels.store_rows(pool, new, cache, slot)
            lo, hi = np.zeros(rows, np.int32), np.full(rows, slots, np.int32)
            result = np.empty((rows, heads * size), np.float32)
            seconds = best(
                max(2, repeat // 5),
                lambda q=q, k=k, v=v, lo=lo, hi=hi, r=result: kernels.attention(pool, q, k, v, lo, hi, r),
            )
            name = f"attention {fmt}, 256 x {slots}, {heads}/{kv} heads of {size}"
            line(name, seconds, 4 * rows * heads * size * slots, "GFLOP/s")
        seconds = best(repeat, lambda c=k, x=new: kernels.store_rows(pool, x, c, 0))
        line(f"store_rows {fmt}, 256 x 2 heads of 512", seconds, new.nbytes + k.nbytes // k.capacity * rows, "GB/s")

    tokens = 16384
    table = random_weight(pool, "q80", tokens, hidden)
    products = normal(rows, tokens) * 8
    nothing = np.zeros(0, np.int32)

    def chunk() -> None:
        state = kernels.HeadState(rows, tokens)
        kernels.head_chunk(pool, products, 0, 30.0, 1.5, nothing, -1, state)

    line("head_chunk 256 x 16384", best(repeat // 4 + 1, chunk), products.nbytes, "GB/s")
    uniforms = rng.random(rows)
    y = x * 0.2
    stats = kernels.head_statistics(pool, y, table, 30.0, 0.6, uniforms)
    seconds = best(3, lambda: kernels.head_statistics(pool, y, table, 30.0, 0.6, uniforms))
    line("head_statistics q80, 16384 of 262144 tokens", seconds, 2 * rows * hidden * tokens, "GOP/s")
    count = int(stats.soft_counts.sum())
    args_ = (table, stats.soft_ids, stats.soft_probabilities, stats.soft_counts, 1.0, out)
    seconds = best(3, lambda: kernels.sparse_rows(pool, *args_))
    line(f"sparse_rows q80, {count / rows:.0f} tokens a row", seconds, 2 * count * hidden, "GOP/s")
    logits = normal(rows, tokens)
    seconds = best(2, lambda: soft.soft_embedding_of_logits(pool, logits, table, 1.0, out))
    line("soft_embedding_of_logits 256 x 16384", seconds, 2 * rows * hidden * tokens, "GFLOP/s")


if __name__ == "__main__":
    main()
