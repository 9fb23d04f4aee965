"""tpu-inference's attention interfaces, implemented with this library's TPU backends.

The engine allocates a cache per layer in the shape that `get_kv_cache_shape` returns: that of PALLAS, [N, planes, K, P,
lanes]. Pages come first and kv heads third, which are the dimensions that the engine shards, so no cache is converted.
XLA_ATTN, selected where PALLAS does not serve a layer, reads the same cache. A batch (`AttentionMetadata`) becomes this
library's inside the jitted step, on each device of the mesh; keys and values arrive in the cache's dtype, already quantised.

vLLM's models call `TPUAttnImpl`, which checks a layer in its constructor. JAX models (0.32) call `attention` without naming a
backend, so the engine would run its own kernel over this library's cache: `create` makes the default select by the cache.

Nothing in the engine (0.32) says which tokens are of an image and see each other (Gemma 3), nor that a layer has chunks
(Llama 4). `create` makes the engine's runner add an image's positions to its batches (`ImageMetadata`); a batch without images
is the engine's, and runs its program. Chunks are the layer's own attribute.
"""

import dataclasses
import functools
import inspect
import math
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_inference.layers.common import attention_interface
from tpu_inference.layers.common.attention_backend import AttentionBackend, RPAAttentionBackend, register_attention_backend
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.layers.vllm.backends.flash_attn import PallasAttentionBackend, PallasAttentionBackendImpl

from attn.arguments import Window, layer_features, window_pair
from attn.capabilities import AttentionType, Feature
from attn.dtypes import KV_CACHE_DTYPES, dtype_name
from attn.errors import BackendLoadError, ShapeError, UnsupportedError
from attn.integrations.tpu_inference import _FIELDS, NAME, PATH
from attn.integrations.vllm import layer_name, mark_images
from attn.jax.backends import pallas, xla_attn
from attn.jax.backends._paged import PagedAttentionImpl
from attn.jax.kernels import xla
from attn.jax.kernels.tpu import ragged_paged_attention as kernel
from attn.jax.metadata import PagedAttentionMetadata
from attn.jax.sharding import HeadShards
from attn.selector import make_request, select
from attn.visibility import BatchMask

#: Fields of a batch that are read, or do not affect which keys a row sees.
_KNOWN = {*_FIELDS, "input_positions", "mamba_state_indices", "padded_num_reqs", "use_causal_mask"}
#: Fields of a batch that key the compilation.
_STATIC = ("padded_num_reqs", "pcp_cache_pages", "use_causal_mask", "window_cuts", "full_layers")
_ELSEWHERE = "use tpu-inference's own backend (omit --attention-backend)"


class PagesFirstXLABackend(xla_attn.XLAAttentionBackend):
    """XLA_ATTN over PALLAS's cache."""

    get_kv_cache_shape = staticmethod(pallas.PallasAttentionBackend.get_kv_cache_shape)
    logical_kv_cache = staticmethod(pallas.PallasAttentionBackend.logical_kv_cache)


class PagesFirstXLAImpl(xla_attn.XLAAttentionImpl, backend=PagesFirstXLABackend):
    _over_cache = staticmethod(xla.pages_first_attention)
    _write = pallas.PallasAttentionImpl._write


#: Implementations over the cache of this module, by the name of the selected backend.
_IMPLS: dict[str, type[PagedAttentionImpl]] = {"PALLAS": pallas.PallasAttentionImpl, "XLA_ATTN": PagesFirstXLAImpl}


@dataclasses.dataclass
class ImageMetadata(AttentionMetadata):
    """A batch with images. spans: [T, 2] int32, the positions of the first and last token of each row's image, or -1.
    window_cuts: whether a layer's window cuts images. full_layers: whether layers without a window see images so, too."""

    spans: jax.Array | None = None
    window_cuts: bool = False
    full_layers: bool = True


_DATA = [field.name for field in dataclasses.fields(ImageMetadata) if field.name not in _STATIC]
# As the engine registers its own batches: arrays are leaves, the rest keys the compilation.
jax.tree_util.register_dataclass(ImageMetadata, _DATA, list(_STATIC))


class _LayerParams(NamedTuple):
    """A layer's rules, as the engine passes them. shares: whether the layer reads the cache of another. chunk_size,
    span_window: as of this library's layers."""

    scale: float
    window: int | Window | None
    soft_cap: float | None
    shares: bool
    causal: bool = True
    chunk_size: int | None = None
    span_window: bool | None = None


def _implementation(
    rules: _LayerParams, heads: tuple[int, int, int], dtype: Any, kv_cache_dtype: str, block_size: int | None, sinks: Any
) -> PagedAttentionImpl:
    """Return the implementation of the selected backend; heads: (H, K, D). Raises `UnsupportedError` with every candidate's
    reasons."""
    target, (num_heads, num_kv_heads, head_size) = "another layer" if rules.shares else None, heads
    window = window_pair(rules.window, AttentionType.DECODER)
    features = layer_features(window, rules.soft_cap, None, sinks, target, rules.chunk_size)
    features |= frozenset() if rules.causal else {Feature.NON_CAUSAL}
    request = make_request(
        head_size, dtype, kv_cache_dtype, block_size, features=features, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    selection = select(request, framework="jax")
    # raises with every candidate's reasons
    selection.require()
    if selection.name not in _IMPLS:
        raise UnsupportedError(f"{selection.name} has no cache for tpu-inference: must be {' or '.join(_IMPLS)}")
    return _IMPLS[selection.name](
        **{name: getattr(request, name) for name in ("num_heads", "head_size", "num_kv_heads", "kv_cache_dtype")},
        scale=rules.scale,
        sliding_window=rules.window,
        logits_soft_cap=rules.soft_cap,
        kv_sharing_target_layer_name=target,
        sinks=sinks,
        chunk_size=rules.chunk_size,
        span_window=rules.span_window,
    )


class AttnKernels(AttentionBackend):
    """The engine's backend of the name "attn": cache shapes and the call.

    soft_cap, chunk_size: of vLLM's layers, whose calls (0.32) do not pass them.
    """

    def __init__(self, soft_cap: float | None = None, chunk_size: int | None = None) -> None:
        self.soft_cap, self.chunk_size = soft_cap, chunk_size

    def get_kv_cache_shape(
        self, total_num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, kv_dtype: Any
    ) -> tuple[int, ...]:
        """Return one shard's [N, planes, K, P, lanes]."""
        return kernel.cache_shape(total_num_pages, page_size, num_kv_heads, head_dim)

    def attention(
        self,
        kv_cache: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        md: Any,
        shared_md: Any,
        mesh: Mesh,
        *,
        head_dim_original: int,
        sm_scale: float,
        attention_chunk_size: int | None,
        q_scale: float | None,
        k_scale: float | None,
        v_scale: float | None,
        sinks: jax.Array | None,
        update_kv_cache: bool,
        use_causal_mask: bool,
        attn_logits_soft_cap: float | None,
        decode_query_size: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Write the new tokens and attend. Returns (kv_cache, output [T, H, D] in q's dtype, 0 in padding rows).

        q: [T, H, D]; k, v: [T, K, D] in the cache's dtype, or in q's if the cache is not quantised. attention_chunk_size: the
        sliding window, W keys with the row's own; without a causal mask, later keys are visible too. decode_query_size: a
        hint for block sizes, not used.

        Raises `UnsupportedError` for what no backend serves, `ShapeError` for a cache of another backend.
        """
        self._check(kv_cache, q, (md, shared_md), mesh, (q_scale, k_scale, v_scale))
        window: int | Window | None = attention_chunk_size
        if attention_chunk_size is not None and not use_causal_mask:
            # without causality, later keys are in the window too
            window = (attention_chunk_size - 1, None)
        soft_cap = self.soft_cap if attn_logits_soft_cap is None else attn_logits_soft_cap
        shards = HeadShards(q.shape[1], k.shape[1], _extent(mesh, ShardingAxisName.ATTN_HEAD))
        if shards.replicas > 1:
            # more devices than kv heads: each has a copy of one
            k, v = (jnp.repeat(x, shards.replicas, axis=1) for x in (k, v))
        # layers without a window see no images in some models (Gemma 4)
        images = md if isinstance(md, ImageMetadata) and (window is not None or md.full_layers) else None
        cuts, spans = (None, None) if images is None else (images.window_cuts, images.spans)
        rules = _LayerParams(sm_scale, window, soft_cap, not update_kv_cache, use_causal_mask, self.chunk_size, cuts)
        local = functools.partial(_local, rules, (1.0 if k_scale is None else k_scale, 1.0 if v_scale is None else v_scale))
        rows, pages = (
            P(ShardingAxisName.ATTN_DATA, ShardingAxisName.ATTN_HEAD),
            P(ShardingAxisName.ATTN_DATA, None, ShardingAxisName.ATTN_HEAD),
        )
        batch = (shared_md.seq_lens, md.block_tables, shared_md.query_start_loc, shared_md.request_distribution)
        requests, heads = P(ShardingAxisName.ATTN_DATA), P(ShardingAxisName.ATTN_HEAD)
        extras: dict[str, Any] = {"sinks": (sinks, heads), "spans": (spans, requests)}
        # an absent array has no spec, so it is left out
        extras = {name: pair for name, pair in extras.items() if pair[0] is not None}
        output, kv_cache = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(rows, rows, rows, pages, [requests] * len(batch), {name: spec for name, (_, spec) in extras.items()}),
            out_specs=(rows, pages),
            check_vma=False,  # a Pallas kernel does not declare which of its results vary over which axes
        )(q, k, v, kv_cache, [*batch], {name: array for name, (array, _) in extras.items()})
        return kv_cache, output

    def _check(self, kv_cache: Any, q: Any, batches: tuple[Any, ...], mesh: Mesh, scales: tuple[Any, Any, Any]) -> None:
        """Raise for what this class would otherwise ignore. scales: of queries, keys and values."""
        q_scale, k_scale, v_scale = scales
        why = [f"context parallelism ({axis} = {mesh.shape[axis]})" for axis in ("dcp", "pcp") if mesh.shape.get(axis, 1) > 1]
        why += dict.fromkeys(f"{name} of a batch" for batch in batches for name in _unknown(batch))
        if q_scale is not None:
            why.append(f"quantised queries (q_scale = {q_scale})")
        # scales of a cache that is not quantised would have no effect
        if kv_cache.dtype.itemsize > 1 and {k_scale, v_scale} - {None, 1.0}:
            why.append(f"k_scale = {k_scale}, v_scale = {v_scale} over a cache of {kv_cache.dtype}")
        if why:
            layer = f"a layer of {q.shape[1]} heads of {q.shape[2]}"
            raise UnsupportedError(f"{layer}: {', '.join(why)} not supported: {_ELSEWHERE}", why)
        if not _is_ours(kv_cache):
            raise ShapeError(
                f"kv_cache has shape {list(kv_cache.shape)}: must be [N, 1 or 2, K, P, 128 or more], of get_kv_cache_shape"
            )


def _unknown(batch: Any) -> list[str]:
    """Return the fields of a batch that later versions may have added and that are set."""
    known = _KNOWN | {"spans", "window_cuts", "full_layers"} if isinstance(batch, ImageMetadata) else _KNOWN
    return [
        field.name
        for field in dataclasses.fields(batch)
        if field.name not in known
        and getattr(batch, field.name) is not None
        and getattr(batch, field.name) is not field.default
    ]


def _is_ours(kv_cache: Any) -> bool:
    """Whether a cache has this module's shape. The second dimension of the engine's own is a page of at least 8 tokens."""
    return kv_cache.ndim == 5 and kv_cache.shape[1] <= 2


def _extent(mesh: Mesh, axes: Any) -> int:
    """Return the number of devices of one or several mesh axes; an axis that the mesh lacks counts as 1."""
    return math.prod(mesh.shape.get(axis, 1) for axis in ([axes] if isinstance(axes, str) else axes or ()))


def _batch(
    rows: int, cache: tuple[int, ...], batch: list[jax.Array], causal: bool, spans: jax.Array | None
) -> PagedAttentionMetadata:
    """Convert one device's batch: lengths [R], block tables [R * B], starts [R + 1], distribution [3]; entries past the last
    request have no meaning."""
    # the distribution is cumulative: its last number is of all requests
    lens, tables, starts, (*_, num_reqs) = batch
    num_blocks, page, requests = cache[0], cache[3], lens.shape[0]
    table, number = tables.reshape(requests, -1), jnp.arange(requests + 1, dtype=jnp.int32)
    tokens = starts[num_reqs]
    # requests past the last one begin and end where that ends: they have no rows
    starts = jnp.where(number <= num_reqs, starts, tokens)
    lens = jnp.where(number[:-1] < num_reqs, lens, 0)
    token = jnp.arange(rows, dtype=jnp.int32)
    # the number of requests that end at or before the token; padding rows belong to the last one
    request = jnp.minimum(jnp.sum(token[:, None] >= starts[1:], axis=1, dtype=jnp.int32), requests - 1)
    position = jnp.maximum(lens[request] - starts[request + 1] + token, 0)
    # padding rows may have positions beyond the table; their slots are -1 below
    slots = table[request, jnp.minimum(position // page, table.shape[1] - 1)] * page + position % page
    return PagedAttentionMetadata(
        query_start_loc=starts,
        seq_lens=lens,
        block_table=table,
        slot_mapping=jnp.where(token < tokens, slots, -1),
        num_reqs=num_reqs,
        num_actual_tokens=tokens,
        mask=BatchMask(spans=spans),
        max_query_len=rows,  # the engine does not pass the longest query
        max_seq_len=table.shape[1] * page,
        causal=causal,
        block_size=page,
        num_blocks=num_blocks,
    )


def _local(
    rules: _LayerParams,
    scales: tuple[float, float],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    batch: list[jax.Array],
    more: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Write and attend on one device of the mesh, with its heads and requests. Returns (output, kv_cache).

    scales: of keys and of values; batch: as of `_batch`; more: the layer's sinks and the batch's spans, if there are any.
    """
    stored, page = dtype_name(kv_cache.dtype), kv_cache.shape[3]
    same = stored == dtype_name(q.dtype)
    # the first name of the dtype; several name the same one
    element = "auto" if same else next(name for name, kept in KV_CACHE_DTYPES.items() if kept == stored)
    heads = (q.shape[1], k.shape[1], q.shape[2])
    impl = _implementation(rules, heads, q.dtype, element, page, more.get("sinks"))
    metadata = _batch(q.shape[0], kv_cache.shape, batch, rules.causal, more.get("spans"))
    return impl.apply(q, k, v, kv_cache, metadata, k_scale=scales[0], v_scale=scales[1])


class TPUAttnImpl(PallasAttentionBackendImpl):
    """A layer of vLLM's models: the engine's, with checks. Encoders (`encoder_only`) use the engine's own kernel."""

    attention_backend = NAME

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the engine's arguments. Raises `UnsupportedError`, with the layer's name, if no backend serves it."""
        name = layer_name()
        try:
            # by the engine's own names, whichever way vLLM passes them
            passed = inspect.signature(PallasAttentionBackendImpl).bind(*args, **kwargs).arguments
        except TypeError as error:
            raise UnsupportedError(f"{name}: {error}: {_ELSEWHERE}") from error
        if passed.get("alibi_slopes") is not None:
            raise UnsupportedError(f"{name}: {Feature.ALIBI.value} not supported by tpu-inference, whose layers do not pass it")
        soft_cap = float(passed.get("logits_soft_cap") or 0) or None
        if getattr(passed.get("attn_type"), "value", passed.get("attn_type", AttentionType.DECODER)) == AttentionType.DECODER:
            try:
                shares = passed.get("kv_sharing_target_layer_name") is not None
                rules = _LayerParams(passed["scale"], passed["sliding_window"], soft_cap, shares)
                heads = (passed["num_heads"], passed["num_kv_heads"], passed["head_size"])
                # only whether there are any matters for the choice: the engine's own are not on a device yet
                sinks = None if passed.get("sinks") is None else jnp.zeros(passed["num_heads"])
                _implementation(rules, heads, torch.get_default_dtype(), passed["kv_cache_dtype"], None, sinks)
            except ValueError as error:
                raise UnsupportedError(f"{name}: {error}") from error
        super().__init__(*args, **kwargs)
        self.soft_cap = soft_cap
        self.attention_backend = _with(soft_cap=soft_cap)

    def forward(self, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # chunks are an attribute of the layer, which an implementation is not given before the call
        self.attention_backend = _with(soft_cap=self.soft_cap, chunk_size=getattr(layer, "attention_chunk_size", None))
        try:
            return super().forward(layer, *args, **kwargs)
        except UnsupportedError as error:
            raise UnsupportedError(f"{layer.layer_name}: {error}", error.reasons) from error


class TPUAttnBackend(PallasAttentionBackend):
    """The vLLM backend class of the name "attn"."""

    @staticmethod
    def get_name() -> str:
        return NAME.upper()

    @staticmethod
    def get_impl_cls() -> type[TPUAttnImpl]:
        return TPUAttnImpl

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether image tokens may see each other in both directions."""
        return True


def _with(**rules: Any) -> str:
    """Return the name of a backend for layers with these arguments of `AttnKernels`.

    The engine's layers (0.32) do not pass them to the call: a layer passes only its backend's name, by which its compiled call
    is cached too.
    """
    terms = {name: value for name, value in rules.items() if value is not None}
    word = re.sub(r"\W", "_", "_".join([NAME, *(f"{name}_{value!r}" for name, value in terms.items())]))
    if terms:
        register_attention_backend(word, attention=functools.partial(AttnKernels, **terms), vllm_backend=f"{PATH}.{word}")
    return word


class _ByCache(RPAAttentionBackend):
    """The default of calls that name no backend: this library over its own cache, otherwise the engine's."""

    def attention(self, kv_cache: jax.Array, *args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
        if _is_ours(kv_cache):
            return AttnKernels().attention(kv_cache, *args, **kwargs)
        return super().attention(kv_cache, *args, **kwargs)


def create() -> AttnKernels:
    """Return the backend; from then on, calls that name none select by their cache, and batches have their images."""
    if not hasattr(attention_interface, RPAAttentionBackend.__name__):
        raise BackendLoadError(
            f"{attention_interface.__name__} has no {RPAAttentionBackend.__name__}, the default of JAX models"
        )
    # the module's name for its default, which calls look up
    attention_interface.RPAAttentionBackend = _ByCache
    runner = getattr(sys.modules.get(_RUNNER), "TPUModelRunner", None)
    if runner is not None and not hasattr(runner._prepare_inputs, "__wrapped__"):
        runner._prepare_inputs = _with_images(runner._prepare_inputs)
    return AttnKernels()


_RUNNER = "tpu_inference.runner.tpu_runner"  #: which the engine has imported where it makes batches
#: Where a step of the runner has its token ids, its batch, its requests by data shard and the tokens of a shard; of how many.
_IDS, _BATCH, _REQUESTS, _TOKENS, _PARTS = 0, 2, 8, 9, 12


def _with_images(prepare: Any) -> Any:
    """Wrap `TPUModelRunner._prepare_inputs`: the batch that it returns has the step's images, if there are any."""

    @functools.wraps(prepare)
    def prepare_inputs(runner: Any, scheduled: Any) -> Any:
        step = prepare(runner, scheduled)
        # most models: their steps are left as they are
        if not runner.model_config.is_mm_prefix_lm:
            return step
        # a batch for each group of layers, where some have windows; () refuses a step of another form below
        groups = getattr(step[_BATCH], "groups", None) if len(step) == _PARTS else ()
        batches = (step[_BATCH],) if groups is None else groups
        if not batches or not all(type(batch) is AttentionMetadata for batch in batches):
            raise UnsupportedError(f"{type(runner).__name__}: a step of this form with images not supported: {_ELSEWHERE}")
        spans = _spans(runner, scheduled, step)
        if spans is None:
            return step
        sharding = NamedSharding(runner.mesh, P(ShardingAxisName.ATTN_DATA))
        model = str(runner.model_config.hf_text_config.model_type)
        images = {
            "spans": jax.device_put(spans, sharding),
            "window_cuts": model.startswith(("gemma3", "gemma4")),  # as in transformers; windows are longer than images
            "full_layers": not model.startswith("gemma4"),
        }
        metadata = tuple(ImageMetadata(**vars(batch), **images) for batch in batches)
        batch = metadata[0] if groups is None else type(step[_BATCH])(metadata, step[_BATCH].layer_names_per_group)
        return (*step[:_BATCH], batch, *step[_BATCH + 1 :])

    return prepare_inputs


def _spans(runner: Any, scheduled: Any, step: Any) -> np.ndarray[Any, Any] | None:
    """Return the spans of a step's rows, of all data shards, or None if no row is of an image. Raises `UnsupportedError` for a
    step that cuts an image."""
    spans = np.full((step[_IDS].shape[0], 2), -1, np.int32)
    for shard, names in step[_REQUESTS].items():
        offset = shard * step[_TOKENS]
        for name in names:
            request, new = runner.requests[name], scheduled.num_scheduled_tokens[name]
            # tokens of audio are causal
            images = [image.mm_position for image in request.mm_features if image.modality != "audio"]
            ranges = [span for image in images for span in image.extract_embeds_range()]
            cut = mark_images(spans[offset : offset + new], request.num_computed_tokens, ranges)
            if cut:
                raise UnsupportedError(f"{name}: a chunk {cut} not supported: {_ELSEWHERE}")
            offset += new
    return spans if (spans >= 0).any() else None
