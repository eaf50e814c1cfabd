"""The sampler's decisions as functions of values (MODEL.md, Denoising one canvas). Nothing here keeps state."""

from collections.abc import Sequence

import numpy as np


def temperature(steps_left: int, max_steps: int, t_min: float, t_max: float) -> float:
    """Temperature of the step with `steps_left` = N..1 to go, itself included."""
    return t_min + (t_max - t_min) * steps_left / max_steps


def accept(entropy: np.ndarray, entropy_bound: float) -> np.ndarray:
    """entropy: float [L], nats -> bool [L]: rows by ascending entropy while the sum of those before stays within the
    bound; the first row always. Equal entropies in row order."""
    order = np.argsort(entropy, kind="stable")
    ascending = entropy[order]
    before = np.cumsum(ascending) - ascending
    take = before <= entropy_bound
    take[0] = True
    accepted = np.zeros(len(entropy), dtype=bool)
    accepted[order[take]] = True
    return accepted


def is_settled(
    argmax: np.ndarray,
    previous: Sequence[np.ndarray],
    mean_entropy: float,
    stability_threshold: int,
    confidence_threshold: float,
) -> bool:
    """True when the argmax canvas equals each of the last `stability_threshold` ones before it and the mean entropy is
    strictly below the threshold. previous: argmax canvases of this canvas's earlier steps, oldest first."""
    if len(previous) < stability_threshold or not mean_entropy < confidence_threshold:
        return False
    recent = previous[len(previous) - stability_threshold :]
    return all(np.array_equal(argmax, p) for p in recent)


def finalize(argmax: np.ndarray, eos_token_ids: Sequence[int], pad_token_id: int) -> tuple[np.ndarray, int | None]:
    """The finished canvas: everything after the first end-of-sequence is padding. Returns it and that token's row."""
    ends = np.flatnonzero(np.isin(argmax, list(eos_token_ids)))
    ids = argmax.copy()
    if len(ends) == 0:
        return ids, None
    ids[ends[0] + 1 :] = pad_token_id
    return ids, int(ends[0])
