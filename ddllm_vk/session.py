"""Session: one KV cache over a model's weights, and the passes a caller can run on it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .cache import ENCODER_CHUNK, KVCache
from .config import ModelConfig
from .errors import InputError
from .model import ModelWeights, canvas_pass, encoder_pass
from .ops import Array, HeadStatistics, Ops

#: (tokens done, tokens in all) of one call of encode, after each pass; returning False ends it there
OnEncode = Callable[[int, int], Any]


class Session:
    """Holds the context of one conversation. Passes of sessions of one model take turns (`lock`).

    kv_cache: what keys and values are stored as, one of cache.FORMATS.
    """

    def __init__(self, ops: Ops, weights: ModelWeights, config: ModelConfig, kv_cache: str, lock: threading.RLock):
        self.ops, self.config, self.lock = ops, config, lock
        with lock:
            self._held: tuple[ModelWeights, KVCache] | None = weights, KVCache(ops, config, kv_cache)
        self._soft: Array | None = None
        self._soft_memory: Array | None = None  #: what _soft was last, to be used again

    @property
    def weights(self) -> ModelWeights:
        return self._open()[0]

    @property
    def cache(self) -> KVCache:
        return self._open()[1]

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return self.cache.length

    def reset(self) -> None:
        """Empties the cache; keeps its memory."""
        self.cache.reset()
        self._soft = None

    def close(self) -> None:
        """Lets go of the model's weights and of the cache; called by Model.close."""
        with self.lock:
            self._held = self._soft = self._soft_memory = None

    def _open(self) -> tuple[ModelWeights, KVCache]:
        if self._held is None:
            raise InputError("the session's model was closed; load it again")
        return self._held

    def encode(self, ids: Sequence[int] | np.ndarray, on_encode: OnEncode | None = None) -> bool:
        """Causal passes over ids, 1-D ints below vocab_size, which extend the cache. Raises InputError for anything
        else. Returns False if `on_encode` ended it; the cache then holds the tokens done so far."""
        ids = _token_ids(ids, self.config, "ids")
        context = self.config.max_position_embeddings
        if self.length + len(ids) > context:
            raise InputError(
                f"{len(ids)} tokens after {self.length} exceed the model's context of {context}: shorten the prompt"
            )
        with self.lock:
            self.cache.grow(self.length + len(ids))
        for start in range(0, len(ids), ENCODER_CHUNK):
            chunk = ids[start : start + ENCODER_CHUNK]
            with self.lock:
                encoder_pass(self.ops, self.weights, self.config, self.cache, chunk)
            if on_encode is not None and on_encode(start + len(chunk), len(ids)) is False:
                return False
        return True

    def fill_with_random_context(self, length: int, seed: int = 0) -> None:
        """Replaces the context by `length` positions of random keys and values: to time passes after a long prompt
        without encoding one. What the passes compute then means nothing."""
        if not 0 <= length <= self.config.max_position_embeddings:
            raise InputError(f"length must be 0 to {self.config.max_position_embeddings} tokens, not {length}")
        with self.lock:
            self.cache.fill(length, seed)
        self._soft = None

    def canvas_logits(
        self, canvas: Sequence[int] | np.ndarray, self_conditioning: np.ndarray | None = None
    ) -> np.ndarray:
        """float32 [canvas_length, vocab_size], softcapped, not temperature-scaled; the cache stays as it was.

        self_conditioning: float32 logits of the same shape, temperature-scaled, of the step before; None in the first.
        """
        ids = self._canvas_ids(canvas)
        scale = self.config.hidden_size**0.5
        with self.lock, self.ops.scope():
            soft = None
            if self_conditioning is not None:
                z = np.ascontiguousarray(self_conditioning, dtype=np.float32)
                if z.shape != (len(ids), self.config.vocab_size):
                    raise InputError(
                        f"self_conditioning must have shape {(len(ids), self.config.vocab_size)}, not {z.shape}"
                    )
                if not np.isfinite(z).all():
                    raise InputError("self_conditioning holds values that are not finite")
                soft = self.ops.soft_embedding_of_logits(z, self.weights.embed_tokens, scale)
            y = canvas_pass(self.ops, self.weights, self.config, self.cache, ids, soft)
            return self.ops.head_logits(y, self.weights.embed_tokens, self.config.final_logit_softcapping)

    def begin_canvas(self) -> None:
        """Forgets the self-conditioning of the canvas before."""
        self._soft = None

    def canvas_step(
        self, canvas: np.ndarray, temperature: float, uniforms: np.ndarray, forbidden_at_row_0: Sequence[int] = ()
    ) -> HeadStatistics:
        """One production pass: statistics of the logits at `temperature`, and the self-conditioning of the next step
        kept on the device. uniforms: float64 [canvas_length]. The forbidden ids are excluded at row 0 from the
        statistics only, not from what the next step is conditioned on."""
        ids, rows = self._canvas_ids(canvas), self.config.canvas_length
        if uniforms.shape != (rows,):
            raise InputError(f"uniforms must have shape ({rows},), not {uniforms.shape}")
        guarded = len(forbidden_at_row_0) > 0
        with self.lock, self.ops.scope():
            y = canvas_pass(self.ops, self.weights, self.config, self.cache, ids, self._soft)
            if guarded:  # row 0 twice: as it is for self-conditioning, and with the ids forbidden for sampling
                y = self.ops.append_row(y, 0)
                uniforms = np.append(uniforms, uniforms[0])
            stats = self.ops.head_statistics(
                y,
                self.weights.embed_tokens,
                self.config.final_logit_softcapping,
                temperature,
                uniforms,
                rows if guarded else -1,
                forbidden_at_row_0,
            )
            scale = self.config.hidden_size**0.5
            self._soft = self._soft_memory = self.ops.soft_embedding(stats, rows, scale, self._soft_memory)
        if guarded:
            for values in (stats.argmax, stats.sampled, stats.entropy):
                values[0] = values[rows]
            stats.argmax, stats.sampled = stats.argmax[:rows], stats.sampled[:rows]
            stats.entropy = stats.entropy[:rows]
        return stats

    def _canvas_ids(self, canvas: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = _token_ids(canvas, self.config, "canvas")
        if len(ids) != self.config.canvas_length:
            raise InputError(f"canvas must have {self.config.canvas_length} ids, not {len(ids)}")
        if self.length + len(ids) > self.config.max_position_embeddings:
            raise InputError(
                f"a canvas after {self.length} tokens exceeds the model's context of "
                f"{self.config.max_position_embeddings}: shorten the prompt"
            )
        return ids


def _token_ids(ids: Sequence[int] | np.ndarray, config: ModelConfig, name: str) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or len(array) == 0 or not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{name} must be a non-empty 1-D sequence of integer token ids")
    if array.min() < 0 or array.max() >= config.vocab_size:
        raise InputError(
            f"{name} holds token id {int(array.max() if array.min() >= 0 else array.min())}; the "
            f"vocabulary has {config.vocab_size}"
        )
    return np.ascontiguousarray(array, dtype=np.int32)
