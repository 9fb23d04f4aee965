"""Shared code of the MLA backends that use this package's Triton kernels: the call, and the limits of architectures."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from attn import envs
from attn.backends.abstract import KVCacheSpec
from attn.capabilities import Capabilities, Device, MultipleOf, Request
from attn.kernels.memory import latent_reason
from attn.torch import records
from attn.torch.arrays import static
from attn.torch.backends import _hopper
from attn.torch.backends._triton import TritonPagedBackend
from attn.torch.backends.mla import _rows
from attn.torch.backends.mla._metadata import MLACommonMetadata
from attn.torch.backends.mla._mla import DecodeCall, MLACommonBackend, MLACommonImpl
from attn.torch.interpreter import judged_on, prepare
from attn.torch.metadata import keep


class TritonKernelsBackend(MLACommonBackend):
    """Base of both backends."""

    is_interpreted = staticmethod(TritonPagedBackend.is_interpreted)

    @classmethod
    def off_paths(cls, device: Device | None = None) -> tuple[str, ...]:
        return _hopper.off_paths("hopper_mla", device)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        """Float32 latents need more shared memory than some devices have."""
        reason = latent_reason(device.arch, request) if device is not None and device.platform == "cuda" else ""
        return super().why_not(request, judged_on(device)) + ([reason] if reason else [])


def capabilities(features: frozenset[str]) -> Capabilities:
    """Return the capabilities of a backend with these kernels, which hold a whole latent in registers: at most 512 + 64."""
    return records.TRITON(
        head_sizes=(MultipleOf(16, 32, 576),),
        kv_cache_dtypes=("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"),
        features=features,
    )


@functools.cache
def _decode() -> Any:
    """Return `mla_decode`. It needs Triton; an import statement would cost each call a microsecond."""
    from attn.torch.kernels.mla_decode import mla_decode

    return mla_decode


def uses_hopper(spec: KVCacheSpec, device: Any) -> bool:
    """Whether decodes over such a cache run in the Hopper kernel, which serves plain 16-bit latents of 512 + 64."""
    plain = spec.kv_cache_dtype in ("auto", spec.dtype) and spec.dtype in ("bfloat16", "float16") and spec.head_size == 576
    if not plain or device is None or torch.device(device).type != "cuda":
        return False
    # here, because `arch` below needs Triton, which is imported where its kernels run
    from attn.kernels.mla_launch import prefers_hopper
    from attn.torch.kernels.direct import arch

    return prefers_hopper(arch(), packed=False)


class TritonKernelsImpl(MLACommonImpl):
    """Base of both implementations."""

    #: Keys (of a list, if sparse) per program; 0: the launch rule chooses by the batch.
    fixed_split_size: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare(self.backend.get_name())

    def _writes_by_kernel(self, kv_cache: torch.Tensor) -> bool:
        return True  # interpreted on a CPU, as the decode is

    def _stages(self, attn_metadata: MLACommonMetadata, signature: tuple[Any, ...]) -> Any:
        """Return the cache of a batch's writes and decodes for calls like the first; None with ATTN_DEBUG=device.

        signature: what calls depend on beside their batch.
        """
        from attn.torch.kernels.kept import Stages

        # Kept by the kind of batch: later steps find the launches of earlier ones.
        shared, decode, batch_key = attn_metadata.kept().shared_calls, attn_metadata.decode, tuple[Any, ...]()
        if shared is None or envs.debug("device"):
            return None
        tensors: list[torch.Tensor | None] = [attn_metadata.slot_mapping]
        alone = False
        if decode is not None:
            rows = (decode.rows.start, decode.rows.stop) if isinstance(decode.rows, slice) else decode.num_tokens
            others = self.batch_invariant, self.need_to_return_lse_for_decode, attn_metadata.short, attn_metadata.prefill
            # A negative scale makes a negated copy of the queries first, which a repeated launch would not.
            alone = isinstance(rows, tuple) and rows[0] == 0 < decode.num_tokens and not any(others) and self.signed_scale > 0
            # what `launches_of` reads of a batch; lengths in steps of 16, the least number of keys in a tile
            bounds = decode.num_reqs, decode.max_query_len, -(-decode.max_seq_len // 16), decode.uneven
            tensors += decode.tensors()
            batch_key = (rows, *bounds, *(static(tensors) or ()))
        kept = shared.get((signature, batch_key))
        kept = keep(shared, (signature, batch_key), {}) if kept is None else kept
        return Stages(kept, [x for x in tensors if x is not None], alone)

    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, meta = call.q, call.meta
        out = self._temporary(q.new_empty(q.shape[0], q.shape[1], self.kv_lora_rank))
        k_scale, k_factor = self._scale(call.layer, call.kv_cache)
        _decode()(
            out,
            call.lse,
            q,
            call.kv_cache,
            query_start_loc=meta.query_start_loc,
            seq_lens=meta.seq_lens,
            block_table=meta.block_table,
            max_query_len=meta.max_query_len,
            max_seq_len=meta.max_seq_len,
            scale=self.scale,
            packed=self.kv_cache_dtype == _rows.PACKED,
            k_scale=k_scale,
            k_factor=k_factor,
            limits=meta.limits,
            indices=call.indices,
            fixed_split=self.fixed_split_size,
            uneven=meta.uneven,
        )
        return out, call.lse

    @staticmethod
    def _temporary(memory: torch.Tensor) -> torch.Tensor:
        from attn.torch.kernels.direct import temporary

        return temporary(memory)

    @staticmethod
    def _operate(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
        from attn.torch.kernels.direct import operate

        operate(function, *tensors)
