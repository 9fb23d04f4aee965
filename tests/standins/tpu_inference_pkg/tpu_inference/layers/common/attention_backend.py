"""The registry of attention backends."""

import abc
from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.attention.backends.registry import AttentionBackendEnum


class AttentionBackend(abc.ABC):
    @abc.abstractmethod
    def get_kv_cache_shape(self, total_num_pages, page_size, num_kv_heads, head_dim, kv_dtype): ...

    @abc.abstractmethod
    def attention(
        self, kv_cache, q, k, v, md, shared_md, mesh, *, head_dim_original, sm_scale, attention_chunk_size, q_scale, k_scale,
        v_scale, sinks, update_kv_cache, use_causal_mask, attn_logits_soft_cap, decode_query_size,
    ): ...  # fmt: skip


class RPAAttentionBackend(AttentionBackend):
    name = "rpa"

    def get_kv_cache_shape(self, total_num_pages, page_size, num_kv_heads, head_dim, kv_dtype):
        packing = 4 // kv_dtype.itemsize
        return (total_num_pages, page_size, -(-2 * num_kv_heads // packing), packing, -(-head_dim // 128) * 128)

    def attention(self, *args, **kwargs):
        raise NotImplementedError("the engine's own kernel")


@dataclass(frozen=True)
class _RegisteredBackend:
    attention: Callable
    linear_attention: Callable | None


_REGISTERED_BACKENDS: dict[str, _RegisteredBackend] = {}


def register_attention_backend(name, *, attention, vllm_backend, linear_attention=None):
    name = name.lower()
    member = AttentionBackendEnum.__members__.get(name.upper())
    if member is None:
        AttentionBackendEnum.register(name.upper(), vllm_backend)
    elif member.get_path() != vllm_backend:
        raise ValueError(f"vLLM already has an attention backend named {name.upper()}, at {member.get_path()}.")
    _REGISTERED_BACKENDS[name] = _RegisteredBackend(attention, linear_attention)


def create_attention_backend(name):
    return RPAAttentionBackend() if name == RPAAttentionBackend.name else _REGISTERED_BACKENDS[name].attention()
