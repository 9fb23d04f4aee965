"""The framework-neutral part of MLA backends: the latent cache's shape, and a layer's checked arguments.

A token is cached as one row [kv_c L | k_pe Dr] that every query head reads, so a request's `head_size` is L + Dr and its
num_kv_heads 1, while `scale` is that of the head before absorption, Dn + Dr (docs/semantics.md §9). The templates of torch
and jax add the arrays: metadata, cache write, weights and the call.

Shape letters in addition to the usual ones: L kv_lora_rank, Dn qk_nope_head_dim, Dr qk_rope_head_dim, Dv v_head_dim.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from attn.arguments import (
    Window,
    check_attn_type,
    check_heads,
    check_scale,
    check_soft_cap,
    layer_features,
    natural_int,
    positive_int,
    refuse,
    request_of,
    window_pair,
)
from attn.backends.abstract import AttentionBackend, AttentionType, MLAAttentionImpl
from attn.backends.metadata import AttentionMetadata, CommonAttentionMetadata
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
from attn.capabilities import KINDS, Device, MultipleOf, Request, supports_size
from attn.distributed import get_dcp_group
from attn.dtypes import kv_cache_row
from attn.errors import MetadataError, ShapeError, UnsupportedError

if TYPE_CHECKING:
    from attn.backends.metadata import IntArray

Array = Any
T = TypeVar("T", bound=AttentionMetadata)

#: The `fp8_ds_mla` row: 512 e4m3 codes, 4 float32 scales (one per 128 codes), 64 bfloat16 rotary values.
DS_MLA_LATENT, DS_MLA_ROPE, DS_MLA_TILE = 512, 64, 128
DS_MLA_BYTES = DS_MLA_LATENT + 4 * (DS_MLA_LATENT // DS_MLA_TILE) + 2 * DS_MLA_ROPE


def dcp_row_limits(batch: CommonAttentionMetadata) -> "tuple[IntArray, IntArray]":
    """Return (owner, limit), each [T]: a row's request, and the number of keys up to the row's own that are on this rank.

    Decode context parallelism strides keys over ranks (docs/semantics.md §15), so a causal rule on local positions would be
    wrong: each row needs its own number of visible keys. Raises `MetadataError` unless the lengths are on the host.
    """
    import numpy as np

    starts, lens, group = batch.query_start_loc_cpu, batch.seq_lens_cpu, get_dcp_group()
    if starts is None or lens is None:
        raise MetadataError("seq_lens_cpu", None, None, "a NumPy mirror, as query_start_loc_cpu: DCP needs both")
    q_lens = starts[1:] - starts[:-1]
    # [T]: each row's request, so that the arithmetic below is per row without a loop.
    owner = np.repeat(np.arange(len(q_lens)), q_lens)
    # Keys that row i sees over all ranks: context plus the rows up to its own; below 0 where a request has more rows
    # than keys.
    seen = np.maximum(np.arange(int(starts[-1])) - starts[owner] + (lens - q_lens)[owner] + 1, 0)
    # Whole rounds over the ranks give each rank `interleave` keys; of the last, partial round rank r has what is left
    # after r full turns (as `attn.reference.dcp_local_lens`).
    base = seen // group.interleave // group.world_size * group.interleave
    limit = base + np.clip(seen - base * group.world_size - group.rank_in_group * group.interleave, 0, group.interleave)
    return owner, limit.astype(np.int32)


class MLABackend(AttentionBackend):
    """Base of backends whose cache stores one row per token.

    `latent_dims` are the (L, Dr) pairs that the kernels support, `qk_nope_head_dims` and `v_head_dims` the supported sizes of
    an expanded head, `most_heads` the largest number of query heads; None means any.
    """

    latent_dims: ClassVar[tuple[tuple[int, int], ...] | None] = None
    most_heads: ClassVar[int | None] = None
    qk_nope_head_dims: ClassVar[tuple[int | MultipleOf, ...] | None] = None
    v_head_dims: ClassVar[tuple[int | MultipleOf, ...] | None] = None

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        # A request may leave the number of heads open; the implementation's constructor, which has it, asks again.
        if cls.most_heads is not None and (request.num_heads or 0) > cls.most_heads:
            why.append(f"num_heads={request.num_heads} (supports up to {cls.most_heads})")
        return why

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return [N, P, L + Dr]; for `fp8_ds_mla` [N, P, 656], in bytes."""
        return (num_blocks, block_size, kv_cache_row(cache_dtype_str, head_size))

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return (0, 1, 2)

    @staticmethod
    def logical_kv_cache(kv_cache: Array) -> tuple[Array, Array]:
        """Return the rows twice, [N, P, 1, width]: a row is the key, and its first L columns are the value."""
        # [N, P, width] -> [N, P, 1, width]: one head that all query heads read.
        rows = kv_cache[:, :, None]
        return rows, rows

    @classmethod
    def latent_reasons(cls, kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int) -> list[str]:
        """Return every reason why the kernels do not support these dimensions; empty if they do."""
        why = []
        if cls.latent_dims is not None and (kv_lora_rank, qk_rope_head_dim) not in cls.latent_dims:
            known = ", ".join(f"{rank} + {rope}" for rank, rope in cls.latent_dims)
            why.append(f"kv_lora_rank + qk_rope_head_dim = {kv_lora_rank} + {qk_rope_head_dim} (supports {known})")
        for name, size, allowed in (
            ("qk_nope_head_dim", qk_nope_head_dim, cls.qk_nope_head_dims),
            ("v_head_dim", v_head_dim, cls.v_head_dims),
        ):
            if allowed is not None and not supports_size(size, allowed):
                why.append(f"{name}={size} (supports {', '.join(map(str, allowed))})")
        return why


class MLAImpl(MLAAttentionImpl[T]):
    """Implementation base that checks an MLA layer's arguments. A subclass passes its backend: `class MyImpl(Template,
    backend=MyBackend)`."""

    backend: ClassVar[type[MLABackend]]
    #: The MLA prefill backend by name, used or rejected, never replaced; None lets the platform choose.
    prefill_backend: MLAPrefillBackendEnum | str | None = None
    #: Features that the prefill backend must support (`nan_safe`, if the layer requests it).
    prefill_features: Collection[str] = ()

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None,
        num_kv_heads: int = 1,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | Window | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        # MLA Specific Arguments
        q_lora_rank: int | None = None,
        kv_lora_rank: int = DS_MLA_LATENT,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = DS_MLA_ROPE,
        qk_head_dim: int | None = None,
        v_head_dim: int = 128,
        kv_b_proj: Any = None,
        indexer: object | None = None,
    ) -> None:
        """Take the arguments of vLLM's `MLAAttentionImpl`; `scale` None means (Dn + Dr) ** -0.5, `qk_head_dim` None Dn + Dr.
        `qk_rope_head_dim` 0 is a model without rotary dimensions: its `k_pe` is [T, 0], or None.

        kv_b_proj: the up-projection W_UK | W_UV: an object with `.weight` [H * (Dn + Dv), L] or `.kernel`
        [L, H * (Dn + Dv)], or an array [L, H, Dn + Dv]. Raises ValueError for invalid arguments, `ShapeError` for inconsistent
        dimensions, and `UnsupportedError` with this backend's reasons for unsupported ones.
        """
        self.num_heads, self.num_kv_heads, self.head_size = check_heads(num_heads, num_kv_heads, head_size)
        self.q_lora_rank = None if q_lora_rank is None else positive_int("q_lora_rank", q_lora_rank)
        self.kv_lora_rank = positive_int("kv_lora_rank", kv_lora_rank)
        self.qk_nope_head_dim = positive_int("qk_nope_head_dim", qk_nope_head_dim)
        self.qk_rope_head_dim = natural_int("qk_rope_head_dim", qk_rope_head_dim)
        self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.v_head_dim = positive_int("v_head_dim", v_head_dim)
        self.kv_cache_dtype = kv_cache_dtype
        # Before the backend is asked: sizes that contradict each other would give reasons about a layer that cannot exist.
        self._check_dimensions(self.qk_head_dim if qk_head_dim is None else qk_head_dim)
        self.signed_scale = check_scale(scale, self.qk_head_dim)
        self.scale = abs(self.signed_scale)  # kernels receive the magnitude; the template negates the query (`fold_sign`)
        self.attn_type = check_attn_type(attn_type)
        self.window = window_pair(sliding_window, attn_type)
        self.logits_soft_cap = check_soft_cap(logits_soft_cap)
        self.alibi_slopes = alibi_slopes
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.kv_b_proj, self.indexer = kv_b_proj, indexer
        refuse(self.backend, self.request())
        # Apart from `refuse`, since a request has the size of the cached row, L + Dr, and not the parts of it that
        # kernels are written for.
        why = self.backend.latent_reasons(self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        if why:
            raise UnsupportedError(f"{self.backend.get_name()} does not serve this layer: {'; '.join(why)}", why)

    def _check_dimensions(self, qk_head_dim: int) -> None:
        rank, rope = self.kv_lora_rank, self.qk_rope_head_dim
        if self.num_kv_heads != 1:
            raise ShapeError(f"num_kv_heads={self.num_kv_heads} must be 1: all heads read the same latent")
        if self.head_size != rank + rope:
            raise ShapeError(f"head_size={self.head_size} must be kv_lora_rank + qk_rope_head_dim = {rank} + {rope}")
        if qk_head_dim != self.qk_head_dim:
            parts = f"{self.qk_nope_head_dim} + {rope}"
            raise ShapeError(f"qk_head_dim={qk_head_dim} must be qk_nope_head_dim + qk_rope_head_dim = {parts}")
        # The row's layout is fixed in bytes: no other sizes fit into it.
        if self.kv_cache_dtype == "fp8_ds_mla" and (rank, rope) != (DS_MLA_LATENT, DS_MLA_ROPE):
            needed = f"kv_lora_rank={DS_MLA_LATENT} and qk_rope_head_dim={DS_MLA_ROPE}"
            raise ShapeError(f"kv_cache_dtype=fp8_ds_mla needs {needed}, got {rank} and {rope}")

    def request(self) -> Request:
        """Return this layer's request, except the dtype (known from the arrays of a call)."""
        capabilities = self.backend.capabilities
        assert capabilities is not None
        # A backend of MLA serves requests for it only (`capabilities.KINDS`), and this layer is one, whichever of the
        # family's kinds it is.
        families = {family for family in KINDS if family in capabilities.features}
        features = layer_features(self.window, self.logits_soft_cap, self.alibi_slopes, None, self.kv_sharing_target_layer_name)
        return request_of(self, features | families)

    def up_projection(self, kv_b_proj: Any = None) -> Array:
        """Return the weights of `kv_b_proj` (None: the layer's own) as [L, H, Dn + Dv], W_UK in the first Dn columns of a head:
        a view if possible. Raises `ShapeError` for weights of another size.
        """
        source = self.kv_b_proj if kv_b_proj is None else kv_b_proj
        # By attribute and not by class: projections are modules of torch, flax or the caller's own, or bare arrays.
        if hasattr(source, "kernel"):
            # flax stores [in, out] under `kernel`, torch [out, in] under `weight`. `[...]` reads the array of an nnx
            # variable; of a tensor it is a view.
            weight = source.kernel[...]
        elif hasattr(source, "weight"):
            weight = source.weight[...].T
        else:
            weight = source
        want = (self.kv_lora_rank, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        flat = (want[0], want[1] * want[2])
        if weight is None or tuple(weight.shape) not in (want, flat):
            shape = "None" if weight is None else list(weight.shape)
            raise ShapeError(f"kv_b_proj's weights have shape {shape}: must be [L, H, Dn + Dv] = {list(want)}, or {list(flat)}")
        # The columns of a head are adjacent, W_UK's before W_UV's, so [L, H * (Dn + Dv)] is a view of [L, H, Dn + Dv].
        return weight.reshape(want)
