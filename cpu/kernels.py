"""All kernels under one roof: what a backend imports. Arrays are float32 and C-contiguous unless said otherwise."""

from ddllm_vk.cpu.attention import attention
from ddllm_vk.cpu.cache_rows import CacheRows, empty_cache, store_rows
from ddllm_vk.cpu.experts import experts
from ddllm_vk.cpu.head import (
    HeadState,
    HeadStatistics,
    finish,
    head_chunk,
    head_logits,
    head_statistics,
    sample_in_tile,
)
from ddllm_vk.cpu.matmul import QuantizedRows, empty_quantized, linear, quantize_rows
from ddllm_vk.cpu.rowwise import (
    add,
    add_rms_norm,
    embedding_rows,
    gelu_mul,
    head_norm_rope,
    rms_norm,
    router,
)
from ddllm_vk.cpu.soft import soft_embedding, soft_embedding_of_logits, sparse_rows, table_mean
from ddllm_vk.cpu.threads import ThreadPool
from ddllm_vk.cpu.weights import DenseWeight, PackedQ40, PackedQ80, Weight, pack, unpack

__all__ = [
    "CacheRows",
    "DenseWeight",
    "HeadState",
    "HeadStatistics",
    "PackedQ40",
    "PackedQ80",
    "QuantizedRows",
    "ThreadPool",
    "Weight",
    "add",
    "add_rms_norm",
    "attention",
    "embedding_rows",
    "empty_cache",
    "empty_quantized",
    "experts",
    "finish",
    "gelu_mul",
    "head_chunk",
    "head_logits",
    "head_norm_rope",
    "head_statistics",
    "linear",
    "pack",
    "quantize_rows",
    "rms_norm",
    "router",
    "sample_in_tile",
    "soft_embedding",
    "soft_embedding_of_logits",
    "sparse_rows",
    "store_rows",
    "table_mean",
    "unpack",
]
