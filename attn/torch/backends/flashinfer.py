"""FLASHINFER: FlashInfer's paged kernels, level with ours in decode and ahead in prefill on Hopper (FA3 templates).

Its wrappers are planned on the host, once for a batch and a group of layers that agree in heads, window, cap, scale and
dtypes; every other layer of the batch only runs. Wrappers are lent from the builder's pool for as long as a batch's
metadata lives, so that two batches in flight never share a plan. A batch of decodes takes the decode wrapper; decodes
that come first take it for themselves; everything else takes the prefill wrapper.

What FlashInfer means differently ends here: its log-sum-exp is base 2, [T, H]; its ALiBi has slopes of its own and another
order with the cap, so ALiBi is refused (vLLM drops it in silence); a window is its left side. Signatures are those of
the flashinfer-ai/flashinfer repository at fb28d724 (0.7).
"""

import weakref
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch

from attn.backends.abstract import AttentionLayer, AttentionType
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import ATTN_TYPES, Capabilities, Feature
from attn.torch import kv_cache as caches
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl
from attn.torch.backends._vendor import LN2, fill
from attn.torch.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder

_WORKSPACE = 128 << 20  #: bytes for split keys' partial results, as FlashInfer's documentation recommends
_workspaces: dict[torch.device, torch.Tensor] = {}


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


class Pool:
    """Wrappers that no batch holds, by kind and by the tensor cores that decode wants or not."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.idle = device, defaultdict[tuple[str, bool], list[Any]](list)

    def take(self, kind: str, tensor_cores: bool) -> Any:
        """A wrapper to plan with: an idle one or a new one."""
        if self.idle[kind, tensor_cores]:
            return self.idle[kind, tensor_cores].pop()
        import flashinfer

        if self.device not in _workspaces:
            _workspaces[self.device] = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=self.device)
        workspace = _workspaces[self.device]
        if kind == "decode":
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        if kind == "ragged":
            return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")


@dataclass
class FlashInferMetadata(PagedAttentionMetadata):
    """The batch, its decodes that come first (`num_decodes`), and the plans made for it so far."""

    pool: Pool | None = None
    num_decodes: int = 0

    def __post_init__(self) -> None:
        self.plans: dict[Group, Any] = {}
        if self.pool is not None:
            weakref.finalize(self, _give_back, self.pool, self.plans)

    def planned(self, group: Group) -> Any:
        """The wrapper that was planned for a group, planning it now if need be."""
        if group not in self.plans:
            self.plans[group] = self._plan(group)
        return self.plans[group]

    def _plan(self, group: Group) -> Any:
        assert self.pool is not None and self.block_size is not None
        starts, lens = self.host_lens()
        starts = starts[group.first : group.last + 1] - starts[group.first]
        lens = lens[group.first : group.last]
        wrapper = self.pool.take(group.kind, _tensor_cores(group))
        rules = {
            "window_left": group.window_left, "logits_soft_cap": group.soft_cap, "sm_scale": group.scale,
            "q_data_type": group.dtype, "kv_data_type": group.kv_dtype,
        }  # fmt: skip
        heads = (group.num_heads, group.num_kv_heads, group.head_size)
        if group.kind == "ragged":
            bounds = _int32(starts)
            wrapper.plan(bounds, bounds, *heads, causal=group.causal, **rules)
            return wrapper
        pages = -(-lens // self.block_size)
        indptr = np.concatenate([[0], np.cumsum(pages)])
        row = np.repeat(np.arange(group.first, group.last), pages)
        column = np.arange(indptr[-1]) - np.repeat(indptr[:-1], pages)
        width = self.block_table.shape[1]
        at = torch.from_numpy(row * width + column).to(self.block_table.device)
        indices = self.block_table.reshape(-1)[at] if width else self.block_table.new_zeros(0)
        pages_of = (_int32(indptr), indices, _int32(np.where(lens > 0, (lens - 1) % self.block_size + 1, 0)))
        if group.kind == "decode":
            wrapper.plan(*pages_of, *heads, self.block_size, **rules)
        else:
            wrapper.plan(_int32(starts), *pages_of, *heads, self.block_size, causal=group.causal, **rules)
        return wrapper


def _give_back(pool: Pool, plans: dict[Group, Any]) -> None:
    for group, wrapper in plans.items():
        pool.idle[group.kind, _tensor_cores(group)].append(wrapper)


def _tensor_cores(group: Group) -> bool:
    """Decode with a group of 4 heads or more keeps tensor cores busy (FlashInfer's own advice)."""
    return group.kind == "decode" and group.num_heads >= 4 * group.num_kv_heads


def _int32(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))


class FlashInferMetadataBuilder(PagedAttentionMetadataBuilder):
    """Keeps the pool of wrappers, and counts the decodes at the batch's head."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pool: Pool | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferMetadata:
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self._pool is None or self._pool.device != plain.seq_lens.device:
            self._pool = Pool(plain.seq_lens.device)
        starts, _ = plain.host_lens()
        rows = np.diff(starts)
        longer = np.flatnonzero(rows != 1)
        num_decodes = int(longer[0]) if len(longer) else len(rows)
        values = {f.name: getattr(plain, f.name) for f in fields(plain)}
        return FlashInferMetadata(**values, pool=self._pool, num_decodes=num_decodes)


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
        keys = self.backend.logical_kv_cache(kv_cache)
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
