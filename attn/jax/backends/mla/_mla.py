"""Base classes of the MLA backends for jax: checks, absorption, cache write, then one hook.

The implementation is a pure function, `apply(q, kv_c_normed, k_pe, kv_cache, attn_metadata, *, w_uk, w_uv) -> (output,
kv_cache)`, which works under jit, `shard_map` over heads and donation. Weights are arguments, never captured, so they can be
trained, sharded or scanned like a model's other parameters. A subclass implements `_decode`, attention over the latent itself
with the query absorbed. It supports every row, including those of prompts, and costs 2 (2 L + Dr) flops per head and pair of
row and key. With expanded keys and values a pair costs 2 (Dn + Dr + Dv), plus 2 L (Dn + Dv) once per head and key. So prompts
that are long enough are expanded and attended by an MLA prefill backend; the batch's bucket decides.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn import envs
from attn.arguments import fold_sign
from attn.backends.abstract import AttentionLayer
from attn.backends.block_table import PAD_SLOT_ID
from attn.backends.checks import check_array, check_built, check_like, check_masks, check_pair, dtype_error, require
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.mla.common import MLABackend, MLAImpl, dcp_row_limits
from attn.backends.mla.prefill.abstract import MLAContextChunk, MLAPrefillBackend, MLAPrefillMetadata
from attn.backends.mla.prefill.selector import get_mla_prefill_backend
from attn.capabilities import Feature
from attn.dtypes import dtype_name
from attn.errors import MetadataError, ShapeError
from attn.jax import kv_cache as caches
from attn.jax.backends import _calls
from attn.jax.kernels import xla_mla
from attn.jax.merge import merge_attn_states
from attn.jax.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder

#: Context rows that are gathered and expanded at a time, a workspace of W * H * (Dn + Dr + Dv) elements; rows that attend them.
WORKSPACE, WINDOW = 4096, xla_mla.WINDOW
#: The host's copy of lengths: there is none under jit.
_ON_HOST: Any = None


class DecodeCall(NamedTuple):
    """The arguments of `_decode`: absorbed attention over the latent cache.

    q_nope: [T, H, L], absorbed; q_pe: [T, H, Dr]; q: [T, H, Dn + Dr], as the layer was given it. rows: the new tokens' encoded
    rows [T, width], which `_write_and_decode` writes first, and new: their kv_c [T, L] and k_pe [T, Dr], or both None.
    kv_cache: as `get_kv_cache_shape`; meta: the batch. k_scale: the scale of an fp8 cache. indices: [T, topk] int32, the keys
    that each row attends; None: all keys, or, in a sparse backend, the indexer's.
    """

    q_nope: jax.Array
    q_pe: jax.Array
    q: jax.Array
    rows: jax.Array | None
    new: tuple[jax.Array, jax.Array] | None
    kv_cache: jax.Array
    meta: PagedAttentionMetadata
    k_scale: Any = 1.0
    indices: Any = None

    @property
    def query(self) -> jax.Array:
        """[T, H, L + Dr]."""
        return jnp.concatenate([self.q_nope, self.q_pe], axis=-1)


def latent_rows(kv_c: jax.Array, k_pe: jax.Array, element: Any, scale: Any = 1.0) -> jax.Array:
    """Encode kv_c [T, L] and k_pe [T, Dr] for a latent cache of dtype `element`: [T, L + Dr], or [T, 656] uint8."""
    if element == jnp.uint8:
        return xla_mla.pack_fp8_ds_mla(kv_c, k_pe)
    return caches.encode(jnp.concatenate([kv_c, k_pe], axis=-1), element, scale)


def write(rows: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Return the cache [N, P, ...] with encoded rows [T, width] written at `slot_mapping` [T] (-1: no write)."""
    flat = kv_cache.reshape(-1, *kv_cache.shape[2:])
    rows = rows.reshape(-1, *kv_cache.shape[2:])
    return flat.at[caches.drop_pads(slot_mapping, flat.shape[0])].set(rows, mode="drop").reshape(kv_cache.shape)


def absorb(q_nope: jax.Array, w_uk: jax.Array) -> jax.Array:
    """Absorb W_UK into q_nope [T, H, Dn]: [T, H, L]."""
    return _product("thd,lhd->thl", q_nope, w_uk)


def expand(latents: jax.Array, weights: jax.Array) -> jax.Array:
    """Apply the up-projection [L, H, E] to latent heads [T, H, L]: [T, H, E]."""
    return _product("thl,lhe->the", latents, weights)


def _product(spec: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    # HIGHEST: neither TF32 nor bf16 passes for float32. The einsum's sums are float32 for 16-bit operands too.
    product = jnp.einsum(spec, x, weights, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)
    return product.astype(x.dtype)


class MLACommonMetadataBuilder(PagedAttentionMetadataBuilder):
    """The paged builder; under decode context parallelism each row becomes a request with the keys it sees on this rank."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        batch = common_attn_metadata
        if batch.dcp_local_seq_lens is not None:
            # On a rank a row sees as many keys as the row before it, or one more (docs/semantics.md §15): no length of a
            # request says which.
            owner, limit = dcp_row_limits(batch)
            starts = np.arange(len(owner) + 1, dtype=np.int32)
            batch = batch.replace(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=limit,
                seq_lens_cpu=limit,
                num_reqs=len(owner),
                block_table=batch.block_table[owner],
                max_query_len=1,
                dcp_local_seq_lens=None,
            )
        return super().build(common_prefix_len, batch, fast_build)


class MLACommonBackend(MLABackend):
    """Base of MLA backends: the default metadata and builder."""

    metadata_cls = PagedAttentionMetadata
    builder_cls = MLACommonMetadataBuilder


class MLACommonImpl(MLAImpl[PagedAttentionMetadata]):
    """Base of MLA implementations. A subclass names its backend and implements `_decode`."""

    framework = "jax"
    can_return_lse_for_decode = True

    #: The activations' dtype for which a prefill backend was chosen, and that backend.
    _prefill: tuple[str, type[MLAPrefillBackend]] | None = None

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Choose the prefill backend for activations of `act_dtype`; later batches reuse it.

        The first batch that needs a prefill backend does this too. Weights are not processed: they are arguments of `apply`.
        """
        dtype = dtype_name(act_dtype)
        options: Any = {"num_heads": self.num_heads, "backend": self.prefill_backend, "features": self.prefill_features}
        chosen = get_mla_prefill_backend(self.qk_head_dim, self.v_head_dim, dtype, framework="jax", **options)
        self._prefill = dtype, chosen

    def weights(self, kv_b_proj: Any = None) -> tuple[jax.Array, jax.Array]:
        """Return (w_uk [L, H, Dn], w_uv [L, H, Dv]), slices, which jit fuses, of an up-projection (None: the layer's own)."""
        both = jnp.asarray(self.up_projection(kv_b_proj))
        return both[..., : self.qk_nope_head_dim], both[..., self.qk_nope_head_dim :]

    @_calls.over_explicit_axes
    def apply(
        self,
        q: jax.Array,
        kv_c_normed: Any,
        k_pe: Any,
        kv_cache: jax.Array,
        attn_metadata: PagedAttentionMetadata | None,
        *,
        w_uk: jax.Array,
        w_uv: jax.Array,
        k_scale: Any = 1.0,
        indices: Any = None,
    ) -> tuple[Any, jax.Array]:
        """Return (output, kv_cache), without side effects.

        q: [T, H, Dn + Dr] or [T, H * (Dn + Dr)], rotary part last; kv_c_normed: [T, L]; k_pe: [T, Dr] or [T, 1, Dr], both
        written to `kv_cache` first unless they are None; all have the T rows of `attn_metadata.slot_mapping`
        (`attn_metadata.pad`). w_uk: [L, H, Dn]; w_uv: [L, H, Dv]. k_scale: the scale of an fp8 cache. indices: [T, topk]
        int32, for sparse backends: positions of keys in the row's own request, in any order, -1 for none.
        output: [T, H, Dv], 0 in padding rows; if `need_to_return_lse_for_decode` is set, (output, lse [H, T] float32, natural
        log). `attn_metadata` None is a profiling run: zeros.
        """
        for name, array in (("query", q), ("kv_c_normed", kv_c_normed), ("k_pe", k_pe)):
            if array is not None:
                check_array(self.backend, name, array, "jax")
        q = self._heads(q, w_uk, w_uv)
        if attn_metadata is None:
            return jnp.zeros((*q.shape[:2], self.v_head_dim), q.dtype), kv_cache
        check_built(self.backend, attn_metadata, PagedAttentionMetadata)
        kv_c_normed, k_pe = self._check_call(q, kv_c_normed, k_pe, kv_cache, attn_metadata, indices)
        ids_valid = None
        if envs.debug("device"):
            attn_metadata, ids_valid = _calls.checked(self, kv_cache, attn_metadata)
        q = fold_sign(q, self.signed_scale)
        # 1.0 for caches without a scale, whatever the layer's: kernels multiply by it
        if not caches.is_quantised(kv_cache.dtype) or kv_cache.dtype == jnp.uint8:  # packed rows have their own scales
            k_scale = 1.0
        new = None if kv_c_normed is None else latent_rows(kv_c_normed, k_pe, kv_cache.dtype, k_scale)
        q_nope, q_pe = q[..., : self.qk_nope_head_dim], q[..., self.qk_nope_head_dim :]
        latents_in = None if kv_c_normed is None else (kv_c_normed, k_pe)
        call = DecodeCall(
            q_nope=absorb(q_nope, w_uk),
            q_pe=q_pe,
            q=q,
            rows=new,
            new=latents_in,
            kv_cache=kv_cache,
            meta=attn_metadata,
            k_scale=k_scale,
            indices=indices,
        )
        if new is not None and self.expands(attn_metadata):
            # One program for batches that have long requests, short ones or both: lengths are values. The absorbed kernel is
            # told that long requests have no keys, so that it passes over them, and each row then takes the result of its kind.
            kv_cache = self._write_new(call)
            long = jnp.diff(attn_metadata.query_start_loc) >= self.expand_from
            short = dataclasses.replace(attn_metadata, seq_lens=jnp.where(long, 0, attn_metadata.seq_lens))
            latents, absorbed_lse, _ = self._write_and_decode(call._replace(rows=None, new=None, kv_cache=kv_cache, meta=short))
            out, lse = self._expanded(call._replace(kv_cache=kv_cache), q, w_uk, w_uv, long)
            # Padding rows count as the first request's here. If that is long, they are past its packed rows, where jax's
            # prefill backends return 0 and -inf.
            expanded = long[xla_mla.request_of(attn_metadata.query_start_loc, jnp.arange(q.shape[0]))]
            out = jnp.where(expanded[:, None, None], out.astype(q.dtype), expand(latents, w_uv))
            if self.need_to_return_lse_for_decode:
                lse = jnp.where(expanded, lse, absorbed_lse)
        else:
            latents, lse, kv_cache = self._write_and_decode(call)
            out = expand(latents, w_uv)
        if ids_valid is not None:
            out = jnp.where(ids_valid, out, jnp.nan)
        return ((out, lse) if self.need_to_return_lse_for_decode else out), kv_cache

    @property
    def expand_from(self) -> int:
        """The shortest query for which expanding costs fewer flops (see the module's docstring)."""
        rank, dims = self.kv_lora_rank, self.qk_nope_head_dim + self.v_head_dim
        saved = 2 * rank + self.qk_rope_head_dim - (self.qk_head_dim + self.v_head_dim)
        # n rows over m keys: absorbed 2 n m (2 L + Dr), expanded 2 n m (Dn + Dr + Dv) + 2 m L (Dn + Dv) for each head. Beyond
        # 2**30 rows stands for never.
        return rank * dims // saved + 1 if saved > 0 else 1 << 30

    def expands(self, attn_metadata: PagedAttentionMetadata) -> bool:
        """Whether a batch of this bucket may contain a request that is cheaper to expand."""
        return attn_metadata.causal and attn_metadata.max_query_len >= self.expand_from

    def _expanded(
        self, call: DecodeCall, q: jax.Array, w_uk: jax.Array, w_uv: jax.Array, long: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return (out [T, H, Dv] float32, lse [H, T]) of the requests marked by `long` [R], with expanded heads.

        call: its cache already holds its rows. q: [T, H, Dn + Dr], not absorbed. Rows of other requests are undefined.

        New rows are used as the cache stores them (a quantised cache rounds them), so that results do not depend on how a
        prompt is split. The context is expanded in chunks of one workspace, which a window of rows at a time attends.
        """
        assert call.rows is not None
        meta = call.meta
        # while a program is traced: the choice is a part of it
        if self._prefill is None or self._prefill[0] != dtype_name(q.dtype):
            self.process_weights_after_loading(q.dtype)
        assert self._prefill is not None
        prefill = self._prefill[1](q.shape[1], self.qk_head_dim, self.v_head_dim, self.scale)

        def heads(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Return keys [m, H, Dn + Dr] and values [m, H, Dv] of cache rows [m, width]."""
            decoded = xla_mla.numbers(rows, q.dtype, call.k_scale)[:, : self.head_size]
            latent, rope = decoded[:, : self.kv_lora_rank], decoded[:, self.kv_lora_rank :]
            nope, value = (_product("tl,lhe->the", latent, w) for w in (w_uk, w_uv))
            rope = jnp.broadcast_to(rope[:, None], (*nope.shape[:2], rope.shape[1]))
            return jnp.concatenate([nope, rope], axis=-1), value

        # Shapes are those of the whole batch, as any number of its requests may be long; the packed rows come first.
        lens = jnp.where(long, jnp.diff(meta.query_start_loc), 0)
        context = jnp.where(long, jnp.maximum(meta.seq_lens - lens, 0), 0)
        # requests with a context first: the rows that attend a workspace are then contiguous
        packed = xla_mla.pack(meta.query_start_loc, lens, jnp.argsort(context == 0, stable=True), q.shape[0])
        # contexts of all long requests in a line, in packed order, which the workspaces divide at equal distances
        keys = jnp.pad(jnp.cumsum(context[packed.order], dtype=jnp.int32), (1, 0))
        query = q[packed.row]
        batch = MLAPrefillMetadata(packed.starts, _ON_HOST, long.shape[0], meta.max_query_len)
        out, lse = prefill.run_prefill_new_tokens(query, *heads(call.rows[packed.row]), batch, True)
        out, lse = self._attend_context(call, prefill, heads, query, packed, keys, (out.astype(jnp.float32), lse))
        return out[packed.packed_row], lse[:, packed.packed_row]

    def _attend_context(
        self,
        call: DecodeCall,
        prefill: MLAPrefillBackend,
        heads: Any,
        query: jax.Array,
        packed: xla_mla.Packed,
        keys: jax.Array,
        state: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Merge the context of packed rows into `state` (out [T, H, Dv], lse [H, T]).

        heads: expands rows of the cache. keys: [R + 1], where the context of each packed request begins, one after another.
        """
        meta, page, ends = call.meta, call.kv_cache.shape[1], keys[-1]
        size, window = min(WORKSPACE, meta.block_table.size * page), min(WINDOW, query.shape[0])
        most = min(meta.seq_lens.shape[0], window // self.expand_from + 2)  # requests that may have rows in a window
        flat = call.kv_cache.reshape(-1, call.kv_cache.shape[2])
        # so that `most` requests from any one on can be sliced
        query_bounds, key_bounds = (jnp.pad(bounds, (0, most), mode="edge") for bounds in (packed.starts, keys))

        def expand_chunk(i: jax.Array, state: Any) -> Any:
            """Expand one workspace of the context."""
            # past the last context row 0 of the cache is expanded, of which no row's range of keys knows
            index = i * size + jnp.arange(size, dtype=jnp.int32)
            request = xla_mla.request_of(keys, index)
            position = jnp.where(index < ends, index - keys[request], 0)
            slot = meta.block_table[packed.order[request], position // page] * page + position % page
            key, value = heads(flat[jnp.where(index < ends, slot, 0)])
            # the requests of a workspace are neighbours, so their rows are too; past the end `request_of` is 0
            low, high = packed.starts[request[0]], packed.starts[request.max() + 1]

            def attend(j: jax.Array, state: Any) -> Any:
                """Attend the workspace by one window of the rows whose contexts it holds."""
                # a slice of `window` rows must lie within the array: XLA would move it silently
                begin = jnp.minimum(low + j * window, query.shape[0] - window)
                row = begin + jnp.arange(window, dtype=jnp.int32)
                first = xla_mla.request_of(packed.starts, row[:1])[0]
                starts, key_starts = (lax.dynamic_slice_in_dim(x, first, most + 1) for x in (query_bounds, key_bounds))
                # each request's rows in this window and keys in this workspace; none for a request without any
                starts, key_starts = jnp.clip(starts - begin, 0, window), jnp.clip(key_starts - i * size, 0, size)
                chunk = MLAContextChunk(key_starts, _ON_HOST, size, size)
                of_window = MLAPrefillMetadata(starts, _ON_HOST, most, min(meta.max_query_len, window), (chunk,))
                rows = lax.dynamic_slice_in_dim(query, begin, window)
                out, lse = prefill.run_prefill_context_chunk(0, rows, key, value, of_window)
                # the last window of a batch may begin early, with rows of the window before
                lse = jnp.where((row >= low + j * window) & (row < high), lse, -jnp.inf)
                before = (lax.dynamic_slice_in_dim(x, begin, window, axis) for axis, x in enumerate(state))
                # a NaN is a result of keys that were seen, not a split without keys
                merged = merge_attn_states(*zip(before, (out, lse), strict=True), nan_is_empty=False)
                return tuple(
                    lax.dynamic_update_slice_in_dim(x, new, begin, axis)
                    for axis, (x, new) in enumerate(zip(state, merged, strict=True))
                )

            return lax.fori_loop(0, -(-(high - low) // window), attend, state)

        return lax.fori_loop(0, -(-ends // size), expand_chunk, state)

    def forward(
        self,
        layer: AttentionLayer,
        hidden_states_or_cq: Any,
        kv_c_normed: Any,
        k_pe: Any,
        kv_cache: Any,
        attn_metadata: PagedAttentionMetadata | None,
        output: None = None,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        """Call `apply` with the signature of vLLM's `forward`, and return the output.

        `hidden_states_or_cq` is q, and the weights are those of `kv_b_proj`. `kv_cache` is an `nnx.Variable` (or any object
        whose array is read and replaced by `[...]`), which is rebound to the new cache. JAX arrays are immutable, so `output`
        must be None.
        """
        w_uk, w_uv = self.weights()

        def apply(cache: Any) -> tuple[Any, Any]:
            weights = {"w_uk": w_uk, "w_uv": w_uv, "k_scale": layer._k_scale}
            return self.apply(hidden_states_or_cq, kv_c_normed, k_pe, cache, attn_metadata, **weights)

        return _calls.forward(self, kv_cache, apply, output, output_scale, output_block_scale)

    def do_kv_cache_update(self, layer: AttentionLayer, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> jax.Array:
        """Return the cache with key = kv_c [T, L] and value = k_pe [T, Dr] written."""
        rows = latent_rows(key, value.reshape(value.shape[0], -1), kv_cache.dtype, layer._k_scale)
        return self._write(rows, kv_cache, slot_mapping)

    def _write(self, rows: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array) -> jax.Array:
        """Return the cache with encoded rows written at `slot_mapping`; backends with another layout override this."""
        return write(rows, kv_cache, slot_mapping)

    def _write_new(self, call: DecodeCall) -> jax.Array:
        """Return the cache with the call's rows written. A kernel that encodes them itself overrides this."""
        assert call.rows is not None
        return self._write(call.rows, call.kv_cache, self._slots(call.meta))

    def _slots(self, attn_metadata: PagedAttentionMetadata) -> jax.Array:
        """Return the batch's slots, with padding rows set to no slot."""
        slots = attn_metadata.slot_mapping
        return jnp.where(jnp.arange(slots.shape[0]) < attn_metadata.num_actual_tokens, slots, PAD_SLOT_ID)

    def _write_and_decode(self, call: DecodeCall) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Write unless `rows` is None, then `_decode`; return (out, lse, kv_cache). A kernel that does both overrides this."""
        if call.rows is not None:
            call = call._replace(rows=None, new=None, kv_cache=self._write_new(call))
        return *self._decode(call), call.kv_cache

    def _decode(self, call: DecodeCall) -> tuple[jax.Array, jax.Array]:
        """Return (out [T, H, L], lse [H, T]); padding rows are 0 and -inf. The cache already holds the new rows."""
        raise NotImplementedError

    def _heads(self, q: jax.Array, w_uk: Any, w_uv: Any) -> jax.Array:
        """Reshape q to [T, H, Dn + Dr], and check the weights' shapes. H is that of `w_uk`, which is smaller in `shard_map`."""
        name, rank = self.backend.get_name(), self.kv_lora_rank
        # a matrix of another rank is refused by the check of its shape
        heads = w_uk.shape[1] if w_uk.ndim == 3 else self.num_heads
        for matrix, array, width in (("w_uk", w_uk, self.qk_nope_head_dim), ("w_uv", w_uv, self.v_head_dim)):
            if array.shape != (rank, heads, width):
                raise ShapeError(f"{name}: {matrix} has shape {list(array.shape)}: must be [{rank}, {heads}, {width}]")
        if self.num_heads % heads:
            raise ShapeError(f"{name}: w_uk has {heads} heads: must be {self.num_heads}, or a divisor of it")
        if q.ndim < 2 or q.size != q.shape[0] * heads * self.qk_head_dim:
            raise ShapeError(f"{name}: q has shape {list(q.shape)}: must be [T, {heads}, {self.qk_head_dim}]")
        return q.reshape(-1, heads, self.qk_head_dim)

    def _check_call(
        self, q: jax.Array, kv_c: Any, k_pe: Any, kv_cache: Any, attn_metadata: PagedAttentionMetadata, indices: Any
    ) -> tuple[Any, Any]:
        """Check static properties, once per compilation, and return (kv_c [T, L], k_pe [T, Dr])."""
        if dtype_name(q.dtype) not in self.backend.capabilities.dtypes:  # type: ignore[union-attr]
            raise dtype_error(self, "q", q)
        check_masks(self, attn_metadata)
        if indices is not None:
            require(self, Feature.SPARSE_MLA)
        # a model without a rotary part has nothing to pass
        if kv_c is not None and k_pe is None and self.qk_rope_head_dim == 0:
            k_pe = kv_c[:, :0]
        check_pair(self, kv_c_normed=kv_c, k_pe=k_pe)
        rows = attn_metadata.slot_mapping.shape[0]
        _calls.check_shape(self, "q", q, rows, *q.shape[1:])
        for name, array, width in (("kv_c_normed", kv_c, self.kv_lora_rank), ("k_pe", k_pe, self.qk_rope_head_dim)):
            if array is not None:
                check_like(self, name, array, q, of="q")
                _calls.check_shape(self, name, array, rows, width)
        _calls.check_cache(self, q, kv_cache, attn_metadata)
        return tuple(None if x is None else x.reshape(rows, -1) for x in (kv_c, k_pe))  # type: ignore[return-value]


def check_indices(indices: jax.Array) -> None:
    """Raise `MetadataError` if a row of indices [T, topk] lists a key twice; waits for the device."""
    # equal keys become neighbours; -1, for none, may be repeated
    chosen = jnp.sort(indices, axis=1)
    twice = (chosen[:, 1:] == chosen[:, :-1]) & (chosen[:, 1:] >= 0)
    if twice.any():
        row, column = (int(x) for x in jnp.argwhere(twice)[0])
        raise MetadataError("indices", row, int(chosen[row, column]), "listed at most once per row")
