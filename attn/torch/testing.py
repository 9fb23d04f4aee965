"""The torch driver of the conformance suite: a `Call` in NumPy becomes tensors, a layer and a cache, and comes back.

The output buffer lies inside a larger one, NaN throughout, so that rows that were not written and memory that should not
have been are both seen.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attn.capabilities import Device
from attn.testing import Call, Result, bits, cache_spec, layer_arguments
from attn.torch import kv_cache as caches

Array = npt.NDArray[Any]

_MARGIN = 2  #: rows beside the output that must stay as they are


class Runner:
    """`Runner(backend, device)(call)` runs a call on a backend class; `build` alone constructs the layer."""

    def __init__(self, backend: Any, device: Device | None = None) -> None:
        platform = device.platform if device is not None else "cpu"
        self.backend, self.device = backend, torch.device("cuda" if platform == "rocm" else platform)

    def build(self, call: Call) -> Any:
        """The implementation of the call's layer. Raises what its constructor raises."""
        arguments = layer_arguments(call)
        if call.sinks is not None:
            arguments["sinks"] = torch.tensor(call.sinks, device=self.device)
        impl = self.backend.get_impl_cls()(**arguments)
        impl.need_to_return_lse_for_decode = call.case.lse
        return impl

    def __call__(self, call: Call) -> Result:
        impl, spec = self.build(call), cache_spec(call)
        metadata = self.backend.get_builder_cls()(spec, ["layer"], None, self.device).build(0, call.writable_batch())
        kv_cache, logical = self._cache(call)
        query, key, value = (
            None if x is None else self._tensor(x, call.case.dtype) for x in (call.query, call.key, call.value)
        )
        assert query is not None
        rows = query.shape[0]
        buffer = query.new_full((rows + 2 * _MARGIN, *query.shape[1:]), torch.nan)
        output = buffer[_MARGIN : _MARGIN + rows] if self.backend.accept_output_buffer else None
        with torch.no_grad():
            result = impl.forward(_layer(call), query, key, value, kv_cache, metadata, output)
        out, lse = result if isinstance(result, tuple) else (result, None)
        keys, values = (None, None) if logical is None else map(_bits, logical)
        return Result(
            bits.decode(_bits(out.reshape(query.shape)), call.case.dtype),
            None if lse is None else _bits(lse),
            keys,
            values,
            str(out.dtype).removeprefix("torch."),
            spilled=not bool(buffer[:_MARGIN].isnan().all() and buffer[_MARGIN + rows :].isnan().all()),
        )

    def _cache(self, call: Call) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """(the cache in the backend's own layout, its logical view), holding the call's bytes."""
        if call.key_cache is None or call.value_cache is None:
            return None, None
        kv_cache = caches.allocate(self.backend, cache_spec(call), call.key_cache.shape[0], self.device)
        logical = self.backend.logical_kv_cache(kv_cache)
        for part, stored in zip(logical, (call.key_cache, call.value_cache), strict=True):
            _raw(part).copy_(_raw(self._put(stored, call.case.element)))
        return kv_cache, logical

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
