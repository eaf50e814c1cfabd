"""The Vulkan devices of this machine: what each is, holds and can do. Read once at start; nothing is created on them.

The names of features are those of spirv.CAPABILITY_FEATURES: what a shader needs is compared with what a device has.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from ..errors import GpuError
from .buffers import largest_buffer

TYPES = {0: "other", 1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}
#: `auto` takes the first of the first of these; a software device (type "cpu") only on request.
PREFERENCE = ("discrete", "integrated", "virtual", "other")

_VULKAN_1_1, _VULKAN_1_2, _VULKAN_1_3 = ((1 << 22) | (minor << 12) for minor in (1, 2, 3))
_COMPUTE_STAGE = 0x20
_DEVICE_LOCAL_HEAP = 1
#: what a driver that gives no figures may be asked for, of a device-local heap: the rest is the desktop's and its own
_USABLE = 0.9

# our name -> (structure, field); a structure of Vulkan 1.n is asked for where the device is 1.n
_FEATURE_FIELDS = {
    "float64": ("features", "shaderFloat64"),
    "int64": ("features", "shaderInt64"),
    "int16": ("features", "shaderInt16"),
    "storage16": ("vulkan11", "storageBuffer16BitAccess"),
    "storage8": ("vulkan12", "storageBuffer8BitAccess"),
    "float16": ("vulkan12", "shaderFloat16"),
    "int8": ("vulkan12", "shaderInt8"),
    "vulkan_memory_model": ("vulkan12", "vulkanMemoryModel"),
    "integer_dot_product": ("vulkan13", "shaderIntegerDotProduct"),
    "cooperative_matrix": ("cooperative_matrix", "cooperativeMatrix"),
}
#: bits of VkSubgroupFeatureFlagBits; they need no enabling
_SUBGROUP_BITS = {
    "subgroup_basic": 1,
    "subgroup_vote": 2,
    "subgroup_arithmetic": 4,
    "subgroup_ballot": 8,
    "subgroup_shuffle": 16,
    "subgroup_shuffle_relative": 32,
    "subgroup_clustered": 64,
    "subgroup_quad": 128,
}
_COOPERATIVE_MATRIX = "VK_KHR_cooperative_matrix"
_MEMORY_BUDGET = "VK_EXT_memory_budget"


@dataclass(frozen=True)
class Heap:
    nbytes: int
    device_local: bool
    free: int | None  #: what this process may still take, where the driver says so


@dataclass(frozen=True)
class Device:
    """One physical device, as its driver reports it. Sizes in bytes."""

    index: int  #: in the order of the Vulkan loader: what --device takes
    name: str
    type: str  #: one of TYPES
    api_version: str
    driver: str  #: its name and version, in its own words
    driver_version: int
    uuid: str
    heaps: tuple[Heap, ...]
    features: frozenset[str]
    subgroup_size: int
    max_storage_buffer_range: int
    max_allocation: int
    max_shared_memory: int
    max_push_constants: int
    max_invocations: int
    max_workgroup_size: tuple[int, int, int]
    max_workgroups: tuple[int, int, int]
    offset_alignment: int
    compute_family: int | None  #: the queue family that runs compute shaders; None: it cannot

    @property
    def title(self) -> str:
        return f"device {self.index} ({self.name})"

    @property
    def shares_host_memory(self) -> bool:
        return self.type in ("cpu", "integrated")

    @property
    def largest_buffer(self) -> int:
        return largest_buffer(self.max_storage_buffer_range, self.max_allocation)

    @property
    def memory(self) -> int:
        """Bytes of memory that buffers can lie in."""
        if self.type == "cpu":  # the heap that lavapipe reports is no limit, and the memory is the host's
            return psutil.virtual_memory().total
        return sum(heap.nbytes for heap in self.heaps if heap.device_local)


def load_vulkan() -> Any:
    """The `vulkan` package; GpuError if it or the loader library is missing."""
    try:
        import vulkan
    except ImportError as e:
        raise GpuError(f"the Python package vulkan cannot be imported ({e}); pip install vulkan") from e
    except OSError:
        raise GpuError(
            "there is no Vulkan loader (libvulkan.so.1); install it (Debian: libvulkan1) and a driver for the GPU"
        ) from None
    return vulkan


@contextlib.contextmanager
def instance() -> Iterator[Any]:
    """A VkInstance of the highest version up to 1.3, destroyed at the end."""
    vk = load_vulkan()
    handle = create_instance(vk)
    try:
        yield handle
    finally:
        vk.vkDestroyInstance(handle, None)


def create_instance(vk: Any) -> Any:
    try:
        version = min(vk.vkEnumerateInstanceVersion(), _VULKAN_1_3)
        application = vk.VkApplicationInfo(pApplicationName="ddllm_vk", apiVersion=version)
        return vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=application), None)
    except vk.VkErrorIncompatibleDriver:
        raise GpuError(
            "there is no Vulkan driver; install the GPU's (Debian: mesa-vulkan-drivers, or the maker's package)"
        ) from None
    except (vk.VkError, vk.ProcedureNotFoundError, KeyError) as e:
        raise GpuError(f"the Vulkan loader does not start ({result_name(e)})") from e


def list_devices() -> list[Device]:
    """Every Vulkan device; GpuError where there is no loader, driver or device."""
    with instance() as handle:
        vk = load_vulkan()
        found = [describe(vk, physical, i) for i, physical in enumerate(physical_devices(vk, handle))]
    if not found:
        raise GpuError("the Vulkan drivers that are installed find no device")
    return found


def physical_devices(vk: Any, handle: Any) -> list[Any]:
    try:
        return list(vk.vkEnumeratePhysicalDevices(handle))
    except (vk.VkError, KeyError) as e:
        raise GpuError(f"the Vulkan drivers that are installed find no device ({result_name(e)})") from e


def pick(devices: list[Device], index: int | None) -> Device:
    """The device of that index; for None the first GPU, never a software device: GpuError where there is none."""
    if index is not None:
        if not 0 <= index < len(devices):
            known = "; ".join(f"{d.index}: {d.name}" for d in devices)
            raise GpuError(f"there is no Vulkan device {index}; there are {known}")
        return devices[index]
    for wanted in PREFERENCE:
        for device in devices:
            if device.type == wanted and device.compute_family is not None:
                return device
    names = ", ".join(f"{d.index}: {d.name}" for d in devices)
    raise GpuError(f"there is no GPU, only software devices ({names}); ask for one by its index to use it all the same")


def free_bytes(device: Device, allocated: int, heaps: list[Heap]) -> int:
    """Bytes that buffers may still take. allocated: what our own hold already; heaps: as they are now."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    local = [heap for heap in heaps if heap.device_local]
    told = [heap.free for heap in local if heap.free is not None]
    guess = sum(int(heap.nbytes * _USABLE) for heap in local) - allocated
    free = sum(told) if told and len(told) == len(local) else guess
    return min(free, psutil.virtual_memory().available) if device.type == "integrated" else free


def heaps_now(index: int) -> list[Heap]:
    """The heaps of device `index` as they are now, asked through an instance of its own."""
    with instance() as handle:
        vk = load_vulkan()
        physical = physical_devices(vk, handle)[index]
        return heaps(vk, physical, extensions_of(vk, physical))


def describe(vk: Any, physical: Any, index: int) -> Device:
    """The Device of a VkPhysicalDevice."""
    extensions = extensions_of(vk, physical)
    properties = vk.vkGetPhysicalDeviceProperties(physical)
    limits = properties.limits
    maintenance = vk.VkPhysicalDeviceMaintenance3Properties()
    subgroup = vk.VkPhysicalDeviceSubgroupProperties(pNext=maintenance)
    identity = last = vk.VkPhysicalDeviceIDProperties(pNext=subgroup)
    driver = None
    if properties.apiVersion >= _VULKAN_1_2:
        driver = last = vk.VkPhysicalDeviceDriverProperties(pNext=last)
    if properties.apiVersion >= _VULKAN_1_1:
        vk.vkGetPhysicalDeviceProperties2(physical, vk.VkPhysicalDeviceProperties2(pNext=last))
    families = vk.vkGetPhysicalDeviceQueueFamilyProperties(physical)
    compute = [i for i, family in enumerate(families) if family.queueFlags & vk.VK_QUEUE_COMPUTE_BIT]
    old = properties.apiVersion < _VULKAN_1_1
    return Device(
        index=index,
        name=properties.deviceName,
        type=TYPES.get(properties.deviceType, "other"),
        api_version=version_text(properties.apiVersion),
        driver=f"{_text(driver.driverName)} {_text(driver.driverInfo)}".strip() if driver else "",
        driver_version=properties.driverVersion,
        uuid=bytes(identity.deviceUUID).hex(),
        heaps=tuple(heaps(vk, physical, extensions)),
        features=frozenset() if old else _features(vk, physical, properties.apiVersion, extensions, subgroup),
        subgroup_size=subgroup.subgroupSize,
        max_storage_buffer_range=limits.maxStorageBufferRange,
        max_allocation=maintenance.maxMemoryAllocationSize or 2**30,
        max_shared_memory=limits.maxComputeSharedMemorySize,
        max_push_constants=limits.maxPushConstantsSize,
        max_invocations=limits.maxComputeWorkGroupInvocations,
        max_workgroup_size=tuple(limits.maxComputeWorkGroupSize),
        max_workgroups=tuple(limits.maxComputeWorkGroupCount),
        offset_alignment=limits.minStorageBufferOffsetAlignment,
        compute_family=None if old or not compute else compute[0],
    )


def _text(characters: Any) -> str:
    return load_vulkan().ffi.string(characters).decode(errors="replace")


def version_text(version: int) -> str:
    return f"{version >> 22 & 0x7F}.{version >> 12 & 0x3FF}.{version & 0xFFF}"


def result_name(error: BaseException) -> str:
    """A VkResult for a message: the `vulkan` package raises classes, or KeyError for a result it does not know."""
    return f"VkResult {error}" if isinstance(error, KeyError) else type(error).__name__


def feature_structures(vk: Any, api_version: int, extensions: set[str]) -> dict[str, Any]:
    """The structures of _FEATURE_FIELDS that this device knows, chained; "features2" heads the chain."""
    chain: dict[str, Any] = {}
    last = None
    if _COOPERATIVE_MATRIX in extensions:
        last = chain["cooperative_matrix"] = vk.VkPhysicalDeviceCooperativeMatrixFeaturesKHR(pNext=last)
    if api_version >= _VULKAN_1_3:
        last = chain["vulkan13"] = vk.VkPhysicalDeviceVulkan13Features(pNext=last)
    if api_version >= _VULKAN_1_2:
        last = chain["vulkan12"] = vk.VkPhysicalDeviceVulkan12Features(pNext=last)
        last = chain["vulkan11"] = vk.VkPhysicalDeviceVulkan11Features(pNext=last)
    chain["features2"] = vk.VkPhysicalDeviceFeatures2(pNext=last)
    chain["features"] = chain["features2"].features
    return chain


def enable_features(vk: Any, physical: Any, names: frozenset[str]) -> tuple[Any, list[str]]:
    """What vkCreateDevice needs to enable the features `names`: the head of the chain and the extensions."""
    extensions = extensions_of(vk, physical)
    chain = feature_structures(vk, vk.vkGetPhysicalDeviceProperties(physical).apiVersion, extensions)
    for name in names & set(_FEATURE_FIELDS):
        structure, field = _FEATURE_FIELDS[name]
        setattr(chain[structure], field, 1)
    return chain["features2"], [_COOPERATIVE_MATRIX] if "cooperative_matrix" in names else []


def _features(vk: Any, physical: Any, api_version: int, extensions: set[str], subgroup: Any) -> frozenset[str]:
    chain = feature_structures(vk, api_version, extensions)
    vk.vkGetPhysicalDeviceFeatures2(physical, chain["features2"])
    found = {
        name
        for name, (structure, field) in _FEATURE_FIELDS.items()
        if structure in chain and getattr(chain[structure], field)
    }
    if subgroup.supportedStages & _COMPUTE_STAGE:
        found |= {name for name, bit in _SUBGROUP_BITS.items() if subgroup.supportedOperations & bit}
    return frozenset(found)


def extensions_of(vk: Any, physical: Any) -> set[str]:
    return {e.extensionName for e in vk.vkEnumerateDeviceExtensionProperties(physical, None)}


def heaps(vk: Any, physical: Any, extensions: set[str]) -> list[Heap]:
    memory = vk.vkGetPhysicalDeviceMemoryProperties(physical)
    free: list[int | None] = [None] * memory.memoryHeapCount
    if _MEMORY_BUDGET in extensions:
        budget = vk.VkPhysicalDeviceMemoryBudgetPropertiesEXT()
        vk.vkGetPhysicalDeviceMemoryProperties2(physical, vk.VkPhysicalDeviceMemoryProperties2(pNext=budget))
        free = [max(budget.heapBudget[i] - budget.heapUsage[i], 0) for i in range(memory.memoryHeapCount)]
    found = [memory.memoryHeaps[i] for i in range(memory.memoryHeapCount)]
    return [Heap(h.size, bool(h.flags & _DEVICE_LOCAL_HEAP), f) for h, f in zip(found, free, strict=True)]
