"""The canvas loop: from prompt ids to finished canvases (MODEL.md, Denoising one canvas). Purely token ids, no text."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

import numpy as np

from . import sampler
from .config import GenerationDefaults, ModelConfig
from .errors import DdllmError, InputError
from .noise import NoiseSource, PhiloxNoise
from .session import OnEncode, Session


@dataclass(frozen=True)
class GenerationConfig:
    """What a caller may choose. None means the checkpoint's own value. Raises InputError naming the field."""

    max_new_tokens: int | None = None  #: tokens
    max_denoising_steps: int | None = None  #: passes a canvas at most
    t_max: float | None = None  #: temperature before the first step
    t_min: float | None = None  #: temperature after the last step
    entropy_bound: float | None = None  #: nats
    stability_threshold: int | None = None  #: earlier argmax canvases that must agree
    confidence_threshold: float | None = None  #: mean entropy in nats
    seed: int = 0
    eos_token_ids: Sequence[int] | None = None  #: () for none
    pad_token_id: int | None = None
    guard_empty_reply: bool = True  #: forbid end-of-sequence at row 0 of the first canvas

    def __post_init__(self) -> None:
        for name, minimum in (("max_new_tokens", 1), ("max_denoising_steps", 1), ("stability_threshold", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | np.integer) or isinstance(value, bool)):
                raise InputError(f"{name} must be an integer, not {value!r}")
            if value is not None and value < minimum:
                raise InputError(f"{name} must be at least {minimum}, not {value}")
        for name in ("t_max", "t_min", "entropy_bound", "confidence_threshold"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, Real) or isinstance(value, bool):
                raise InputError(f"{name} must be a number, not {value!r}")
            number = float(value)
            if name.startswith("t_") and not (number > 0 and math.isfinite(number)):
                raise InputError(f"{name} must be a positive number, not {value}")
            if not number >= 0:
                raise InputError(f"{name} must not be negative, got {value}")
        if not isinstance(self.seed, int | np.integer):
            raise InputError(f"seed must be an integer, not {self.seed!r}")

    def over(self, defaults: GenerationDefaults) -> "Settings":
        """These choices over a checkpoint's defaults."""
        values = {f.name: getattr(defaults, f.name) for f in fields(GenerationDefaults)}
        values |= {name: value for name in values if (value := getattr(self, name)) is not None}
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
        if values["t_min"] > values["t_max"]:
            raise InputError(f"t_min {values['t_min']} is above t_max {values['t_max']}")
        return Settings(**values, seed=int(self.seed), guard_empty_reply=self.guard_empty_reply)


@dataclass(frozen=True)
class Settings(GenerationDefaults):
    """A GenerationConfig with every value decided."""

    seed: int = 0
    guard_empty_reply: bool = True


@dataclass
class StepInfo:
    """One denoising step, as told to `on_step`. Arrays have canvas_length entries."""

    canvas_index: int  #: from 0
    step: int  #: from 0
    max_steps: int
    temperature: float
    ids: np.ndarray  #: int32, most probable tokens: what the canvas would be if it ended here
    sampled: np.ndarray  #: int32
    accepted: np.ndarray  #: bool
    canvas: np.ndarray  #: int32, accepted and renoised: input of the next step
    entropy: np.ndarray  #: float64, nats
    mean_entropy: float
    finished: bool  #: the adaptive stop fired
    seconds: float  #: this step


@dataclass
class Canvas:
    """A finished canvas."""

    index: int
    ids: np.ndarray  #: int32 [canvas_length], padded after end-of-sequence
    steps: int  #: passes it took


@dataclass
class Denoised:
    """Outcome of `denoise`: ids up to and including the first end-of-sequence, at most max_new_tokens."""

    ids: np.ndarray
    finish_reason: str  #: "stop" | "length" | "cancelled"
    canvases: list[Canvas]
    passes: int = 0  #: canvas passes run, those of a cancelled canvas included
    unsettled: list[int] = field(default_factory=list)  #: canvases that ran out of steps
    encode_seconds: float = 0.0
    denoise_seconds: float = 0.0


@dataclass
class GenerationStats:
    """Figures of one generation. Seconds of wall clock; bytes."""

    prompt_tokens: int
    new_tokens: int
    canvases: int
    steps: list[int] = field(default_factory=list)  #: passes, per finished canvas
    passes: int = 0  #: in all, those of a cancelled canvas included
    unsettled: list[int] = field(default_factory=list)  #: canvases, from 0, that ran out of steps before settling
    encode_seconds: float = 0.0
    denoise_seconds: float = 0.0
    seconds: float = 0.0
    tokens_per_pass: float = 0.0
    tokens_per_second: float = 0.0
    peak_memory_bytes: int = 0  #: of the process


@dataclass
class Result:
    """What `Model.generate` returns."""

    text: str
    ids: np.ndarray = field(repr=False)  #: int32
    finish_reason: str  #: "stop" | "length" | "cancelled"
    canvases: list[Canvas] = field(repr=False)
    stats: GenerationStats


OnStep = Callable[[StepInfo], Any]  #: returning False ends the generation after this step
OnCanvas = Callable[[Canvas], Any]


def canvases_to_write(prompt_tokens: int, max_new_tokens: int, config: ModelConfig) -> int:
    """Canvases that a generation may write: what max_new_tokens asks for, as far as the context holds it."""
    length, context = config.canvas_length, config.max_position_embeddings
    fits = (context - prompt_tokens) // length
    if fits < 1:
        raise InputError(
            f"the prompt has {prompt_tokens} tokens; the model's context of {context} must also hold one canvas of "
            f"{length}: shorten the prompt to {max(context - length, 0)} tokens"
        )
    return min(-(-max_new_tokens // length), fits)


def denoise(
    session: Session,
    prompt_ids: np.ndarray,
    settings: Settings,
    noise: NoiseSource | None = None,
    on_step: OnStep | None = None,
    on_canvas: OnCanvas | None = None,
    on_encode: OnEncode | None = None,
) -> Denoised:
    """Encodes the prompt and denoises canvas after canvas until end-of-sequence or enough tokens.

    prompt_ids: int32 [P], P >= 1. The session must be fresh. on_encode is told of the prompt's passes and of those that
    commit a finished canvas. Raises InputError when the context cannot hold it.
    """
    config = session.config
    count = canvases_to_write(len(prompt_ids), settings.max_new_tokens, config)
    if noise is None:
        noise = PhiloxNoise(settings.seed, config.canvas_length, config.vocab_size)
    out = Denoised(np.empty(0, dtype=np.int32), "length", [])

    pending = prompt_ids  # not yet in the cache: the prompt, then each finished canvas but the last
    for index in range(count):
        started = time.perf_counter()
        complete = session.encode(pending, on_encode)
        encoded = time.perf_counter()
        out.encode_seconds += encoded - started
        if not complete:
            out.finish_reason = "cancelled"
            break
        argmax, steps, settled = _denoise_canvas(session, settings, noise, index, on_step)
        out.passes += steps
        out.denoise_seconds += time.perf_counter() - encoded
        if argmax is None:
            out.finish_reason = "cancelled"
            break
        ids, end = sampler.finalize(argmax, settings.eos_token_ids, settings.pad_token_id)
        out.canvases.append(Canvas(index, ids, steps))
        if not settled:
            out.unsettled.append(index)
        if on_canvas is not None:
            on_canvas(out.canvases[-1])
        out.ids = np.concatenate([out.ids, ids if end is None else ids[: end + 1]])
        if len(out.ids) > settings.max_new_tokens:
            out.ids = out.ids[: settings.max_new_tokens]
            break
        if end is not None:
            out.finish_reason = "stop"
            break
        pending = ids
    return out


def _denoise_canvas(
    session: Session, settings: Settings, noise: NoiseSource, index: int, on_step: OnStep | None
) -> tuple[np.ndarray | None, int, bool]:
    """The argmax canvas of the last step (None if `on_step` called it off), the number of steps, whether it settled."""
    guarded = settings.eos_token_ids if settings.guard_empty_reply and index == 0 else ()
    canvas = _checked_ids(noise.initial_canvas(index), session.config)
    session.begin_canvas()
    argmaxes: deque[np.ndarray] = deque(maxlen=max(settings.stability_threshold, 1))  # the latest ones
    n, step, settled = settings.max_denoising_steps, 0, False
    for step in range(n):
        started = time.perf_counter()
        t = sampler.temperature(n - step, n, settings.t_min, settings.t_max)
        stats = session.canvas_step(canvas, t, _checked_uniforms(noise.uniforms(index, step), session.config), guarded)
        if not np.isfinite(stats.entropy).all():
            raise DdllmError(
                f"the logits of canvas {index}, step {step + 1} are not numbers: the weights are damaged or overflow; "
                "verify the model's files"
            )
        accepted = sampler.accept(stats.entropy, settings.entropy_bound)
        canvas = np.where(accepted, stats.sampled, _checked_ids(noise.renoise(index, step), session.config))
        mean_entropy = float(stats.entropy.mean())
        settled = sampler.is_settled(
            stats.argmax, list(argmaxes), mean_entropy, settings.stability_threshold, settings.confidence_threshold
        )
        argmaxes.append(stats.argmax)
        if on_step is not None:
            info = StepInfo(
                index,
                step,
                n,
                t,
                stats.argmax,
                stats.sampled,
                accepted,
                canvas,
                stats.entropy,
                mean_entropy,
                settled,
                time.perf_counter() - started,
            )
            if on_step(info) is False:
                return None, step + 1, settled
        if settled:
            break
    return argmaxes[-1], step + 1, settled


def _checked_ids(ids: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Ids of a NoiseSource, which may be the caller's own."""
    ids, rows, vocab = np.asarray(ids), config.canvas_length, config.vocab_size
    if ids.shape != (rows,) or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab:
        raise InputError(f"noise must give {rows} integer ids below {vocab}, got {ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int32)


def _checked_uniforms(u: np.ndarray, config: ModelConfig) -> np.ndarray:
    """float64 [canvas_length] of a NoiseSource."""
    u = np.asarray(u, dtype=np.float64)
    if u.shape != (config.canvas_length,) or not ((u >= 0) & (u <= 1)).all():
        raise InputError(f"noise must give {config.canvas_length} uniforms from 0 to 1, got shape {u.shape}")
    return u
