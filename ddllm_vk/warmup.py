"""Compiling every CPU kernel into the cache on disk (cpu/jit.py), so that no later run has to.

A kernel is compiled for the types of its arguments, not for shapes, formats or threads: a tiny model of random weights,
run in each way that makes a difference, meets all that there are.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

#: Called with a kernel's name before it is compiled, the kernels that are ready, and those in all.
OnCompile = Callable[[str, int, int], Any]

# In the cache's folder, once it has everything: what _state gave then.
_COMPLETE = "complete.json"

# More tokens than the head keeps candidates of: then the self-conditioning needs the dense product too.
_VOCABULARY = 4096

# (weights, activations, kv_cache) of load_model: integer products, float32 ones of quantised weights, dense weights.
_WAYS: tuple[tuple[Any, Any, Any], ...] = (("stored", "q80", "f16"), ("stored", "f32", "q80"), ("f32", "f32", "f32"))


def warm_up(on_compile: OnCompile | None = None) -> int:
    """Compiles the kernels that the cache lacks for the active instruction set; returns how many those were."""
    from .cpu import jit

    folder = Path(jit.CACHE_FOLDER)
    if _is_complete(folder):
        return 0
    import_module(".backends.cpu", __package__)  # and with it all kernels, so that their number is known
    from .cpu import peak

    compiled: set[str] = set()

    def count(name: str) -> None:
        compiled.add(name)
        if on_compile is not None:
            on_compile(name, sum(bool(kernel.signatures) for kernel in jit.KERNELS), len(jit.KERNELS))

    with jit.compilations(count):
        _use_models()
        peak.measure(peak.ThreadPool(1), runs=1)
    with contextlib.suppress(OSError):  # then the next run looks again
        (folder / _COMPLETE).write_text(json.dumps(_state(folder)), encoding="utf-8")
    return len(compiled)


def _is_complete(folder: Path) -> bool:
    """Whether a run that compiled everything left a note here which still holds."""
    try:
        note, now = json.loads((folder / _COMPLETE).read_text(encoding="utf-8")), _state(folder)
        return note["sources"] == now["sources"] and note["files"].items() <= now["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _state(folder: Path) -> dict[str, Any]:
    """The sources, which call the kernels, as a digest, and the compiled files with their sizes."""
    sources = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        sources.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.nb*")}
    return {"sources": sources.hexdigest(), "files": files}


def _use_models() -> None:
    """Everything that generate, demo, bench and the Python API do with a model, in all of _WAYS."""
    import numpy as np

    from .checkpoint.presets import PRESETS, with_layers
    from .checkpoint.synth import synthesize
    from .diffusion import GenerationConfig
    from .loader import load_model

    config = with_layers(PRESETS["tiny"], PRESETS["tiny"]["text_config"]["num_hidden_layers"])
    config["text_config"]["vocab_size"] = _VOCABULARY
    with tempfile.TemporaryDirectory(prefix="ddllm_vk-") as folder:
        path = Path(folder) / "model"
        synthesize(path, config)
        for weights, activations, kv_cache in _WAYS:
            model = load_model(path, weights=weights, activations=activations, kv_cache=kv_cache, threads=1)
            model.generate([2, 3, 4], GenerationConfig(max_new_tokens=1, max_denoising_steps=2, seed=0))
            session = model.session()
            canvas = np.arange(model.config.canvas_length, dtype=np.int32)
            logits = session.canvas_logits(canvas)
            session.canvas_logits(canvas, self_conditioning=logits)
            model.close()
