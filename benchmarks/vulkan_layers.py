"""Canvas passes on a Vulkan device against the CPU, and the share of each shader.

    ddllm_vk synth --preset 26b-a4b --layers 2 FOLDER
    python benchmarks/vulkan_layers.py --model FOLDER [--device N] [--context N] [--cpu] [--products]

Seconds are wall clock; in brackets the CPU seconds of the process, which are what counts of a software device on a
machine that does other things too. A canvas pass is the layers without the head.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

import ddllm_vk
from ddllm_vk import quants
from ddllm_vk.backends.vulkan import VulkanOps
from ddllm_vk.gpu.choice import open_runtime
from ddllm_vk.gpu.program import Program
from ddllm_vk.gpu.runtime import Runtime
from ddllm_vk.loader import peak_memory_bytes
from ddllm_vk.model import canvas_pass
from ddllm_vk.units import format_bytes

rng = np.random.default_rng(0)


def best(repeat: int, run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds, the least of each over `repeat` runs."""
    times = []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    walls, cpus = zip(*times, strict=True)
    return min(walls), min(cpus)


def layers(options: argparse.Namespace, backend: str) -> None:
    started = time.perf_counter()
    choices = {"device": options.device, "gpu_runtime": options.gpu_runtime} if backend == "vulkan" else {}
    model = ddllm_vk.load_model(options.model, backend=backend, **choices)
    loaded, peak = time.perf_counter() - started, peak_memory_bytes()
    print(
        f"{backend}: weights {format_bytes(model.weight_bytes)}, loaded in {loaded:.1f} s, peak memory of the process"
        f" {format_bytes(peak)}"
    )
    config, session = model.config, model.session()
    ops = session.ops
    if options.context:
        session.encode(rng.integers(0, config.vocab_size, options.context))
    canvas = rng.integers(0, config.vocab_size, config.canvas_length, dtype=np.int32)

    def run() -> None:
        with ops.scope():
            canvas_pass(ops, session.weights, config, session.cache, canvas, None)

    run()  # compiles
    wall, cpu = best(options.repeat, run)
    count = config.num_hidden_layers
    print(
        f"{backend}: {config.canvas_length} rows after {options.context}: {wall:.2f} s [{cpu:.2f}] for {count} layers,"
        f" {wall / count:.2f} s [{cpu / count:.2f}] a layer"
    )
    if isinstance(ops, VulkanOps):
        shares(ops, options.repeat)
    model.close()


def shares(ops: VulkanOps, repeat: int) -> None:
    """Each dispatch of the latest pass submitted alone."""
    found: dict[str, list[float]] = {}
    for dispatch in ops.passes.latest().dispatches:
        recording = ops.runtime.record(Program([dispatch]))
        wall, cpu = best(repeat, recording.run)
        recording.free()
        entry = found.setdefault(dispatch.pipeline.shader.name, [0, 0.0, 0.0])
        entry[0], entry[1], entry[2] = entry[0] + 1, entry[1] + wall, entry[2] + cpu
    total = sum(entry[1] for entry in found.values())
    for name, (count, wall, cpu) in sorted(found.items(), key=lambda item: -item[1][1]):
        print(f"  {name:34} {count:4.0f} dispatches  {wall:7.3f} s [{cpu:.3f}]  {wall / total:5.1%}")


def products(runtime: Runtime, repeat: int, m: int = 256, k: int = 2816, n: int = 2112) -> None:
    """The Q40 and Q80 products of `m` rows, in 10^9 operations a second."""
    ops = VulkanOps(runtime, 1e-6)
    for fmt in quants.QUANTIZED:
        raw = quants.quantize(fmt, rng.standard_normal((n, k), dtype=np.float32))
        weight = ops.upload(fmt, lambda first, count, raw=raw: raw[first : first + count], (n, k))
        x = runtime.allocate(4 * m * k).slice()
        runtime.upload(x, rng.standard_normal((m, k), dtype=np.float32))
        program = Program()
        codes = ops.kernels.quantize_rows(program, x, (m, k))
        result = ops.kernels.take(m, n)
        for part in weight.parts:
            ops.kernels.multiply(program, codes, m, weight, part.slice, part.count, part.first, n, result, True, None)
        recording = runtime.record(program)
        recording.run()
        wall, cpu = best(repeat, recording.run)
        operations = 2e-9 * m * k * n
        print(f"{fmt} {m} x {k} x {n}: {operations / wall:.1f} GOP/s [{operations / cpu:.1f} a CPU second]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; without it only --products")
    parser.add_argument("--device", type=int)
    parser.add_argument("--gpu-runtime", default="vulkan")
    parser.add_argument("--context", type=int, default=0, help="positions before the canvas")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="the CPU backend too")
    parser.add_argument("--products", action="store_true", help="the quantised products alone")
    options = parser.parse_args()
    if options.products:
        with open_runtime(options.device, options.gpu_runtime) as runtime:
            products(runtime, options.repeat)
    if options.model:
        for backend in ("vulkan", "cpu") if options.cpu else ("vulkan",):
            layers(options, backend)


if __name__ == "__main__":
    main()
