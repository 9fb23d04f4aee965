"""FLASHINFER: FlashInfer's paged kernels, level with ours in decode and ahead in prefill on Hopper (FA3 templates).

Its wrappers are planned on the host, once for a batch and a group of layers that agree in heads, window, cap, scale and
dtypes; every other layer of the batch only runs (`_flashinfer` lends the wrappers). A batch of decodes takes the decode
wrapper; decodes that come first take it for themselves; everything else takes the prefill wrapper.

What FlashInfer means differently ends here: its log-sum-exp is base 2, [T, H]; its ALiBi has slopes of its own and another
order with the cap, so ALiBi is refused (vLLM drops it in silence); a window is its left side. Signatures are those of
the flashinfer-ai/flashinfer repository at fb28d724 (0.7).
"""

import functools
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch

from attn.backends.abstract import AttentionLayer, AttentionType
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import ATTN_TYPES, Capabilities, Feature
from attn.torch import kv_cache as caches
from attn.torch.backends._flashinfer import lend
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl
from attn.torch.backends._vendor import LN2, canonical, decodes_first, fill, int32, page_list
from attn.torch.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder


class Group(NamedTuple):
    """Layers that share a plan: everything that a plan fixes apart from the batch."""

    kind: str  #: decode, prefill (both paged) or ragged
    first: int  #: the part of the batch: requests first..last
    last: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    causal: bool
    window_left: int
    soft_cap: float
    scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass
class FlashInferMetadata(PagedAttentionMetadata):
    """The batch, its decodes that come first (`num_decodes`), and the plans made for it so far."""

    num_decodes: int = 0
    plans: dict[Group, Any] = field(default_factory=dict)

    def planned(self, group: Group) -> Any:
        """The wrapper that was planned for a group, planning it now if need be."""
        if group not in self.plans:
            self.plans[group] = self._plan(group)
        return self.plans[group]

    def _plan(self, group: Group) -> Any:
        import flashinfer

        assert self.block_size is not None
        starts, lens = self.host_lens()
        starts = starts[group.first : group.last + 1] - starts[group.first]
        lens = lens[group.first : group.last]
        # a group of 4 heads or more keeps tensor cores busy in decode too (FlashInfer's own advice)
        dense = group.kind == "decode" and group.num_heads >= 4 * group.num_kv_heads
        # a paged wrapper's first plan chooses its kernels (FA2 or FA3) from the dtypes, and keeps them for every later one
        kind = (group.kind, dense, group.dtype, group.kv_dtype)
        wrapper = lend(self, self.seq_lens.device, kind, functools.partial(_make, flashinfer, group.kind, dense))
        rules = {
            "window_left": group.window_left, "logits_soft_cap": group.soft_cap, "sm_scale": group.scale,
            "q_data_type": group.dtype, "kv_data_type": group.kv_dtype,
        }  # fmt: skip
        heads = (group.num_heads, group.num_kv_heads, group.head_size)
        if group.kind == "ragged":
            wrapper.plan(int32(starts), int32(starts), *heads, causal=group.causal, **rules)
            return wrapper
        pages = page_list(self.block_table, lens, self.block_size, group.first)
        last = int32(np.where(lens > 0, (lens - 1) % self.block_size + 1, 0))
        if group.kind == "decode":
            wrapper.plan(*pages, last, *heads, self.block_size, **rules)
        else:
            wrapper.plan(int32(starts), *pages, last, *heads, self.block_size, causal=group.causal, **rules)
        return wrapper


def _make(flashinfer: Any, kind: str, tensor_cores: bool, workspace: torch.Tensor) -> Any:
    if kind == "decode":
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    if kind == "ragged":
        return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")


class FlashInferMetadataBuilder(PagedAttentionMetadataBuilder):
    """Counts the decodes at the batch's head."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferMetadata:
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        head = decodes_first(plain.host_lens()[0])
        return FlashInferMetadata(**{f.name: getattr(plain, f.name) for f in fields(plain)}, num_decodes=head)


class FlashInferBackend(PagedAttentionBackend):
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(64, 128, 256),
        kv_cache_dtypes=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
        attn_types=ATTN_TYPES,
        features=frozenset(
            {
                Feature.NON_CAUSAL,
                Feature.SLIDING_WINDOW,
                Feature.SOFT_CAP,
                Feature.SINKS,
                Feature.LSE,
                Feature.KV_SHARING,
            }
        ),
        packages=("flashinfer",),
        install="flashinfer-python",
        archs=(("cuda", ("sm_80+",)),),
    )

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

    @staticmethod
    def get_impl_cls() -> type["FlashInferImpl"]:
        return FlashInferImpl

    @staticmethod
    def get_metadata_cls() -> type[FlashInferMetadata]:
        return FlashInferMetadata

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        return FlashInferMetadataBuilder


class FlashInferImpl(PagedAttentionImpl):
    backend = FlashInferBackend
    can_return_lse_for_decode = True

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        assert isinstance(attn_metadata, FlashInferMetadata)
        causal = self.window[1] == 0 or (attn_metadata.causal and self.attn_type == AttentionType.DECODER)
        keys = tuple(map(canonical, self.backend.logical_kv_cache(kv_cache)))
        scales = {}
        if caches.is_quantised(kv_cache.dtype):
            scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        decodes, requests = attn_metadata.num_decodes, attn_metadata.num_reqs
        rows = attn_metadata.num_actual_tokens
        parts = [("decode", 0, decodes, slice(0, decodes)), ("prefill", decodes, requests, slice(decodes, rows))]
        for kind, first, last, part in parts:
            if part.stop > part.start:
                group = self._group(kind, first, last, causal, query.dtype, kv_cache.dtype)
                self._run(group, attn_metadata, query[part], (keys,), scales, output[part], _columns(lse, part))

    def _attend_ragged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        assert isinstance(attn_metadata, FlashInferMetadata)
        part = slice(0, attn_metadata.num_actual_tokens)
        if part.stop:
            group = self._group("ragged", 0, attn_metadata.num_reqs, self.window[1] == 0, query.dtype, key.dtype)
            self._run(group, attn_metadata, query[part], (key[part], value[part]), {}, output[part], _columns(lse, part))

    def _group(self, kind: str, first: int, last: int, causal: bool, dtype: torch.dtype, kv_dtype: torch.dtype) -> Group:
        return Group(
            kind, first, last, self.num_heads, self.num_kv_heads, self.head_size, causal,
            -1 if self.window[0] is None else self.window[0], self.logits_soft_cap or 0.0, self.scale, dtype, kv_dtype,
        )  # fmt: skip

    def _run(
        self,
        group: Group,
        meta: FlashInferMetadata,
        query: torch.Tensor,
        keys: tuple[Any, ...],
        scales: dict[str, float],
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        out, log = meta.planned(group).run(query.contiguous(), *keys, return_lse=True, **scales)
        fill(out, (log * LN2).T, self.sinks, output, lse)


def _columns(lse: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if lse is None else lse[:, part]
