"""How the time of a program is shared among its shaders, measured from outside: the same way for every runtime."""

import time

from .program import Program
from .runtime import Runtime


def seconds_by_shader(runtime: Runtime, program: Program, repeat: int = 3) -> dict[str, tuple[int, float]]:
    """Dispatches and seconds of every shader of `program`, longest first: each dispatch submitted alone, the best of
    `repeat` times. What a submission costs by itself is in every figure; the program runs, so its buffers change."""
    shares: dict[str, tuple[int, float]] = {}
    for dispatch in program.dispatches:
        recording = runtime.record(Program([dispatch]))
        times = []
        for _ in range(repeat):
            started = time.perf_counter()
            recording.run()
            times.append(time.perf_counter() - started)
        recording.free()
        name = dispatch.pipeline.shader.name
        count, seconds = shares.get(name, (0, 0.0))
        shares[name] = (count + 1, seconds + min(times))
    return dict(sorted(shares.items(), key=lambda item: -item[1][1]))
