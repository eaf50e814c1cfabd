"""The `vulkan` runtime: direct calls through the `vulkan` package, which needs no compiler and releases the GIL.

Each program is one command buffer; barriers stand where plan_barriers puts them; descriptors cover exactly the slices.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import GpuError
from .buffers import Buffer
from .devices import (
    Device,
    Heap,
    create_instance,
    enable_features,
    extensions_of,
    heaps,
    load_vulkan,
    physical_devices,
    result_name,
)
from .program import Program, plan_barriers
from .runtime import STAGE_BYTES, Recording, Runtime
from .shaders import Shader

#: Seconds a submission may take: longer than any pass on a software device, so that a hung GPU ends in a message.
RUN_LIMIT = 900.0
_POLL = 200_000_000  # nanoseconds of one wait: between two, Python sees signals


class VulkanRecording(Recording):
    runtime: "VulkanRuntime"

    def __init__(self, runtime: "VulkanRuntime", program: Program):
        super().__init__(runtime, program)
        self._commands, self._descriptors = runtime.record_commands(program)

    def _run(self) -> None:
        self.runtime.submit(self._commands)

    def _free(self) -> None:
        self.runtime.free_commands(self._commands, self._descriptors)


class VulkanRuntime(Runtime):
    name = "vulkan"

    def __init__(self, device: Device, direct: bool | None = None):
        super().__init__(device, device.features, direct)
        if device.compute_family is None:
            raise GpuError(f"{device.title} cannot run compute shaders with Vulkan 1.1")
        self.vk = vk = load_vulkan()
        self._stage: Buffer | None = None
        self._instance = create_instance(vk)
        self._physical = physical_devices(vk, self._instance)[device.index]
        self._memory = vk.vkGetPhysicalDeviceMemoryProperties(self._physical)
        self._extensions = extensions_of(vk, self._physical)
        chain, extensions = enable_features(vk, self._physical, self.features)
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=device.compute_family, queueCount=1, pQueuePriorities=[1.0])
        create = vk.VkDeviceCreateInfo(
            pNext=chain, pQueueCreateInfos=[queue], ppEnabledExtensionNames=extensions, enabledLayerCount=0
        )
        with self._translated("cannot be opened"):
            self._device = vk.vkCreateDevice(self._physical, create, None)
            self._queue = vk.vkGetDeviceQueue(self._device, device.compute_family, 0)
            pool = vk.VkCommandPoolCreateInfo(
                flags=vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT, queueFamilyIndex=device.compute_family
            )
            self._command_pool = vk.vkCreateCommandPool(self._device, pool, None)
            self._transfer = self._new_commands()
            self._fence = vk.vkCreateFence(self._device, vk.VkFenceCreateInfo(), None)
        self._modules: list[tuple[Any, Any, Any]] = []  # (pipeline, layout, set layout)

    # Memory

    def _heaps(self) -> list[Heap]:
        return heaps(self.vk, self._physical, self._extensions)

    def _allocate(self, nbytes: int, host: bool) -> Buffer:
        vk = self.vk
        usage = (
            vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        )
        visible = host or self.direct
        with self._translated(f"cannot allocate a buffer of {nbytes} bytes"):
            buffer = vk.vkCreateBuffer(self._device, vk.VkBufferCreateInfo(size=nbytes, usage=usage), None)
            try:
                needs = vk.vkGetBufferMemoryRequirements(self._device, buffer)
                kind = self._memory_type(needs.memoryTypeBits, visible, host)
                allocate = vk.VkMemoryAllocateInfo(allocationSize=needs.size, memoryTypeIndex=kind)
                memory = vk.vkAllocateMemory(self._device, allocate, None)
            except BaseException:
                vk.vkDestroyBuffer(self._device, buffer, None)
                raise
            vk.vkBindBufferMemory(self._device, buffer, memory, 0)
            mapped = None
            if visible:
                mapped = np.frombuffer(vk.vkMapMemory(self._device, memory, 0, nbytes, 0), dtype=np.uint8)
        return Buffer(nbytes, host, (buffer, memory), mapped)

    def _memory_type(self, allowed: int, visible: bool, host: bool) -> int:
        """The memory type that is best for the purpose: device memory, or such that the host sees without flushes."""
        vk = self.vk
        local = vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
        seen = vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
        cached = vk.VK_MEMORY_PROPERTY_HOST_CACHED_BIT
        wishes = (
            ([seen | cached, seen] if host else [local | seen | cached, local | seen, seen]) if visible else [local, 0]
        )
        for wish in wishes:
            for i in range(self._memory.memoryTypeCount):
                if allowed >> i & 1 and self._memory.memoryTypes[i].propertyFlags & wish == wish:
                    return i
        raise GpuError(f"{self.device.title} has no memory of the kind that is needed")

    def _free(self, buffer: Buffer) -> None:
        handle, memory = buffer.handle
        self.vk.vkDestroyBuffer(self._device, handle, None)
        self.vk.vkFreeMemory(self._device, memory, None)

    def _stage_in(self, buffer: Buffer, offset: int, data: np.ndarray) -> None:
        size = -(-data.size // 4) * 4
        stage = self._staging()
        stage[: data.size] = data
        stage[data.size : size] = 0
        self._copy(self._stage.handle[0], 0, buffer.handle[0], offset, size)  # type: ignore[union-attr]

    def _stage_out(self, buffer: Buffer, offset: int, out: np.ndarray) -> None:
        stage = self._staging()
        self._copy(buffer.handle[0], offset, self._stage.handle[0], 0, out.size)  # type: ignore[union-attr]
        out[:] = stage[: out.size]

    def _staging(self) -> np.ndarray:
        if self._stage is None or self._stage.freed:
            self._stage = self.allocate(min(STAGE_BYTES, self.largest_buffer), host=True)
        return self._stage.array(np.uint8)

    def _copy(self, source: Any, source_at: int, target: Any, target_at: int, size: int) -> None:
        vk, commands = self.vk, self._transfer
        with self._recording(commands):
            self._barrier(commands, vk.VK_PIPELINE_STAGE_TRANSFER_BIT)
            region = vk.VkBufferCopy(srcOffset=source_at, dstOffset=target_at, size=size)
            vk.vkCmdCopyBuffer(commands, source, target, 1, [region])
            self._barrier(commands, vk.VK_PIPELINE_STAGE_HOST_BIT)
        self.submit(commands)

    # Pipelines

    def _create_pipeline(self, shader: Shader, constants: Mapping[str, int | float]) -> Any:
        vk, ffi = self.vk, self.vk.ffi
        types = {"uint": np.uint32, "int": np.int32, "float": np.float32}
        words = b"".join(types[c.type](constants[c.name]).tobytes() for c in shader.constants)
        with self._translated(f"cannot compile the shader {shader.name}"):
            module_info = vk.VkShaderModuleCreateInfo(codeSize=len(shader.spirv), pCode=shader.spirv)
            module = vk.vkCreateShaderModule(self._device, module_info, None)
            bindings = [
                vk.VkDescriptorSetLayoutBinding(
                    binding=i,
                    descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                    descriptorCount=1,
                    stageFlags=vk.VK_SHADER_STAGE_COMPUTE_BIT,
                )
                for i in range(len(shader.bindings))
            ]
            set_info = vk.VkDescriptorSetLayoutCreateInfo(pBindings=bindings)
            set_layout = vk.vkCreateDescriptorSetLayout(self._device, set_info, None)
            size = 4 * len(shader.push_constants)
            ranges = [vk.VkPushConstantRange(stageFlags=vk.VK_SHADER_STAGE_COMPUTE_BIT, offset=0, size=size)]
            layout_info = vk.VkPipelineLayoutCreateInfo(
                pSetLayouts=[set_layout], pPushConstantRanges=ranges if size else []
            )
            layout = vk.vkCreatePipelineLayout(self._device, layout_info, None)
            specialisation = None
            if words:
                entries = [vk.VkSpecializationMapEntry(i, 4 * i, 4) for i in range(len(shader.constants))]
                data = ffi.from_buffer(words)
                specialisation = vk.VkSpecializationInfo(pMapEntries=entries, dataSize=len(words), pData=data)
            stage = vk.VkPipelineShaderStageCreateInfo(
                stage=vk.VK_SHADER_STAGE_COMPUTE_BIT, module=module, pName="main", pSpecializationInfo=specialisation
            )
            create = vk.VkComputePipelineCreateInfo(stage=stage, layout=layout, basePipelineIndex=-1)
            pipeline = vk.vkCreateComputePipelines(self._device, None, 1, [create], None)[0]
            vk.vkDestroyShaderModule(self._device, module, None)
        self._modules.append((pipeline, layout, set_layout))
        return pipeline, layout, set_layout

    # Programs

    def _record(self, program: Program) -> VulkanRecording:
        return VulkanRecording(self, program)

    def record_commands(self, program: Program) -> tuple[Any, Any]:
        """Command buffer and descriptor pool of a program."""
        vk = self.vk
        point, compute = vk.VK_PIPELINE_BIND_POINT_COMPUTE, vk.VK_SHADER_STAGE_COMPUTE_BIT
        with self._translated("cannot record a program"):
            pool, sets = self._descriptor_sets(program)
            commands = self._new_commands()
            plan = plan_barriers(program.dispatches)
            plan[0] = True  # what was uploaded, or left by the run before
            with self._recording(commands):
                for dispatch, barrier, (descriptors, origins) in zip(program.dispatches, plan, sets, strict=True):
                    pipeline, layout, _ = dispatch.pipeline.handle
                    if barrier:
                        self._barrier(commands, vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT)
                    vk.vkCmdBindPipeline(commands, point, pipeline)
                    vk.vkCmdBindDescriptorSets(commands, point, layout, 0, 1, [descriptors], 0, None)
                    push = dispatch.push_bytes(origins)
                    if push:
                        vk.vkCmdPushConstants(commands, layout, compute, 0, len(push), vk.ffi.from_buffer(push))
                    vk.vkCmdDispatch(commands, *dispatch.groups)
                self._barrier(commands, vk.VK_PIPELINE_STAGE_HOST_BIT)
        return commands, pool

    def _descriptor_sets(self, program: Program) -> tuple[Any, list[tuple[Any, list[int]]]]:
        """A pool, and for every dispatch its descriptor set and the origins of its bindings: where each descriptor
        begins in its buffer. Equal ones are made once."""
        vk, align = self.vk, self.device.offset_alignment
        keys = []
        for dispatch in program.dispatches:
            operands = dispatch.operands
            origins = [s.offset // align * align for s in operands]
            ranges = tuple((id(s.buffer), o, s.offset + s.nbytes - o) for s, o in zip(operands, origins, strict=True))
            keys.append((id(dispatch.pipeline), ranges, origins, dispatch))
        distinct = {(pipeline, ranges): dispatch for pipeline, ranges, _, dispatch in keys}
        total = sum(len(ranges) for _, ranges in distinct)
        size = vk.VkDescriptorPoolSize(type=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, descriptorCount=total)
        create = vk.VkDescriptorPoolCreateInfo(maxSets=len(distinct), pPoolSizes=[size])
        pool = vk.vkCreateDescriptorPool(self._device, create, None)
        sets = {}
        for (pipeline, ranges), dispatch in distinct.items():
            layout = dispatch.pipeline.handle[2]
            allocate = vk.VkDescriptorSetAllocateInfo(descriptorPool=pool, pSetLayouts=[layout])
            (made,) = vk.vkAllocateDescriptorSets(self._device, allocate)[0:1]
            sets[pipeline, ranges] = made
            for i, (operand, (_, origin, length)) in enumerate(zip(dispatch.operands, ranges, strict=True)):
                info = vk.VkDescriptorBufferInfo(buffer=operand.buffer.handle[0], offset=origin, range=length)
                write = vk.VkWriteDescriptorSet(
                    dstSet=made,
                    dstBinding=i,
                    descriptorCount=1,
                    descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                    pBufferInfo=[info],
                )
                vk.vkUpdateDescriptorSets(self._device, 1, [write], 0, None)
        return pool, [(sets[pipeline, ranges], origins) for pipeline, ranges, origins, _ in keys]

    def submit(self, commands: Any) -> None:
        """Runs a command buffer and waits for it."""
        vk = self.vk
        submit = vk.VkSubmitInfo(pCommandBuffers=[commands])
        interrupt: BaseException | None = None
        try:
            vk.vkQueueSubmit(self._queue, 1, [submit], self._fence)
            deadline = time.monotonic() + RUN_LIMIT
            while True:
                try:
                    vk.vkWaitForFences(self._device, 1, [self._fence], vk.VK_TRUE, _POLL)
                    break
                except vk.VkTimeout:
                    if time.monotonic() > deadline:
                        raise self.fail(f"it did not finish within {RUN_LIMIT:.0f} s") from None
                except KeyboardInterrupt as e:  # what runs cannot be stopped: wait for it, its buffers are in use
                    interrupt = e
            vk.vkResetFences(self._device, 1, [self._fence])
        except (vk.VkError, KeyError) as e:
            raise self.fail(_explain(e)) from e
        except KeyboardInterrupt:  # outside the wait: whether something runs is not known
            self.fail("it was interrupted")
            raise
        if interrupt is not None:
            raise interrupt

    def free_commands(self, commands: Any, pool: Any) -> None:
        self.vk.vkFreeCommandBuffers(self._device, self._command_pool, 1, [commands])
        self.vk.vkDestroyDescriptorPool(self._device, pool, None)

    def _new_commands(self) -> Any:
        vk = self.vk
        allocate = vk.VkCommandBufferAllocateInfo(
            commandPool=self._command_pool, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
        )
        return vk.vkAllocateCommandBuffers(self._device, allocate)[0]

    @contextlib.contextmanager
    def _recording(self, commands: Any) -> Iterator[None]:
        self.vk.vkBeginCommandBuffer(commands, self.vk.VkCommandBufferBeginInfo())
        yield
        self.vk.vkEndCommandBuffer(commands)

    def _barrier(self, commands: Any, stage: int) -> None:
        """What shaders and copies did is finished and visible to `stage`: compute, transfer or host."""
        vk = self.vk
        before = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | vk.VK_PIPELINE_STAGE_TRANSFER_BIT
        accesses = {
            vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT: vk.VK_ACCESS_SHADER_READ_BIT | vk.VK_ACCESS_SHADER_WRITE_BIT,
            vk.VK_PIPELINE_STAGE_TRANSFER_BIT: vk.VK_ACCESS_TRANSFER_READ_BIT | vk.VK_ACCESS_TRANSFER_WRITE_BIT,
            vk.VK_PIPELINE_STAGE_HOST_BIT: vk.VK_ACCESS_HOST_READ_BIT,
        }
        written = vk.VK_ACCESS_SHADER_WRITE_BIT | vk.VK_ACCESS_TRANSFER_WRITE_BIT
        barrier = vk.VkMemoryBarrier(srcAccessMask=written, dstAccessMask=accesses[stage])
        vk.vkCmdPipelineBarrier(commands, before, stage, 0, 1, [barrier], 0, None, 0, None)

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        vk = self.vk
        try:
            yield
        except vk.VkErrorDeviceLost as e:
            raise self.fail(_explain(e)) from e
        except (vk.VkError, KeyError) as e:
            raise GpuError(f"{self.device.title} {what}: {_explain(e)}") from e

    def _close(self) -> None:
        vk = self.vk
        for pipeline, layout, set_layout in self._modules:
            vk.vkDestroyPipeline(self._device, pipeline, None)
            vk.vkDestroyPipelineLayout(self._device, layout, None)
            vk.vkDestroyDescriptorSetLayout(self._device, set_layout, None)
        vk.vkDestroyFence(self._device, self._fence, None)
        vk.vkDestroyCommandPool(self._device, self._command_pool, None)
        vk.vkDestroyDevice(self._device, None)
        vk.vkDestroyInstance(self._instance, None)


def _explain(error: BaseException) -> str:
    known = {
        "VkErrorDeviceLost": "the driver lost the device",
        "VkErrorOutOfDeviceMemory": "the device is out of memory",
        "VkErrorOutOfHostMemory": "the driver is out of host memory",
    }
    name = result_name(error)
    return f"{known[name]} ({name})" if name in known else name
