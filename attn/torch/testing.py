"""The torch driver of the conformance suite: a `Call` in NumPy becomes tensors, a layer and a cache, and comes back.

The output buffer lies inside a larger one, NaN throughout, so that rows that were not written and memory that should not
have been are both seen.
"""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attn.backends.mla.prefill.abstract import MLAContextChunk, MLAPrefillMetadata
from attn.capabilities import Device, Feature
from attn.testing import Call, Result, bits, cache_spec, latent_rows, layer_arguments
from attn.testing.prefill import PrefillCall
from attn.torch import kv_cache as caches
from attn.torch.interpreter import correct_bfloat16

Array = npt.NDArray[Any]

_Part = tuple[torch.Tensor, ...]
_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}

_MARGIN = 2  #: rows beside the output that must stay as they are


class Runner:
    """`Runner(backend, device)(call)` runs a call on a backend class; `build` alone constructs the layer."""

    def __init__(self, backend: Any, device: Device | None = None) -> None:
        by_choice = getattr(backend, "is_interpreted", None)
        if by_choice is not None and by_choice():
            correct_bfloat16()
        platform = device.platform if device is not None else "cpu"
        self.backend, self.device = backend, torch.device("cuda" if platform == "rocm" else platform)

    def build(self, call: Call) -> Any:
        """The implementation of the call's layer. Raises what its constructor raises."""
        arguments = layer_arguments(call)
        if call.case.mla:
            arguments["kv_b_proj"] = self._tensor(arguments["kv_b_proj"], call.case.dtype)
            indices = torch.from_numpy(call.indices).to(self.device) if call.case.topk else None
            arguments["indexer"] = SimpleNamespace(topk_indices=indices)
        elif call.sinks is not None:
            arguments["sinks"] = torch.tensor(call.sinks, device=self.device)
        impl = self.backend.get_impl_cls()(**arguments)
        impl.need_to_return_lse_for_decode = call.case.lse
        if (record := self.backend.capabilities) is not None:  # one choice of prefill, whatever the poison
            impl.prefill_features = record.features & {Feature.NAN_SAFE}
        return impl

    def __call__(self, call: Call) -> Result:
        impl, spec = self.build(call), cache_spec(call)
        metadata = self.backend.get_builder_cls()(spec, ["layer"], None, self.device).build(0, call.writable_batch())
        kv_cache, parts = self._cache(call)
        fresh = (call.key, call.value)
        if call.case.mla:
            rank, whole = call.case.mla[0], latent_rows(call)[:, 0]
            fresh = (whole[:, :rank], whole[:, rank:])
        query, key, value = (None if x is None else self._tensor(x, call.case.dtype) for x in (call.query, *fresh))
        assert query is not None
        rows = query.shape[0]
        scaled = call.case.output_scale is not None
        buffer = query.new_full((rows + 2 * _MARGIN, *call.output_shape[1:]), torch.nan)
        if scaled:
            buffer = buffer.to(torch.float8_e4m3fn)
        output_scale = torch.tensor(call.case.output_scale, device=self.device) if scaled else None
        output = buffer[_MARGIN : _MARGIN + rows] if self.backend.accept_output_buffer else None
        with torch.no_grad():
            result = impl.forward(_layer(call), query, key, value, kv_cache, metadata, output, output_scale)
        out, lse = result if isinstance(result, tuple) else (result, None)
        keys, values = (None, None) if parts is None else map(_stored, parts)
        return Result(
            bits.decode(_bits(out.reshape(call.output_shape)), str(out.dtype).removeprefix("torch.")),
            None if lse is None else _bits(lse),
            keys,
            values,
            str(out.dtype).removeprefix("torch."),
            spilled=not bool(buffer[:_MARGIN].float().isnan().all() and buffer[_MARGIN + rows :].float().isnan().all()),
        )

    def _cache(self, call: Call) -> tuple[torch.Tensor | None, tuple[_Part, _Part] | None]:
        """(the cache in the backend's own layout, holding the call's bytes; its keys and values as parts of stored rows)."""
        if call.key_cache is None or call.value_cache is None:
            return None, None
        kv_cache = caches.allocate(self.backend, cache_spec(call), call.key_cache.shape[0], self.device)
        parts: tuple[_Part, _Part]
        if call.case.element in bits.SELF_SCALED:
            keys, values, key_scales, value_scales = caches.split(kv_cache, call.case.head_size)
            parts = ((keys, key_scales[..., None]), (values, value_scales[..., None]))
        else:
            keys, values = self.backend.logical_kv_cache(kv_cache)
            parts = ((keys,), (values,))
        for part, stored in zip(parts, (call.key_cache, call.value_cache), strict=True):
            begin = 0
            for tensor in part:
                end = begin + tensor.shape[-1] * tensor.itemsize // stored.itemsize
                rows = np.array(stored[..., begin:end], order="C").view(_INTEGERS[tensor.itemsize])
                _raw(tensor).copy_(torch.from_numpy(rows))
                begin = end
        return kv_cache, parts

    def _tensor(self, values: Array, dtype: str) -> torch.Tensor:
        return self._put(bits.encode(values, dtype), dtype)

    def _put(self, stored: Array, element: str) -> torch.Tensor:
        """Stored bits as a tensor of `element`."""
        raw = stored.view(np.int16) if stored.dtype == np.uint16 else stored
        return torch.from_numpy(raw.copy()).view(getattr(torch, element)).to(self.device)


def _layer(call: Call) -> SimpleNamespace:
    """What an implementation asks of the layer it belongs to: its scales, as tensors and, where they are scalar, floats."""
    values = {"q": 1.0, "k": call.case.k_scale, "v": call.case.v_scale, "prob": 1.0}
    scales = {f"_{name}_scale": torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
    return SimpleNamespace(**scales, **{f"{name}_float": float(s) for name, s in scales.items() if s.ndim == 0})


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that copying keeps every NaN's bits."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _stored(part: _Part) -> Array:
    """Rows as the suite keeps them: a dtype's bits, or codes and the bytes of their scale."""
    if len(part) == 1:
        return _bits(part[0])
    return np.concatenate([_bits(tensor).view(np.uint8) for tensor in part], -1)


def _bits(tensor: torch.Tensor) -> Array:
    """A tensor as `attn.testing.bits` stores its dtype."""
    host = tensor.detach().cpu().contiguous()
    kinds = {
        torch.bfloat16: (torch.int16, np.uint16),
        torch.float8_e4m3fn: (torch.uint8, np.uint8),
        torch.float8_e5m2: (torch.uint8, np.uint8),
    }
    raw, kind = kinds.get(host.dtype, (host.dtype, None))
    array: Array = host.view(raw).numpy().copy()
    return array if kind is None else array.view(kind)


def prefill(backend: Any, call: PrefillCall) -> tuple[Array, list[tuple[Array, Array]]]:
    """An MLA prefill backend's answers: the new tokens' output alone, then (out, lse) of them and of each chunk, NumPy.

    Values are a view beside their keys, as the template's are.
    """
    on_gpu = torch.cuda.is_available() and {"cuda", "rocm"} & set(backend.capabilities.platforms)
    device = torch.device("cuda" if on_gpu else "cpu")
    if "triton" in backend.capabilities.packages and os.environ.get("TRITON_INTERPRET") == "1" and not on_gpu:
        correct_bfloat16()

    def put(values: Array, dtype: torch.dtype = getattr(torch, call.case.dtype)) -> torch.Tensor:  # noqa: B008
        return torch.from_numpy(values.copy()).to(device, dtype)

    def beside(keys: Array, values: Array) -> tuple[torch.Tensor, torch.Tensor]:
        size = keys.shape[2]
        both = put(np.concatenate([keys, values], 2))
        return both[..., :size].contiguous(), both[..., size:]

    def host(state: Any) -> tuple[Array, Array]:
        out, lse = (x.float().cpu().numpy() for x in state)
        return out, lse

    starts, int32 = call.query_start_loc, torch.int32
    chunks = tuple(
        MLAContextChunk(put(at, int32), at, int(at[-1]), int(np.diff(at).max(initial=0))) for *_, at in call.parts[1:]
    )
    meta = MLAPrefillMetadata(put(starts, int32), starts, len(starts) - 1, int(np.diff(starts).max(initial=0)), chunks)
    case = call.case
    impl = backend(case.num_heads, *case.sizes, call.scale)
    query = put(call.query)
    with torch.no_grad():
        new = beside(*call.parts[0][:2])
        alone = impl.run_prefill_new_tokens(query, *new, meta, False)
        assert alone.dtype == query.dtype
        states = [host(impl.run_prefill_new_tokens(query, *new, meta, True))]
        for i, (keys, values, _) in enumerate(call.parts[1:]):
            states.append(host(impl.run_prefill_context_chunk(i, query, *beside(keys, values), meta)))
    return alone.float().cpu().numpy(), states
