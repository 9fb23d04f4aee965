"""The torch driver of the conformance suite: converts a NumPy `Call` to tensors, a layer and a cache, and the result back.

The output buffer is part of a larger one that is filled with NaN, which shows both rows that were not written and writes to
other memory.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attn.capabilities import Device
from attn.testing import Call, Result, bits, cache_spec
from attn.testing.prefill import PrefillArrays, results
from attn.testing.runner import BaseRunner
from attn.torch import kv_cache as caches
from attn.torch.arrays import bits_of, raw
from attn.torch.interpreter import correct_bfloat16
from attn.torch.ops import Part, parts_of, stored_bits

Array = npt.NDArray[Any]

# Bits are moved as integers: a conversion of floats could change a NaN's.
_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}

_MARGIN = 2  #: rows before and after the output that must not be written


class TorchRunner(BaseRunner):
    __doc__ = BaseRunner.__doc__

    framework = "torch"

    def __init__(self, backend: Any, device: Device | None = None) -> None:
        by_choice = getattr(backend, "is_interpreted", None)
        if by_choice is not None and by_choice():
            correct_bfloat16()
        platform = device.platform if device is not None else "cpu"
        self.backend, self.device = backend, torch.device("cuda" if platform == "rocm" else platform)

    def _array(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    def _dtype(self, name: str) -> Any:
        return getattr(torch, name)

    def _own_sinks(self, sinks: Array) -> torch.Tensor:
        return torch.tensor(sinks)  # on the CPU: the layer moves them

    def _of_impl(self, call: Call) -> dict[str, Any]:
        if not call.case.mla:
            # as slopes always are, sinks may be on the host at a layer's first call
            convert = self._own_sinks if call.case.data_seed % 2 else self._array
            return {} if call.sinks is None else {"sinks": convert(call.sinks)}
        indexer = SimpleNamespace(topk_indices=self._array(call.indices) if call.case.topk else None)
        return {"kv_b_proj": self._tensor(call.weights, call.case.dtype), "indexer": indexer}

    def _of_latent_layer(self, call: Call) -> dict[str, Any]:
        case, (rank, nope, _, value) = call.case, call.case.mla
        width, dtype = case.num_heads * (nope + value), self._dtype(case.dtype)
        up = torch.nn.Linear(rank, width, bias=False, device=self.device, dtype=dtype)
        up.weight.data = self._tensor(np.array(call.weights.reshape(rank, -1).T, order="C"), case.dtype)
        return {"kv_b_proj": up, "indexer": self._of_impl(call)["indexer"] if case.topk else None}

    def layer(self, call: Call, **changes: Any) -> Any:
        """As `BaseRunner.layer`, on the device."""
        return super().layer(call, **changes).to(self.device)

    def __call__(self, call: Call) -> Result:
        return self.open(call)(call)

    def metadata(self, call: Call) -> Any:
        return self._builder(call).build(0, self._batch(call))

    def _builder(self, call: Call) -> Any:
        return self.backend.get_builder_cls()(cache_spec(call), ["layer"], None, self.device)

    def open(self, call: Call) -> Callable[..., Result]:
        """Create the call's layer and its cache, and return a function that runs calls on both, one after another.

        It takes a call, and the metadata of its batch, by default built for it.
        """
        case = call.case
        layer = self.layer(call) if case.through == "layer" else None
        impl = self.build(call) if layer is None else layer.impl
        kv_cache, parts = self._cache(call)
        if layer is not None and kv_cache is not None and call.key_cache is not None:
            cache = layer.new_kv_cache(call.key_cache.shape[0], self.device)
            # The layer's own cache has the layout that is filled with the case's bytes, or the test would test another one.
            assert (cache.shape, cache.stride(), cache.dtype) == (kv_cache.shape, kv_cache.stride(), kv_cache.dtype)
        builder = self._builder(call)

        def step(call: Call, metadata: Any = None) -> Result:
            if metadata is None:
                batch = self._batch(call)
                metadata = builder.build(0, batch) if layer is None else layer.build(batch, device=self.device)
            if call.case.topk:  # an indexer selects keys for every batch
                impl.indexer.topk_indices = torch.from_numpy(call.indices).to(self.device)
            if layer is not None:
                with torch.no_grad():
                    result = layer(*self._rows(call), kv_cache, metadata)
                out = result[0] if isinstance(result, tuple) else result
                buffer = out[:0]
                out.reshape(call.output_shape)[call.num_tokens :] = torch.nan  # a layer's own output is undefined there
            else:
                result, buffer = self._forward(impl, call, kv_cache, metadata)
            out, lse = result if isinstance(result, tuple) else (result, None)
            keys, values = (None, None) if parts is None else map(stored_bits, parts)
            return Result(
                bits.decode(bits_of(out.reshape(call.output_shape)), str(out.dtype).removeprefix("torch.")),
                None if lse is None else bits_of(lse),
                keys,
                values,
                str(out.dtype).removeprefix("torch."),
                spilled=not bool(buffer.float().isnan().all()),
            )

        return step

    def _forward(self, impl: Any, call: Call, kv_cache: torch.Tensor | None, metadata: Any) -> tuple[Any, torch.Tensor]:
        """Return (the implementation's result, the rows next to its output that it must not write)."""
        rows, scaled = call.query.shape[0], call.case.output_scale is not None
        query, key, value = self._rows(call)
        # before and behind: an index of either sign that runs too far shows
        buffer = query.new_full((rows + 2 * _MARGIN, *call.output_shape[1:]), torch.nan)
        if scaled:
            buffer = buffer.to(torch.float8_e4m3fn)
        output_scale = torch.tensor(call.case.output_scale, device=self.device) if scaled else None
        output = buffer[_MARGIN : _MARGIN + rows] if self.backend.accept_output_buffer else None
        with torch.no_grad():
            result = impl.forward(_layer(call, self.device), query, key, value, kv_cache, metadata, output, output_scale)
        return result, torch.cat([buffer[:_MARGIN].float(), buffer[_MARGIN + rows :].float()])

    def _rows(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return query, key and value (MLA: query, kv_c and k_pe) in the case's memory layout."""
        case = call.case
        query = self._tensor(call.query, case.dtype)
        if case.mla:
            query = views(query) if case.layout == "fused" else query
            if call.key is None:
                return query.flatten(1) if case.layout == "flat" else query, None, None
            whole = self._tensor(call.key[:, 0], case.dtype)
            latent, rope = whole[:, : case.mla[0]], whole[:, case.mla[0] :]
            if case.layout == "flat":
                return query.flatten(1), latent, rope
            if case.layout == "heads_first":
                return query.transpose(0, 1).contiguous().transpose(0, 1), latent, rope[:, None]
            return query, latent if case.layout == "fused" else latent.contiguous(), rope.contiguous()
        key, value = (None if x is None else self._tensor(x, case.dtype) for x in (call.key, call.value))
        tensors = [x for x in (query, key, value) if x is not None]
        if case.layout == "flat":
            tensors = [x.flatten(1) for x in tensors]
        elif case.layout == "heads_first":
            tensors = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
        elif case.layout == "fused":
            widths = [x.shape[1] * x.shape[2] for x in tensors]
            packed = views(torch.cat([x.flatten(1) for x in tensors], 1))
            tensors = [part.unflatten(1, x.shape[1:]) for part, x in zip(packed.split(widths, 1), tensors, strict=True)]
        return tensors[0], tensors[1] if len(tensors) > 1 else None, tensors[2] if len(tensors) > 1 else None

    def _cache(self, call: Call) -> tuple[torch.Tensor | None, tuple[Part, Part] | None]:
        """Return (the cache in the backend's layout with the call's bytes; its keys and values as parts of stored rows)."""
        if call.key_cache is None or call.value_cache is None:
            return None, None
        kv_cache = caches.allocate(self.backend, cache_spec(call), call.key_cache.shape[0], self.device)
        parts = parts_of(self.backend, kv_cache, call.case.kv_cache_dtype, call.case.head_size)
        for part, stored in zip(parts, (call.key_cache, call.value_cache), strict=True):
            begin = 0
            for tensor in part:
                end = begin + tensor.shape[-1] * tensor.itemsize // stored.itemsize
                # a part's bytes among those of the row: codes first, then the scale of the token and head
                rows = np.array(stored[..., begin:end], order="C").view(_INTEGERS[tensor.itemsize])
                raw(tensor).copy_(torch.from_numpy(rows))
                begin = end
        return kv_cache, parts

    def _tensor(self, values: Array, dtype: str) -> torch.Tensor:
        stored = bits.encode(values, dtype)
        carried = stored.view(np.int16) if stored.dtype == np.uint16 else stored
        return torch.from_numpy(carried.copy()).view(self._dtype(dtype)).to(self.device)


def views(rows: torch.Tensor) -> torch.Tensor:
    """Copy rows [T, ...] to views of rows that are wider by 3 elements, in front."""
    flat = rows.flatten(1)
    # 3 elements: rows of a multiple of 16 bytes then have no address and no stride that is one, in any dtype
    return torch.cat([flat.new_zeros(len(flat), 3), flat], 1)[:, 3:].view(rows.shape)


def _layer(call: Call, device: torch.device) -> SimpleNamespace:
    """The layer's attributes that an implementation reads: its scales as float32 buffers (0-d or [K]) on the layer's
    device, and scalar ones as floats too."""
    values = {"q": 1.0, "k": call.case.k_scale, "v": call.case.v_scale, "prob": 1.0}
    scales = {f"_{name}_scale": torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
    floats = {f"{name}_float": float(scale) for name, scale in scales.items() if scale.ndim == 0}
    return SimpleNamespace(**{name: scale.to(device) for name, scale in scales.items()}, **floats)


def prefill(backend: Any, call: PrefillArrays) -> tuple[Array, list[tuple[Array, Array]]]:
    """Run an MLA prefill backend by `attn.testing.prefill.results`; values are a view next to their keys, as the template's."""
    on_gpu = torch.cuda.is_available() and {"cuda", "rocm"} & set(backend.capabilities.platforms)
    device = torch.device("cuda" if on_gpu else "cpu")
    if "triton" in backend.capabilities.packages and os.environ.get("TRITON_INTERPRET") == "1" and not on_gpu:
        correct_bfloat16()

    def put(values: Array) -> torch.Tensor:
        return torch.tensor(values, device=device)

    def rows(values: Array) -> torch.Tensor:
        tensor = put(values).to(getattr(torch, call.case.dtype))
        return views(tensor) if call.case.layout == "fused" else tensor

    def beside(keys: Array, values: Array) -> tuple[torch.Tensor, torch.Tensor]:
        return rows(keys), rows(np.concatenate([keys, values], 2))[..., keys.shape[2] :]

    with torch.no_grad():
        return results(backend, call, put, rows, beside, lambda x: x.double().cpu().numpy())
