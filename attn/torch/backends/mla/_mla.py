"""Base classes of the MLA backends for torch: cache write, absorbed decode, expanded prefill, one hook.

`forward` writes the new rows, then attends the decodes and the prompts. Decodes are absorbed (docs/semantics.md §9): W_UK is
applied to the query, so that every head attends the cached latent itself, and W_UV to the result. A subclass implements
`_decode`. Prefills expand the latent to heads and use an MLA prefill backend, which is chosen separately; the context is
processed in chunks of bounded size, merged by log-sum-exp. All keys, including those of new tokens, are attended as the cache
stores them. So results depend neither on how a prompt is split into chunks nor on whether it is absorbed or expanded.

Weights are absorbed once, by `process_weights_after_loading` or the first call; after loading other weights, call it again.
"""

import copy
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, TypeVar

import torch

from attn.arguments import fold_sign
from attn.backends.abstract import AttentionLayer
from attn.backends.checks import (
    check_array,
    check_block_size,
    check_built,
    check_cache_element,
    check_like,
    check_masks,
    check_no_gradient,
    check_pair,
    check_rows,
    dtype_error,
)
from attn.backends.mla.common import MLABackend, MLAImpl
from attn.backends.mla.prefill.abstract import MLAPrefillBackend
from attn.backends.mla.prefill.selector import get_mla_prefill_backend
from attn.capabilities import Device, Feature
from attn.errors import DeviceError, ShapeError, UnsupportedError
from attn.imports import installed
from attn.torch import kv_cache as caches
from attn.torch.arrays import Facts
from attn.torch.backends._paged import check_replays, is_elsewhere
from attn.torch.backends.mla import _rows
from attn.torch.backends.mla._metadata import (
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLADecodeMetadata,
    MLAPrefillBatch,
    Rows,
)
from attn.torch.merge import merge_into
from attn.torch.metadata import check_device

M = TypeVar("M", bound=MLACommonMetadata)

#: Bytes of expanded keys and values that a chunk of context may take: 6,500 tokens of 128 bfloat16 heads, 52,000 of 16. Also of
#: the absorbed queries and their results that short prompts may take at once: 1,900 rows of 128 heads.
_WORKSPACE = 512 << 20


class DecodeCall(NamedTuple):
    """The arguments of `_decode`: absorbed attention over the cache, which already holds the new rows.

    layer: provides `_k_scale` of an fp8 cache. q: [Td, H, L + Dr] in the activations' dtype, contiguous: q[..., :L] is
    absorbed, q[..., L:] rotary. kv_cache: [N, P, width]. meta: the batch's decodes; row i of a request sees its first
    seq_len - q_len + i + 1 keys, or the number given by `meta.limits`. indices: of a sparse backend, [Td, topk] int32. lse:
    [H, Td] float32, if it is wanted; `_decode` may fill and return it.
    """

    layer: AttentionLayer
    q: torch.Tensor
    kv_cache: torch.Tensor
    meta: MLADecodeMetadata
    indices: torch.Tensor | None = None
    lse: torch.Tensor | None = None


class MLACommonBackend(MLABackend):
    """Base of MLA backends: the default metadata and builder."""

    metadata_cls = MLACommonMetadata
    builder_cls = MLACommonMetadataBuilder
    accept_output_buffer = True

    @classmethod
    def rules(cls, device: Device | None = None) -> tuple[str, ...]:
        """Say which requests are absorbed."""
        most = getattr(cls.get_builder_cls(), "decode_threshold", None)  # a subclass may have a builder of its own
        return () if most is None else (f"requests of up to {most} new tokens are absorbed, longer ones are expanded",)


class MLACommonImpl(MLAImpl[MLACommonMetadata]):
    """Base of MLA implementations. A subclass names its backend and implements `_decode`."""

    framework = "torch"
    traceable = False
    _absorbed: "tuple[torch.dtype, torch.device] | None" = None
    _prefill: MLAPrefillBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.backend.capabilities is not None
        #: The cache's element type for each dtype of a query that the backend supports.
        self._elements = {
            getattr(torch, dtype): caches.element_type(self.kv_cache_dtype, dtype) for dtype in self.backend.capabilities.dtypes
        }
        #: Elements of a row of the cache.
        # of an empty cache, whose last dimension is a row
        self._row_width = self.backend.get_kv_cache_shape(0, 0, 1, self.head_size, self.kv_cache_dtype)[2]
        # one cache dtype of codes is of codes for every dtype of a query
        coded = all(caches.is_quantised(element) for element in self._elements.values())
        #: Whether rows are codes that the layer's scale multiplies (a packed row has scales of its own).
        self._has_scale = coded and self.kv_cache_dtype != _rows.PACKED

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Absorb `kv_b_proj` for activations of `act_dtype`, and choose the prefill backend.

        Keeps contiguous copies [H, Dn, L] and [H, L, Dv], and [L, H * (Dn + Dv)] for prefills (the weight itself if its dtype
        is `act_dtype`).
        """
        up = self.up_projection()
        if not isinstance(up, torch.Tensor):
            raise TypeError(f"{self.backend.get_name()}: kv_b_proj holds a {type(up).__name__}: must hold torch tensors")
        up = up.detach().to(act_dtype)
        # First, because it may refuse the dtype: then the weights stay that were absorbed for another.
        prefill = self._choose_prefill(act_dtype, up.device)
        self._w_up = up.reshape(self.kv_lora_rank, -1)
        # contiguous [H, Dn, L] and [H, L, Dv]: the second operands of a product for each head
        self._w_uk_t = up[..., : self.qk_nope_head_dim].permute(1, 2, 0).contiguous()
        self._w_uv = up[..., self.qk_nope_head_dim :].transpose(0, 1).contiguous()
        self._prefill = prefill
        self._absorbed = (act_dtype, up.device)

    def _choose_prefill(self, act_dtype: Any, device: torch.device) -> MLAPrefillBackend:
        chosen = get_mla_prefill_backend(
            self.qk_head_dim,
            self.v_head_dim,
            act_dtype,
            framework="torch",
            num_heads=self.num_heads,
            backend=self.prefill_backend,
            on_host=device.type == "cpu",
            features=self.prefill_features,
        )
        return chosen(self.num_heads, self.qk_head_dim, self.v_head_dim, self.scale)

    def forward(
        self,
        layer: AttentionLayer,
        hidden_states_or_cq: torch.Tensor,
        kv_c_normed: torch.Tensor | None,
        k_pe: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> Any:
        """Compute the MLA of one layer over one batch.

        hidden_states_or_cq: the queries [T, H, Dn + Dr] (or [T, H * (Dn + Dr)]), projected and rotated; kv_c_normed:
        [T, L]; k_pe: [T, Dr] or [T, 1, Dr], rotated; both None if the tokens are already cached; kv_cache: as
        `get_kv_cache_shape`, written in place; output: [T, H, Dv] or [T, H * Dv] to fill, or None. Returns the output, or,
        if `need_to_return_lse_for_decode` is set, (output, lse [H, T] float32, or float64 for float64, natural log). Rows
        from `num_actual_tokens` on are left unchanged; metadata None is a profiling run.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(f"{self.backend.get_name()}: {Feature.OUTPUT_SCALE.value} not supported")
        # a dictionary of this call alone, where nothing is kept: in a graph, and in a profiling run
        signature, stages, calls = None, None, dict[Any, Any]()
        if isinstance(attn_metadata, MLACommonMetadata) and not torch.compiler.is_compiling():
            kept = attn_metadata.kept()
            signature = self._signature(layer, kept.facts((hidden_states_or_cq, kv_c_normed, k_pe, kv_cache, output)))
            calls = kept.calls
            stages = calls.get(signature)
            # The whole call is one stage: its launches are repeated without looking at the batch.
            if stages is not None and stages.alone:
                operands = hidden_states_or_cq, kv_c_normed, k_pe, kv_cache
                result = self._repeat(layer, stages, attn_metadata, *operands, output)
                if result is not None:
                    return result
        query = self._shaped("query", hidden_states_or_cq, (self.num_heads, self.qk_head_dim))
        if is_elsewhere(query):
            with torch.cuda.device(query.device):
                return self.forward(layer, query, kv_c_normed, k_pe, kv_cache, attn_metadata, output)
        new = self._new_rows(kv_c_normed, k_pe)
        shape = (query.shape[0], self.num_heads, self.v_head_dim)
        out = query.new_empty(shape) if output is None else self._check_output(query, output, shape)
        if attn_metadata is None:
            out.zero_()
            return out if output is None else output
        if signature not in calls:
            self._check_call(layer, query, new, kv_cache, attn_metadata)
        if self._absorbed != (query.dtype, query.device):
            self._absorb_for(query)
        # before it is absorbed, so that the rotary part is negated too
        query = fold_sign(query, self.signed_scale)
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = query.new_empty(self.num_heads, query.shape[0], dtype=torch.promote_types(query.dtype, torch.float32))
        if signature is not None:
            if signature not in calls:
                calls[signature] = self._stages(attn_metadata, signature)
            stages = calls[signature]
        decode, slots = attn_metadata.decode, attn_metadata.slot_mapping
        if slots.shape[0] != attn_metadata.num_actual_tokens:
            # slots of padding may be anything
            slots = slots[: attn_metadata.num_actual_tokens]
        write = None if new is None else functools.partial(self.do_kv_cache_update, layer, *new, kv_cache, slots)
        batches: tuple[MLADecodeMetadata, ...] = ()
        # The usual way: the write belongs to the decodes' stage, in whose launch it also copies rotary queries.
        if decode is not None and decode.num_tokens and not self.batch_invariant:
            self._run_decode(layer, query, kv_cache, decode, (out, lse), new=new, write=write, stages=stages)
        else:
            if new is not None and write is not None:
                self._run_stage(stages, "write", write, *new, kv_cache, self._scale(layer, kv_cache)[0])
            if decode is not None and decode.num_tokens:
                batches = decode.microbatches(1)  # products of all tokens would depend on how many there are
        if attn_metadata.short is not None or attn_metadata.prefill is not None:
            check_replays(self.backend.get_name(), query)
        if attn_metadata.short is not None:
            # one after another, which bounds the memory of absorbed queries
            # an absorbed query of L + Dr and its result of L for each row and head
            most = _WORKSPACE // (self.num_heads * (self.head_size + self.kv_lora_rank) * query.element_size())
            batches += attn_metadata.short.microbatches(1 if self.batch_invariant else most)
        for batch in batches:
            self._run_decode(layer, query, kv_cache, batch, (out, lse))
        if attn_metadata.prefill is not None:
            if attn_metadata.prefill.num_tokens:
                for prefill in attn_metadata.prefill.one_by_one if self.batch_invariant else (attn_metadata.prefill,):
                    self._run_prefill(layer, query, new, kv_cache, prefill, out, lse)
            # rows before the start of a sequence, which no backend is asked for
            _clear(attn_metadata.prefill.empty, out, lse)
        result = out if output is None else output
        return result if lse is None else (result, lse)

    def _stages(self, attn_metadata: MLACommonMetadata, signature: tuple[Any, ...]) -> Any:
        """Return the cache of launches for calls with this signature over a batch, or None."""
        return None

    def _signature(self, layer: AttentionLayer, of_tensors: Facts | None) -> tuple[Any, ...] | None:
        """Return what a call's checks and launches depend on besides its batch; None if `of_tensors` is None."""
        if of_tensors is None:
            return None
        facts: list[Any] = [of_tensors, type(self), self.num_heads, self.kv_lora_rank]
        facts += (self.qk_nope_head_dim, self.v_head_dim, self.qk_rope_head_dim)
        facts += (self.signed_scale, self.kv_cache_dtype, self.batch_invariant, self.need_to_return_lse_for_decode)
        # of the implementations that have one: a caller may set it between calls
        facts.append(getattr(self, "fixed_split_size", 0))
        if self._has_scale:
            facts.append(caches.of_scale(layer._k_scale))
        return tuple(facts)

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        absorbed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Write kv_c [T, L] and k_pe [T, Dr] as rows at `slot_mapping` [T]; -1 writes nothing.

        absorbed: queries [t, H, Dn + Dr] and their absorbed form [t, H, L + Dr], whose rotary part is copied in the same
        launch where a kernel writes.
        """
        if self._writes_by_kernel(kv_cache):
            _kernel()(key, value, kv_cache, slot_mapping, *self._scale(layer, kv_cache), *(absorbed or ()))
            return kv_cache
        rows = _rows.encode(key.detach(), value.detach(), self.kv_cache_dtype, kv_cache.dtype, layer._k_scale)
        caches.put([(rows, kv_cache)], slot_mapping)
        if absorbed is not None:
            self._copy_rotary(*absorbed)
        return kv_cache

    def _writes_by_kernel(self, kv_cache: torch.Tensor) -> bool:
        """Whether a Triton kernel writes the cache: on GPUs with Triton. A backend of plain torch operators overrides this."""
        return kv_cache.is_cuda and installed("triton")

    def _scale(self, layer: AttentionLayer, kv_cache: torch.Tensor) -> tuple[torch.Tensor | None, float]:
        """Return the scale of an fp8 cache: (float32 on the device, 1.0), or (None, its value) if the host has it."""
        if not self._has_scale:
            return None, 1.0
        scale: Any = layer._k_scale
        if not isinstance(scale, torch.Tensor) or scale.device.type == "cpu":
            return None, float(scale)  # known on the host, so it costs kernels nothing
        if scale.dtype == torch.float32 and scale.device == kv_cache.device and not scale.requires_grad:
            return scale, 1.0
        return scale.detach().to(kv_cache.device, torch.float32), 1.0

    # --- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (out [Td, H, L], lse [H, Td] float32, natural log); a row without keys is 0 and -inf.

        The lse may be None unless `need_to_return_lse_for_decode` is set.
        """
        raise NotImplementedError

    def _indices(self, meta: MLADecodeMetadata, count: int) -> torch.Tensor | None:
        """Return the keys that a sparse backend attends in the `count` rows of decodes; None: all of them."""
        return None

    def _run_decode(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: MLADecodeMetadata,
        results: tuple[torch.Tensor, torch.Tensor | None],
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        write: Callable[..., Any] | None = None,
        stages: Any = None,
    ) -> None:
        """Fill the decodes' rows of results, out [T, H, Dv] and lse [H, T] or None. write: writes new rows to the cache."""
        out, lse = results
        rows, query = meta.rows, rows_of(query, meta.rows)
        if isinstance(rows, slice):
            rows_out, log = rows_of(out, rows), None if lse is None else lse[:, rows]
        else:
            # gathered rows have no view in the output: computed apart and scattered
            rows_out = out.new_empty(query.shape[0], *out.shape[1:])
            log = None if lse is None else lse.new_empty(lse.shape[0], query.shape[0])
        indices = self._indices(meta, query.shape[0])
        call = DecodeCall(layer, query, kv_cache, meta, indices, log)  # its queries are absorbed later
        run = functools.partial(self._attend_decodes, call, rows_out, write)
        # every tensor whose address a launch of the stage has, weights included, in the order of `_repeat`
        tensors = self._of_decode(layer, kv_cache, query, rows_out, log, *(new or (None, None)), indices)
        self._run_stage(stages, _name(indices), run, *tensors)
        if not isinstance(rows, slice):
            out[rows] = rows_out
            if lse is not None and log is not None:
                lse[:, rows] = log

    def _of_decode(
        self, layer: AttentionLayer, kv_cache: torch.Tensor, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors of a decode's stage. tensors: queries, output, log-sum-exp, new rows and indices."""
        return *tensors, kv_cache, self._w_uk_t, self._w_uv, self._scale(layer, kv_cache)[0]

    def _repeat(
        self,
        layer: AttentionLayer,
        stages: Any,
        meta: MLACommonMetadata,
        query: torch.Tensor,
        kv_c: torch.Tensor | None,
        k_pe: torch.Tensor | None,
        kv_cache: torch.Tensor,
        output: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Repeat a call that is one stage, without a log-sum-exp. Returns the output; None if it could not be repeated."""
        decode = meta.decode
        # weights that were moved or cast since are absorbed again by the general path
        if decode is None or self._absorbed != (query.dtype, query.device):
            return None
        indices = self._indices(decode, decode.num_tokens)
        out = query.new_empty(query.shape[0], self.num_heads, self.v_head_dim) if output is None else output
        tensors = self._of_decode(layer, kv_cache, query, out, None, kv_c, k_pe, indices)
        return out if stages.repeat(_name(indices), tensors) else None

    def _attend_decodes(self, call: DecodeCall, out: torch.Tensor, write: Callable[..., Any] | None) -> None:
        """Write new rows, and fill out [Td, H, Dv] and, unless None, `call.lse` for queries `call.q` [Td, H, Dn + Dr]."""
        query, lse = call.q, call.lse
        # [T, H, L + Dr]; its latents are written by a product, its end is copied
        absorbed = self._temporary(query.new_empty(query.shape[0], self.num_heads, self.head_size))
        if write is None:
            self._copy_rotary(query, absorbed)
        else:
            write((query, absorbed))
        self._absorb(query, absorbed)
        # [T, H, L]: attention over latents, before W_UV
        latent, log = self._decode(call._replace(q=absorbed))
        if latent.dtype != query.dtype:
            # the plain torch backends return float32; the product has one dtype
            latent = latent.to(query.dtype)
        # [H, T, L] x [H, L, Dv], into a view of the output
        self._operate(_bmm, latent.transpose(0, 1), self._w_uv, out.transpose(0, 1))
        # kernels write to `lse`; vendors' functions return an array of their own
        if lse is not None and log is not lse:
            assert log is not None
            lse.copy_(log)

    @staticmethod
    def _run_stage(stages: Any, name: Any, run: Callable[[], Any], *tensors: torch.Tensor | None) -> None:
        """Do what `run` does for `tensors`, by launches that `stages` kept if there are any."""
        if stages is None:
            run()
        else:
            stages(name, run, *tensors)

    @staticmethod
    def _temporary(memory: torch.Tensor) -> torch.Tensor:
        """Return memory whose contents are of this call alone."""
        return memory

    @staticmethod
    def _operate(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Call a function of torch's that a repeated call makes again, between its launches."""
        function(*tensors)

    def _absorb(self, query: torch.Tensor, absorbed: torch.Tensor) -> None:
        """Write q_nope W_UK^T of queries [T, H, Dn + Dr] into absorbed[..., :L], [T, H, L + Dr], without a concatenation."""
        heads, nope, rank = self.num_heads, self.qk_nope_head_dim, self.kv_lora_rank
        (q_t, q_h, q_d), (a_t, a_h, a_d) = query.stride(), absorbed.stride()
        # one view each: [H, T, Dn] and [H, T, L]
        q_nope = query.as_strided((heads, query.shape[0], nope), (q_h, q_t, q_d))
        self._operate(_bmm, q_nope, self._w_uk_t, absorbed.as_strided((heads, query.shape[0], rank), (a_h, a_t, a_d)))

    def _copy_rotary(self, query: torch.Tensor, absorbed: torch.Tensor) -> None:
        """Copy the rotary part of queries [T, H, Dn + Dr] into absorbed[..., L:]."""
        if self.qk_rope_head_dim:
            copy_ends = functools.partial(_copy_ends, self.qk_rope_head_dim)
            self._operate(copy_ends, query.transpose(0, 1), absorbed.transpose(0, 1))

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _run_prefill(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        kv_cache: torch.Tensor,
        batch: MLAPrefillBatch,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        # bytes of a token's expanded keys and values
        per_token = self.num_heads * (self.qk_head_dim + self.v_head_dim) * query.element_size()
        plan = batch.plan(max(1, _WORKSPACE // per_token))
        prompts = query[batch.rows]
        if new is None:
            rows = _rows.gather(kv_cache, *batch.own_places())
        else:
            kv_c, k_pe = (x[batch.rows] for x in new)
            # Rounded as the cache stores them, without reading them back: every chunking of a prompt then attends the same
            # keys.
            rows = _rows.encode(kv_c, k_pe, self.kv_cache_dtype, kv_cache.dtype, layer._k_scale)
        key, value = self._expand(_rows.decode(rows, self.kv_cache_dtype, layer._k_scale), query.dtype)
        log: Any
        # to be merged with the context's, or to be returned
        with_lse = bool(plan.chunks) or lse is not None
        state = self._prefill.run_prefill_new_tokens(prompts, key, value, plan.new_tokens, with_lse)
        result, log = state if with_lse else (state, None)
        if plan.chunks:
            log = log.contiguous()  # some backends return a transposed [T, H]
        if not plan.once:  # a row that is merged several times is rounded once, at the end
            result = result.to(log.dtype)
        for chunk in plan.chunks:
            rows = _rows.decode(_rows.gather(kv_cache, *chunk.places), self.kv_cache_dtype, layer._k_scale)
            key, value = self._expand(rows, query.dtype)
            state = self._prefill.run_prefill_context_chunk(0, prompts[chunk.rows], key, value, chunk.meta)
            # into views: rows of requests without keys in this chunk are not touched
            merge_into(result[chunk.rows], log[:, chunk.rows], *state)
        out[batch.rows] = result.to(out.dtype)
        if lse is not None:
            lse[:, batch.rows] = log

    def _expand(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Expand latent rows [m, L + Dr] to keys [m, H, Dn + Dr] and values [m, H, Dv] of `dtype`; the values are a view.

        On a CPU, dequantized rows stay in float32 for the product, so that only its result is rounded. On other devices they
        are rounded to `dtype` first, because a float32 product is many times slower there.
        """
        wide = torch.promote_types(rows.dtype, dtype) if rows.device.type == "cpu" else dtype
        heads = (rows[:, : self.kv_lora_rank].to(wide) @ self._w_up.to(wide)).to(dtype).view(len(rows), self.num_heads, -1)
        key = heads.new_empty(len(rows), self.num_heads, self.qk_head_dim)
        key[..., : self.qk_nope_head_dim] = heads[..., : self.qk_nope_head_dim]
        # one rotary key, which all heads share
        key[..., self.qk_nope_head_dim :] = rows[:, None, self.kv_lora_rank :]
        return key, heads[..., self.qk_nope_head_dim :]

    # --- checks ------------------------------------------------------------------------------------------------------

    def with_indices(self, topk_indices: torch.Tensor, query: torch.Tensor) -> Self:
        """Return a copy of this implementation, absorbed for such queries, that attends the keys in `topk_indices`."""
        if self._absorbed != (query.dtype, query.device):
            self._absorb_for(query)
        # shares the absorbed weights; only the indices are its own
        other = copy.copy(self)
        other.indexer = SimpleNamespace(topk_indices=topk_indices)
        return other

    def _absorb_for(self, query: torch.Tensor) -> None:
        """Absorb for this call's dtype and device. Raises `DeviceError` if the weights are on another device."""
        self.process_weights_after_loading(query.dtype)
        assert self._absorbed is not None
        if self._absorbed[1] != query.device:
            raise DeviceError(f"{self.backend.get_name()}: kv_b_proj is on {self._absorbed[1]}, query on {query.device}")

    def _shaped(self, name: str, tensor: torch.Tensor, want: tuple[int, ...]) -> torch.Tensor:
        """Reshape a tensor to [T, *want]; its last dimensions may be flattened to one."""
        if not isinstance(tensor, torch.Tensor):
            check_array(self.backend, name, tensor, "torch")
        shape = tensor.shape
        if shape[1:] == want:
            return tensor
        if shape[1:] != (math.prod(want),):
            raise ShapeError(f"{self.backend.get_name()}: {name} has shape {list(shape)}: must be {['T', *want]}")
        return tensor.reshape(shape[0], *want)

    def _new_rows(self, kv_c: torch.Tensor | None, k_pe: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (kv_c [T, L], k_pe [T, Dr]) of the new tokens, or None if they are already cached."""
        # a layer without rotary part may leave it out
        if k_pe is None and kv_c is not None and self.qk_rope_head_dim == 0:
            k_pe = kv_c[..., :0]
        if kv_c is None or k_pe is None:
            check_pair(self, kv_c_normed=kv_c, k_pe=k_pe)
            return None
        kv_c = self._shaped("kv_c_normed", kv_c, (self.kv_lora_rank,))
        # first, because [T, 1, Dr] of one rotary column would pass for it when flattened
        if isinstance(k_pe, torch.Tensor) and k_pe.dim() == 2 and k_pe.shape[1] == self.qk_rope_head_dim:
            return kv_c, k_pe
        return kv_c, self._shaped("k_pe", k_pe, (1, self.qk_rope_head_dim))[:, 0]

    def _check_output(self, query: torch.Tensor, output: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the buffer as [T, H, Dv]. Raises unless its shape, dtype and device match."""
        if output.shape != shape and output.shape != (shape[0], shape[1] * shape[2]):
            raise ShapeError(f"{self.backend.get_name()}: output has shape {list(output.shape)}: must be {list(shape)}")
        check_like(self, "output", output, query)
        return output if output.shape == shape else output.view(shape)

    def _check_call(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        kv_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
    ) -> None:
        """Check ranks, shapes, dtypes and devices, without reading tensor values."""
        check_built(self.backend, attn_metadata, MLACommonMetadata)
        if query.dtype not in self._elements:
            raise dtype_error(self, "query", query)
        check_masks(self, attn_metadata)
        check_device(self.backend, attn_metadata, query)
        kv_c, k_pe = new or (None, None)
        for name, tensor in (("query", query), ("kv_c_normed", kv_c), ("k_pe", k_pe)):
            if tensor is not None:
                check_like(self, name, tensor, query)
                check_rows(self, name, tensor, attn_metadata.num_actual_tokens)
        if torch.is_grad_enabled():
            check_no_gradient(self, query=query, kv_c_normed=kv_c, k_pe=k_pe)
        self._check_cache(layer, query, kv_cache, attn_metadata.block_size)

    def _check_cache(self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, block_size: int | None) -> None:
        name, width = self.backend.get_name(), self._row_width
        if not isinstance(kv_cache, torch.Tensor):
            raise TypeError(f"{name}: kv_cache must be a torch.Tensor, got {type(kv_cache).__name__}")
        if kv_cache.dim() != 3 or kv_cache.shape[2] != width:
            raise ShapeError(f"{name}: kv_cache has shape {list(kv_cache.shape)}: must be [N, P, {width}]")
        if not kv_cache.stride(0):
            caches.check_not_expanded(name, kv_cache)
        check_block_size(name, kv_cache.shape[1], block_size)
        element = self._elements[query.dtype]
        check_cache_element(self, query, kv_cache, element)
        if caches.is_quantised(element):
            caches.check_scale_device(self.backend, layer, query)
        if getattr(layer._k_scale, "ndim", 0):
            raise UnsupportedError(f"{name}: {Feature.PER_HEAD_SCALES.value} not supported: a latent row has one scale")


@functools.cache
def _kernel() -> Any:
    """Return `write_latents`. It needs Triton; an import statement would cost each call a microsecond."""
    from attn.torch.kernels.latent_write import write_latents

    return write_latents


def _name(indices: torch.Tensor | None) -> Any:
    """Return the name of a decode's stage, for launches with such indices."""
    return "decode" if indices is None else ("decode", indices.shape, indices.stride())


def _copy_ends(count: int, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the last elements of each row."""
    target[..., -count:].copy_(source[..., -count:])


def _bmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.bmm(a, b, out=out)


def rows_of(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return rows of a tensor [T, ...]: the tensor itself if they are all of them."""
    if isinstance(rows, slice) and rows.start == 0 and rows.stop == tensor.shape[0]:
        return tensor
    return tensor[rows]


def _clear(rows: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Set rows [n], which see no key, to 0 and -inf."""
    if rows is not None:
        out[rows] = 0
        if lse is not None:
            lse[:, rows] = -torch.inf
