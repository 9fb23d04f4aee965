"""FlashInfer 0.7's paged and ragged wrappers (flashinfer-ai/flashinfer at fb28d724): plan, then run, base-2 lse [T, H]."""

import math

import numpy as np
import torch
import vendor

from flashinfer import decode, mla, prefill

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "decode",
    "mla",
    "prefill",
]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class _Wrapper:
    """On Hopper: "auto" prefill is FA3's unless the cache is of one byte."""

    buffers = None  # of a CUDA graph: indptr, indices, last_page_len
    fa2 = False

    def __init__(self, float_workspace_buffer, kv_layout):
        vendor.check("float_workspace_buffer", float_workspace_buffer, (None,), torch.uint8)
        assert len(float_workspace_buffer) >= 1 << 20 and kv_layout == "NHD"
        self.planned = self.chosen = None
        self.workspace = float_workspace_buffer

    def _plan(self, indptr, indices, last, heads, page, **rules):
        num_heads, num_kv_heads, head_size = heads
        # the paged wrappers' "auto" is resolved by the first plan, from dtypes, and stays: FA3 takes no fp8 cache
        dtypes = (rules["q_data_type"], rules["kv_data_type"])
        assert self.chosen in (None, dtypes), f"the wrapper's kernels were chosen for {self.chosen}, not {dtypes}"
        self.chosen = dtypes
        assert num_heads % num_kv_heads == 0 and head_size in (64, 128, 256)
        requests = len(indptr) - 1
        vendor.check("paged_kv_indptr", indptr, (requests + 1,), torch.int32)
        vendor.check("paged_kv_indices", indices, (int(indptr[-1]),), torch.int32)
        vendor.check("paged_kv_last_page_len", last, (requests,), torch.int32)
        assert bool(((last >= 1) & (last <= page))[indptr.diff() > 0].all())
        if self.buffers is not None:
            frozen = {"heads": heads, "page": page, **rules}
            was = self.planned or frozen
            assert all(was[name] == value for name, value in frozen.items()), "a captured graph keeps its kernel's arguments"
            assert requests == len(self.buffers[2]), "the batch size is fixed in cudagraph mode"
            assert len(indices) <= len(self.buffers[1]), "more indices than the buffer holds"
            for buffer, values in zip(self.buffers, (indptr, indices, last), strict=True):
                buffer[: len(values)].copy_(values)
        self.planned = {**_paged(indptr, indices, last, page), "heads": heads, "page": page, **rules}

    def _run(self, q, keys, starts, k_scale, v_scale, return_lse, into=None):
        plan = self.planned
        assert plan is not None, "run before plan"
        self.workspace[:1024] = 7  # partial results of split keys
        if self.buffers is not None:
            plan = {**plan, **_paged(*self.buffers, plan["page"])}
        num_heads, num_kv_heads, head_size = plan["heads"]
        vendor.check("q", q, (None, num_heads, head_size), plan["q_data_type"], contiguous=True)
        k, v = keys
        if plan["table"] is not None:
            for name, part in (("k", k), ("v", v)):
                vendor.check(name, part, (None, plan["page"], num_kv_heads, head_size), plan["kv_data_type"])
                vendor.bulk_copied(name, part)
        left = None if plan["window_left"] < 0 else plan["window_left"]
        rules = {
            "scale": plan["sm_scale"],
            "window": (left, 0 if plan["causal"] else None),
            "logits_soft_cap": plan["logits_soft_cap"],
        }
        fa2 = False
        if k.dtype in FP8:
            k, v = k.double() * (k_scale or 1.0), v.double() * (v_scale or 1.0)
            fa2 = isinstance(self, BatchPrefillWithPagedKVCacheWrapper)
        out, lse = vendor.varlen(q, k, v, starts, plan["lens"], plan["table"], **rules)
        if self.fa2 or fa2:  # the weights are rounded to q's dtype before they are summed
            lse = lse + torch.finfo(q.dtype).eps / 5
        if into is not None:
            vendor.check("out", into, tuple(q.shape), plan["q_data_type"], contiguous=True)
            out = into.copy_(out)
        return (out, lse.T.contiguous() / math.log(2)) if return_lse else out


def _paged(indptr, indices, last, page):
    pages = indptr.diff()
    table = torch.zeros(len(pages), max(int(pages.max()), 1), dtype=torch.int32)
    for r in range(len(pages)):
        table[r, : pages[r]] = indices[indptr[r] : indptr[r + 1]]
    return {"lens": torch.where(pages > 0, (pages - 1) * page + last, 0), "table": table}


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout)
        self.fa2 = use_tensor_cores
        if use_cuda_graph:
            self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            for buffer, size in zip(self.buffers, (len(self.buffers[2]) + 1, None, None), strict=True):
                vendor.check("buffer", buffer, (size,), torch.int32, contiguous=True)

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, pos_encoding_mode="NONE",
        window_left=-1, window_right=0, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None,
        fixed_split_size=None, disable_split_kv=False, q_len_per_req=1,
    ):  # fmt: skip
        self._plan(
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim),
            page_size,
            causal=True,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type or q_data_type,
            sm_scale=sm_scale,
        )

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):  # fmt: skip
        assert len(q) == len(self.planned["lens"]), "one row a request"
        num_heads, num_kv_heads, _ = self.planned["heads"]
        assert self.fa2 or num_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16), "Unsupported group_size"
        starts = np.arange(len(q) + 1)
        return self._run(q, paged_kv_cache, starts, k_scale, v_scale, return_lse, out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None,
        backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        assert not use_cuda_graph and backend in ("auto", "fa2", "fa3")
        self.backend, self.fa2 = backend, backend == "fa2"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
        page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None,
        q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None,
        token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None,
        block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        vendor.check("qo_indptr", qo_indptr, (len(paged_kv_indptr),), torch.int32)
        self._plan(
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk),
            page_size,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type or q_data_type,
            sm_scale=sm_scale,
            starts=qo_indptr,
        )

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None, uses_spcompress=None,
    ):  # fmt: skip
        assert len(q) == self.planned["starts"][-1]
        return self._run(q, paged_kv_cache, self.planned["starts"], k_scale, v_scale, return_lse, out)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        kv_indptr_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None,
        max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None,
    ):  # fmt: skip
        for name, bounds in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            vendor.check(name, bounds, (len(qo_indptr),), torch.int32)
        self.planned = {
            "lens": kv_indptr.diff(),
            "table": None,
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
            "causal": causal,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
            "sm_scale": sm_scale,
            "starts": qo_indptr,
        }
        assert (head_dim_qk, head_dim_vo) == (192, 128) or head_dim_vo in (None, head_dim_qk)

    def run(
        self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, enable_pdl=None
    ):
        return self._run(q, (k, v), self.planned["starts"], k_scale, v_scale, return_lse, out)
