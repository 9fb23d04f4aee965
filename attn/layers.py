"""What the attention layers of both wings share (`Attention`, `MLAAttention`): their arguments, and the choice made of them.

A layer chooses its backend once, when it is built. The wings add what belongs to a framework: where a module keeps its
scales, and how it is called.
"""

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar

from attn import selector
from attn.backends.abstract import AttentionType, KVCacheSpec
from attn.backends.arguments import (
    Window,
    check_attn_type,
    check_heads,
    check_scale,
    check_soft_cap,
    layer_features,
    list_of_names,
    positive_int,
    rank_of_numbers,
    window_pair,
)
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Feature
from attn.distributed import world_size
from attn.dtypes import dtype_name
from attn.imports import resolve_obj_by_qualname
from attn.verdicts import Selection


class ChosenLayer:
    """A layer with a backend of its own choice and a paged cache."""

    framework: ClassVar[str]
    selection: Selection
    kv_cache_spec: KVCacheSpec
    backend: Any

    @staticmethod
    @abstractmethod
    def _default_dtype() -> Any:
        """The dtype of a layer that names none."""

    def _finish(self) -> None:
        """What a wing adds to a layer once all is chosen."""

    @abstractmethod
    def _keep_scale(self, name: str, scale: Any) -> None:
        """Hold a scale (0-d or [K] float32) as attribute `name` and, when it is one number, `{name}_float`."""

    def _keep_scales(self, num_kv_heads: int, k_scale: Any, v_scale: Any) -> None:
        check = resolve_obj_by_qualname(f"attn.{self.framework}.kv_cache.check_scale")
        for name, value in (("_q_scale", 1.0), ("_k_scale", k_scale), ("_v_scale", v_scale), ("_prob_scale", 1.0)):
            self._keep_scale(name, check(name, value, num_kv_heads))

    def new_kv_cache(self, num_blocks: int, device: Any = None) -> Any:
        """A zeroed cache of `num_blocks` blocks in this layer's backend's layout, on a device (or a JAX sharding).

        Builders made from `kv_cache_spec` afterwards check block ids and slots against the largest cache so made.
        """
        allocate = resolve_obj_by_qualname(f"attn.{self.framework}.kv_cache.allocate")
        self.kv_cache_spec = replace(self.kv_cache_spec, num_blocks=max(self.kv_cache_spec.num_blocks or 0, num_blocks))
        return allocate(self.backend, self.kv_cache_spec, num_blocks, device)


class ChosenAttention(ChosenLayer):
    """Multi-head attention over a paged KV cache, grouped-query included.

    Arguments are those of the seeds' `AttentionImpl`, and:
        sinks: [H] float32, one logit a head that takes softmax weight and gives nothing (gpt-oss).
        dtype: the activations' dtype; the framework's default when None.
        block_size: tokens a block of the cache.
        backend: a registry member or name, obeyed or refused; None lets the platform choose.
        features: further features that calls will need (`["tree_mask", "lse"]`: a list, never one string), so that the
            choice knows them.
        k_scale, v_scale: of a quantised cache: a float, or [K] float32 (an array or a list) where the backend takes
            per-head scales.

    `selection` is the decision with all its reasons; print it. Raises ValueError for nonsense and `UnsupportedError` with
    every candidate's reasons when nobody serves the layer.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | Window | None = None,
        kv_cache_dtype: str | None = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        sinks: Any = None,
        dtype: Any = None,
        block_size: int = 16,
        backend: AttentionBackendEnum | str | None = None,
        features: Collection[str] = (),
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
    ) -> None:
        super().__init__()
        dtype = self._default_dtype() if dtype is None else dtype
        num_heads, num_kv_heads, head_size = check_heads(num_heads, num_kv_heads, head_size)
        window = window_pair(sliding_window, check_attn_type(attn_type))
        wanted = layer_features(window, check_soft_cap(logits_soft_cap), alibi_slopes, sinks, kv_sharing_target_layer_name)
        for name, values in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if values is not None:
                rank_of_numbers(name, values)
        if rank_of_numbers("k_scale", k_scale) or rank_of_numbers("v_scale", v_scale):
            wanted |= {Feature.PER_HEAD_SCALES}
        if world_size() > 1:
            wanted |= {Feature.DCP}
        request = selector.make_request(
            head_size,
            dtype,
            kv_cache_dtype,
            block_size,
            attn_type=attn_type,
            features=wanted.union(list_of_names("features", features)),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
        block_size, kv_cache_dtype = request.block_size or block_size, request.kv_cache_dtype
        self.selection = selector.select(request, framework=self.framework, backend=backend)
        self.backend = self.selection.require()
        self.impl = self.backend.get_impl_cls()(
            num_heads, head_size, check_scale(scale, head_size), num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
            logits_soft_cap, attn_type, kv_sharing_target_layer_name, **({} if sinks is None else {"sinks": sinks}),
        )  # fmt: skip
        self.kv_cache_spec = KVCacheSpec(
            block_size, num_kv_heads, head_size, dtype_name(dtype), kv_cache_dtype, sliding_window=sliding_window,
            attn_type=attn_type,
        )  # fmt: skip
        self._keep_scales(num_kv_heads, k_scale, v_scale)
        self._finish()


class ChosenMLAAttention(ChosenLayer):
    """Multi-head latent attention over a paged cache of latents (DeepSeek-V2 and V3, Kimi K2).

    num_heads: query heads H; kv_lora_rank L, qk_nope_head_dim Dn, qk_rope_head_dim Dr, v_head_dim Dv: the model's sizes.
    kv_b_proj: the up-projection [W_UK | W_UV]: an object with `.weight` [H * (Dn + Dv), L] or `.kernel` [L, H * (Dn + Dv)],
        or the bare array [L, H, Dn + Dv].
    scale: of the head before absorption; None is (Dn + Dr)^-0.5 (with YaRN the model multiplies mscale^2 in).
    indexer: where a sparse backend finds the keys that each row attends; giving one asks for a sparse backend.
    prefill_backend: an MLA prefill backend by name, obeyed or refused; None lets the platform choose.
    k_scale: of an fp8 cache, one number for whole rows. The rest as in `Attention`.

    `selection` is the decision with all its reasons; print it. Raises ValueError for nonsense and `UnsupportedError` with
    every candidate's reasons when nobody serves the layer.
    """

    def __init__(
        self,
        num_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        scale: float | None = None,
        kv_cache_dtype: str | None = "auto",
        *,
        q_lora_rank: int | None = None,
        indexer: object | None = None,
        dtype: Any = None,
        block_size: int = 64,
        backend: AttentionBackendEnum | str | None = None,
        prefill_backend: MLAPrefillBackendEnum | str | None = None,
        features: Collection[str] = (),
        k_scale: Any = 1.0,
    ) -> None:
        super().__init__()
        dtype = self._default_dtype() if dtype is None else dtype
        rank, rope = positive_int("kv_lora_rank", kv_lora_rank), positive_int("qk_rope_head_dim", qk_rope_head_dim)
        nope = positive_int("qk_nope_head_dim", qk_nope_head_dim)
        wanted = {Feature.MLA if indexer is None else Feature.SPARSE_MLA, *([Feature.DCP] if world_size() > 1 else [])}
        request = selector.make_request(
            rank + rope,
            dtype,
            kv_cache_dtype,
            block_size,
            features=wanted.union(list_of_names("features", features)),
            num_heads=num_heads,
            num_kv_heads=1,
        )
        self.selection = selector.select(request, framework=self.framework, backend=backend)
        self.backend = self.selection.require()
        self.impl = self.backend.get_impl_cls()(
            num_heads, rank + rope, check_scale(scale, nope + rope), 1, None, None, request.kv_cache_dtype, None,
            AttentionType.DECODER, None, q_lora_rank, rank, nope, rope, nope + rope, v_head_dim, kv_b_proj, indexer,
        )  # fmt: skip
        self.impl.prefill_backend = prefill_backend
        self.impl.prefill_features = request.features & {Feature.NAN_SAFE}
        self.kv_cache_spec = KVCacheSpec(
            request.block_size or block_size, 1, rank + rope, request.dtype, request.kv_cache_dtype
        )
        self._keep_scales(1, k_scale, 1.0)
        self._finish()
