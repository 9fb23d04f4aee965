"""PALLAS: this package's Pallas kernels for TPUs: one writes new tokens and attends all pages, one is for encoders.

They are fast because scores never leave VMEM, and DMA copies keys while earlier ones are processed. Cross attention
reads the encoder's keys from pages, which a scatter writes once. The requests of an encoder are segments of one dense sequence,
and rows attend only blocks with keys of their segment. On a CPU the same kernels run in TPU interpret mode, thousands of times
slower, for tests. On GPUs use XLA_ATTN.

A layer that requests `batch_invariant` has blocks of one size in every batch. Each item of a launch is of one request, so its
steps are then that request's own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn import envs
from attn.backends.abstract import AttentionType, MultipleOf
from attn.backends.block_table import PAD_SLOT_ID
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.paged import PagedCall
from attn.capabilities import ATTN_TYPES, ENCODER_TYPES, Device, Feature, Request
from attn.errors import MetadataError, ShapeError
from attn.jax import kv_cache as caches
from attn.jax import records
from attn.jax.backends import _calls
from attn.jax.backends._paged import FEATURES, PagedAttentionBackend, PagedAttentionImpl
from attn.jax.kernels.tpu import ragged_paged_attention as kernel
from attn.jax.kernels.tpu.flash_attention import Extras, FlashParams, flash_attention
from attn.jax.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder
from attn.visibility import LayerMask

#: The maximum width of a tree: a row of its mask is the lanes of one register.
MAX_TREE_WIDTH = 128

#: Static arguments: each combination of their values and of shapes compiles a program, which layers share.
_STATIC = ("max_query_len", "mask", "logits_soft_cap", "return_lse", "invariant")
_attend = _calls.in_32_bits(jax.jit(kernel.ragged_paged_attention, static_argnames=_STATIC))
_attend_segments = _calls.in_32_bits(jax.jit(flash_attention, static_argnames=("rules", "return_lse")))


class PallasMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builder that also checks that a decoder's slots match the block table, to which the kernel writes."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.kv_cache_spec.attn_type == AttentionType.DECODER:
            # arrays on the device are copied to the host for this check, which waits for it; others are looked at where they
            # are
            if envs.debug("device"):
                _check_slots(common_attn_metadata.on_host(), self.kv_cache_spec.block_size)
            elif not fast_build:
                _check_slots(common_attn_metadata, self.kv_cache_spec.block_size)
        return built


class PallasAttentionBackend(PagedAttentionBackend):
    name = "PALLAS"
    builder_cls = PallasMetadataBuilder
    block_sizes = (16, 32, 64, 128, 256)
    interpreted_on = ("cpu",)
    capabilities = records.PALLAS(
        head_sizes=(MultipleOf(16, 64, 256), 512),
        kv_cache_dtypes=("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4_per_token_head"),
        attn_types=ATTN_TYPES,
        features=FEATURES | {Feature.BATCH_INVARIANT},
    )

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        if request.kv_cache_dtype == "int4_per_token_head":
            sizes = (("head_size", request.head_size, (128, 256)), ("block_size", request.block_size or 128, (128,)))
            for name, size, allowed in sizes:
                if size not in allowed:
                    supported = ", ".join(map(str, allowed))
                    why.append(f"{name}={size} (kv_cache_dtype={request.kv_cache_dtype} supports {supported})")
        if device is not None and device.platform == "gpu":
            why.append("its kernels are for TPUs (a CPU interprets them, for tests); use XLA_ATTN on GPUs")
        if request.attn_type in ENCODER_TYPES and Feature.BATCH_INVARIANT in request.features:
            why.append(
                f"batch_invariant for {request.attn_type}: requests share blocks of keys (supports decoder, encoder_decoder)"
            )
        return why

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[N, 2, K, P, D], so that a page is one DMA; heads of 64 are [N, 1, K, P, 128], keys and values side by side.

        D is padded with zeros to a multiple of 128; `logical_kv_cache` includes the padding. int4_per_token_head: see
        `pages_of`, of which `logical_kv_cache` makes rows.
        """
        packed = cache_dtype_str == "int4_per_token_head"
        return kernel.cache_shape(num_blocks, block_size, num_kv_heads, head_size, packed)

    @staticmethod
    def logical_kv_cache(kv_cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kernel.keys_and_values(kv_cache)

    @staticmethod
    def kv_cache_of_rows(key: jax.Array, value: jax.Array) -> jax.Array:
        """The int4_per_token_head cache whose `logical_kv_cache` are these rows."""
        return kernel.pages_of(*kernel.packed(key, value))


class PallasAttentionImpl(PagedAttentionImpl, backend=PallasAttentionBackend):
    """Calls the kernels, compiled for the TPU of this machine or, ahead of time, for that of the current abstract mesh."""

    can_return_lse_for_decode = True

    def _write(
        self, key: jax.Array, value: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array, k_scale: Any, v_scale: Any
    ) -> jax.Array:
        key, value = (caches.encode(x, kv_cache.dtype, s) for x, s in ((key, k_scale), (value, v_scale)))
        return kernel.write(key, value, kv_cache, slot_mapping)

    def _write_and_attend(self, call: PagedCall) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        key, value, kv_cache, meta, tree = call.key, call.value, call.kv_cache, call.meta, call.meta.mask.tree
        # not in the record, since a tree's width belongs to a batch and not to a layer
        if tree is not None and tree.shape[1] > MAX_TREE_WIDTH:
            raise ShapeError(f"PALLAS: tree_mask is {tree.shape[1]} wide: must be at most {MAX_TREE_WIDTH}")
        slots, scales = self._slots(meta), {"k_scale": call.k_scale, "v_scale": call.v_scale}
        if key is not None and value is not None:
            if self.attn_type == AttentionType.ENCODER_DECODER:
                # the kernel assumes that new keys are the last tokens of their requests; the encoder's keys are not
                kv_cache, key, value = self._write(key, value, kv_cache, slots, **scales), None, None
            else:
                key, value = (caches.encode(x, kv_cache.dtype, s) for x, s in zip((key, value), scales.values(), strict=True))
        # Constants of `_attend` are those that change the program; scales, slopes and sinks are arrays of it.
        seen = {"mask": call.mask.layer, "batch_mask": meta.mask, "max_query_len": meta.max_query_len}
        options = {"return_lse": self.need_to_return_lse_for_decode, "invariant": self.batch_invariant}
        numbers = {name: getattr(self, name) for name in ("scale", "logits_soft_cap", "alibi_slopes", "sinks")}
        rules = {**numbers, **seen, **scales, **options}
        return _attend(call.query, key, value, kv_cache, *meta.requests, slots, **rules)

    def _attend_ragged(self, call: PagedCall) -> tuple[jax.Array, jax.Array | None]:
        ends, row = call.meta.query_start_loc[1:], jnp.arange(call.query.shape[0])
        request = jnp.searchsorted(ends, row, side="right")  # sorted, so a block has few requests; R in padding rows
        live = row < ends[-1]
        value = jnp.where(live[:, None, None], call.value, 0)  # a NaN in padding would cost a second pass
        # Padding rows have segment R, and padding keys R + 1, which no row has: so those rows see no key and are 0.
        segments = request[None], jnp.where(live, request, ends.shape[0] + 1)[None]
        query, key, value = (x[None] for x in (call.query, call.key, value))
        rules = FlashParams(LayerMask(False, self.window), self.scale, self.logits_soft_cap)
        out, lse = _attend_segments(query, key, value, rules, Extras(*segments, self.alibi_slopes, self.sinks), return_lse=True)
        return out[0], lse[0]


def _check_slots(batch: CommonAttentionMetadata, block_size: int) -> None:
    """Raise `MetadataError` unless each request's slots are its block table's, or -1 for its first or last tokens.

    Only arrays on the host are checked.
    """
    slots, starts, lens, table = batch.slot_mapping, batch.query_start_loc_cpu, batch.seq_lens_cpu, batch.block_table
    if starts is None or lens is None or not isinstance(slots, np.ndarray) or not isinstance(table, np.ndarray):
        return
    for r in range(batch.num_reqs):
        passed = slots[starts[r] : starts[r + 1]]
        written = np.flatnonzero(passed != PAD_SLOT_ID)
        if not written.size:
            continue
        position = lens[r] - len(passed) + np.arange(len(passed))
        # The kernel copies new rows to the pages that it reads, by the table; slots say only which tokens are written.
        by_table = table[r, np.maximum(position, 0) // block_size] * block_size + position % block_size
        wrong = written[(passed != by_table)[written]]
        if wrong.size:
            t = int(wrong[0])
            raise MetadataError("slot_mapping", int(starts[r]) + t, int(passed[t]), f"{int(by_table[t])} by block_table, or -1")
        # it writes one range of rows a request, so tokens without a slot are at its ends only
        if len(written) != written[-1] - written[0] + 1:
            t = int(np.flatnonzero(passed[written[0] :] == PAD_SLOT_ID)[0] + written[0])
            raise MetadataError("slot_mapping", int(starts[r]) + t, -1, "a slot between two others of its request")
