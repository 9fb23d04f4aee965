"""Base classes of the paged backends for torch: checks, the cache write, then one hook.

`forward` returns zeros in a profiling run; otherwise it writes K/V, unless the layer shares another layer's cache, attends
and returns. A subclass implements `_attend` (over the paged cache) and, for encoder types, `_attend_ragged` (over the keys
of the call). Every limit is in the backend's capability record. The constructor checks the layer against that record, so an
unsupported layer is rejected before any weight is loaded.
"""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attn import envs
from attn.arguments import fold_sign
from attn.backends.abstract import AttentionLayer, AttentionType
from attn.backends.checks import (
    check_array,
    check_block_size,
    check_built,
    check_cache_element,
    check_cache_heads,
    check_like,
    check_masks,
    check_no_gradient,
    check_pair,
    check_placed,
    check_rows,
    dtype_error,
    require,
)
from attn.backends.paged import PagedBackend, PagedCall, PagedImpl
from attn.capabilities import ENCODER_TYPES, Feature
from attn.dtypes import PER_TOKEN_HEAD, QuantKey, kFp8StaticTensorSym
from attn.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from attn.imports import installed
from attn.torch import kv_cache as caches
from attn.torch.alignment import aligned
from attn.torch.arrays import Facts
from attn.torch.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder, check_device, keep

if TYPE_CHECKING:  # loaded with Triton
    from attn.torch.kernels.kept import Stages

#: The dtype of the output when output_scale is given.
FUSED_OUTPUT = torch.float8_e4m3fn


class PagedAttentionBackend(PagedBackend):
    """Base of paged backends: the default metadata and builder."""

    metadata_cls = PagedAttentionMetadata
    builder_cls = PagedAttentionMetadataBuilder
    accept_output_buffer = True


class HeadsFirstBackend(PagedAttentionBackend):
    """A paged backend whose cache stores each head's tokens contiguously within a block."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[2, N, K, P, D]: keys, then values, in the HND layout."""
        return (2, num_blocks, num_kv_heads, block_size, head_size)

    @staticmethod
    def logical_kv_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_cache[0].transpose(1, 2), kv_cache[1].transpose(1, 2)


#: The dtypes of keys that `kv_write` takes, and of caches that it codes them for.
_WRITTEN = (torch.bfloat16, torch.float16, torch.float32)
_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
#: The query, key and value that a caller passed.
QKV = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Known(NamedTuple):
    """What is kept of a call that passed its checks, for calls with an equal signature over the same batch or, if it has
    launches, over another one of the same kind.

    gpu: the index of its GPU, None for other devices; shape, strides: of its output [T, H, D]; lse_dtype: of its log-sum-exp,
    None for none; as_passed: whether it took the tensors that were passed, not views or copies of them; launches: repeats its
    launches with other tensors (`attn.torch.kernels.kept`), or None; stages: repeats the write of the cache alone where nothing
    repeats the attention, or None. held: of its `PagedCall`, for calls over the same batch.
    """

    gpu: int | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lse_dtype: torch.dtype | None
    as_passed: bool
    launches: Callable[..., bool] | None
    stages: "Stages | None"
    held: dict[str, Any]


def is_captured(x: torch.Tensor) -> bool:
    """Whether a call on tensor `x` is being captured in a graph, which is replayed for other lengths too."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def is_elsewhere(x: torch.Tensor) -> bool:
    """Whether a call on tensor `x` is of another GPU than the current one, on which some packages launch whatever they get."""
    return not torch.compiler.is_compiling() and x.is_cuda and x.get_device() != torch.cuda.current_device()


#: Whether graphs that are captured now are replayed with the lengths of their capture alone, as a benchmark's are.
of_one_batch: ContextVar[bool] = ContextVar("of_one_batch", default=False)


def check_replays(name: str, x: torch.Tensor) -> None:
    """Raise `UnsupportedError` if a call on tensor `x`, which depends on lengths on the host, is captured in a graph: its
    replays would attend the same lengths, whatever the batch's arrays hold by then."""
    if is_captured(x) and not of_one_batch.get():
        raise UnsupportedError(
            f"{name}: lengths are read on the host, so every replay of a CUDA graph would attend those of its capture: call "
            "the layer outside of the capture, or use a backend that reads them on the device (TRITON_ATTN, TRITON_MLA)"
        )


def _tensors(scales: Sequence[Any]) -> list[torch.Tensor]:
    return [scale for scale in scales if isinstance(scale, torch.Tensor)]


@functools.cache
def _runs_triton(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for a GPU: AMD's, and NVIDIA's from Ampere on."""
    return installed("triton") and (torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0))


class PagedAttentionImpl(PagedImpl[PagedAttentionMetadata]):
    """Base of paged implementations. A subclass names its backend and implements `_attend`.

    `traceable`: whether `torch.compile` can trace `_attend`.
    """

    framework = "torch"
    traceable = False
    #: Whether `attend_keys` attends keys that are in no cache where they are, and whether these may be a run of them only.
    attends_keys = attends_valid_keys = False
    #: Whether the kernel makes the output: `_attend` then returns it where the call has none. No launches of such are kept.
    makes_output = False
    #: Whether `dense_decode.row` computes single rows over such keys as this layer would.
    has_row_operator: bool = False
    #: (shape, block size) of the last cache that passed `_check_extent`.
    _known_extent: tuple[torch.Size | None, int] = (None, 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.backend.capabilities is not None
        self._features = self.backend.capabilities.features
        #: The cache's element type for each dtype of a query that the backend supports.
        self._elements = {
            getattr(torch, dtype): caches.element_type(self.kv_cache_dtype, dtype) for dtype in self.backend.capabilities.dtypes
        }
        #: Whether a cache holds codes that scales multiply, for some dtype of a query.
        self._quantised = any(map(caches.is_quantised, self._elements.values()))

    @staticmethod
    def _float32(values: Any) -> torch.Tensor:
        """Convert to float32. A float32 tensor is not copied, so weights loaded into it later take effect."""
        if isinstance(values, torch.Tensor):
            # `.to` returns a float32 tensor itself: a parameter stays the parameter
            return values.to(torch.float32)
        on_meta = torch.get_default_device().type == "meta"  # where the values would be lost
        return torch.as_tensor(values, dtype=torch.float32, device="cpu" if on_meta else None)

    def _by_head(self, name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """Reshape a tensor [T, heads, D] or [T, heads * D] to [T, heads, D]."""
        if not isinstance(tensor, torch.Tensor):
            check_array(self.backend, name, tensor, "torch")
        shape = tensor.shape
        # by the dimensions, since nearly every call ends here: a comparison of whole shapes makes a tuple first
        if len(shape) == 3 and shape[1] == heads and shape[2] == self.head_size:
            return tensor
        if len(shape) != 2 or shape[1] != heads * self.head_size:
            raise ShapeError(
                f"{self.backend.get_name()}: {name} has shape {list(shape)}: must be [T, {heads}, {self.head_size}]"
            )
        return tensor.reshape(-1, heads, self.head_size)

    def _move_to(self, device: torch.device) -> None:
        """Move the per-head vectors to the device of the call; only the first call copies. Raises `DeviceError` for a vector on
        "meta", which has no values."""
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self._moved("alibi_slopes", self.alibi_slopes, device)
        if self.sinks is not None and self.sinks.device != device:
            self.sinks = self._moved("sinks", self.sinks, device)

    def _moved(self, name: str, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        if values.is_meta:
            raise DeviceError(
                f"{self.backend.get_name()}: {name} are on meta, query on {device}: load their values before a call "
                "(layer.to_empty(device=...), then load_state_dict)"
            )
        return values.to(device)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> Any:
        # As they were passed: kept launches are of these, not of the views and copies that a call makes of them.
        qkv = query, key, value
        scale, signature, known, shared = None, None, None, None
        if output_scale is not None or output_block_scale is not None:
            scale = self._check_output_scale(query, output_scale, output_block_scale)
        # Nothing is kept of a call with an output scale, nor in a graph, which records the call itself.
        elif isinstance(attn_metadata, PagedAttentionMetadata) and not torch.compiler.is_compiling():
            kept = attn_metadata.kept()
            # once: a module looks a buffer up in half a microsecond
            scales = (layer._k_scale, layer._v_scale) if self._quantised else ()
            signature = self._signature(layer, scales, query, kept.facts((*qkv, kv_cache, output)))
            # calls over this batch (a layer of the same shape before), then over batches of its kind (an earlier step)
            known = kept.calls.get(signature)
            if known is None and signature is not None and not envs.debug("device"):
                batch_key = self._kind_of_batch(attn_metadata, kv_cache)
                shared = None if batch_key is None else kept.shared_calls
                if shared is not None and (known := shared.get((signature, batch_key))) is not None:
                    # What was derived from the other batch (`held`) is not of this one.
                    kept.calls[signature] = known = known._replace(held={})
            if known is not None:
                if known.launches is None:
                    result = self._again(known, layer, qkv, kv_cache, attn_metadata, output)
                else:  # its launches alone: 16 us of the host where the whole call takes 99 (64 decodes, timed without a GPU)
                    result = self._repeat(known, kept.addresses, scales, qkv, kv_cache, output)
                if result is not None:
                    return result
        # Nothing is kept under ATTN_DEBUG=device, which checks ids and slots in each call.
        keeps = known is None and signature is not None and not envs.debug("device")
        result, made = self._call(layer, qkv, kv_cache, attn_metadata, output, scale, known, keeps)
        # only now: a call that raised leaves no record that would spare the next one its checks
        if made is not None:
            kept.calls[signature] = made
            if made.launches is not None and shared is not None:
                keep(shared, (signature, batch_key), made._replace(held={}))
        return result

    def _call(
        self,
        layer: AttentionLayer,
        qkv: QKV,
        kv_cache: Any,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor | None,
        scale: torch.Tensor | None,
        known: Known | None,
        keeps: bool,
    ) -> tuple[Any, Known | None]:
        """Make a call, checked unless it is `known`. Return the result of `forward` and, if it `keeps`, what is then known."""
        query = self._by_head("query", qkv[0], self.num_heads)
        # of a known call without asking its query
        gpu = None if known is None else known.gpu
        if (gpu is not None and gpu != torch._C._cuda_getDevice()) or (known is None and is_elsewhere(query)):
            with torch.cuda.device(query.device):
                return self.forward(layer, *qkv, kv_cache, attn_metadata, output, scale), None
        key = None if qkv[1] is None else self._by_head("key", qkv[1], self.num_kv_heads)
        value = None if qkv[2] is None else self._by_head("value", qkv[2], self.num_kv_heads)
        out_dtype = query.dtype if scale is None else FUSED_OUTPUT
        out = output
        if output is None and not (self.makes_output and attn_metadata is not None):
            out = torch.empty_like(query, dtype=out_dtype)
        # a known call's output was checked; one of [T, H * D] still has to be viewed by heads
        elif output is not None and (known is None or output.shape != query.shape):
            out = self._check_output(query, output, out_dtype)
        # a profiling run: it measures memory, and has neither a batch nor a cache
        if attn_metadata is None:
            assert out is not None
            out.zero_()
            return out if output is None else output, None
        if known is None:
            self._check_call(layer, query, key, value, kv_cache, attn_metadata)
        self._move_to(query.device)
        query = aligned(fold_sign(query, self.signed_scale))  # after the checks, which name the caller's own tensors
        lse = None
        if self.need_to_return_lse_for_decode:
            # heads outermost, as vLLM's interface returns it (docs/semantics.md §1)
            lse = query.new_empty(self.num_heads, query.shape[0], dtype=torch.promote_types(query.dtype, torch.float32))
        held = {} if known is None else known.held
        mask = held.get("mask")
        if mask is None:
            mask = held["mask"] = self.visible(attn_metadata)
        # the fields in their order: by name, making a call takes twice as long
        call = PagedCall._make((query, attn_metadata, mask, kv_cache, key, value, layer, out, lse, scale, 1.0, 1.0, held))
        launches, stages = None, self._stages(call) if keeps else None if known is None else known.stages
        if keeps and stages is None and not self.makes_output:
            launches, made = self._run_first(call, qkv), out
        else:
            made = self._run(call, stages)
            made = made if out is None else out
        result = made if output is None else output
        if keeps:
            assert made is not None
            gpu = query.get_device() if query.is_cuda else None
            as_passed = all(map(is_, (query, key, value), qkv)) and (output is None or out is output)
            of_output = made.shape, made.stride(), None if lse is None else lse.dtype
            known = Known(gpu, *of_output, as_passed, launches, stages, held)
        return result if lse is None else (result, lse), known if keeps else None

    def _kind_of_batch(self, attn_metadata: PagedAttentionMetadata, kv_cache: Any) -> Any:
        """Return what the launches that `_run_first` keeps depend on of a batch beside its `Kept.shared_calls`; None if they
        must not be repeated over another batch."""
        # the longest request is an argument of most kernels, so it is the same in launches that are repeated
        return attn_metadata.max_seq_len

    def _stages(self, call: PagedCall) -> "Stages | None":
        """Return what keeps the launch that writes the cache, where the attention's are not kept; None if nothing does."""
        if call.key is None or self.attn_type in ENCODER_TYPES or not self._writes_by_kernel(call.key, call.kv_cache):
            return None
        if type(self).do_kv_cache_update is not PagedAttentionImpl.do_kv_cache_update:  # it may be more than launches
            return None
        from attn.torch.kernels.kept import Stages

        return Stages({}, [call.meta.slot_mapping])

    def _run(self, call: PagedCall, stages: "Stages | None" = None) -> torch.Tensor | None:
        """Write the new tokens, unless they belong to another layer's cache, and attend; return what `_attend` does."""
        key, meta = call.key, call.meta
        if self.attn_type in ENCODER_TYPES:
            return self._attend_ragged(call._replace(kv_cache=None, key=aligned(key), value=aligned(call.value)))
        if self.kv_sharing_target_layer_name is None and key is not None:
            slots = meta.slot_mapping
            if self.attn_type != AttentionType.ENCODER_DECODER:  # its rows are the encoder's, without padding
                slots = slots[: meta.num_actual_tokens]
            write = functools.partial(self.do_kv_cache_update, call.layer, key, call.value, call.kv_cache, slots)
            if stages is None:
                write()
            else:
                scales = _tensors((call.layer._k_scale, call.layer._v_scale)) if self._quantised else ()
                stages("write", write, key, call.value, call.kv_cache, *scales)
        made = self._attend(call)
        if made is not None and not self.makes_output:  # it would be dropped, and the output buffer's memory returned
            name = f"{type(self).__name__}._attend()"
            raise TypeError(f"{name} returned a {type(made).__name__}: it must fill call.output and return None")
        return made

    def _run_first(self, call: PagedCall, qkv: QKV) -> Callable[..., bool] | None:
        """Run a call of which the batch knows no equal. qkv: its query, key and value as they were passed; the call may have
        copies. Returns a function that repeats its launches with other tensors, those of `_launched`, and returns whether
        it did; None if they cannot be repeated."""
        self._run(call)
        return None

    def _repeat(
        self,
        known: Known,
        batch: Sequence[int],
        scales: tuple[Any, ...],
        qkv: QKV,
        kv_cache: torch.Tensor | None,
        output: torch.Tensor | None,
    ) -> Any:
        """Repeat the launches of an equal call over a batch whose tensors are at these addresses. Returns the result of
        `forward`; None if they could not be repeated."""
        assert known.launches is not None
        query, out, lse = qkv[0], output, None
        if out is None:
            out = query.new_empty_strided(known.shape, known.strides)
        if known.lse_dtype is not None:
            lse = query.new_empty(self.num_heads, known.shape[0], dtype=known.lse_dtype)
        # in the order in which the first call gave them to its `Keeper`
        if not known.launches(self._launched(scales, out, lse, *qkv, kv_cache), batch):
            return None
        return out if lse is None else (out, lse)

    def _again(
        self,
        known: Known,
        layer: AttentionLayer,
        qkv: QKV,
        kv_cache: Any,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor | None,
    ) -> Any:
        """Make a known call whose launches are not kept. Returns the result of `forward`; None if its tensors must be viewed,
        copied or computed on another device than the current one first, which `_call` does."""
        (query, key, value), out, lse, gpu = qkv, output, None, known.gpu
        # On a GPU queries are read in vectors: their strides are known, their address is not.
        elsewhere = gpu is not None and (gpu != torch._C._cuda_getDevice() or aligned(query, strides=False) is not query)
        if elsewhere or not known.as_passed:
            return None
        if out is None and not self.makes_output:
            out = query.new_empty_strided(known.shape, known.strides)
        if known.lse_dtype is not None:
            lse = query.new_empty(self.num_heads, known.shape[0], dtype=known.lse_dtype)
        held = known.held
        tensors = query, attn_metadata, held["mask"], kv_cache, key, value, layer, out, lse
        made = self._run(PagedCall._make((*tensors, None, 1.0, 1.0, held)), known.stages)
        out = made if out is None else out
        return out if lse is None else (out, lse)

    def _launched(self, scales: tuple[Any, ...], *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return every tensor whose address a call's launches depend on, the batch's excepted. scales: of a quantised cache,
        else none; tensors: the output, the log-sum-exp, and the arguments of the call."""
        vectors = *tensors, self.sinks, self.alibi_slopes
        return (*vectors, *_tensors(scales)) if scales else vectors

    def _signature(
        self, layer: AttentionLayer, scales: tuple[Any, ...], query: torch.Tensor, of_tensors: Facts | None
    ) -> tuple[Any, ...] | None:
        """Return what checks and launches of a call depend on beside its batch; None if `of_tensors` is, or if the call has yet
        to move the per-head vectors to its device: launches of another layer's call would be given their addresses on the
        host. scales: as in `_launched`."""
        if of_tensors is None:
            return None
        facts = [of_tensors, *self._constants()]
        for per_head in (self.sinks, self.alibi_slopes):
            if per_head is not None and per_head.device != query.device:
                return None
            # addresses differ from layer to layer and are passed to each launch; what kernels are compiled for may not
            facts.append(None if per_head is None else (per_head.dtype, per_head.stride()))
        if scales:
            facts += map(caches.of_scale, scales)
            # FlashInfer's kernels take the scales as numbers
            facts += getattr(layer, "_k_scale_float", None), getattr(layer, "_v_scale_float", None)
        return tuple(facts)

    def _constants(self) -> tuple[Any, ...]:
        """Return what launches depend on of this layer; layers for which it is equal share what is kept of a call."""
        return (
            type(self), self.num_heads, self.num_kv_heads, self.head_size, self.signed_scale, self.logits_soft_cap, self.mask,
            self.attn_type, self.kv_cache_dtype, self.kv_sharing_target_layer_name is None, self.batch_invariant,
            self.need_to_return_lse_for_decode,
        )  # fmt: skip

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        key, value = self._by_head("key", key, self.num_kv_heads), self._by_head("value", value, self.num_kv_heads)
        key_cache, value_cache, scales = self._caches(kv_cache)
        # by operators of torch: on CPUs, in traced graphs, and for dtypes that the kernel does not write
        if not self._writes_by_kernel(key, kv_cache):
            caches.write(key, value, key_cache, value_cache, slot_mapping, *(scales or (layer._k_scale, layer._v_scale)))
            return kv_cache
        from attn.torch.kernels.kv_write import write_kv, write_kv_per_token

        if scales is not None:
            write_kv_per_token(key, value, key_cache, value_cache, *scales, slot_mapping)
        else:
            coded = caches.is_quantised(kv_cache.dtype)
            # a cache of floats has no scales to divide by, whatever the layer's are
            of_cache = [self._on(kv_cache.device, scale) if coded else None for scale in (layer._k_scale, layer._v_scale)]
            write_kv(key, value, key_cache, value_cache, slot_mapping, *of_cache)
        return kv_cache

    def _writes_by_kernel(self, key: torch.Tensor, kv_cache: torch.Tensor) -> bool:
        """Whether a Triton kernel writes the cache, in one launch: on GPUs with Triton, outside of graphs that are traced."""
        if not kv_cache.is_cuda or key.dtype not in _WRITTEN or torch.compiler.is_compiling():
            return False
        return kv_cache.dtype in (key.dtype, *_CODES) and kv_cache.stride(-1) == 1 and _runs_triton(kv_cache.device)

    @staticmethod
    def _on(device: torch.device, scale: Any) -> torch.Tensor:
        """Return a scale on the device. A scalar from the host is filled in, since graph capture does not allow the copy."""
        is_tensor = isinstance(scale, torch.Tensor)
        # as it is: its address is what a kept launch exchanges
        if is_tensor and scale.device == device and scale.dtype == torch.float32 and not scale.requires_grad:
            return scale  # type: ignore[no-any-return]
        on_host = not is_tensor or (scale.ndim == 0 and scale.device.type == "cpu")
        if on_host and not torch.compiler.is_compiling():
            return torch.full((), float(scale), dtype=torch.float32, device=device)
        return torch.as_tensor(scale, dtype=torch.float32, device=device).detach()

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Return keys and values [N, P, K, D], and their scales, both [N, P, K], if each token and head has its own."""
        if self.kv_cache_dtype in PER_TOKEN_HEAD:
            key_cache, value_cache, *scales = caches.split(kv_cache, self.head_size)
            return key_cache, value_cache, (scales[0], scales[1])
        return (*self.backend.logical_kv_cache(kv_cache), None)

    def row_launcher(self, device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
        """Return a function that computes `attend_keys` of single rows on a device with little work of the host, or None.

        It takes query [B, H, 1, D], key and value [B, K, m, D], sinks [H] of any float dtype or None, and `valid` of
        `attend_keys`; it returns [B, 1, H, D].
        """
        return None

    def _may_lack_keys(self, call: PagedCall) -> bool:
        """Whether a row may see no key: not if each sees its own, and no graph is captured, which serves other lengths too."""
        if self.attn_type != AttentionType.DECODER or not call.meta.has_own_keys:
            return True
        return is_captured(call.query)

    def _attend(self, call: PagedCall) -> torch.Tensor | None:
        """Fill rows below `num_actual_tokens` of `call.output` and, unless None, of `call.lse`, from the cache.

        Return the output if the call has none: see `makes_output`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no _attend(call), which computes a call over the cache")

    def _attend_ragged(self, call: PagedCall) -> torch.Tensor | None:
        """Do the same for encoder types, from the keys and values of the call."""
        raise NotImplementedError(f"{type(self).__name__} has no _attend_ragged(call), which computes a call of an encoder")

    def _check_call(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata,
    ) -> None:
        """Check ranks, shapes, dtypes and devices, without reading tensor values."""
        # In the order in which a message helps most: what the batch is, dtypes, shapes, devices, and the cache at last.
        check_built(self.backend, attn_metadata, PagedAttentionMetadata)
        if query.dtype not in self._elements:
            raise dtype_error(self, "query", query)
        check_rows(self, "query", query, attn_metadata.num_actual_tokens)
        if torch.is_grad_enabled() and Feature.BACKWARD not in self._features:
            check_no_gradient(self, query=query, key=key, value=value)
        check_device(self.backend, attn_metadata, query)
        check_masks(self, attn_metadata)
        check_pair(self, key=key, value=value)
        for name, tensor in (("key", key), ("value", value)):
            if tensor is not None:
                check_like(self, name, tensor, query)
                if self.attn_type != AttentionType.ENCODER_DECODER:  # it writes the encoder's tokens, which may be fewer
                    check_rows(self, name, tensor, attn_metadata.num_actual_tokens)
        if self.attn_type not in ENCODER_TYPES:
            self._check_cache(layer, query, kv_cache, attn_metadata.block_size)
            if not torch.compiler.is_compiling() and envs.debug("device"):
                # reads the device's values, which no other check does
                attn_metadata.check_ids(*self._caches(kv_cache)[0].shape[:2])

    def _check_output_scale(self, query: torch.Tensor, output_scale: Any, output_block_scale: Any) -> torch.Tensor:
        """Return output_scale as [] float32 on the device. Raises unless it has one element."""
        name = self.backend.get_name()
        if output_block_scale is not None:
            raise UnsupportedError(f"{name}: output_block_scale not supported")
        require(self, Feature.OUTPUT_SCALE)
        scale = torch.as_tensor(output_scale, dtype=torch.float32, device=query.device).detach()
        if scale.numel() != 1:
            raise ShapeError(f"{name}: output_scale has shape {list(scale.shape)}: must have one element")
        return scale.reshape(())

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        return quant_key == kFp8StaticTensorSym and Feature.OUTPUT_SCALE in self._features

    def _check_output(self, query: torch.Tensor, output: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer as [T, H, D]. Raises unless its shape, dtype and device match: the output is never cast."""
        name = self.backend.get_name()
        # [T, H, D] or [T, H * D], as engines allocate it
        if output.numel() != query.numel() or output.shape[0] != query.shape[0]:
            raise ShapeError(f"{name}: output has shape {list(output.shape)}: must be {list(query.shape)}, like the query")
        if output.dtype != out_dtype:
            why = (
                f"query {query.dtype}: must be equal"
                if out_dtype == query.dtype
                else f"must be {out_dtype} for an output_scale"
            )
            raise DTypeError(f"{name}: output has dtype {output.dtype}, {why}")
        check_placed(self, "output", output, query)
        return output if output.shape == query.shape else output.view(query.shape)

    def _check_cache(self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, block_size: int | None) -> None:
        if torch.compiler.is_compiling():  # extents may be symbols, which must not leave the graph
            page = self._check_extent(kv_cache)
        else:
            # A layer's cache is nearly always the one of its last call: its shape was checked then.
            shape, page = self._known_extent
            if shape is None or not isinstance(kv_cache, torch.Tensor) or kv_cache.shape != shape:
                page = self._check_extent(kv_cache)
                self._known_extent = (kv_cache.shape, page)
        check_block_size(self.backend.get_name(), page, block_size)
        element = self._elements[query.dtype]
        check_cache_element(self, query, kv_cache, element)
        if not caches.is_quantised(element):
            return
        caches.check_scale_device(self.backend, layer, query)
        if self.kv_cache_dtype in PER_TOKEN_HEAD:
            if any(getattr(layer, f"{prefix}_scale_float", None) != 1.0 for prefix in ("_k", "_v")):
                raise UnsupportedError(
                    f"{self.backend.get_name()}: {self.kv_cache_dtype} keeps its own scales: k_scale and v_scale must be 1"
                )
        elif getattr(layer._k_scale, "ndim", 0) or getattr(layer._v_scale, "ndim", 0):
            require(self, Feature.PER_HEAD_SCALES)

    def _check_extent(self, kv_cache: Any) -> int:
        """Return a cache's block size. Raises unless it is a tensor of the backend's layout with this layer's heads."""
        name = self.backend.get_name()
        # of an empty cache, since only the number of dimensions is asked for
        rank = len(self.backend.get_kv_cache_shape(0, 0, self.num_kv_heads, self.head_size, self.kv_cache_dtype))
        if kv_cache is not None and not isinstance(kv_cache, torch.Tensor):
            raise TypeError(f"{name}: kv_cache must be a torch.Tensor, got {type(kv_cache).__name__}")
        if kv_cache is None or kv_cache.dim() != rank:
            raise ShapeError(f"{name}: kv_cache must have {rank} dimensions (get_kv_cache_shape)")
        caches.check_not_expanded(name, kv_cache)
        key_cache = self._caches(kv_cache)[0]
        check_cache_heads(self, key_cache.shape[2:])
        return key_cache.shape[1]
