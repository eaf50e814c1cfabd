"""Everything under the operations of the Vulkan backend: devices, memory, compiled shaders, programs, runtimes.

`open_runtime` (choice.py) gives a `Runtime` (runtime.py), the seam: buffers, pipelines, a recorded Program, run it.
shaders/README.md shows how it is used. Knows nothing of models.
"""
