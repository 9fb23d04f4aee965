"""FLEX_ATTENTION: PyTorch's compiler writes the kernel, for masks and scores that no other kernel here serves.

It wins nowhere: it is the last exact resort on a GPU that has Triton and nothing better, and it needs nothing but
PyTorch. The cache is attended in place, through a `BlockMask` made from the block table (`_flex`); every rule is a mod.
One program is compiled for a set of rules, a dtype and a number of heads, for batches of any shape: seconds, once.

On a GPU that program is a Triton kernel, or FlashAttention 4's where PyTorch can have it (`_flex_flash`). On a CPU it is
C++, which needs a compiler and cannot return the log-sum-exp; where that is wanted, or sinks (which need it), the same mods
run in PyTorch's written-out form, a few rows at a time against the whole cache. Masked values are multiplied by 0 on both,
so that NaN there is not masked (`nan_safe`).

Two refusals come with a call or a batch. The GPU kernels count elements in 32 bits (pytorch#185264, vllm#50427), which
bounds a layer's cache. And a page has one place in a request: a table that names it twice where a row may see both is
refused by the builder, where the table is on the host (elsewhere the later place stands).
"""

import os
import shutil
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from attn.backends.abstract import AttentionType
from attn.backends.arguments import window_pair
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import ATTN_TYPES, ENCODER_TYPES, Capabilities, Device, Feature, MultipleOf, Request
from attn.errors import UnsupportedError
from attn.imports import installed
from attn.torch.backends import _flex, _flex_flash
from attn.torch.backends._flex import Masks, Plan, Rules, Shape
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl, PagedCall, RaggedCall
from attn.torch.backends._vendor import fill
from attn.torch.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder

_SCORES_AT_ONCE = 1 << 24  #: elements of a score matrix that is written out, all heads together: 64 MiB in fp32


@dataclass
class FlexAttentionMetadata(PagedAttentionMetadata):
    """The batch, and the plans made for it so far: one for each extent of a cache and set of masks."""

    plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)

    def planned(self, num_pages: int, page: int, block: int, masks: Masks) -> Plan:
        """The plan for a cache of `num_pages` pages, making it now if need be; page 0: for the call's own keys."""
        key = (num_pages, page, block, masks)
        if key not in self.plans:
            table, lens = self.block_table, self.seq_lens
            if page == 0:  # a request's keys lie as its rows do
                lens = self.query_start_loc[1:] - self.query_start_loc[:-1]
                first = (-(-lens // block)).cumsum(0) + lens // -block
                columns = max(1, -(-self.max_query_len // block))
                table = first[:, None] + torch.arange(columns, device=lens.device)
            self.plans[key] = _flex.lay_out(self, table, lens, num_pages, page or block, block, masks)
        return self.plans[key]


class FlexAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """The plain batch, to which plans are added as layers ask for them."""

    metadata_cls = FlexAttentionMetadata

    def extend(self, metadata: FlexAttentionMetadata, batch: CommonAttentionMetadata, fast_build: bool) -> None:
        if not fast_build and self.kv_cache_spec.attn_type not in ENCODER_TYPES:
            self._check_places(batch)

    def _check_places(self, batch: CommonAttentionMetadata) -> None:
        """Raise `UnsupportedError` where a request's table names a page twice, from the first that a window reaches on."""
        table, lens, query_lens = batch.block_table, batch.seq_lens_cpu, batch.query_lens_cpu()
        if not isinstance(table, np.ndarray) or lens is None or query_lens is None or not table.size:
            return
        page, left = self.kv_cache_spec.block_size, window_pair(self.kv_cache_spec.sliding_window, AttentionType.DECODER)[0]
        place = np.arange(table.shape[1])
        begin = np.zeros_like(lens) if left is None else np.maximum(lens - query_lens - left, 0) // page
        live = (place >= begin[:, None]) & (place < -(-lens // page)[:, None])
        ordered = np.sort(np.where(live, table, -1 - place), 1)
        twice = np.argwhere((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0))
        if len(twice):
            r, i = (int(x) for x in twice[0])
            raise UnsupportedError(
                f"FLEX_ATTENTION: block_table[{r}] names block {ordered[r, i]} twice: a block has one place in a request"
            )


class FlexAttentionBackend(PagedAttentionBackend):
    name = "FLEX_ATTENTION"
    metadata_cls = FlexAttentionMetadata
    builder_cls = FlexAttentionMetadataBuilder
    block_sizes = (MultipleOf(16),)
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda", "rocm", "xpu", "cpu"),
        dtypes=("bfloat16", "float16", "float32"),
        head_sizes=(MultipleOf(8, 16, 256),),
        attn_types=ATTN_TYPES,
        features=frozenset(
            {
                Feature.NON_CAUSAL,
                Feature.SLIDING_WINDOW,
                Feature.TWO_SIDED_WINDOW,
                Feature.SOFT_CAP,
                Feature.ALIBI,
                Feature.SINKS,
                Feature.LSE,
                Feature.TREE_MASK,
                Feature.KV_SHARING,
            }
        ),
        archs=(("cuda", ("sm_80+",)),),
    )

    max_cache_span = 2**31  # offsets are 32-bit

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        if device is not None and device.platform == "cpu":
            if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
                why.append("no C++ compiler is installed (g++, or the one that CXX names)")
        elif device is not None and not installed("triton"):
            why.append("triton is not installed")
        return why


class FlexAttentionImpl(PagedAttentionImpl, backend=FlexAttentionBackend):
    can_return_lse_for_decode = True

    def _attend(self, call: PagedCall) -> None:
        if call.query.device.type != "cpu":
            check_span(call.kv_cache[0])
        self._compute(call, *self.backend.logical_kv_cache(call.kv_cache))

    def _attend_ragged(self, call: RaggedCall) -> None:
        self._compute(call, call.key, call.value)

    def _compute(self, call: PagedCall | RaggedCall, key: torch.Tensor, value: torch.Tensor) -> None:
        """Attend keys and values [N, P, K, D], or the call's own [T, K, D]."""
        query, meta, causal = call.query, call.meta, call.causal
        assert isinstance(meta, FlexAttentionMetadata)
        tokens, ragged = meta.num_actual_tokens, self.attn_type in ENCODER_TYPES
        if tokens == 0:
            return
        block = _flex.block_rows(tokens, meta.num_reqs)
        masks = Masks(*self.window, causal, meta.tree_mask is not None)
        if ragged:
            blocks = _flex.extent(tokens, meta.num_reqs, block)
            plan = meta.planned(blocks, 0, block, masks)
            key, value = (x[plan.source].unflatten(0, (blocks, block)) for x in (key, value))
        else:
            plan = meta.planned(key.shape[0], key.shape[1], block, masks)
        on_cpu = query.device.type == "cpu"
        wanted = call.lse is not None or self.sinks is not None
        written_out = on_cpu and wanted
        alibi = "" if self.alibi_slopes is None else "signed" if causal else "symmetric"
        rules = Rules(masks, self.scale, self.logits_soft_cap, alibi, wanted or not on_cpu, block, key.shape[1])
        flash = query.is_cuda and not _flex_flash.reasons(query.dtype, block, key.shape[1], query.device)
        flash = flash and plan.lists[1].shape[1] <= key.shape[0]  # its lists are no longer than the cache
        shape = Shape(query.dtype, self.num_heads, self.num_kv_heads, self.head_size, query.device.type, flash)
        slopes = query.new_zeros(self.num_heads, dtype=torch.float32) if self.alibi_slopes is None else self.alibi_slopes
        laid = query[plan.source].unflatten(0, (-1, block))
        scores = self.num_heads * block * key.shape[0] * key.shape[1]
        step = max(1, _SCORES_AT_ONCE // scores) if written_out else len(laid)
        with torch.no_grad():
            parts = []
            for own, rows, lists in plan.split(step):
                some = laid[own]
                _flex.vary(0, some, rows, *lists, key, value, plan.places)
                _flex.vary(1, lists[1], lists[3])
                parts.append(_run(rules, shape, written_out, (some, key, value, rows, lists, plan.places, slopes)))
        if rules.lse:
            out = torch.cat([part[0] for part in parts], 2)
            log = torch.cat([part[1].lse for part in parts], 2)[0][:, plan.back]
        else:
            out, log = parts[0], torch.where(plan.unseeing, -torch.inf, 0.0).expand(self.num_heads, -1)
        fill(out[0].transpose(0, 1)[plan.back], log, self.sinks, call.output, call.lse)


def _run(rules: Rules, shape: Shape, written_out: bool, arrays: tuple[Any, ...]) -> Any:
    """The program of these rules on arrays; the Triton kernel's where FlashAttention's cannot be compiled."""
    try:
        return _flex.program(rules, shape, "eager" if written_out else "inductor")(*arrays)
    except Exception as error:
        if not (shape.flash and _flex_flash.gave_up(error)):
            raise
        return _flex.program(rules, shape._replace(flash=False), "inductor")(*arrays)


def check_span(cache: torch.Tensor) -> None:
    """Raise `UnsupportedError` when keys or values [N, P, K, D] reach farther than the kernels can count."""
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(cache.shape, cache.stride(), strict=True))
    if span > FlexAttentionBackend.max_cache_span:
        most = FlexAttentionBackend.max_cache_span // cache.stride(0)
        raise UnsupportedError(
            f"FLEX_ATTENTION: a cache of {cache.shape[0]} blocks spans {span} elements (supports "
            f"{FlexAttentionBackend.max_cache_span}, {most} blocks): PyTorch's kernels count them in 32 bits"
        )
