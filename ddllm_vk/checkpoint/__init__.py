"""Model folders on disk: reading (safetensors, Hugging Face or converted), converting, inventing, describing.

Knows names, shapes and formats of stored tensors; knows nothing of how they are computed with.
"""

from .layout import TensorSpec, expected_tensors
from .reader import Checkpoint, StoredTensor, open_checkpoint

__all__ = ["Checkpoint", "StoredTensor", "TensorSpec", "expected_tensors", "open_checkpoint"]
