"""Arguments, backend choice and metadata of the attention layers of both frameworks (`Attention`, `MLAAttention`).

A layer chooses its backend once, in its constructor. The framework's class adds where the module keeps its scales and how
it is called.
"""

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from attn import arrays, recording, selector
from attn.arguments import (
    Window,
    as_int,
    check_attn_type,
    check_flag,
    check_heads,
    check_scale,
    check_soft_cap,
    layer_features,
    list_of_names,
    natural_int,
    positive_int,
    rank_of_numbers,
    window_pair,
)
from attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionType, KVCacheSpec
from attn.backends.mla.common import MLABackend, MLAImpl
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
from attn.backends.paged import PagedImpl
from attn.backends.pages import check_pages, page_slots
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import ENCODER_TYPES, Feature, Request
from attn.distributed import world_size
from attn.dtypes import needs_scales
from attn.errors import DTypeError
from attn.imports import resolve_obj_by_qualname
from attn.selection.platforms import Platform
from attn.selection.verdicts import Selection

#: Each layer's builders, by the arguments they were made with. Kept outside the layers, because a builder is not part of a
#: layer's state and must not be copied, saved or hashed with it.
_builders: "weakref.WeakKeyDictionary[Any, dict[Any, Any]]" = weakref.WeakKeyDictionary()


#: The effect of an int8 cache without scales, and the remedy.
UNSCALED = (
    "a scale of 1 rounds to integers (relative error 0.7 for keys of standard deviation 0.4): set k_scale and v_scale to the "
    "largest absolute value / 127 (attn.kv_cache_scales computes them), or use int8_per_token_head"
)


class _Unset(float):
    """A number that was not passed."""


# A float of 1, so that code below needs no case for it, and told from a caller's 1.0 by identity: only a scale that was
# not passed warns.
_UNSET = _Unset(1.0)


class BaseLayer:
    """A layer with a backend and a paged cache."""

    framework: ClassVar[str]
    selection: Selection
    kv_cache_spec: KVCacheSpec
    backend: type[AttentionBackend]
    impl: AttentionImpl[Any]
    #: The recorder of this layer's calls, if ATTN_RECORD is set.
    recorder: recording.Recorder | None = None
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float

    @staticmethod
    @abstractmethod
    def _default_dtype() -> Any:
        """Return the dtype of a layer created without one."""

    def _request(
        self, head_size: int, dtype: Any, features: Collection[str], required: Collection[str], return_lse: bool, **more: Any
    ) -> Request:
        """Return the layer's request.

        features: the caller's; required: those of the layer's other arguments; more: arguments of `selector.make_request`.
        """
        # Under decode context parallelism each rank returns a part of the softmax, which the backend must support even
        # if the layer itself returns no log-sum-exp.
        needed = {Feature.DCP: world_size() > 1, Feature.LSE: check_flag("return_lse", return_lse)}
        features = {*required, *list_of_names("features", features), *(feature for feature, is_set in needed.items() if is_set)}
        dtype = self._default_dtype() if dtype is None else dtype
        return selector.make_request(head_size, dtype, features=features, **more)

    def _choose(self, request: Request, backend: Any, return_lse: bool, **arguments: Any) -> None:
        """Select the backend, and make its implementation from the request and the layer's other arguments."""
        selection = selector.select(request, framework=self.framework, backend=backend, platform=self._platform())
        chosen = selection.require()
        impl_cls: Any = chosen.get_impl_cls()
        named = ("num_heads", "head_size", "num_kv_heads", "kv_cache_dtype", "attn_type")
        impl = impl_cls(**{name: getattr(request, name) for name in named}, **arguments)
        # Set, never unset: under decode context parallelism `AttentionImpl.__new__` has turned it on.
        if return_lse:
            impl.need_to_return_lse_for_decode = True
        impl.batch_invariant = Feature.BATCH_INVARIANT in request.features
        impl.layer_dtype = request.dtype
        # Last, together: a layer whose module is cast to a dtype that its backend refuses stays what it was.
        self.backend, self.selection, self.impl, self.recorder = chosen, selection, impl, recording.recorder()

    def _platform(self) -> Platform | None:
        """Return the platform of the layer's device; None: the framework's current one."""
        return None

    def _placed(self, device: Any) -> Any:
        """Return the device of a batch or a cache that a caller asks for (None: the layer's own, then the framework's default).

        A layer that this puts on another platform than its backend's selects again.
        """
        return device

    def _finish(self) -> None:
        """Finish construction in the framework's way, after the backend is chosen."""

    @abstractmethod
    def _keep_scale(self, name: str, scale: Any) -> None:
        """Store a scale (0-d or [K] float32) as attribute `name` and, if it is a single number, also as `{name}_float`."""

    def _keep_scales(self, num_kv_heads: int, k_scale: Any, v_scale: Any) -> None:
        check = resolve_obj_by_qualname(f"attn.{self.framework}.kv_cache.check_scale")
        # vLLM's layer has these four; queries and probabilities are not quantised here, and kernels that read the
        # scales get 1.
        for name, value in (("_q_scale", 1.0), ("_k_scale", k_scale), ("_v_scale", v_scale), ("_prob_scale", 1.0)):
            rank_of_numbers(name[1:], value)
            self._keep_scale(name, check(name[1:], value, num_kv_heads))

    def build(self, batch: Any, *, common_prefix_len: int = 0, device: Any = None) -> Any:
        """Convert a batch (`CommonAttentionMetadata`) to the backend's metadata: once per batch, for all layers that are
        equal in heads, window and cache.

        common_prefix_len: tokens known to be shared by all requests, a multiple of the block size: a hint. device: None is
        the layer's own. Raises `MetadataError`, `ShapeError` or `DTypeError` for a batch inconsistent with itself or the cache.
        """
        return self.builder(device).build(common_prefix_len, batch)

    def builder(self, device: Any = None, config: dict[str, Any] | None = None) -> Any:
        """Return the metadata builder that `build` uses: cached per device, `config` and number of the cache's blocks.

        For features that only a builder has: `build(0, batch, fast_build=True)`, FLASHINFER's plans of CUDA graphs
        (`build_for_cudagraph_capture`), and under jax `config={"bucket": False}` (the batch's exact extents).
        """
        device = self._placed(device)
        # By implementation, not by layer: casting a torch module makes a new implementation, whose batches may need
        # another builder.
        builders = _builders.setdefault(self.impl, {})
        # The specification has the number of blocks, so a larger cache gets a builder that checks ids against it.
        key = (self.kv_cache_spec, device, tuple(sorted(config.items())) if config else ())
        builder = builders.get(key)
        if builder is None:
            builder = builders[key] = self.backend.get_builder_cls()(self.kv_cache_spec, config=config, device=device)
        return builder

    def new_kv_cache(self, num_blocks: int, device: Any = None) -> Any:
        """Create a zeroed cache of `num_blocks` blocks in the backend's layout, on a device (None: the layer's own).

        `build` checks block ids and slots against the largest cache created by this method; a builder obtained earlier
        keeps its own limit. Raises ValueError unless `num_blocks` is a positive int.
        """
        return self._new_kv_cache(positive_int("num_blocks", num_blocks), device)

    def load_pages(self, kv_cache: Any, block_ids: Sequence[int], keys: Any, values: Any) -> Any:
        """Store pages in blocks `block_ids` of `kv_cache` and return it: changed in place under torch; a new array under jax
        (jit the call with the cache donated to write in place).

        block_ids: [n] ints, each once. keys, values: [n, P, K, D]; of an MLA layer the latents [n, P, L] and rotary keys
        [n, P, Dr]. They are values of any float dtype, cast or quantised with the layer's scales as new tokens are; or
        codes of the cache's element type, stored bit for bit. Raises `MetadataError` for block ids, `ShapeError` and
        `DTypeError`.
        """
        spec = self.kv_cache_spec
        caches = f"attn.{self.framework}.kv_cache"
        num_blocks, block_size = resolve_obj_by_qualname(f"{caches}.extent")(self.backend, kv_cache)
        # Ids are checked against this cache, which may have fewer blocks than the largest one of the layer.
        slots = page_slots(block_ids, num_blocks, block_size)
        pages = [arrays.to_framework(x, self.framework) for x in (keys, values)]
        checked = zip(("keys", "values"), pages, self._row_shapes(), strict=True)
        extent = (len(block_ids), block_size)
        codes = [check_pages(name, x, (*extent, *row), spec.kv_cache_dtype, spec.dtype) for name, x, row in checked]
        # Codes are stored with the scale that they were made with, values with the layer's: one call does not mix the two.
        if codes[0] != codes[1]:
            raise DTypeError(f"keys have dtype {pages[0].dtype}, values {pages[1].dtype}: must both be values or both be codes")
        # [n, P, ...] -> [n * P, ...], in the order of `slots`.
        rows = [x.reshape(-1, *x.shape[2:]) for x in pages]
        return resolve_obj_by_qualname(f"{caches}.load")(self, kv_cache, slots, *rows, codes[0])

    def _with_weights(self, result: Any, *arguments: Any) -> tuple[Any, ...]:
        """Append the attention weights of a call to its output, (output, weights) or (output, lse, weights)."""
        weights = resolve_obj_by_qualname("attn.weights.of_call")(self, recording.Arguments(*arguments))
        return (*result, weights) if isinstance(result, tuple) else (result, weights)

    @abstractmethod
    def _row_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a token's entries in the cache: key and value, or latent and rotary key."""

    def _new_kv_cache(self, num_blocks: int, device: Any, layers: int | None = None) -> Any:
        """Create one array for the caches of `layers` layers, of `num_blocks` blocks each; None: a cache of one layer."""
        allocate = resolve_obj_by_qualname(f"attn.{self.framework}.kv_cache.allocate")
        device = self._placed(device)
        # Before the specification changes: if memory runs out, `build` goes on checking against the caches that exist.
        cache = allocate(self.backend, self.kv_cache_spec, num_blocks * (layers or 1), device)
        known = self.kv_cache_spec
        most_layers = max(known.num_layers or 0, layers or 0) or None
        # The largest of all caches: a batch does not say which one it is for, so ids are checked against the widest
        # range, and `check_num_blocks` rejects the batch for a smaller cache.
        spec = replace(known, num_blocks=max(known.num_blocks or 0, num_blocks), num_layers=most_layers)
        object.__setattr__(self, "kv_cache_spec", spec)  # nnx rejects assignment under `jax.eval_shape`
        return cache


class BaseAttention(BaseLayer):
    """Multi-head attention over a paged KV cache, grouped-query included.

    Arguments are those of vLLM's `AttentionImpl`, and:
        sinks: [H] float32, one logit per head that takes softmax weight but has no value (gpt-oss). In lists and NumPy arrays,
            NaN sinks and non-finite slopes raise an error; a framework's array is not inspected, since its weights may be
            loaded later. Under torch an `nn.Parameter` is a parameter of the layer, `sinks` in `named_parameters()`: it is
            trained, loaded and cast with the model; other values are a float32 buffer, `sinks` in `state_dict()`.
        dtype: the activations' dtype; the framework's default when None.
        block_size: tokens per block of the cache.
        backend: a registry member or name, used or rejected; None follows `attn.backend_per_kind` and the environment, or lets
            the platform choose.
        features: further features that calls will need (`["tree_mask", "lse"]`: a list, not one string), for the choice.
        return_lse: whether calls return (output, lse) instead of output. lse: [H, T] float32, the natural log of the sum of
            exp(scores), sinks excluded, -inf where a row sees no key; for merging parts of one softmax
            (`attn.torch.merge_attn_states`, `attn.jax.merge_attn_states`).
        chunk_size: positions per chunk, where a row sees no key before its own chunk (Llama 4); None: no chunks.
        span_window: whether a batch's `spans` are cut by the window's left bound too; required if a layer with a window is to
            serve batches with spans.
        k_scale, v_scale: scales of a quantised cache: a float, or [K] float32 (an array or a list) where the backend supports
            per-head scales. An int8 cache without them warns: its codes are values rounded to integers.
            `attn.kv_cache_scales` computes both from keys and values.

    `selection` is the decision with all its reasons; print it. Raises ValueError for invalid arguments and `UnsupportedError`
    with every candidate's reasons if no backend serves the layer.
    """

    impl: PagedImpl[Any]

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
        return_lse: bool = False,
        chunk_size: int | None = None,
        span_window: bool | None = None,
        k_scale: Any = _UNSET,
        v_scale: Any = _UNSET,
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_size = check_heads(num_heads, num_kv_heads, head_size)
        # Normalised here for the request's features; the implementation normalises its arguments again, because it may be made
        # without a layer.
        window, soft_cap = window_pair(sliding_window, check_attn_type(attn_type)), check_soft_cap(logits_soft_cap)
        if sliding_window is not None:
            # Of Python's ints: the window is part of the builders' keys and of the description of a graph's operator.
            width = as_int(sliding_window)
            sliding_window = window if width is None else width
        required = layer_features(window, soft_cap, alibi_slopes, sinks, kv_sharing_target_layer_name, chunk_size)
        for name, values in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if values is not None:
                rank_of_numbers(name, values)
        # Rank 1 is a scale of each head; the values are not read, since they may be parameters that are loaded later.
        if rank_of_numbers("k_scale", k_scale) or rank_of_numbers("v_scale", v_scale):
            required |= {Feature.PER_HEAD_SCALES}
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "attn_type": attn_type}
        cache = {"kv_cache_dtype": kv_cache_dtype, "block_size": block_size}
        request = self._request(head_size, dtype, features, required, return_lse, **heads, **cache)
        # a backend of vLLM's interface alone does not take these
        extras = {"sinks": sinks, "chunk_size": chunk_size, "span_window": span_window}
        self._choose(
            request,
            backend,
            return_lse,
            scale=check_scale(scale, head_size),
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            # Left out if None: such a backend's constructor has no such keyword, and serves the layer if it asks for
            # none of them.
            **{name: value for name, value in extras.items() if value is not None},
        )
        self.kv_cache_spec = KVCacheSpec(
            request.block_size or block_size,
            num_kv_heads,
            head_size,
            request.dtype,
            request.kv_cache_dtype,
            attn_type=attn_type,
            sliding_window=sliding_window,
        )
        self._keep_scales(num_kv_heads, k_scale, v_scale)
        self._warn_unscaled([name for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)) if scale is _UNSET])
        self._finish()

    def _warn_unscaled(self, missing: list[str]) -> None:
        """Warn that scales of an int8 cache were not passed."""
        spec = self.kv_cache_spec
        # An encoder's layer has no cache whose codes could be rounded.
        if missing and spec.attn_type not in ENCODER_TYPES and needs_scales(spec.kv_cache_dtype):
            names = " and ".join(missing)
            warnings.warn(
                f"{self.selection.name}: kv_cache_dtype={spec.kv_cache_dtype!r} without {names}: {UNSCALED}", stacklevel=3
            )

    def _row_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        row = (self.impl.num_kv_heads, self.impl.head_size)
        return row, row


class BaseMLAAttention(BaseLayer):
    """Multi-head latent attention over a paged cache of latents (DeepSeek-V2 and V3, Kimi K2).

    num_heads: query heads H; kv_lora_rank L, qk_nope_head_dim Dn, qk_rope_head_dim Dr, v_head_dim Dv: the model's sizes;
        Dr is 0 where it has no rotary dimensions.
    kv_b_proj: the up-projection [W_UK | W_UV]: an object with `.weight` [H * (Dn + Dv), L] or `.kernel` [L, H * (Dn + Dv)],
        or the bare array [L, H, Dn + Dv].
    scale: multiplies the scores of the head before absorption; None is (Dn + Dr)^-0.5 (with YaRN, times mscale^2).
    indexer: selects the keys that each row sees; passing one requests a sparse backend.
    prefill_backend: an MLA prefill backend by name, used or rejected; None lets the platform choose.
    k_scale: scale of an fp8 cache, one number for whole rows. The others, including `return_lse`, are as in `Attention`.

    `selection` is the decision with all its reasons; print it. Raises ValueError for invalid arguments and `UnsupportedError`
    with every candidate's reasons if no backend serves the layer.
    """

    backend: type[MLABackend]
    impl: MLAImpl[Any]

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
        return_lse: bool = False,
        k_scale: Any = 1.0,
    ) -> None:
        super().__init__()
        rank, rope = positive_int("kv_lora_rank", kv_lora_rank), natural_int("qk_rope_head_dim", qk_rope_head_dim)
        nope = positive_int("qk_nope_head_dim", qk_nope_head_dim)
        required = {Feature.MLA if indexer is None else Feature.SPARSE_MLA}
        heads = {"num_heads": num_heads, "num_kv_heads": 1}
        cache = {"kv_cache_dtype": kv_cache_dtype, "block_size": block_size}
        # A cached row is latent and rotary key together, read by all heads: to the selector one kv head of L + Dr.
        request = self._request(rank + rope, dtype, features, required, return_lse, **heads, **cache)
        self._choose(
            request,
            backend,
            return_lse,
            # The scale of the head before absorption (docs/semantics.md §9), not of the cached row.
            scale=check_scale(scale, nope + rope),
            # Required arguments of vLLM's `MLAAttentionImpl`, which this layer does not offer.
            **dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name")),
            q_lora_rank=q_lora_rank,
            kv_lora_rank=rank,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            qk_head_dim=nope + rope,
            v_head_dim=v_head_dim,
            kv_b_proj=kv_b_proj,
            indexer=indexer,
        )
        # The implementation chooses it when it has its weights, because the choice depends on their device.
        self.impl.prefill_backend = prefill_backend
        self.impl.prefill_features = request.features & {Feature.NAN_SAFE}
        self.kv_cache_spec = KVCacheSpec(
            request.block_size or block_size, 1, rank + rope, request.dtype, request.kv_cache_dtype
        )
        self._keep_scales(1, k_scale, 1.0)
        self._finish()

    def _row_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.impl.kv_lora_rank,), (self.impl.qk_rope_head_dim,)
