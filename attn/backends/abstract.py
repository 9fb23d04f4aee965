"""The interface that every attention backend of every framework implements.

Names and signatures are vLLM's. Added are members that explain choices and make calls safe:
`AttentionBackend.capabilities` and `why_not` (why a request is rejected), `AttentionImpl.__call__` (takes and returns
arrays of any framework), `do_kv_cache_update` (the cache write without the attention) and `logical_kv_cache` (a cache of any
layout viewed as keys and values).

Shape letters: T tokens in the batch, R requests, S longest context, H query heads, K kv heads, D head_size, N blocks,
P block_size. `Array` is an array of the implementation's framework.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from attn import arrays
from attn.backends.facts import Implementation, LayerBackend, returns
from attn.backends.metadata import AttentionMetadata, CommonAttentionMetadata
from attn.capabilities import ENCODER_TYPES, AttentionType, Device, MultipleOf, Request, supports_size
from attn.distributed import get_dcp_group
from attn.dtypes import QuantKey
from attn.visibility import LayerMask, Visibility

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionType",
    "KVCacheSpec",
    "MLAAttentionImpl",
    "MultipleOf",
    "T",
    "is_quantized_kv_cache",
]

Array = Any
T = TypeVar("T", bound=AttentionMetadata)


@dataclass(frozen=True)
class KVCacheSpec:
    """The cache of one layer (or a group of equal layers), as a metadata builder needs to know it.

    num_layers: the layers whose caches are in one array of num_layers * num_blocks blocks (jax), if known.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kv_cache_dtype: str = "auto"
    # Not part of a layer's arguments: known once a cache exists, for the check of block ids.
    num_blocks: int | None = None
    sliding_window: int | tuple[int | None, int | None] | None = None
    attn_type: str = AttentionType.DECODER
    num_layers: int | None = None


class AttentionLayer(Protocol):
    """The layer from which an implementation is called; it holds the scales of quantised tensors."""

    _q_scale: Array
    _k_scale: Array
    _v_scale: Array
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float
    _prob_scale: Array

    def forward(self, query: Array, key: Array, value: Array, kv_cache: Array, attn_metadata: AttentionMetadata) -> Array: ...


class AttentionBackend(LayerBackend):
    """Abstract class for attention backends.

    A backend declares its properties as class data: `name`, `metadata_cls`, `builder_cls`, `block_sizes` and one
    `capabilities` record. `impl_cls` is set by the implementation's class statement (`class MyImpl(Template,
    backend=MyBackend)`). The interface's methods return these; selection, error messages, the tables and the conformance cases
    are derived from them. A class may override the methods instead.
    """

    # For some attention backends, we allocate an output tensor before
    # calling the custom op. When piecewise cudagraph is enabled, this
    # makes sure the output tensor is allocated inside the cudagraph.
    accept_output_buffer: bool = False

    impl_cls: ClassVar[type["AttentionImpl[Any]"]]
    metadata_cls: ClassVar[type[AttentionMetadata]]
    builder_cls: ClassVar[type["AttentionMetadataBuilder[Any]"]]
    lse_flag = "can_return_lse_for_decode"

    #: Supported numbers of tokens per cache block: sizes, or rules for them.
    block_sizes: ClassVar[tuple[int | MultipleOf, ...]] = (MultipleOf(1),)

    #: Maximum number of elements that the keys of one layer's cache span on a GPU (None: no limit); a call rejects more.
    max_cache_span: ClassVar[int | None] = None

    @classmethod
    @returns("builder_cls")
    def get_builder_cls(cls) -> type["AttentionMetadataBuilder[Any]"]:
        return cls.builder_cls

    @classmethod
    def get_supported_kernel_block_size(cls) -> list[int | MultipleOf]:
        """`block_sizes`, unless the implementation says otherwise: vLLM's interface has this method on both classes."""
        # The marked method of the base class returns the backend's data, which this would ask again; only an override
        # has another answer.
        if not isinstance(cls.block_sizes, Collection):
            raise TypeError(f"block_sizes={cls.block_sizes!r} must be a tuple: ({cls.block_sizes!r},)")
        sizes = cls.get_impl_cls().get_supported_kernel_block_size
        return list(cls.block_sizes) if getattr(sizes, "datum", None) == "block_sizes" else sizes()

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> AttentionMetadata:
        return cls.get_metadata_cls()(*args, **kwargs)

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        raise NotImplementedError

    @staticmethod
    # The order of the shape's dimensions in memory, outermost first: an engine that allocates the cache permutes by it
    # (vLLM's interface). Not abstract, because vLLM takes an exception for the identity.
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        raise NotImplementedError

    @staticmethod
    def logical_kv_cache(kv_cache: Array) -> tuple[Array, Array]:
        """Return a cache of this backend's shape as (keys [N, P, K, D], values [N, P, K, D]): views if the framework has
        them; for inspection, tests and transfer."""
        raise NotImplementedError

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return (cls.__module__, cls.__qualname__)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        """Return every reason why this backend does not serve `request` (on `device`); empty if it does.

        A backend whose limits depend on each other overrides this, calls super, and adds the reasons for those combinations.
        """
        # No limits are known of a class written for vLLM's interface alone: it is accepted, and its constructor has the
        # last word.
        if cls.capabilities is None:
            return []
        why = cls.capabilities.reasons(request, device, cls.served_features())
        # An encoder's layer reads the keys of the call: it has no blocks whose size could matter.
        if request.block_size is not None and request.attn_type not in ENCODER_TYPES:
            allowed = cls.get_supported_kernel_block_size()
            if not supports_size(request.block_size, allowed):
                why.append(f"block_size={request.block_size} (supports {', '.join(map(str, allowed))})")
        return why


class AttentionMetadataBuilder(ABC, Generic[T]):
    """Converts the framework-neutral batch into one backend's metadata, of `metadata_cls`, once per batch.

    `device` is the framework's device (None: its default). Builders keep no state between batches, except the plans of CUDA
    graphs if a backend has `build_for_cudagraph_capture`.
    """

    metadata_cls: type[T]

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: Sequence[str] = (), config: Any = None, device: Any = None
    ) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, tuple(layer_names)
        self.config, self.device = config, device

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> T:
        """Build this backend's metadata for the batch.

        `common_prefix_len` tokens (a multiple of block_size) are known to be shared by all requests: a hint that a backend
        with cascade attention may use and others ignore. Raises `MetadataError` for an inconsistent batch.
        """
        raise NotImplementedError


class AttentionImpl(Implementation, ABC, Generic[T]):
    """One layer's attention. `forward` takes arrays of the implementation's framework; calling the object takes arrays of any
    framework (`attn.arrays`)."""

    # Whether the attention impl can return the softmax lse for decode.
    # Some features like decode context parallelism require the softmax lse.
    can_return_lse_for_decode: bool = False

    # some attention backends might not always want to return lse
    # even if they can return lse (for efficiency reasons)
    need_to_return_lse_for_decode: bool = False

    #: The layer's mask.
    mask: LayerMask = LayerMask()

    #: Whether the backend is known to serve this layer without causal masking too (`attn.backends.checks.check_masks`).
    serves_non_causal: bool = False

    #: Whether a request's bits must not depend on the rest of the batch (docs/semantics.md §17). Set by a layer that requests
    #: the feature, whose backend then declares it; the default is the fastest plan for each batch.
    batch_invariant: bool = False

    backend: ClassVar[type[AttentionBackend]]
    #: "torch" or "jax": the framework to which `__call__` converts.
    framework: ClassVar[str] = "torch"
    #: Whether `torch.compile` can trace `forward`; if not, the layer is one operator of a graph.
    traceable: ClassVar[bool] = True

    #: Name of the activation dtype that the enclosing layer was built for; None without a layer.
    layer_dtype: str | None = None

    dcp_world_size: int
    dcp_rank: int

    def traces(self, attn_metadata: Any) -> bool:
        """Whether `torch.compile` can trace a call with this batch; by default `traceable`."""
        return self.traceable

    def visible(self, attn_metadata: Any) -> Visibility:
        """Return the visibility of a batch: the mask of the layer and that of the batch."""
        # A cross-attention layer is not causal whatever the batch says, and a batch of a decoder may turn causality off
        # (`causal=False`). Where nothing changes, a call makes no record.
        causal = self.mask.causal and bool(attn_metadata.causal)
        return Visibility(self.mask if causal == self.mask.causal else self.mask._replace(causal=causal), attn_metadata.mask)

    def __new__(cls, *args: Any, **kwargs: Any) -> "AttentionImpl[T]":
        # use __new__ so that all subclasses will call this
        self = super().__new__(cls)
        try:
            # Read once, at construction, as in vLLM: a group set later does not change layers that exist.
            self.dcp_world_size = get_dcp_group().world_size
            self.dcp_rank = get_dcp_group().rank_in_group
        except AssertionError:
            # DCP might not be initialized in testing
            self.dcp_world_size = 1
            self.dcp_rank = 0
        # Ranks merge their partial results by it (docs/semantics.md §15).
        self.need_to_return_lse_for_decode = self.dcp_world_size > 1 and self.can_return_lse_for_decode
        return self

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        raise NotImplementedError

    @classmethod
    @returns("block_sizes")
    def get_supported_kernel_block_size(cls) -> list[int | MultipleOf]:
        return list(getattr(getattr(cls, "backend", None), "block_sizes", AttentionBackend.block_sizes))

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: Array,
        key: Array,
        value: Array,
        kv_cache: Array,
        attn_metadata: T,
        output: Array | None = None,
        output_scale: Array | None = None,
        output_block_scale: Array | None = None,
    ) -> Array:
        """Compute attention of one layer over one batch.

        query: [T, H, D]; key, value: [T, K, D], written to `kv_cache` first unless the layer shares another's cache or they
        are None; output: [T, H, D] buffer to fill, or None. Returns the output; if `need_to_return_lse_for_decode` is set,
        (output, lse [H, T] float32, or float64 for float64 queries, natural log, sinks excluded). Rows at or past
        `num_actual_tokens` are not touched. `attn_metadata` None is a profiling run: returns zeros.
        """
        raise NotImplementedError

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Array, value: Array, kv_cache: Array, slot_mapping: Array
    ) -> Array:
        """Write key, value [T, K, D] at `slot_mapping` [T] (block * P + offset; -1 writes nothing), quantised if the cache
        is. Returns the cache: under torch the same object, changed; under jax a new array."""
        raise NotImplementedError

    def __call__(
        self,
        layer: AttentionLayer,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Array,
        attn_metadata: T,
        output: None = None,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        """Call `forward` with arrays of any framework: converted by DLPack, the output returned in the query's framework. The
        cache is not converted (it belongs to this implementation's framework), nor are gradients or an output buffer."""
        if output is not None:
            raise ValueError("output= is written in place and cannot be converted: call forward(), or omit it")

        # Scales may be Python numbers, which belong to no framework.
        def native(x: Any) -> Any:
            return x if x is None or isinstance(x, int | float) else arrays.to_framework(x, self.framework)

        came_as = arrays.framework_of(query)
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        # Left out if None: an implementation without output quantisation need not have the arguments.
        passed = {name: native(scale) for name, scale in scales.items() if scale is not None}
        result = self.forward(layer, native(query), native(key), native(value), kv_cache, attn_metadata, **passed)
        if isinstance(result, tuple):
            return tuple(arrays.to_framework(x, came_as, like=query) for x in result)
        return arrays.to_framework(result, came_as, like=query)

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """
        Does this attention implementation support fused output quantization.
        This is used by the AttnFusionPass to only fuse output quantization
        onto implementations that support it.

        :param quant_key: QuantKey object that describes the quantization op
        :return: is fusion supported for this type of quantization
        """
        return False

    def supports_quant_query_input(self) -> bool:
        """
        Check if this attention implementation supports pre-quantized query input.

        When True, the attention layer will quantize queries before passing them
        to this backend, allowing torch.compile to fuse the quantization with
        previous operations.

        Returns:
            bool: True if the implementation can accept pre-quantized queries.
        """
        return False

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Called once after a model's weights are loaded; `act_dtype` is the activations' dtype."""


class MLAAttentionImpl(AttentionImpl[T], Generic[T]):
    """Multi-head latent attention: the same interface, with the latent's dimensions and projections."""

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        # MLA Specific Arguments
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
    ) -> None:
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        hidden_states_or_cq: Array,
        kv_c_normed: Array,
        k_pe: Array,
        kv_cache: Array,
        attn_metadata: T,
        output: Array | None = None,
        output_scale: Array | None = None,
        output_block_scale: Array | None = None,
    ) -> Array:
        raise NotImplementedError


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    return kv_cache_dtype != "auto"
