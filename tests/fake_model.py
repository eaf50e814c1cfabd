"""A model whose passes cost nothing: tests of the command line without weights. Run as a script it is the command line.

The reply, the steps it takes and the pace come from the environment: FAKE_REPLY, FAKE_STEPS, FAKE_STEP_SECONDS,
FAKE_CHUNK_SECONDS. With FAKE_ANNOUNCE each step is told on stderr.
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import ddllm_vk
from ddllm_vk.config import GenerationDefaults, load_config
from ddllm_vk.loader import Model
from ddllm_vk.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parent / "oracle" / "case_1_base" / "checkpoint"


class FakeSession:
    """Settles a canvas on the next part of the reply: each step one more share of its rows."""

    def __init__(self, config: Any, reply: list[int], steps: int, step_seconds: float):
        self.config, self.reply, self.steps, self.step_seconds = config, reply, steps, step_seconds
        self.canvas, self.step, self.length = -1, 0, 0
        self.cache = SimpleNamespace(nbytes=1000)

    def reset(self) -> None:
        self.canvas, self.length = -1, 0

    def encode(self, ids: np.ndarray, on_encode: Any = None) -> bool:
        """As long as FAKE_CHUNK_SECONDS for every 16 tokens."""
        for start in range(0, len(ids), 16):
            time.sleep(float(os.environ.get("FAKE_CHUNK_SECONDS", "0")))
            done = min(start + 16, len(ids))
            if on_encode is not None and on_encode(done, len(ids)) is False:
                return False
        self.length += len(ids)
        return True

    def fill_with_random_context(self, length: int) -> None:
        self.canvas, self.length = -1, length

    def begin_canvas(self) -> None:
        self.canvas, self.step = self.canvas + 1, 0

    def canvas_step(self, canvas: np.ndarray, temperature: float, uniforms: np.ndarray, forbidden: Any = ()) -> Any:
        if "FAKE_ANNOUNCE" in os.environ:
            os.write(2, b"a step begins\n")
        time.sleep(self.step_seconds)
        rows = self.config.canvas_length
        self.step += 1
        target = np.zeros(rows, dtype=np.int32)
        part = self.reply[self.canvas * rows : (self.canvas + 1) * rows]
        target[: len(part)] = part
        settled = np.arange(rows) < rows * self.step / self.steps
        argmax = np.where(settled, target, canvas).astype(np.int32)
        return SimpleNamespace(argmax=argmax, sampled=argmax.copy(), entropy=np.where(settled, 0.0, 3.0))


class FakeModel(Model):
    def __init__(self, path: Path, reply: str, steps: int, step_seconds: float):
        config = load_config(path)
        defaults = GenerationDefaults(max_new_tokens=64, eos_token_ids=(1, 6))
        super().__init__(path, config, defaults, Tokenizer.from_folder(path), None, None, 1000, "f16")
        self.reply = self.tokenizer.encode(reply, add_special_tokens=False)
        self.steps, self.step_seconds = steps, step_seconds

    def session(self) -> Any:
        return FakeSession(self.config, self.reply, self.steps, self.step_seconds)


def load_model(path: Any, progress: Any = None, **choices: Any) -> FakeModel:
    if progress is not None:
        progress(1, 2)
    return FakeModel(
        CHECKPOINT,
        os.environ.get("FAKE_REPLY", "the sky is blue<turn|>"),
        int(os.environ.get("FAKE_STEPS", "3")),
        float(os.environ.get("FAKE_STEP_SECONDS", "0")),
    )


if __name__ == "__main__":
    from ddllm_vk.__main__ import main

    ddllm_vk.load_model = load_model
    sys.exit(main())
