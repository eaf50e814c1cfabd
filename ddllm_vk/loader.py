"""load_model: from a model folder to a Model with uploaded weights, and the Model itself."""

import logging
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from .cache import FORMATS
from .checkpoint import Checkpoint, StoredTensor, open_checkpoint
from .config import GenerationDefaults, ModelConfig
from .diffusion import GenerationConfig, GenerationStats, OnCanvas, OnStep, Result, denoise
from .errors import GpuError, InputError
from .model import ModelWeights
from .noise import NoiseSource
from .ops import Ops
from .quants import BLOCK, QUANTIZED, dequantize, quantize, tensor_bytes
from .session import OnEncode, Session
from .tokenizer import Tokenizer

Progress = Callable[[int, int], Any]  #: (bytes done, bytes in all)

MOST_THREADS = 1024  #: more than any machine has cores

#: the model that comes with the package
BUNDLED_MODEL = Path(__file__).resolve().parent / "models" / "demo"

_log = logging.getLogger("ddllm_vk")


class Model:
    """A loaded model. Make it with `load_model`; close it, or let it go, to free the weights."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        defaults: GenerationDefaults,
        tokenizer: Tokenizer,
        ops: Ops,
        weights: ModelWeights,
        weight_bytes: int,
        kv_cache: str,
        backend: str = "cpu",
    ):
        self.path, self.config, self.generation_defaults, self.tokenizer = path, config, defaults, tokenizer
        self.weight_bytes = weight_bytes  #: bytes the weights take on the device
        self.kv_cache = kv_cache  #: what sessions store keys and values as
        self.backend = backend  #: what runs it: "cpu", "vulkan" or "reference"
        self._ops, self._weights, self._lock = ops, weights, threading.RLock()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False

    def session(self) -> Session:
        """A fresh session with a KV cache of its own. Raises InputError if the model was closed."""
        if self._closed:
            raise InputError(f"{self.path}: the model was closed; load it again")
        session = Session(self._ops, self._weights, self.config, self.kv_cache, self._lock)
        self._sessions.add(session)
        return session

    def prompt_ids(self, prompt: str | Sequence[Any] | np.ndarray) -> np.ndarray:
        """int32 ids of a prompt: ids as they are, a string as one user message, messages through the chat template."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InputError("the prompt is empty")
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], dict):
            prompt = self.tokenizer.apply_chat_template(list(prompt))
        ids = np.asarray(prompt)
        if ids.ndim != 1 or len(ids) == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError("the prompt is empty or is neither token ids, a string nor a list of messages")
        return ids

    def generate(
        self,
        ids_or_messages: str | Sequence[Any] | np.ndarray,
        config: GenerationConfig | None = None,
        on_step: OnStep | None = None,
        on_canvas: OnCanvas | None = None,
        noise: NoiseSource | None = None,
        on_encode: OnEncode | None = None,
    ) -> Result:
        """Denoises a reply to token ids, a list of chat messages, or a string (one user message).

        on_step after every denoising step, on_encode after every encoder pass: returning False ends the generation.
        Raises InputError for an empty prompt, ids outside the vocabulary, or a prompt beyond the context.
        """
        started = time.perf_counter()
        settings = (config or GenerationConfig()).over(self.generation_defaults)
        for i in (*settings.eos_token_ids, settings.pad_token_id):
            if not 0 <= i < self.config.vocab_size:
                raise InputError(f"token id {i} is outside the vocabulary of {self.config.vocab_size}")
        if settings.guard_empty_reply and len(set(settings.eos_token_ids)) >= self.config.vocab_size:
            raise InputError("every token ends the sequence, so no reply can begin; pass guard_empty_reply=False")
        prompt = self.prompt_ids(ids_or_messages)
        out = denoise(self.session(), prompt, settings, noise, on_step, on_canvas, on_encode)
        seconds = time.perf_counter() - started
        steps = [c.steps for c in out.canvases]
        stats = GenerationStats(
            prompt_tokens=len(prompt),
            new_tokens=len(out.ids),
            canvases=len(out.canvases),
            steps=steps,
            passes=out.passes,
            unsettled=out.unsettled,
            encode_seconds=out.encode_seconds,
            denoise_seconds=out.denoise_seconds,
            seconds=seconds,
            tokens_per_pass=len(out.ids) / max(out.passes, 1),
            tokens_per_second=len(out.ids) / seconds,
            peak_memory_bytes=peak_memory_bytes(),
        )
        return Result(self.tokenizer.decode(out.ids.tolist()), out.ids, out.finish_reason, out.canvases, stats)

    def close(self) -> None:
        """Frees the device's memory; neither the model nor its sessions can be used after it."""
        with self._lock:
            self._closed = True
            for session in list(self._sessions):
                session.close()
            self._ops.close()
            self._weights = ModelWeights(None, None, {}, [])


def peak_memory_bytes() -> int:
    """The most memory this process has held resident, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def load_model(
    path: str | Path | None = None,
    backend: Literal["auto", "cpu", "vulkan", "reference"] = "cpu",
    device: int | None = None,
    nodes: Sequence[str] | None = None,
    weights: Literal["stored", "f32", "q40"] = "stored",
    embedding: Literal["q80", "q40", "f32"] | None = None,
    activations: Literal["q80", "f32"] = "q80",
    kv_cache: Literal["f16", "q80", "f32"] | None = None,
    threads: int | None = None,
    gpu_runtime: Literal["auto", "vulkan", "kompute"] = "auto",
    progress: Progress | None = None,
) -> Model:
    """Loads a Hugging Face folder or a converted folder; without a path the small model that comes with the package.

    backend: "vulkan" is the GPU; "auto" is the GPU where there is one that can be used and holds the model, else the
    CPU, and a logged warning says why; "reference" is plain numpy, for tests.
    device: index of a Vulkan device, as the `devices` command lists them; None: the first GPU. A software device is
    used if it is asked for by its index, or with backend="vulkan" where there is nothing else; never by "auto".
    gpu_runtime: how the GPU is driven; "auto" takes what passes the self-test and is fastest.
    weights: "stored" as the folder has them; "f32" unquantised arithmetic; "q40" quantised while loading, with the
    embedding as `embedding` (q80 if None).
    activations: "q80" inputs of products with quantised weights are quantised too; "f32" they are not, for tests.
    kv_cache: what keys and values are stored as. None: f16, but f32 where nothing else is rounded: no weight is
    quantised, or activations="f32". Over an f32 cache attention is computed in float32; over the others its products
    are of bfloat16 on machines that have instructions for them.
    threads: of the CPU, default the physical cores. Raises ConfigError, CheckpointError, TokenizerError, InputError,
    GpuError.
    """
    _check_choice("backend", backend, ("auto", "cpu", "vulkan", "reference"))
    _check_choice("gpu_runtime", gpu_runtime, ("auto", "vulkan", "kompute"))
    _check_choice("weights", weights, ("stored", "f32", "q40"))
    _check_choice("activations", activations, ("q80", "f32"))
    if kv_cache is not None:
        _check_choice("kv_cache", kv_cache, FORMATS)
    if embedding is not None:
        _check_choice("embedding", embedding, ("q80", "q40", "f32"))
        if weights != "q40":
            raise InputError('embedding can be chosen with weights="q40" only')
    if backend in ("cpu", "reference") and device not in (None, 0):
        raise InputError(f"device {device}: the {backend} backend has the one device 0")
    if nodes:
        raise InputError("nodes: running over several nodes is not implemented yet")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise InputError(f"threads must be 1 to {MOST_THREADS}, not {threads}")

    with open_checkpoint(BUNDLED_MODEL if path is None else path) as checkpoint:
        tokenizer = Tokenizer.from_folder(checkpoint.path)
        config, eps = checkpoint.config, checkpoint.config.rms_norm_eps
        cache_format = kv_cache or _default_kv_cache(checkpoint, weights, embedding or "q80", activations)

        def loaded(name: str, ops: Ops) -> Model:
            try:
                uploaded, size = _upload(ops, checkpoint, weights, embedding or "q80", progress)
            except BaseException:
                ops.close()
                raise
            path, defaults = checkpoint.path, checkpoint.generation_defaults
            return Model(path, config, defaults, tokenizer, ops, uploaded, size, cache_format, name)

        if backend in ("auto", "vulkan"):
            try:
                return loaded("vulkan", _vulkan_ops(backend, eps, activations, device, gpu_runtime))
            except GpuError as e:
                if backend == "vulkan":
                    raise
                _log.warning("running on the CPU: %s", e)
        if backend == "reference":
            from .backends.reference import ReferenceOps

            return loaded("reference", ReferenceOps(eps, activations))
        from .backends.cpu import CpuOps

        return loaded("cpu", CpuOps(eps, activations, threads))


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _vulkan_ops(backend: str, eps: float, activations: str, device: int | None, gpu_runtime: str) -> Ops:
    """GpuError where there is no device to use; for "auto" a software device is none."""
    from .backends.vulkan import VulkanOps
    from .gpu.choice import open_runtime
    from .gpu.devices import list_devices, pick

    devices = list_devices()
    if backend == "vulkan" and device is None and all(d.type == "cpu" for d in devices):
        device = 0
        _log.warning("there is no GPU: running Vulkan on the software device %s, which is slow", devices[0].name)
    chosen = pick(devices, device)
    if backend == "auto" and chosen.type == "cpu":
        raise GpuError(f"{chosen.title} is a software device, slower than the CPU backend")
    return VulkanOps(open_runtime(chosen.index, gpu_runtime), eps, activations)


def _upload_format(tensor: StoredTensor, weights: str, embedding: str) -> str:
    """The format a tensor is uploaded in, for load_model's `weights` and `embedding`."""
    if tensor.role == "float":
        return "f32"
    wanted = embedding if weights == "q40" and tensor.role == "embedding" else weights
    if wanted == "stored" or (wanted in QUANTIZED and tensor.shape[-1] % BLOCK):
        return tensor.format
    if wanted == "f32":  # f16 and bf16 are widened tile by tile: the same values
        return "f32" if tensor.format in QUANTIZED else tensor.format
    return wanted


def _default_kv_cache(checkpoint: Checkpoint, weights: str, embedding: str, activations: str) -> str:
    """f32 where nothing else is rounded, else f16: see load_model."""
    formats = {_upload_format(tensor, weights, embedding) for tensor in checkpoint.tensors.values()}
    return "f16" if activations == "q80" and formats & set(QUANTIZED) else "f32"


def _upload(
    ops: Ops, checkpoint: Checkpoint, weights: str, embedding: str, progress: Progress | None
) -> tuple[ModelWeights, int]:
    config = checkpoint.config
    # in the order in which they lie in the files, which a disk reads best
    tensors = sorted(checkpoint.tensors.values(), key=lambda t: (t.file, t.start))
    formats = {t.name: _upload_format(t, weights, embedding) for t in tensors}
    total, done, size = sum(t.nbytes for t in tensors), 0, 0
    needed = sum(tensor_bytes(formats[t.name], t.shape) for t in tensors)
    # Where the system cannot keep the files beside the weights, it would evict what is still to be read.
    keep_cached = psutil.virtual_memory().available >= needed + total
    w = ModelWeights(
        None, None, {}, [{} for _ in config.layers], [1.0] * config.num_hidden_layers, [1.0] * config.num_hidden_layers
    )
    ops.expect((formats[t.name], t.shape) for t in tensors if t.shape)
    for tensor in tensors:
        read = partial(_read_rows, tensor, formats[tensor.name], keep_cached)
        kind, layer, short = _split_name(tensor.name)
        if short == "layer_scalar":
            scalars = w.encoder_layer_scalar if kind == "encoder" else w.decoder_layer_scalar
            scalars[layer] = float(read(0, 1).reshape(()))
        else:
            weight = ops.upload(formats[tensor.name], read, tensor.shape)
            size += ops.weight_bytes(weight)
            if kind == "layer":
                w.layers[layer][short] = weight
            elif kind == "self_conditioning":
                w.self_conditioning[short] = weight
            else:
                setattr(w, short, weight)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    return w, size


def _split_name(name: str) -> tuple[str, int, str]:
    """A checkpoint's name as (group, layer or -1, name inside the group without `.weight`)."""
    parts = name.removesuffix(".weight").split(".")
    if parts[1] == "encoder":
        return "encoder", int(parts[4]), parts[5]
    if parts[2] == "layers":
        return "layer", int(parts[3]), ".".join(parts[4:])
    if parts[2] == "self_conditioning":
        return "self_conditioning", -1, parts[3]
    return "top", -1, parts[2]


def _read_rows(tensor: StoredTensor, fmt: str, keep_cached: bool, first: int, count: int) -> np.ndarray:
    """Rows first..first+count of a tensor, converted to `fmt`."""
    rows = tensor.read_rows(first, count, keep_cached)
    if fmt == tensor.format:
        return rows
    values = dequantize(tensor.format, rows)
    return values if fmt == "f32" else quantize(fmt, values)
