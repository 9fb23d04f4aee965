"""`attn.jax.Attention` and `MLAAttention`: attention layers as `nnx.Module`s; the backend is chosen once, on construction."""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import reprlib

from attn import recording
from attn.arguments import positive_int
from attn.layer import BaseAttention, BaseLayer, BaseMLAAttention

if TYPE_CHECKING:  # loaded with the backends that are chosen
    from attn.jax.backends._paged import PagedAttentionImpl
    from attn.jax.backends.mla._mla import MLACommonImpl


def _scale_property(name: str) -> Any:
    """A scale as an array, from the static value that `_keep_scale` stored."""
    # NumPy's array: one of JAX that is made while a module is built under a trace would be a tracer.
    return property(lambda layer: np.asarray(getattr(layer, f"{name}_static"), np.float32))


class _Module(BaseLayer, nnx.Module):
    """The storage of scales and the allocation of caches of a module."""

    framework = "jax"
    # Scales are static, like the backend, not leaves of the module's state: a checkpoint need not contain them, and a
    # module built under `nnx.eval_shape` has them.
    _q_scale, _k_scale, _v_scale, _prob_scale = map(_scale_property, ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"))

    @staticmethod
    def _default_dtype() -> Any:
        return jnp.dtype(jnp.float32)

    def new_kv_cache(self, num_blocks: int, device: Any = None, *, layers: int | None = None) -> jax.Array:
        """Return a zeroed cache of `num_blocks` blocks in the backend's layout, on a device or with a sharding.

        layers: number of caches, concatenated along N in one array, for layers in a scan: layer i reads and writes its
            own with `attn_metadata.of_layer(i)`. Block ids are those of one layer's cache, 0 to num_blocks - 1. None: the
            cache of one layer, which a call refuses for a traced i; a scan over a single layer needs layers=1.

        `build` checks block ids and slots against the largest `num_blocks` allocated so far, and `of_layer` against the most
        `layers`; a call rejects a smaller cache for such a batch. A builder that was created earlier from `kv_cache_spec` keeps
        its own limits. Raises ValueError unless both are positive ints.
        """
        layers = None if layers is None else positive_int("layers", layers)
        return self._new_kv_cache(positive_int("num_blocks", num_blocks), device, layers)

    def __nnx_repr__(self) -> Iterator[reprlib.Object]:
        """Show the module in one line, by itself and within a model, as under torch."""
        yield reprlib.Object(type=type(self), empty_repr=f"{self.selection.name}, {self.selection.request}")

    def _keep_scale(self, name: str, scale: Any) -> None:
        # tuples and floats are hashable, as nnx's static fields must be
        if scale.ndim == 0:
            setattr(self, f"{name}_float", float(scale))
        setattr(self, f"{name}_static", tuple(scale.tolist()) if scale.ndim else float(scale))


class Attention(BaseAttention, _Module):
    __doc__ = BaseAttention.__doc__

    impl: "PagedAttentionImpl"

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None,
        value: jax.Array | None,
        kv_cache: jax.Array | None,
        attn_metadata: Any,
        *,
        return_weights: bool = False,
    ) -> tuple[Any, Any]:
        """Return (output, kv_cache): a pure function of its arguments; see `PagedAttentionImpl.apply`.

        query: [T, H, D] (or [T, H * D]); key, value: [T, K, D], written to `kv_cache`. Jit it with the cache donated, so
        that the write happens in place: `nnx.jit(step, donate_argnames=("kv_cache",))`.
        return_weights: return each request's attention weights too, last in the output: a list of [H, n, m] float32
        (`attn.weights`); not in a transformation of JAX.
        """
        # a second pass by the weights' own formula, over the cache that this call has written
        if return_weights:
            out, after = self(query, key, value, kv_cache, attn_metadata)
            return self._with_weights(out, query, key, value, after, attn_metadata), after
        arguments = (query, key, value, kv_cache, attn_metadata)
        # a recorder runs the call itself, as it records calls that raise too
        run = functools.partial(self.impl.apply, *arguments, k_scale=self._k_scale, v_scale=self._v_scale)
        return run() if self.recorder is None else self.recorder.call(self, run, recording.Arguments(*arguments))

    forward = __call__


class MLAAttention(BaseMLAAttention, _Module):
    __doc__ = BaseMLAAttention.__doc__

    impl: "MLACommonImpl"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # a leaf of this module's state: inside the implementation, jit would treat it as a constant
        self.kv_b_proj, self.impl.kv_b_proj = self.impl.kv_b_proj, None

    def __call__(
        self,
        q: jax.Array,
        kv_c_normed: jax.Array | None,
        k_pe: jax.Array | None,
        kv_cache: jax.Array,
        attn_metadata: Any,
        indices: Any = None,
        *,
        return_weights: bool = False,
    ) -> tuple[Any, jax.Array]:
        """Return (output [T, H, Dv], kv_cache): a pure function of its arguments and `kv_b_proj`; see `MLACommonImpl.apply`.

        q: [T, H, Dn + Dr], kv_c_normed: [T, L], k_pe: [T, Dr], projected, normalised and rotated by the model; the new rows
        are written to `kv_cache`. Jit it with the cache donated, so that the write happens in place. A sparse backend also
        takes `indices=` [T, topk]. return_weights: as in `Attention`.
        """
        if return_weights:
            out, after = self(q, kv_c_normed, k_pe, kv_cache, attn_metadata, indices)
            return self._with_weights(out, q, kv_c_normed, k_pe, after, attn_metadata, indices), after
        w_uk, w_uv = self.impl.weights(self.kv_b_proj)
        arguments = (q, kv_c_normed, k_pe, kv_cache, attn_metadata)
        run = functools.partial(self.impl.apply, *arguments, w_uk=w_uk, w_uv=w_uv, k_scale=self._k_scale, indices=indices)
        return run() if self.recorder is None else self.recorder.call(self, run, recording.Arguments(*arguments, indices))

    forward = __call__
