"""Opening a device with the runtime that suits it: the one place where a runtime is chosen."""

from ..errors import GpuError, InputError
from .devices import Device, list_devices, pick
from .kompute_runtime import KomputeRuntime
from .runtime import Runtime
from .selftest import Verdict, check_drivers, judge
from .vulkan_runtime import VulkanRuntime

RUNTIMES: dict[str, type[VulkanRuntime] | type[KomputeRuntime]] = {"vulkan": VulkanRuntime, "kompute": KomputeRuntime}
CHOICES = ("auto", *RUNTIMES)
#: `auto` takes the earlier of RUNTIMES unless a later one is faster by this factor: the direct one can use features
#: (integer dot product, float16) that the self-test does not time.
CLEARLY_FASTER = 1.2


def open_runtime(device: int | None = None, choice: str = "auto") -> Runtime:
    """The Vulkan device of that index (None: the first GPU, never a software device) with the runtime `choice`; "auto"
    takes the best of those that pass the self-test. GpuError says what is missing or what failed."""
    if choice not in CHOICES:
        raise InputError(f"gpu_runtime={choice!r} is not known; use one of {', '.join(CHOICES)}")
    check_drivers()
    chosen = pick(list_devices(), device)
    verdicts = {name: judge(chosen, name) for name in RUNTIMES if choice in ("auto", name)}
    return RUNTIMES[best(chosen, verdicts)](chosen)


def best(device: Device, verdicts: dict[str, Verdict]) -> str:
    """The runtime that is clearly faster, else the first that is usable; GpuError if none is."""
    usable = {name: verdict.seconds for name, verdict in verdicts.items() if verdict.usable}
    if not usable:
        reasons = "; ".join(f"{name}: {verdict.reason}" for name, verdict in verdicts.items())
        raise GpuError(f"{device.title} cannot be used ({reasons})")
    fastest = min(usable.values())
    return next(name for name, seconds in usable.items() if seconds <= CLEARLY_FASTER * fastest)
