"""The jax driver of the conformance suite: a `Call` in NumPy becomes arrays, a jitted layer and a cache, and comes back.

The layer is called as it is, not under a jit of its own: a backend jits what it computes, and so shares programs between
layers whose numbers alone differ. `captured` is the whole layer compiled. Rows that the builder adds hold NaN here:
nothing may depend on them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from attn.capabilities import Device
from attn.testing import Call, Result, bits, cache_spec, layer_arguments

Array = npt.NDArray[Any]


class Runner:
    """`Runner(backend, device)(call)` runs a call on a backend class; `build` alone constructs the layer."""

    def __init__(self, backend: Any, device: Device | None = None) -> None:
        self.backend, self.device = backend, device
        self._places: dict[tuple[int, ...], tuple[Array, Array]] = {}

    def build(self, call: Call) -> Any:
        """The implementation of the call's layer. Raises what its constructor raises."""
        sinks = {} if call.sinks is None else {"sinks": jnp.asarray(call.sinks)}
        impl = self.backend.get_impl_cls()(**layer_arguments(call), **sinks)
        impl.need_to_return_lse_for_decode = call.case.lse
        return impl

    def __call__(self, call: Call) -> Result:
        return self._run(call, self.build(call).apply)

    def captured(self, call: Call) -> Result:
        """The same with the layer jitted as a whole and its cache donated."""
        return self._run(call, jax.jit(self.build(call).apply, donate_argnums=3))

    def _run(self, call: Call, apply: Any) -> Result:
        case, count = call.case, call.query.shape[0]
        metadata = self.backend.get_builder_cls()(cache_spec(call), ["layer"], None, None).build(0, call.writable_batch())
        rows = metadata.slot_mapping.shape[0]
        arrays = [None if x is None else self._rows(x, case.dtype, rows) for x in (call.query, call.key, call.value)]
        scales = {"k_scale": jnp.asarray(case.k_scale, jnp.float32), "v_scale": jnp.asarray(case.v_scale, jnp.float32)}
        result, kv_cache = apply(*arrays, self._cache(call), metadata, **scales)
        out, lse = result if isinstance(result, tuple) else (result, None)
        values = bits.decode(_bits(out), case.dtype).reshape(rows, *call.query.shape[1:])
        keys_and_values = (None, None)
        if kv_cache is not None:
            flat = _bits(kv_cache).reshape(-1)
            keys_and_values = tuple(flat[place] for place in self._where(call))  # type: ignore[assignment]
        return Result(
            values[:count],
            None if lse is None else np.asarray(lse)[:, :count],
            *keys_and_values,
            str(out.dtype),
            padding=0.0,
            spilled=bool(np.any(values[count:] != 0)),
        )

    def _rows(self, values: Array, dtype: str, rows: int) -> jax.Array:
        padded = np.full((rows, *values.shape[1:]), np.nan, np.float32)
        padded[: len(values)] = values
        return jnp.asarray(bits.encode(padded, dtype).view(jnp.dtype(dtype)))

    def _cache(self, call: Call) -> jax.Array | None:
        """A cache in the backend's own layout, filled through the places of its logical view; poison where that has none."""
        if call.key_cache is None or call.value_cache is None:
            return None
        case = call.case
        shape = self._shape(call)
        raw = bits.poisoned((int(np.prod(shape)),), case.element, case.poison)
        for place, stored in zip(self._where(call), (call.key_cache, call.value_cache), strict=True):
            raw[place] = 0  # a logical view may be wider than the head: its padding is zeros by contract
            raw[place[..., : stored.shape[-1]]] = stored
        return jnp.asarray(raw.view(jnp.dtype(case.element)).reshape(shape))

    def _shape(self, call: Call) -> tuple[int, ...]:
        assert call.key_cache is not None
        num_blocks, block_size, num_kv_heads, head_size = call.key_cache.shape
        return tuple(self.backend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, call.case.kv_cache_dtype))

    def _where(self, call: Call) -> tuple[Array, Array]:
        """Where in a flat cache each key and value element lies, by asking `logical_kv_cache` about a cache of indices."""
        shape = self._shape(call)
        if shape not in self._places:
            index = jnp.arange(int(np.prod(shape)), dtype=jnp.int32).reshape(shape)
            keys, values = self.backend.logical_kv_cache(index)
            self._places[shape] = np.asarray(keys), np.asarray(values)
        return self._places[shape]


def _bits(array: jax.Array) -> Array:
    """An array as `attn.testing.bits` stores its dtype."""
    host = np.asarray(array)
    return host.view(bits.raw(str(host.dtype)))
