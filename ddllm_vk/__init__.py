"""ddllm_vk: diffusion language models on hardware people own.

The public API is what this module exports; everything else may change.
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING

# Run from a checkout's root, Python finds this folder first, and `ddllm_vk.cpu` and `ddllm_vk.net` lie beside it.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "cpu" / "__init__.py").is_file():
    __path__.append(str(_root))

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import GenerationDefaults, ModelConfig
    from .diffusion import Canvas, GenerationConfig, GenerationStats, Result, StepInfo
    from .errors import CheckpointError, ConfigError, DdllmError, GpuError, InputError, TokenizerError
    from .loader import Model, load_model
    from .noise import NoiseSource, PhiloxNoise
    from .session import Session

_PUBLIC = {
    "Canvas": ".diffusion",
    "CheckpointError": ".errors",
    "ConfigError": ".errors",
    "DdllmError": ".errors",
    "GenerationConfig": ".diffusion",
    "GenerationDefaults": ".config",
    "GenerationStats": ".diffusion",
    "GpuError": ".errors",
    "InputError": ".errors",
    "Model": ".loader",
    "ModelConfig": ".config",
    "NoiseSource": ".noise",
    "PhiloxNoise": ".noise",
    "Result": ".diffusion",
    "Session": ".session",
    "StepInfo": ".diffusion",
    "TokenizerError": ".errors",
    "load_model": ".loader",
}

__all__ = [
    "Canvas",
    "CheckpointError",
    "ConfigError",
    "DdllmError",
    "GenerationConfig",
    "GenerationDefaults",
    "GenerationStats",
    "GpuError",
    "InputError",
    "Model",
    "ModelConfig",
    "NoiseSource",
    "PhiloxNoise",
    "Result",
    "Session",
    "StepInfo",
    "TokenizerError",
    "load_model",
]


def __getattr__(name: str):
    """The public names, imported on first use: `import ddllm_vk` and `--help` stay instant."""
    from importlib import import_module

    if name in _PUBLIC:
        value = getattr(import_module(_PUBLIC[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
