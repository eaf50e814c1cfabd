"""The same arithmetic with torch and with numpy's BLAS, each left out where it is not installed."""

import os
from collections.abc import Callable

import numpy as np

try:
    import torch
except ImportError:
    torch = None
try:
    import threadpoolctl
except ImportError:
    threadpoolctl = None

TORCH_F32, TORCH_BF16, NUMPY = "torch f32", "torch bf16", "numpy f32"
NAMES = (TORCH_F32, TORCH_BF16, NUMPY)


def use_threads(threads: int) -> list[str]:
    """Gives each library that many threads; lines about what there is and what it runs."""
    lines = []
    if torch is None:
        lines.append("torch is not installed: left out")
    else:
        torch.set_num_threads(threads)
        bf16 = "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else "no instructions for bfloat16"
        lines.append(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {bf16}")
    if threadpoolctl is None:
        lines.append("threadpoolctl is not installed: numpy's BLAS is left out")
    else:
        threadpoolctl.threadpool_limits(threads, user_api="blas")
        for pool in threadpoolctl.threadpool_info():
            if pool["user_api"] == "blas":
                kernel = pool.get("architecture", "?")
                lines.append(
                    f"{pool['internal_api']} {pool['version']}, {pool['num_threads']} threads, {kernel} kernels"
                )
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        if name in os.environ:
            lines.append(f"{name}={os.environ[name]} is set: OpenBLAS may run slower kernels than it would choose")
    return lines


def linear(x: np.ndarray, rows: int, columns: int, rng: np.random.Generator) -> dict[str, Callable[[], object]]:
    """x [M, K] times random weights [N, K] transposed."""
    w = floats(rng, rows, columns)
    functions: dict[str, Callable[[], object]] = {}
    if torch is not None:
        for name, dtype in ((TORCH_F32, torch.float32), (TORCH_BF16, torch.bfloat16)):
            a, b = torch.from_numpy(x).to(dtype), torch.from_numpy(w).to(dtype)
            functions[name] = lambda a=a, b=b: torch.nn.functional.linear(a, b)
    if threadpoolctl is not None:
        out = np.empty((len(x), rows), np.float32)
        functions[NUMPY] = lambda: np.matmul(x, w.T, out=out)
    return functions


def experts(
    x: np.ndarray, ids: np.ndarray, count: int, inner: int, rng: np.random.Generator
) -> dict[str, Callable[[], object]]:
    """What a forward pass of torch does: for each expert its rows, the gated layer, and adding up the results."""
    if torch is None:
        return {}
    hidden = x.shape[1]
    functions = {}
    gate_up, down = floats(rng, count, 2 * inner, hidden), floats(rng, count, hidden, inner)
    of = [torch.from_numpy(np.nonzero((ids == e).any(axis=1))[0]) for e in range(count)]
    for name, dtype in ((TORCH_F32, torch.float32), (TORCH_BF16, torch.bfloat16)):
        tensors = [torch.from_numpy(a).to(dtype) for a in (x, gate_up, down)]

        def run(x=tensors[0], gate_up=tensors[1], down=tensors[2]):
            out = torch.zeros_like(x)
            for e, rows in enumerate(of):
                if len(rows):
                    gate, up = torch.nn.functional.linear(x[rows], gate_up[e]).chunk(2, dim=-1)
                    active = torch.nn.functional.gelu(gate, approximate="tanh") * up
                    out.index_add_(0, rows, torch.nn.functional.linear(active, down[e]))
            return out

        functions[name] = run
    return functions


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Callable[[], object]]:
    """q: [M, heads, hd]; k, v: [kv, slots, hd]; every row sees every slot."""
    if torch is None:
        return {}
    functions = {}
    for name, dtype in ((TORCH_F32, torch.float32), (TORCH_BF16, torch.bfloat16)):
        a, b, c = (torch.from_numpy(array).to(dtype)[None] for array in (q.transpose(1, 0, 2).copy(), k, v))
        functions[name] = lambda a=a, b=b, c=c: torch.nn.functional.scaled_dot_product_attention(
            a, b, c, scale=1.0, enable_gqa=True
        )
    return functions


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random numbers; much the same ones over and over, as drawing gigabytes takes longer than multiplying them."""
    some = rng.standard_normal(1 << 20, dtype=np.float32)
    return np.resize(some, shape)
