"""XFORMERS: memory-efficient attention by the operators of xformers, the only vendor's kernels for GPUs before Ampere.

Only the split-K operator, written in Triton, reads a paged cache directly; full causal decodes over pages of a multiple of 64
use it. For everything else the keys are gathered under a block-diagonal mask, and xformers picks FlashAttention or CUTLASS.
With a window, keys are gathered from the start of the first row's window, in decode too: the paged masks support no window
except a start, and multiply the page's contents before it by 0 (vllm#23969 applied none).
Differences that this adapter handles: masks are planned from host lengths, once per batch for all layers with equal rules;
rows without a key must be left out; the log-sum-exp is packed or, from CUTLASS, padded. xformers has no soft cap, and ALiBi
only as a bias of every score. Interface of facebookresearch/xformers 0.0.35.
"""

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from attn.backends.abstract import AttentionType
from attn.backends.paged import PagedCall
from attn.capabilities import ATTN_TYPES, Device, Feature, MultipleOf, Request, arch_matches
from attn.imports import assumed, installed, resolve_obj_by_qualname, version_of
from attn.torch import records
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl, check_replays
from attn.torch.backends._vendor import arch_of, fill, lacking, token_slots
from attn.torch.metadata import PLANNED_BY, PagedAttentionMetadata, PagedAttentionMetadataBuilder

_NEEDS = (
    ("memory_efficient_attention_forward_requires_grad", ("attn_bias", "scale", "op")),
    ("attn_bias.BlockDiagonalMask.from_seqlens", ("q_seqlen", "kv_seqlen", "device")),
    ("attn_bias.BlockDiagonalMask.make_causal_from_bottomright", ()),
    ("attn_bias.BlockDiagonalMask.make_local_attention_from_bottomright", ("window_size",)),
    ("attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens", ("block_tables", "page_size", "device")),
    ("triton_splitk.FwOp", ()),
)


class Rule(NamedTuple):
    """The key of a plan, besides the batch.

    paged: whether split-K may read the pages. ragged: whether the keys are those of the call, not of the cache.
    """

    causal: bool
    left: int | None
    paged: bool
    ragged: bool


@dataclass(frozen=True)
class OperatorCall:
    """The requests of one kernel call: their rows, row counts, key slots (None: all), mask and operator."""

    rows: torch.Tensor | slice
    counts: list[int]
    slots: torch.Tensor | None
    mask: Any
    op: Any = None


@dataclass
class XFormersMetadata(PagedAttentionMetadata):
    """The batch, which keeps its plans."""

    _launched_by: ClassVar = attrgetter(*PLANNED_BY)

    def planned(self, rule: Rule) -> list[OperatorCall]:
        """Return the kernel calls of the batch under a rule, planned if the rule is new. None has a row without a key."""
        check_replays("XFORMERS", self.seq_lens)
        self.host_lens()  # first: lengths that are fetched are fields, and plans are kept by the fields
        plans: dict[Rule, list[OperatorCall]] = self.kept().plans
        if rule not in plans:
            plans[rule] = list(self._plan(rule))
        return plans[rule]

    def _plan(self, rule: Rule) -> Iterator[OperatorCall]:
        fmha = _fmha()
        starts, lens = self.host_lens()
        counts = np.diff(starts)
        lens = counts if rule.ragged else lens
        # Rows before the first key lead, so the last `lens` rows of a request are those that see one.
        counts = np.minimum(counts, lens) if rule.causal else np.where(lens > 0, counts, 0)
        alone = counts == 1 if rule.paged and rule.causal and rule.left is None else np.zeros(len(counts), bool)
        device = self.seq_lens.device
        # Two calls at most: split-K over pages for single rows, gathered keys for all others.
        for paged, chosen in ((True, alone), (False, (counts > 0) & ~alone)):
            requests = np.flatnonzero(chosen)
            if not len(requests):
                continue
            n, end = counts[requests], lens[requests]
            # the last rows of each request
            rows = np.concatenate([np.arange(stop - c, stop) for stop, c in zip(starts[requests + 1], n, strict=True)])
            whole = rows[-1] - rows[0] + 1 == len(rows)
            # a slice where rows are neighbours: views instead of copies
            idx = slice(int(rows[0]), int(rows[-1]) + 1) if whole else torch.from_numpy(rows).to(device)
            if paged:
                bias_cls = fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
                table = self.block_table[torch.from_numpy(requests).to(device)]
                mask = bias_cls.from_seqlens(n.tolist(), end.tolist(), table, self.block_size, device=device)
                yield OperatorCall(idx, n.tolist(), None, mask, fmha.triton_splitk.FwOp)
                continue
            # the first key that the first row sees
            begin = np.zeros_like(end) if rule.left is None else np.maximum(end - n - rule.left, 0)
            mask = fmha.attn_bias.BlockDiagonalMask.from_seqlens(n.tolist(), (end - begin).tolist(), device=device)
            if rule.left is not None:
                # its window counts the row's own key
                mask = mask.make_local_attention_from_bottomright(rule.left + 1)
            elif rule.causal:
                mask = mask.make_causal_from_bottomright()
            if rule.ragged:
                yield OperatorCall(idx, n.tolist(), None, mask)
            else:
                assert self.block_size is not None
                yield OperatorCall(idx, n.tolist(), token_slots(self.block_table, self.block_size, requests, begin, end), mask)


class XFormersMetadataBuilder(PagedAttentionMetadataBuilder):
    metadata_cls = XFormersMetadata


class XFormersAttentionBackend(PagedAttentionBackend):
    name = "XFORMERS"
    metadata_cls = XFormersMetadata
    builder_cls = XFormersMetadataBuilder
    capabilities = records.CUDA(
        head_sizes=(MultipleOf(8, 32, 256),),
        attn_types=ATTN_TYPES,
        features=frozenset({Feature.NON_CAUSAL, Feature.SLIDING_WINDOW, Feature.SINKS, Feature.LSE, Feature.KV_SHARING}),
        packages=("xformers",),
        install="xformers",
        archs=(("cuda", ("sm_75+",)),),
    )

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        causal = request.attn_type == AttentionType.DECODER and Feature.NON_CAUSAL not in request.features
        if Feature.SLIDING_WINDOW in request.features and not causal:
            why.append(f"{Feature.SLIDING_WINDOW.value} without causality not supported")
        # no bfloat16 on tensor cores before Ampere
        if device is not None and request.dtype == "bfloat16" and arch_matches(device.arch, "sm_7?"):
            why.append(f"dtype=bfloat16 on {device.arch} (supports sm_80+)")
        return why or list(_lacking(device is not None and device.platform == "cuda"))


class XFormersImpl(PagedAttentionImpl, backend=XFormersAttentionBackend):
    can_return_lse_for_decode = True

    def _attend(self, call: PagedCall) -> None:
        keys, values = (cache.flatten(0, 1) for cache in self.backend.logical_kv_cache(call.kv_cache))
        paged = _reads_pages(self.head_size, call.meta.block_size, arch_of(call.query.device))
        self._compute(call, keys, values, Rule(call.causal, call.window[0], paged, ragged=False))

    def _attend_ragged(self, call: PagedCall) -> None:
        rows = call.meta.num_actual_tokens
        self._compute(call, call.key[:rows], call.value[:rows], Rule(call.causal, None, paged=False, ragged=True))

    def _compute(self, call: PagedCall, keys: torch.Tensor, values: torch.Tensor, rule: Rule) -> None:
        """Attend keys, values [.., K, D], one token per row."""
        query, meta = call.query, call.meta
        assert isinstance(meta, XFormersMetadata)
        rows, groups = meta.num_actual_tokens, (self.num_kv_heads, self.num_heads // self.num_kv_heads)
        out = torch.empty_like(query[:rows])
        # rows of no call see no key
        log = torch.full((self.num_heads, rows), -torch.inf, dtype=torch.float32, device=query.device)
        for one in meta.planned(rule):
            gathered = [x if one.slots is None else x.index_select(0, one.slots) for x in (keys, values)]
            # [1, tokens, K, heads per group, D] with a stride of 0 over the heads of a group
            wide = [x[None, :, :, None].expand(-1, -1, -1, groups[1], -1) for x in gathered]
            # the entry that returns the log-sum-exp; no gradient is computed
            result, state = _fmha().memory_efficient_attention_forward_requires_grad(
                query[one.rows].unflatten(1, groups)[None], *wide, attn_bias=one.mask, scale=self.scale, op=one.op
            )
            out[one.rows], log[:, one.rows] = result[0].flatten(1, 2), _packed(state.flatten(1, 2).float(), one.counts)
        fill(out, log, self.sinks, call.output, call.lse)


def _packed(log: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return [H, T] of a log-sum-exp that is packed, [1, H, T or more], or padded per request, [R, H, longest or more]."""
    counts = [sum(counts)] if log.shape[0] == 1 else counts
    return torch.cat([state[:, :n] for state, n in zip(log, counts, strict=True)], 1)


def _fmha() -> Any:
    import xformers.ops.fmha

    return xformers.ops.fmha


def _reads_pages(head_size: int, block_size: int | None, arch: str) -> bool:
    """Whether split-K serves: it computes in blocks of 64 keys, and its results for smaller pages are silently wrong."""
    right = block_size is not None and block_size % 64 == 0 and head_size in (16, 32, 64, 128, 256, 512)
    return right and (not arch or arch_matches(arch, "sm_80+")) and _has_block_pointers()


@functools.cache
def _has_block_pointers() -> bool:
    """Whether Triton has block pointers, which split-K's kernel uses; 3.9 removed them."""
    return installed("triton") and hasattr(resolve_obj_by_qualname("triton.language"), "make_block_ptr")


def _lacking(on_gpu: bool) -> tuple[str, ...]:
    """Return the missing features of the installed xformers; empty, without an import, if it is not installed."""
    return _installed_lacks(on_gpu) if installed("xformers") and not assumed("xformers") else ()


@functools.cache
def _installed_lacks(on_gpu: bool) -> tuple[str, ...]:
    package = " ".join(filter(None, ("xformers", version_of("xformers"))))
    why = lacking(package, _fmha(), _NEEDS)
    # without its extension xformers rejects every operator on a GPU, including those from torch and Triton
    # set when xformers was imported above, which goes on without its extension
    broken = getattr(sys.modules.get("xformers._cpp_lib"), "_cpp_library_load_exception", None)
    return (*why, f"{package} did not load its extension: {broken.__cause__ or broken}") if on_gpu and broken else why
