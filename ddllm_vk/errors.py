"""The one exception family. A message says what is wrong, where (file, tensor, option, node), and what to do."""


class DdllmError(Exception):
    """Base of every error this package raises on purpose; the command line prints it as one line and exits 1."""


class ConfigError(DdllmError):
    """A config.json or generation_config.json that is broken or describes something unsupported."""


class CheckpointError(DdllmError):
    """A model folder or weight file that is missing, truncated, inconsistent or not writable."""


class TokenizerError(DdllmError):
    """A tokenizer or chat template that is missing or broken."""


class InputError(DdllmError):
    """An argument of the caller that cannot be used: prompt, count, option."""


class GpuError(DdllmError):
    """A Vulkan device, driver, runtime or shader that is missing, refused, too small, or that failed while running."""
