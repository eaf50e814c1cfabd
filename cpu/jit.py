"""The decorator of every compiled kernel, and where its object code is kept.

numba's cache key covers a kernel's own file, not the generator that emits its inner loops nor the chosen instruction
set, and would run a stale kernel silently. So the folder's name is a digest of everything that shapes the code.
"""

# numba comes without type information.
# pyright: reportAttributeAccessIssue=false

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import config, event
from numba.core.registry import cpu_target

from ddllm_vk.cpu import isa


def _digest() -> str:
    parts = [
        numba.__version__,
        llvmlite.__version__,
        isa.ACTIVE.name,
        *map(str, cpu_target.target_context.codegen().magic_tuple()),
    ]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> str:
    """A writable folder for these sources and this target; under the temporary folder if the home is not writable."""
    name = _digest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddllm_vk" / "kernels"
    with contextlib.suppress(OSError):
        (base / name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=base / name):
            return str(base / name)
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    fallback = Path(tempfile.gettempdir()) / f"ddllm_vk-{user}"
    try:
        fallback.mkdir(mode=0o700, exist_ok=True)
        # Object code is loaded from here: never from a folder somebody else made.
        if not hasattr(os, "getuid") or fallback.stat().st_uid == os.getuid():
            (fallback / name).mkdir(exist_ok=True)
            return str(fallback / name)
    except OSError:
        pass
    return tempfile.mkdtemp(prefix="ddllm_vk-")


CACHE_FOLDER = _cache_folder()

#: Every kernel of the modules imported so far; `signatures` of one that has been neither compiled nor loaded is empty.
KERNELS: list[Any] = []


def is_cold() -> bool:
    """Whether no kernel of this installation has been compiled for this machine yet."""
    return not any(Path(CACHE_FOLDER).rglob("*.nbi"))


@contextlib.contextmanager
def _our_cache() -> Iterator[None]:
    """numba reads its settings when a function is decorated; those of other libraries stay as they are."""
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES if hasattr(config, "CACHE_LOCATOR_CLASSES") else None
    config.CACHE_DIR = CACHE_FOLDER
    if before[1]:
        config.CACHE_LOCATOR_CLASSES = ""
    try:
        yield
    finally:
        config.CACHE_DIR = before[0]
        if before[1]:
            config.CACHE_LOCATOR_CLASSES = before[1]


def kernel(function: Callable) -> Callable:
    """Compile `function` at its first call, without the GIL, cached. The code may fuse a*b + c but reorders nothing:
    sums that need an order other than left to right are emitted with that order (intrinsics.py, emit.py)."""
    with _our_cache():
        compiled = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})(function)
    _survive_damage(compiled)
    KERNELS.append(compiled)
    return compiled


class _OnCompile(event.Listener):
    def __init__(self, call: Callable[[str], object]) -> None:
        self.call = call

    def on_start(self, event: event.Event) -> None:
        if event.data["dispatcher"] in KERNELS:  # numba compiles functions of its own too
            self.call(event.data["dispatcher"].__name__.lstrip("_"))

    def on_end(self, event: event.Event) -> None:
        pass


def compilations(call: Callable[[str], object]) -> contextlib.AbstractContextManager[None]:
    """Inside, `call` gets the name of each kernel that is compiled because the cache does not have it, beforehand."""
    return event.install_listener("numba:compile", _OnCompile(call))


def _survive_damage(compiled: Callable) -> None:
    """Let a damaged cache file cost a compilation, not the program: numba itself fails on one."""
    cache = getattr(compiled, "_cache", None)
    load = getattr(cache, "load_overload", None)
    if cache is None or load is None:
        return

    def load_or_forget(*args: object) -> object:
        try:
            return load(*args)
        except Exception:
            cache.flush()
            return None

    cache.load_overload = load_or_forget
