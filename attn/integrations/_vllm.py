"""vLLM's three attention interfaces, implemented with this library's selector, builders and implementations.

A layer chooses its backend in its constructor, so that an unsupported layer is rejected before any weight is loaded, and
again for the block size that vLLM chooses later. A batch has one description for all layers; each backend builds its
metadata from it when the first of its layers needs it. vLLM's cache of a layer is a tensor [N, K, P, 2 D] with strides that
vLLM chooses; backends receive a view of it. A token's value follows its key; on a CPU, where a head's tokens are adjacent in
a block, the head's values follow its keys, as in vLLM's own CPU backend.

Unknown arguments of a layer, flags of a configuration and fields of a batch that change the meaning of a call are rejected,
so that features of later versions of vLLM are not dropped silently.
"""

import inspect
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention import backend as vllm_backend
from vllm.v1.kv_cache_interface import KVCacheLayout

from attn import envs
from attn.arguments import layer_features, window_pair
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import ENCODER_TYPES, AttentionType, Feature, Request
from attn.dtypes import KV_CACHE_DTYPES, PER_TOKEN_HEAD, needs_scales
from attn.errors import UnsupportedError
from attn.integrations.vllm import layer_name, logger, mark_images
from attn.layer import UNSCALED
from attn.selector import make_request, select
from attn.torch import kv_cache as caches
from attn.torch.layer import Attention

_ELSEWHERE = "attn serves no vLLM layer with it; use one of vLLM's own backends"
_BLOCK_SIZE = 16  #: until vLLM chooses one; final for layers without a cache
#: vLLM's names for requirements of a layer -> this library's features.
_FEATURES = {
    "has_sink": Feature.SINKS,
    "has_sliding_window": Feature.SLIDING_WINDOW,
    "use_non_causal": Feature.NON_CAUSAL,
    "use_per_head_quant_scales": Feature.PER_HEAD_SCALES,
    "use_mm_prefix": Feature.SPANS,
}
#: Attributes of an implementation of vLLM that are arguments of this library's layer.
_ARGUMENTS = """
    num_heads num_kv_heads head_size scale sliding_window logits_soft_cap alibi_slopes sinks attn_type dtype kv_cache_dtype
    features
"""
#: Other configuration fields that are read, or require nothing of a backend; any other that is set is rejected.
_READ = {"head_size", "dtype", "kv_cache_dtype", "block_size", "attn_type", "device_capability", "use_kv_connector"}
#: Neutral values of a layer's further arguments.
_OFF = {"chunk_lookback": -1}
#: Fields of a batch that have the same name and meaning here.
_SIZES = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len")
_EQUAL = ("query_start_loc", "seq_lens", "slot_mapping", "causal", *_SIZES)
#: Other fields that are read, and fields that do not affect which keys a row sees.
_ALSO_READ = ("query_start_loc_cpu", "block_table_tensor", "seq_lens_cpu_upper_bound", "mm_req_doc_ranges")
_UNRELATED = """
    logits_indices_padded num_logits_indices max_logits_per_req encoder_seq_lens encoder_seq_lens_cpu positions is_prefilling
    req_idx replayssm_decode_base_cpu
"""
_KNOWN = {*_EQUAL, *_ALSO_READ, *_UNRELATED.split()}


class AttnBackend(vllm_backend.AttentionBackend):
    """CUSTOM of vLLM's registry."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [name for name in KV_CACHE_DTYPES if name not in PER_TOKEN_HEAD]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["AttnImpl"]:
        return AttnImpl

    @staticmethod
    def get_builder_cls() -> type["AttnMetadataBuilder"]:
        return AttnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [vllm_backend.MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Any layout; on a CPU preferably with a head's tokens adjacent, which CPU_ATTN reads in long runs."""
        if not current_platform.is_cpu():
            return None
        return (KVCacheLayout.LBHNC, *(layout for layout in KVCacheLayout if layout is not KVCacheLayout.LBHNC))

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether image tokens may see each other in both directions; `validate_configuration` says in which layers."""
        return True

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Return every reason to reject a layer of this configuration: of this integration, then of each backend."""
        # by the names of this version of vLLM, so that what it has added is seen and refused
        arguments = inspect.signature(super().validate_configuration).bind(*args, **kwargs).arguments
        invariant = arguments.pop("use_batch_invariant", False)
        features = {feature for word, feature in _FEATURES.items() if arguments.pop(word, False)}
        why = [f"{word} not supported: {_ELSEWHERE}" for word, value in arguments.items() if value and word not in _READ]
        if invariant and not envs.batch_invariant():  # a layer learns of it by the environment alone
            why.append("use_batch_invariant not supported without VLLM_BATCH_INVARIANT=1 in the environment")
        name, attn_type = layer_name(), _word(arguments["attn_type"])
        features -= {Feature.SPANS} if attn_type in ENCODER_TYPES else set()  # each of its tokens sees all
        problem = _cache_problem(arguments["kv_cache_dtype"])
        if problem:
            return [f"{name}: {reason}" for reason in (*why, problem)]
        request = make_request(
            arguments["head_size"],
            arguments["dtype"],
            arguments["kv_cache_dtype"],
            arguments["block_size"],
            attn_type=attn_type,
            features=features,
        )
        selection = select(request, framework="torch")
        # a backend serves it: why others do not is of no interest
        if selection.winner is None:
            why += [*selection.reasons, _serving_backends(request)]
        return [f"{name}: {reason}" for reason in why]


@dataclass
class AttnMetadata(vllm_backend.AttentionMetadata):
    """One batch as this library describes it, and the metadata that its backends have built from it so far.

    `slot_mapping` exists for vLLM's cross attention, which replaces it with the encoder's.
    """

    batch: CommonAttentionMetadata
    slot_mapping: torch.Tensor
    device: torch.device
    built: dict[Any, Any] = field(default_factory=dict)

    def of(self, layer: Attention) -> Any:
        """Return the metadata of a layer's backend."""
        # layers of one kind share a batch's metadata; a model with windows has two or three
        key = (layer.backend, layer.kv_cache_spec)
        if key not in self.built:
            logger.info_once("Using %s of attn for %s", layer.selection.name, layer.selection.request)
            batch, spec = self.batch, layer.kv_cache_spec
            if spec.attn_type in ENCODER_TYPES:  # vLLM passes one block per request, which is not read
                columns = -(-batch.max_seq_len // spec.block_size)
                batch = batch.replace(block_table=batch.block_table.new_zeros(batch.num_reqs, columns))
            self.built[key] = layer.backend.get_builder_cls()(spec, device=self.device).build(0, batch)
        return self.built[key]


class AttnMetadataBuilder(vllm_backend.AttentionMetadataBuilder):
    """Converts vLLM's batch to this library's."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # until a draft is verified, its lengths on the host are upper bounds
        self.exact = getattr(vllm_config, "speculative_config", None) is None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AttnMetadata:
        common = common_attn_metadata
        for name in (f.name for f in fields(common) if f.name not in _KNOWN and not f.name.startswith("_")):
            # Fields of later versions: those that are set may change what rows see.
            value = getattr(common, name)
            # a tensor has no truth of its own
            if value is not None and (isinstance(value, torch.Tensor) or value):
                self._refuse(name)
        if isinstance(common.causal, torch.Tensor):
            self._refuse("per-request causality")
        lens = common.seq_lens
        if lens.device.type != "cpu":
            # bounds are the lengths, unless drafts of the step before are still being verified
            lens = getattr(common, "seq_lens_cpu_upper_bound", None) if self.exact else None
        batch = CommonAttentionMetadata(
            **{name: getattr(common, name) for name in _EQUAL},
            block_table=common.block_table_tensor,
            query_start_loc_cpu=common.query_start_loc_cpu.numpy(),
            seq_lens_cpu=None if lens is None else lens.numpy(),
            spans=self._spans(common),
        )
        return AttnMetadata(batch, common.slot_mapping, self.device)

    def _spans(self, common: Any) -> torch.Tensor | None:
        """Return the spans of rows within `mm_req_doc_ranges` (request -> ranges of positions, inclusive); None without any.

        Raises `UnsupportedError` for a range of which this step has a part only.
        """
        if not common.mm_req_doc_ranges:
            return None
        # A bound that exceeds a length is that of a request that generates, all of whose ranges are before its rows.
        bounds = getattr(common, "seq_lens_cpu_upper_bound", None)
        lens = (common.seq_lens.cpu() if bounds is None else bounds).tolist()
        starts = common.query_start_loc_cpu.tolist()
        spans = np.full((common.num_actual_tokens, 2), -1, np.int32)
        for r, ranges in common.mm_req_doc_ranges.items():
            rows = spans[starts[r] : starts[r + 1]]
            cut = mark_images(rows, lens[r] - len(rows), ranges)
            if cut:
                self._refuse(f"a chunk of request {r} {cut}")
        # a batch without images has no spans: its launches are those of plain causality
        return torch.from_numpy(spans).to(self.device, non_blocking=True) if (spans >= 0).any() else None

    def _refuse(self, feature: str) -> NoReturn:
        raise UnsupportedError(f"{', '.join(self.layer_names)}: {feature} not supported: {_ELSEWHERE}")


class _Unscaled(Attention):
    """A layer that takes its scales from vLLM's layer: vLLM's calls the implementation directly."""

    def _warn_unscaled(self, missing: list[str]) -> None:
        """Do not warn: `AttnImpl` knows the scales when it first writes."""


class AttnImpl(vllm_backend.AttentionImpl):
    """One layer: this library's chosen backend over vLLM's cache."""

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
        sinks: torch.Tensor | None = None,
        **further: Any,
    ) -> None:
        """Take vLLM's arguments. A layer that shares another's cache needs no feature: vLLM does not call its cache write.

        Raises `UnsupportedError`, with the layer's name, if no backend serves it.
        """
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes, self.sliding_window, self.logits_soft_cap = alibi_slopes, sliding_window, logits_soft_cap
        self.kv_cache_dtype, self.attn_type, self.sinks = kv_cache_dtype, _word(attn_type), sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.dtype, self.name = torch.get_default_dtype(), layer_name()
        self.layers: dict[int, Attention] = {}
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None
        self._unscaled = needs_scales(kv_cache_dtype)
        config = get_current_vllm_config_or_none()
        required = {
            Feature.NON_CAUSAL: getattr(getattr(config, "attention_config", None), "use_non_causal", False),
            Feature.SPANS: getattr(getattr(config, "model_config", None), "is_mm_prefix_lm", False)
            and self.attn_type not in ENCODER_TYPES,
        }
        self.features = [feature for feature, needed in required.items() if needed]
        for name, value in further.items():
            # arguments of later versions, unless they ask for nothing
            if value not in (None, False) and value != _OFF.get(name):
                raise UnsupportedError(f"{self.name}: {name}={value!r} not supported: {_ELSEWHERE}")
        if problem := _cache_problem(kv_cache_dtype):
            raise UnsupportedError(f"{self.name}: {problem}")
        # now, so that a layer that no backend serves is refused before weights are loaded
        self._layer(_BLOCK_SIZE)

    def _layer(self, block_size: int) -> Attention:
        """Return this layer for a block size, created once; it holds the choice and its reasons."""
        if block_size not in self.layers:
            try:
                arguments: dict[str, Any] = {name: getattr(self, name) for name in _ARGUMENTS.split()}
                self.layers[block_size] = _Unscaled(**arguments, block_size=block_size)
            except UnsupportedError as error:
                raise UnsupportedError(f"{self.name}: {error}\n{_serving_backends(self._request())}", error.reasons) from None
        return self.layers[block_size]

    def _request(self) -> Request:
        window = window_pair(self.sliding_window, self.attn_type)
        features = layer_features(window, self.logits_soft_cap or None, self.alibi_slopes, self.sinks, None)
        required = features.union(self.features)
        return make_request(self.head_size, self.dtype, self.kv_cache_dtype, attn_type=self.attn_type, features=required)

    def _cache(self, layer: Attention, kv_cache: torch.Tensor) -> torch.Tensor:
        """View vLLM's cache [N, K, P, 2 D] as a cache of the layer's backend."""
        # vLLM passes the same tensor in each step: its views are made once
        if self._seen is None or self._seen[0] is not kv_cache:
            blocks, heads, size, row = kv_cache.shape
            if row != 2 * self.head_size:
                raise UnsupportedError(
                    f"{self.name}: a cache with rows of {row} elements for head_size={self.head_size}: "
                    f"{Feature.HEAD_SIZE_V.value} not supported: {_ELSEWHERE}"
                )
            element = caches.element_type(self.kv_cache_dtype, self.dtype)
            pages = (
                kv_cache.view(element) if kv_cache.itemsize == element.itemsize == 1 else kv_cache
            )  # codes may have a byte dtype
            # tokens of a head are adjacent: then vLLM's CPU layout has all keys of a head in front of its values
            if pages.device.type == "cpu" and pages.stride(2) == row:
                both = pages.view(blocks, heads, 2, size, self.head_size).permute(2, 0, 3, 1, 4)
            else:
                both = pages.unflatten(3, (2, self.head_size)).permute(3, 0, 2, 1, 4)
            self._seen = kv_cache, caches.in_layout(layer.backend, both)
        return self._seen[1]

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write key, value [T, K, D] at `slot_mapping` [T]; encoders have no cache. An int8 cache without scales warns once."""
        if self._unscaled:
            self._unscaled = False
            names = [name for name in ("k_scale", "v_scale") if getattr(layer, f"_{name}_float", None) == 1.0]
            if names:
                logger.warning_once(
                    "%s: kv_cache_dtype=%r without %s: %s", self.name, self.kv_cache_dtype, " and ".join(names), UNSCALED
                )
        if self.attn_type not in ENCODER_TYPES:
            wrapped = self._layer(kv_cache.shape[2])
            wrapped.impl.do_kv_cache_update(layer, key, value, self._cache(wrapped, kv_cache), slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttnMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention. query, output: [T, H, D]; key, value: [T, K, D], already cached unless this is an encoder."""
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        cache = None
        if self.attn_type in ENCODER_TYPES:
            wrapped = self._layer(_BLOCK_SIZE)
        else:
            wrapped, key, value = self._layer(kv_cache.shape[2]), None, None  # type: ignore[assignment]
            cache = self._cache(wrapped, kv_cache)
        if self.sinks is not None:
            wrapped.impl.sinks = self.sinks.detach().float()  # the model's, which may have been loaded since
        clamps = getattr(layer, "mm_prefix_clamp_sliding_window", False)  # vLLM passes it to the call only
        # part of the rules that kept launches depend on, so set before each call
        wrapped.impl.mask = wrapped.impl.mask._replace(span_window=clamps)
        try:
            metadata, scales = attn_metadata.of(wrapped), (output_scale, output_block_scale)
            wrapped.impl.forward(layer, query, key, value, cache, metadata, output, *scales)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.name}: {error}\n{_serving_backends(self._request())}", error.reasons) from None
        return output


def _word(attn_type: Any) -> str:
    """Convert vLLM's attention type, a member of a str enum, to this library's."""
    return str(getattr(attn_type, "value", attn_type))


def _cache_problem(kv_cache_dtype: str | None) -> str | None:
    """Return why a cache dtype is not supported: unknown, or with scales that vLLM stores elsewhere in a block."""
    if kv_cache_dtype is None or kv_cache_dtype in AttnBackend.supported_kv_cache_dtypes:
        return None
    return f"kv_cache_dtype={kv_cache_dtype} not supported (supports {', '.join(AttnBackend.supported_kv_cache_dtypes)})"


def _serving_backends(request: Request) -> str:
    """Return a sentence with the backends that serve a request on any device."""
    candidates = [member.candidate() for member in AttentionBackendEnum]
    loaded = [c for c in candidates if getattr(getattr(c.backend, "capabilities", None), "framework", None) == "torch"]
    names = [c.name for c in loaded if c.backend is not None and not c.backend.why_not(request)]
    return f"backends that support it on their devices: {', '.join(names) or 'none'}"
