"""The framework-neutral part of paged backends: the cache's default shape, and a layer's checked arguments.

The frameworks' templates (`attn.torch.backends._paged`, `attn.jax.backends._paged`) add the arrays: metadata, cache write and
the call. Every limit is in the backend's capability record, which the constructor checks, so an unsupported layer is rejected
before any weight is loaded.
"""

from abc import abstractmethod
from typing import Any, NamedTuple, TypeVar

from attn.arguments import (
    check_attn_type,
    check_flag,
    check_heads,
    check_per_head,
    check_scale,
    check_soft_cap,
    layer_features,
    positive_int,
    refuse,
    request_of,
    window_pair,
)
from attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionType
from attn.backends.metadata import AttentionMetadata
from attn.capabilities import Device, Request
from attn.dtypes import PER_TOKEN_HEAD, kv_cache_row
from attn.errors import ShapeError
from attn.visibility import LayerMask, Visibility, Window

Array = Any
T = TypeVar("T", bound=AttentionMetadata)


class PagedCall(NamedTuple):
    """The arguments of `_attend` and `_attend_ragged`: arrays of one framework.

    query: [T, H, D]; rows from `meta.num_actual_tokens` on are padding. meta: the batch. mask: what the rows see.
    `_attend`: over kv_cache, as `get_kv_cache_shape`. It holds the new tokens already, or, where jax writes and attends in one
    kernel, key and value hold them: [T, K, D] or None.
    `_attend_ragged` (encoder types): each request's rows attend its own keys; key, value: [T, K, D]; kv_cache is None.

    Under torch, output: [T, H, D], to be filled, or None for a backend that makes it; lse: [H, T] float32 (float64 for
    float64), natural log, to be filled, or None; query, key and value are aligned for vector reads (`attn.torch.alignment`);
    layer: provides `_k_scale` and `_v_scale` of a quantised cache. output_scale: [] float32 on the device, or None; always None
    unless the capabilities include it. If given, output is float8_e4m3fn and receives result / output_scale, saturated and
    rounded to nearest even. held: what `_attend` derived from the first such call over this batch, for the next ones; empty at
    the first. None: no other call follows.
    Under jax, k_scale, v_scale: the scales of a quantised cache, a scalar or [K].
    """

    query: Any
    meta: Any
    mask: Visibility
    kv_cache: Any = None
    key: Any = None
    value: Any = None
    layer: Any = None
    output: Any = None
    lse: Any = None
    output_scale: Any = None
    k_scale: Any = 1.0
    v_scale: Any = 1.0
    held: dict[str, Any] | None = None

    @property
    def window(self) -> Window:
        """(left, right): a row at position p sees keys p - left <= j <= p + right; None: unbounded; right 0: causal."""
        return self.mask.window

    @property
    def causal(self) -> bool:
        """Whether causality or the window hides later keys (the batch's tree, spans and prefixes apart)."""
        return self.mask.window[1] == 0


class PagedBackend(AttentionBackend):
    """Base of backends whose cache stores keys and values separately, with a token's heads adjacent (NHD)."""

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        if request.kv_cache_dtype == "int4_per_token_head":
            if request.head_size % 2:  # two codes share a byte
                why.append(f"head_size={request.head_size} (kv_cache_dtype={request.kv_cache_dtype} supports multiples of 2)")
        elif request.kv_cache_dtype in PER_TOKEN_HEAD and request.block_size and request.num_kv_heads:
            codes = request.block_size * request.num_kv_heads * request.head_size
            # Per page and kind the layout is [codes of all tokens and heads | float32 scales], so codes' bytes have to
            # be whole words.
            if codes % 4:  # the float32 scales that follow the codes would be misaligned
                sizes = f"block_size={request.block_size} num_kv_heads={request.num_kv_heads} head_size={request.head_size}"
                why.append(f"{sizes} (kv_cache_dtype={request.kv_cache_dtype} supports multiples of 4 as their product)")
        return why

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return [2, N, P, K, D]: keys, then values, a token's heads adjacent (the layout called NHD).

        With a scale per token and head, D + 4 bytes: a block holds the codes of all its tokens, then their scales. With codes
        of four bits, D / 2 + 4: each row holds its codes, then its scale.
        """
        # Keys and values in one array, outermost: `kv_cache[0]` is all keys, contiguous, as kernels take them.
        return (2, num_blocks, block_size, num_kv_heads, kv_cache_row(cache_dtype_str, head_size))

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return (0, 1, 2, 3, 4)

    @staticmethod
    def logical_kv_cache(kv_cache: Array) -> tuple[Array, Array]:
        return kv_cache[0], kv_cache[1]


class PagedImpl(AttentionImpl[T]):
    """Implementation base that checks a layer's arguments. A subclass passes its backend: `class MyImpl(Template,
    backend=MyBackend)`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | Window | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        sinks: Any = None,
        chunk_size: int | None = None,
        span_window: bool | None = None,
    ) -> None:
        """Take the arguments of vLLM's `AttentionImpl`, and `sinks`: [H] float32, one extra logit per head that takes weight
        but has no value; `chunk_size` and `span_window` as in the layer.

        `sliding_window` may also be a (left, right) pair, inclusive, None for unbounded. Raises ValueError for invalid
        arguments and `UnsupportedError` with this backend's reasons for unsupported ones.
        """
        self.num_heads, self.num_kv_heads, self.head_size = check_heads(num_heads, num_kv_heads, head_size)
        self.signed_scale = check_scale(scale, head_size)
        self.scale = abs(self.signed_scale)  # kernels receive the magnitude; the template negates the query (`fold_sign`)
        self.attn_type = check_attn_type(attn_type)
        self.logits_soft_cap = check_soft_cap(logits_soft_cap)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = self._per_head("alibi_slopes", alibi_slopes)
        self.sinks = self._per_head("sinks", sinks)
        self.mask = LayerMask(
            # Only decoders are causal; encoders and cross attention see all keys, within the window.
            attn_type == AttentionType.DECODER,
            window_pair(sliding_window, attn_type),
            None if chunk_size is None else positive_int("chunk_size", chunk_size),
            None if span_window is None else check_flag("span_window", span_window),
        )
        if chunk_size and attn_type != AttentionType.DECODER:
            raise ValueError(f"chunk_size={chunk_size}: must be None for {attn_type} attention")
        # Since a request is made of the attributes above; still before any weight is loaded.
        refuse(self.backend, self.request())
        self.mask = self.mask.within_int32()  # positions in kernels are of 32 bits

    @property
    def window(self) -> Window:
        """(left, right), inclusive; None: unbounded."""
        return self.mask.window

    def request(self) -> Request:
        """Return this layer's request, except the dtype (known from the arrays of a call)."""
        shared, chunk_size = self.kv_sharing_target_layer_name, self.mask.chunk_size
        # Features follow from the normalised attributes: a cap of 0 is off and a window of (None, None) is none, and
        # neither needs a backend that has them.
        scores = (self.logits_soft_cap, self.alibi_slopes, self.sinks)
        return request_of(self, layer_features(self.window, *scores, shared, chunk_size))

    def _per_head(self, name: str, values: Any) -> Array | None:
        """Return [H] float32, or None. Raises `ShapeError`, and ValueError as `check_per_head` does."""
        if values is None:
            return None
        check_per_head(name, values)
        # float32 whatever the layer's dtype: kernels add them to scores, which are float32.
        array = self._float32(values)
        if tuple(array.shape) != (self.num_heads,):
            raise ShapeError(f"{name} has shape {list(array.shape)}: must be [{self.num_heads}], one per query head")
        return array

    @staticmethod
    @abstractmethod
    def _float32(values: Any) -> Array:
        """Return `values` as a float32 array of this implementation's framework."""
