"""FLASHINFER: FlashInfer's paged kernels; on Hopper as fast as TRITON_ATTN in decode and faster in prefill (FA3 templates).

Its wrappers are planned on the host, once per batch and group of layers with equal heads, window, cap, scale and dtypes; the
other layers of a group reuse the plan (`_flashinfer` provides the wrappers). Decodes at the start of a batch take the decode
wrapper, all other requests the prefill wrapper. On Blackwell, layers that TensorRT-LLM's kernels serve need no plan
(`_flashinfer_trtllm`: so far tested on a simulated FlashInfer only).

A CUDA graph of decodes is captured with `build_for_cudagraph_capture`. Its wrappers read buffers of their own, into which
every later `build` by the same builder for the same number of decodes plans the new batch.

Differences of FlashInfer that this adapter handles: its log-sum-exp is base 2, [T, H]. Its ALiBi computes its own slopes and
applies the soft cap in another order, so ALiBi is rejected (vLLM silently drops it). Its windows have a left side only. Its
FA2 kernels sum weights rounded to the query's dtype (`m16k16_rowsum_f16f16f32`); this error (1e-3 in bfloat16) shows in the
lse, not in outputs. If an lse is returned, other kernels serve; where there are none, the request is rejected. Its wrapper of
causality and ranges (0.7.2, `BatchPrefillWithCausalBidirectionalRangesWrapper`) is of FA2's kernels on every GPU, visits every
key for every row, and takes one range a row, where a span beside a prefix needs two, and no soft cap: spans are rejected.
Signatures are those of the flashinfer-ai/flashinfer repository at fb28d724 (0.7).
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.paged import PagedCall
from attn.capabilities import ATTN_TYPES, MASK_FEATURES, PAGED_FEATURES, Device, Feature, Request, arch_matches
from attn.errors import MetadataError, UnsupportedError
from attn.torch import records
from attn.torch.backends import _flashinfer_trtllm as trtllm
from attn.torch.backends._flashinfer import Group, plan, workspace, wrapper_for
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl, is_captured, of_one_batch
from attn.torch.backends._vendor import LN2, arch_of, decodes_first, fill, halves, int32, page_list
from attn.torch.metadata import PagedAttentionMetadataBuilder

#: Prefill with fewer rows per request selects FA2's kernels; on Hopper "auto" selects FA3's. Measured on an H200, ms of FA2
#: and FA3: 16q4s1k (4 rows per request) 0.0415, 0.0778; 1q512s8k_63q1s4k (9, the prompt before the decodes) 0.578, 1.265;
#: 2q2k_32q1s1k (121) 0.315, 0.298; 4q4k (4096) 1.686, 1.176.
FEW_ROWS = 32
#: Query heads per kv head that FlashInfer's decode kernels without tensor cores support (DISPATCH_GQA_GROUP_SIZE, utils.cuh).
PLAIN_GROUPS = (1, 2, 3, 4, 6, 8, 16)


@dataclass
class FlashInferMetadata(trtllm.UnplannedMetadata):
    """The batch and its plans so far.

    captured: whether the plans are those of a CUDA graph, in wrappers with fixed buffers, which the builder keeps too.
    """

    plans: dict[Group, Any] = field(default_factory=dict)
    captured: bool = False

    def planned(self, group: Group) -> Any:
        """Return a group's wrapper, planned if it is new. Raises `UnsupportedError` for a new one during graph capture."""
        # A plan is of the fields it was made from: others may have been assigned since. A graph's plans are `build`'s.
        planned = group in self.plans and (self.captured or group in self.kept().plans)
        # Replays of any other plan would attend the lengths of the capture.
        if is_captured(self.seq_lens) and not (planned and (self.captured or of_one_batch.get())):
            raise UnsupportedError(
                "FLASHINFER: planning runs on the host and cannot be captured in a CUDA graph: run the layer once before "
                "the capture, with the metadata of build_for_cudagraph_capture"
            )
        if not planned:
            if group not in self.plans:
                self.plans[group] = self._wrapper(group)
            self.plan(group)
        return self.plans[group]

    def plan(self, group: Group) -> None:
        """Plan this batch in the group's wrapper in `plans`."""
        assert self.block_size is not None
        # Plans are made on the host from lengths there; without the caller's mirrors this waits for the device, once a batch.
        starts, lens = self._host_lens(group)
        wrapper = self.kept().plans[group] = self.plans[group]
        rules = {
            "window_left": group.window_left,
            "logits_soft_cap": group.soft_cap,
            "sm_scale": group.scale,
            "q_data_type": group.dtype,
            "kv_data_type": group.kv_dtype,
        }
        heads = (group.num_heads, group.num_kv_heads, group.head_size)
        if group.wrapper == "ragged":
            plan(wrapper, self.seq_lens.device, int32(starts), int32(starts), *heads, causal=group.causal, **rules)
            return
        pages = page_list(self.block_table, lens, self.block_size, group.first)
        # tokens in each request's last page: 1 to P, not 0 to P - 1
        last = int32(np.where(lens > 0, (lens - 1) % self.block_size + 1, 0))
        paged = (*pages, last, *heads, self.block_size)
        if group.wrapper == "decode":
            plan(wrapper, self.seq_lens.device, *paged, **rules)
        else:
            plan(wrapper, self.seq_lens.device, int32(starts), *paged, causal=group.causal, **rules)

    def _host_lens(self, group: Group) -> tuple[Any, Any]:
        starts, lens = self.host_lens()
        return starts[group.first : group.last + 1] - starts[group.first], lens[group.first : group.last]

    def _wrapper(self, group: Group) -> Any:
        import flashinfer

        # with 4 or more heads per group, decode is faster on tensor cores (FlashInfer's advice); these are FA2's kernels
        dense = group.wrapper == "decode" and group.num_heads >= 4 * group.num_kv_heads and not group.lse
        device = self.seq_lens.device
        if self.captured:
            if group.wrapper != "decode":
                raise UnsupportedError(f"FLASHINFER: a CUDA graph of decodes cannot contain {group.wrapper} attention")
            buffer = functools.partial(torch.zeros, dtype=torch.int32, device=device)
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace(device),
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=dense,
                paged_kv_indptr_buffer=buffer(self.num_reqs + 1),
                # as many page ids as any replay may have: the widest table, all of it
                paged_kv_indices_buffer=buffer(self.block_table.numel()),
                paged_kv_last_page_len_buffer=buffer(self.num_reqs),
            )
        # by the mean number of rows of a request: see FEW_ROWS
        few = group.wrapper == "prefill" and self._host_lens(group)[0][-1] < FEW_ROWS * (group.last - group.first)
        kernels = "fa2" if few and not group.lse else "auto"
        # a paged wrapper's first plan chooses its kernels (FA2 or FA3) from the dtypes, and later plans keep them
        key = (group.wrapper, dense, kernels, group.dtype, group.kv_dtype)
        return wrapper_for(self, device, key, functools.partial(_make, flashinfer, group.wrapper, dense, kernels))


def _make(flashinfer: Any, wrapper: str, tensor_cores: bool, kernels: str, workspace: torch.Tensor) -> Any:
    if wrapper == "decode":
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    if wrapper == "ragged":
        return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernels)


class FlashInferMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builder that counts the decodes at the start of a batch and keeps the plans of captured graphs by request count."""

    metadata_cls = FlashInferMetadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Strong: a graph reads the buffers of these wrappers for as long as it may be replayed.
        self._graphs: dict[int, FlashInferMetadata] = {}

    def extend(self, metadata: FlashInferMetadata, batch: CommonAttentionMetadata, fast_build: bool) -> None:
        """Count the decodes, and plan a batch of decodes in the captured graph's wrappers, if one has as many requests.

        The graph's next replay, and the next use by any metadata with these wrappers, then attends this batch. Raises
        `MetadataError` if the batch has more pages than the block table of the captured batch has entries.
        """
        metadata.num_decodes = decodes_first(metadata.host_lens()[0])
        graph = self._graphs.get(metadata.num_reqs)
        # only a batch of decodes alone can be replayed
        if graph is not None and metadata.num_decodes == metadata.num_reqs:
            self._check_room(metadata, graph.block_table.numel())
            metadata.plans, metadata.captured = graph.plans, True
            for group in metadata.plans:
                metadata.plan(group)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashInferMetadata:
        """Return metadata to capture a CUDA graph of decodes: one token per request, and the widest block table of any replay.

        Run the layers once with it before the capture, which plans them. Before a replay, `build` for a batch of the same
        number of decodes plans that batch in place. The caller must keep, and overwrite, the other tensors that the graph
        reads: query, output, `slot_mapping`, and, for kernels without a plan (`_flashinfer_trtllm`), `block_table` and
        `seq_lens`. The metadata uses a tensor as passed if it is on the device in the metadata's dtype. All plans of one size
        share buffers, so replays of that size must use one stream. Raises `UnsupportedError` for any other batch.
        """
        meta = self.build(0, common_attn_metadata)
        assert isinstance(meta, FlashInferMetadata)
        if not 0 < meta.num_decodes == meta.num_reqs:
            raise UnsupportedError(
                f"FLASHINFER: a CUDA graph can be captured for decodes only, one token per request (got {meta.num_decodes} "
                f"decodes in {meta.num_reqs} requests)"
            )
        graph = self._graphs.setdefault(meta.num_reqs, meta)
        if graph.block_table.numel() < meta.block_table.numel():
            wider = f"at most {graph.block_table.numel()}, as in the previous capture of as many requests"
            raise MetadataError("block_table", None, f"{meta.block_table.numel()} entries", wider)
        meta.plans, meta.captured = graph.plans, True
        assert meta.block_size is not None
        meta.max_seq_len = meta.block_table.shape[1] * meta.block_size  # the maximum over all replays
        return meta

    def _check_room(self, meta: FlashInferMetadata, room: int) -> None:
        pages = int((-(-meta.host_lens()[1] // self.kv_cache_spec.block_size)).sum())
        if pages > room:
            raise MetadataError(
                "seq_lens", None, f"{pages} pages", f"at most {room} pages, the size of the captured block table"
            )


class FlashInferBackend(PagedAttentionBackend):
    name = "FLASHINFER"
    metadata_cls = FlashInferMetadata
    builder_cls = FlashInferMetadataBuilder
    capabilities = records.FLASHINFER(
        head_sizes=(64, 128, 256),
        kv_cache_dtypes=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
        attn_types=ATTN_TYPES,
        features=PAGED_FEATURES - MASK_FEATURES - {Feature.TWO_SIDED_WINDOW, Feature.ALIBI},
        refusals=((Feature.SPANS, "FlashInfer's kernels for spans are FA2's, with one range a row, and are not wrapped"),),
    )

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        if device is None or device.platform != "cuda" or Feature.LSE not in request.features:
            return why
        trtllm_serves = arch_matches(device.arch, "sm_10*") and Feature.SOFT_CAP not in request.features
        if not arch_matches(device.arch, "sm_90") and not trtllm_serves:
            arch = device.arch or "an unknown arch"
            why.append(f"lse on {arch}: FlashInfer's FA2 kernels sum rounded weights (supports sm_90)")
        return why


class FlashInferImpl(PagedAttentionImpl, backend=FlashInferBackend):
    can_return_lse_for_decode = True

    def _attend(self, call: PagedCall) -> None:
        meta = call.meta
        assert isinstance(meta, FlashInferMetadata)
        keys = halves(call.kv_cache)
        scales = {}
        if self._quantised:
            scales = {"k_scale": call.layer._k_scale_float, "v_scale": call.layer._v_scale_float}
        # sinks are applied from the log-sum-exp, after the kernel
        held, logs = {} if call.held is None else call.held, call.lse is not None or self.sinks is not None
        if "groups" not in held:
            held["groups"] = self._groups_of(call, logs)
        for group, rows, unplanned in held["groups"]:
            # which depends on lengths: a request without rows or keys takes the wrappers
            if unplanned and trtllm.fits(meta, group, logs):
                state = trtllm.run(unplanned, group, meta, call.query[rows].contiguous(), keys, logs, **scales)
                self._fill(call, rows, *state)
            else:
                self._planned(call, group, rows, (keys,), scales)

    def _groups_of(self, call: PagedCall, logs: bool) -> list[tuple[Group, slice, Any]]:
        """Return the groups of a batch (decodes, prompts), their rows, and what serves each without a plan, or None.

        logs: whether log-sum-exps are read."""
        meta = call.meta
        decodes, requests, rows = meta.num_decodes, meta.num_reqs, meta.num_actual_tokens
        if call.lse is not None and self.num_heads // self.num_kv_heads not in PLAIN_GROUPS:
            decodes = 0  # prefill's FA3 kernels sum unrounded weights
        groups, arch = list[tuple[Group, slice, Any]](), arch_of(call.query.device)
        for wrapper, first, last, end in (("decode", 0, decodes, decodes), ("prefill", decodes, requests, rows)):
            if end > first:
                group = self._group(call, wrapper, first, last, call.kv_cache.dtype)
                unplanned = trtllm.backend_for(arch, group._replace(first=0, last=0), meta.block_size, logs)
                groups.append((group, slice(first, end), unplanned))
        return groups

    def _attend_ragged(self, call: PagedCall) -> None:
        rows = slice(0, call.meta.num_actual_tokens)
        if rows.stop:
            group = self._group(call, "ragged", 0, call.meta.num_reqs, call.key.dtype)
            self._planned(call, group, rows, (call.key[rows], call.value[rows]), {})

    def _group(self, call: PagedCall, wrapper: str, first: int, last: int, kv_dtype: torch.dtype) -> Group:
        return Group(
            wrapper,
            first,
            last,
            *(self.num_heads, self.num_kv_heads, self.head_size),
            causal=call.causal,
            # -1 is no bound
            window_left=-1 if call.window[0] is None else call.window[0],
            soft_cap=self.logits_soft_cap or 0.0,
            scale=self.scale,
            dtype=call.query.dtype,
            kv_dtype=kv_dtype,
            lse=call.lse is not None,
        )

    def _planned(self, call: PagedCall, group: Group, rows: slice, keys: tuple[Any, ...], scales: dict[str, float]) -> None:
        """Compute one group of the batch by its planned wrapper, in the output itself where nothing is left to do."""
        # the log-sum-exp says which rows saw no key, of which the kernel's output is undefined
        with_log = call.lse is not None or self.sinks is not None or self._may_lack_keys(call)
        assert isinstance(call.meta, FlashInferMetadata)
        run, query, output = call.meta.planned(group).run, call.query, call.output
        # one group without padding: the tensors themselves, without a view each
        if rows.stop - rows.start < query.shape[0]:
            query, output = query[rows], output[rows]
        if with_log:
            self._fill(call, rows, *run(query.contiguous(), *keys, return_lse=True, **scales))
        elif output.is_contiguous():
            run(query.contiguous(), *keys, out=output, **scales)
        else:
            output.copy_(run(query.contiguous(), *keys, **scales))

    def _fill(self, call: PagedCall, rows: slice, out: torch.Tensor, log: torch.Tensor | None) -> None:
        if log is None:
            call.output[rows] = out
        else:
            lse = None if call.lse is None else call.lse[:, rows]
            fill(out, (log * LN2).T, self.sinks, call.output[rows], lse)
