"""Base classes of the paged backends for jax: checks, the cache write, then one hook.

The implementation is a pure function, `apply(query, key, value, kv_cache, attn_metadata) -> (output, kv_cache)`, which works
under jit, `shard_map` and donation. `forward` has vLLM's signature, and rebinds a cache stored in an `nnx.Variable`. A subclass
implements `_attend` (over the paged cache) and, for encoder types, `_attend_ragged` (over the keys of the call). The checks
use only static properties, so they run once per compilation. Every limit is in the backend's capability record. With
ATTN_DEBUG=device the values of a batch are checked too, inside the step, if `jax.experimental.checkify` functionalises it;
otherwise these checks do nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attn import envs
from attn.arguments import fold_sign
from attn.backends.abstract import AttentionLayer, AttentionType
from attn.backends.block_table import PAD_SLOT_ID
from attn.backends.checks import check_array, check_built, check_like, check_masks, check_pair, dtype_error
from attn.backends.paged import PagedBackend, PagedCall, PagedImpl
from attn.capabilities import ENCODER_TYPES, PAGED_FEATURES, Feature
from attn.dtypes import dtype_name
from attn.errors import ShapeError, UnsupportedError
from attn.jax import kv_cache as caches
from attn.jax.backends import _calls
from attn.jax.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder

#: Features of every paged backend for jax.
FEATURES = PAGED_FEATURES - {Feature.LSE} | {Feature.PER_HEAD_SCALES, Feature.NAN_SAFE}


class PagedAttentionBackend(PagedBackend):
    """Base of paged backends: the default metadata and builder."""

    metadata_cls = PagedAttentionMetadata
    builder_cls = PagedAttentionMetadataBuilder


class PagedAttentionImpl(PagedImpl[PagedAttentionMetadata]):
    """Base of paged implementations. A subclass names its backend and implements `_attend`."""

    framework = "jax"

    @staticmethod
    def _float32(values: Any) -> Any:
        return caches.constant(values)

    @_calls.over_explicit_axes
    def apply(
        self,
        query: jax.Array,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: PagedAttentionMetadata | None,
        *,
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
    ) -> tuple[Any, Any]:
        """Return (output, kv_cache), without side effects.

        query: [T, H, D] or [T, H * D]; key, value: [T, K, D] or [T, K * D], written to `kv_cache` first unless they are None
        or the layer shares another layer's cache; in query's dtype, or codes of the cache's. All have the T rows of
        `attn_metadata.slot_mapping` (`attn_metadata.pad`).
        output: [T, H, D], 0 in padding rows; if `need_to_return_lse_for_decode` is set, (output, lse [H, T] float32, natural
        log, sinks excluded). `attn_metadata` None is a profiling run: zeros.
        """
        for label, array in (("query", query), ("key", key), ("value", value)):
            if array is not None:
                check_array(self.backend, label, array, "jax")
        # heads may be flattened, [T, H * D], so the number of elements decides
        if query.ndim < 2 or query.size != query.shape[0] * self.num_heads * self.head_size:
            name, want = self.backend.get_name(), f"[T, {self.num_heads}, {self.head_size}]"
            raise ShapeError(f"{name}: query has shape {list(query.shape)}: must be {want}")
        query = query.reshape(-1, self.num_heads, self.head_size)
        # vLLM runs a model once without a batch to see how much memory it takes: nothing is written
        if attn_metadata is None:
            return jnp.zeros_like(query), kv_cache
        check_built(self.backend, attn_metadata, PagedAttentionMetadata)
        self._check_call(query, key, value, kv_cache, attn_metadata)
        # Kernels take maxima of scaled scores by a positive factor, so a negative scale negates queries.
        query = fold_sign(query, self.signed_scale)
        heads = (-1, self.num_kv_heads, self.head_size)
        key, value = (None if x is None else x.reshape(heads) for x in (key, value))
        # before anything is computed, so that no derivative reaches a kernel
        query, key, value, kv_cache = _undifferentiable(self.backend.get_name(), (query, key, value, kv_cache))
        call = PagedCall(query, attn_metadata, self.visible(attn_metadata), kv_cache, key, value)
        if self.attn_type in ENCODER_TYPES:
            out, lse = self._attend_ragged(call._replace(kv_cache=None))
        else:
            # the layer whose cache it is has written them (docs/semantics.md §14)
            if self.kv_sharing_target_layer_name is not None:
                call = call._replace(key=None, value=None)
            # other caches store numbers themselves, which no scale multiplies
            if caches.is_quantised(kv_cache.dtype):
                call = call._replace(k_scale=k_scale, v_scale=v_scale)
            attend = self._check_and_attend if envs.debug("device") else self._write_and_attend
            out, lse, kv_cache = attend(call)
        return ((out, lse) if self.need_to_return_lse_for_decode else out), kv_cache

    def forward(
        self,
        layer: AttentionLayer,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: PagedAttentionMetadata | None,
        output: None = None,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        """Call `apply` with the signature of vLLM's `forward`, and return the output.

        `kv_cache` is an `nnx.Variable` (or any object whose array is read and replaced by `[...]`), which is rebound to the
        new cache. JAX arrays are immutable, so `output` must be None.
        """
        scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        apply = lambda cache: self.apply(query, key, value, cache, attn_metadata, **scales)  # noqa: E731
        return _calls.forward(self, kv_cache, apply, output, output_scale, output_block_scale)

    def do_kv_cache_update(self, layer: AttentionLayer, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> jax.Array:
        heads = (-1, self.num_kv_heads, self.head_size)
        return self._write(key.reshape(heads), value.reshape(heads), kv_cache, slot_mapping, layer._k_scale, layer._v_scale)

    def _rules(self, call: PagedCall) -> dict[str, Any]:
        """Return the constants of the layer and the batch under the names that kernels give them."""
        rules = {name: getattr(self, name) for name in ("scale", "window", "logits_soft_cap", "alibi_slopes", "sinks")}
        return {**rules, "max_query_len": call.meta.max_query_len, "causal": call.mask.layer.causal}

    def _slots(self, attn_metadata: PagedAttentionMetadata) -> jax.Array:
        """Return the batch's slots, with padding rows set to no slot (in cross attention, the encoder's slots unchanged)."""
        slots = attn_metadata.slot_mapping
        if self.attn_type == AttentionType.ENCODER_DECODER:
            return slots
        # A caller's arrays may have been padded with other slots, and a padding row must never overwrite a token.
        return jnp.where(jnp.arange(slots.shape[0]) < attn_metadata.num_actual_tokens, slots, PAD_SLOT_ID)

    def _write(
        self, key: jax.Array, value: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array, k_scale: Any, v_scale: Any
    ) -> jax.Array:
        """Return the cache with key, value [T, K, D] written at `slot_mapping` [T]; another layout overrides this."""
        return caches.write_pair(key, value, kv_cache, slot_mapping, k_scale, v_scale)

    def _check_and_attend(self, call: PagedCall) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Check the batch's values, then call `_write_and_attend`. The output of a batch that fails the check is NaN."""
        safe, ids_valid = _calls.checked(self, call.kv_cache, call.meta)
        out, lse, kv_cache = self._write_and_attend(call._replace(meta=safe))
        return jnp.where(ids_valid, out, jnp.nan), lse, kv_cache

    def _write_and_attend(self, call: PagedCall) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Write unless key is None, then `_attend`; return (out, lse, kv_cache). A kernel that does both overrides this."""
        kv_cache = call.kv_cache
        if call.key is not None and call.value is not None:
            kv_cache = self._write(call.key, call.value, kv_cache, self._slots(call.meta), call.k_scale, call.v_scale)
        made = self._attend(call._replace(key=None, value=None, kv_cache=kv_cache))
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(f"{type(self).__name__}._attend() returned a {type(made).__name__}: must return (out, lse or None)")
        return *made, kv_cache

    def _attend(self, call: PagedCall) -> tuple[jax.Array, jax.Array | None]:
        """Return (out [T, H, D], lse [H, T] float32, natural log, or None if not needed); padding rows are 0 and -inf.

        The cache already holds the new tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} has no _attend(call), which computes a call over the cache")

    def _attend_ragged(self, call: PagedCall) -> tuple[jax.Array, jax.Array | None]:
        """Return the same for encoder types, from the keys and values of the call."""
        raise NotImplementedError(f"{type(self).__name__} has no _attend_ragged(call), which computes a call of an encoder")

    def _check_call(self, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: PagedAttentionMetadata) -> None:
        """Check static properties (ranks, shapes and dtypes), once per compilation."""
        if dtype_name(query.dtype) not in self.backend.capabilities.dtypes:  # type: ignore[union-attr]
            raise dtype_error(self, "query", query)
        check_masks(self, attn_metadata)
        check_pair(self, key=key, value=value)
        # the padded batch's: XLA needs every array of a step to have the bucket's extents
        rows = attn_metadata.slot_mapping.shape[0]
        if self.attn_type != AttentionType.ENCODER_DECODER:  # there the slots are the encoder's, the query's rows the decoder's
            _calls.check_shape(self, "query", query, rows, self.num_heads, self.head_size)
        for name, array in (("key", key), ("value", value)):
            if array is not None:
                # codes in the cache's own dtype are stored as they are; anything else must be the query's dtype
                if array.dtype != getattr(kv_cache, "dtype", None):
                    check_like(self, name, array, query)
                _calls.check_shape(self, name, array, rows, self.num_kv_heads, self.head_size)
        if self.attn_type not in ENCODER_TYPES:
            _calls.check_cache(self, query, kv_cache, attn_metadata)


# A rule for derivatives, not a check of types: tracers of grad and of jit look the same to the code that they pass.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _undifferentiable(name: str, arrays: Any) -> Any:
    """Return `arrays` unchanged; differentiation raises a clear error here rather than deep inside a kernel."""
    return arrays


@_undifferentiable.defjvp
def _refuse_derivatives(name: str, primals: Any, tangents: Any) -> Any:
    raise UnsupportedError(
        f"{name}: {Feature.BACKWARD.value} not supported: its layers are for serving. To train, use "
        "attn.attention (any device), or attn.jax.kernels.tpu.flash_attention (TPU)"
    )
