"""`attn.jax.dot_product_attention`: `jax.nn.dot_product_attention` with a chosen backend, and flax's `attention_fn`.

The diffusion registry chooses: on a TPU this package's Pallas flash kernel for what it supports (causal square attention,
windows, key lengths; no bias, no mask array), cuDNN or this package's Triton kernels on a GPU, else XLA. cuDNN and XLA are
`jax.nn`'s own implementations, and compute gradients of calls that the Triton kernels compute.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn.arguments import as_int, check_flag, fold_sign
from attn.arrays import framework_of
from attn.capabilities import Feature
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.diffusion.selector import make_diffusion_request, select_diffusion
from attn.errors import DTypeError, ShapeError, UnsupportedError
from attn.jax.platforms import platform_of
from attn.kernels.paged_launch import LayerParams
from attn.visibility import LayerMask, Visibility, Window

_LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
_TRITON = "TRITON_ATTN_JAX"
_OURS = ("PALLAS", _TRITON)  #: backends that are kernels of this package
_OF_JAX = {"CUDNN": "cudnn", "XLA_ATTN": "xla"}  #: backends that are implementations of `jax.nn.dot_product_attention`


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    backend: DiffusionAttentionBackendEnum | str | None = None,
) -> Any:
    """Attention with the signature and the semantics of `jax.nn.dot_product_attention`, differentiable.

    query: [B, T, N, H] or [T, N, H]; key, value: [B, S, K, H] or [S, K, H]; bias: added to scores, and mask: bool, True =
    attend, both broadcastable to [B, N, T, S]. is_causal and local_window_size (left, right) align the first row with the
    first key (top-left). query_seq_lengths, key_value_seq_lengths: [B] int32; rows past a query's length are 0.
    implementation: "xla" or "cudnn", forces jax's own. backend: forces a diffusion backend by name.

    Returns [B, T, N, H] or [T, N, H] in the query's dtype; with return_residual also the natural log-sum-exp [B, T, N] (or
    [T, N]) float32. One difference: a row that sees no key is 0 with every backend, where `jax.nn` returns a mean of
    values, or NaN where a bias is -inf for every key (a bias of -inf hides its key: docs/semantics.md §1). No heads, or heads
    of size 0, give an empty result.

    Raises `ShapeError` and `DTypeError` for arrays that do not belong together, `UnsupportedError` with every reason, TypeError
    for arrays of another framework and ValueError for other invalid arguments.
    """
    is_causal, return_residual = check_flag("is_causal", is_causal), check_flag("return_residual", return_residual)
    for name, array in (("query", query), ("key", key), ("value", value)):
        if framework_of(array) not in ("jax", "numpy"):
            raise TypeError(f"{name} is an array of {framework_of(array)}: must be a jax array (see attn.arrays.to_framework)")
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(f'implementation={implementation!r} is unknown; known: "xla", "cudnn", None')
    if implementation is not None and backend is not None:
        raise ValueError(f"implementation={implementation!r} and backend={backend!r} exclude each other: pass only one")
    # Before the batch dimension is added, so that messages have the caller's shapes.
    _check(query, key, value, mask)
    scored = _of_scores("bias", bias, query, key), _of_scores("mask", mask, query, key)
    lens = [_lengths(name, x, query) for name, x in zip(_LENGTHS, (query_seq_lengths, key_value_seq_lengths), strict=True)]
    visible = LayerMask(is_causal, _window(local_window_size)).within_int32()
    batched = query.ndim == 4
    if not batched:
        query, key, value = query[None], key[None], value[None]
    call = _DenseCall(query, key, value, *scored, scale, visible, *lens).simplified()
    if implementation is None and backend is None and 0 in query.shape[-2:]:
        implementation = "xla"  # no backend is asked for no heads
    how = implementation or _chosen(call, backend)
    if how in _OURS and (why := call.why_not(how)):
        if backend is not None:
            raise UnsupportedError(f"{how}: {why}", [why])
        # The selection knows a layer's features; whether a call has lengths under causality, or a traced scale, shows here
        # only.
        how = _other(call)
    if how == "PALLAS":
        out, lse = _pallas(call)
    elif how == _TRITON:
        out, lse = _triton(call)
    elif how in ("xla", "cudnn"):
        out, lse = _of_jax(call, how)
    else:
        raise UnsupportedError(f"{how}: dot_product_attention supports only PALLAS, {_TRITON}, CUDNN and XLA_ATTN")
    # jax.nn's own implementations leave these rows 0; the other kernels do not know a query's length.
    if call.query_lens is not None:
        real = jnp.arange(query.shape[1])[None, :, None] < call.query_lens[:, None, None]
        out, lse = jnp.where(real[..., None], out, 0), jnp.where(real, lse, -jnp.inf)
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


class _DenseCall(NamedTuple):
    """The checked arguments, with a batch dimension; query_lens, key_lens: [B] int32."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    scale: float | None
    visible: LayerMask
    query_lens: jax.Array | None
    key_lens: jax.Array | None

    def simplified(self) -> "_DenseCall":
        """Return the same call with keys of -inf bias in the mask, and without the keys that causality hides from every row."""
        bias, mask, rows = self.bias, self.mask, self.query.shape[1]
        if bias is not None:
            # A finite score plus -inf would do, but a row of nothing else would be NaN: the mask leaves such rows 0.
            visible = bias != -jnp.inf
            mask, bias = visible if mask is None else mask & visible, jnp.where(visible, bias, 0)
        # Rows count from the first key, so that under causality no row sees a key behind the last row's own.
        num_keys = min(rows, self.key.shape[1]) if self.visible.causal else self.key.shape[1]
        # jax.nn takes lengths beyond the keys, but kernels of this package would read what is behind them.
        lens = None if self.key_lens is None else jnp.minimum(self.key_lens, num_keys)
        bias, mask = (x if x is None or x.shape[-1] == 1 else x[..., :num_keys] for x in (bias, mask))
        return self._replace(key=self.key[:, :num_keys], value=self.value[:, :num_keys], bias=bias, mask=mask, key_lens=lens)

    @property
    def needs_mask(self) -> bool:
        """Whether there is a bias or a mask, or the last row is not aligned with the last key, as in this package's kernel."""
        # with equally many rows and keys, counting from the first and from the last are the same
        aligned = self.query.shape[1] == self.key.shape[1] or self.visible == LayerMask(causal=False)
        return self.bias is not None or self.mask is not None or not aligned

    def why_not(self, how: str) -> str:
        """Why a kernel of this package does not compute the call; "" if it does."""
        if isinstance(self.scale, jax.core.Tracer):
            return "scale is traced (must be a number: it is part of the program)"
        if how == "PALLAS":
            return ""
        if self.key_lens is not None and self.visible != LayerMask(causal=False):
            return "key_value_seq_lengths with causality or a window is not supported"
        if not all(isinstance(n, int) for x in self[:3] for n in x.shape):
            return "shapes are symbolic (must be known: kernels are compiled for them)"
        return ""

    def seen(self) -> jax.Array:
        """The rows that see a key: bool [B, T, N]."""
        batch, rows, heads, _ = self.query.shape
        key = jnp.arange(self.key.shape[1])
        # Rows and keys both count from 0 here: `jax.nn` aligns them at the top left (docs/semantics.md §3).
        allowed = Visibility(self.visible).allowed(jnp.arange(rows)[:, None], key)[None, None]
        if self.key_lens is not None:
            allowed = allowed & (key < self.key_lens[:, None])[:, None, None]
        if self.mask is not None:
            allowed = allowed & self.mask
        return jnp.swapaxes(jnp.broadcast_to(allowed.any(-1), (batch, heads, rows)), 1, 2)


def _chosen(call: _DenseCall, backend: DiffusionAttentionBackendEnum | str | None, *features: Feature) -> str | None:
    """Return the backend's name, or that of jax's implementation. Raises `UnsupportedError` with every reason.

    features: asked for beside those that the call needs.
    """
    request = make_diffusion_request(
        call.query.shape[-1],
        call.query.dtype,
        num_heads=call.query.shape[2],
        num_kv_heads=call.key.shape[2],
        # Always: a caller may differentiate at any time, and a selection must not depend on it.
        features=[Feature.BACKWARD, *([Feature.MASK] if call.needs_mask else []), *features],
    )
    place = next(filter(None, map(platform_of, call[:3])), None)
    chosen = select_diffusion(request, backend=backend, framework="jax", platform=place)
    chosen.require()
    return _OF_JAX.get(chosen.name or "", chosen.name)


def _pallas(call: _DenseCall) -> tuple[jax.Array, jax.Array]:
    from attn.jax.kernels.tpu.flash_attention import Extras, FlashParams, flash_attention

    rules, extras = FlashParams(call.visible, call.scale), Extras(kv_lens=call.key_lens)
    if call.key_lens is not None and call.visible != LayerMask(causal=False):
        # The kernel would align the last row with the last of these keys. Segments hide the others and move no row.
        keys = jnp.arange(call.key.shape[1]) < call.key_lens[:, None]
        extras = Extras(jnp.ones(call.query.shape[:2], jnp.int32), keys.astype(jnp.int32))
    out, lse = flash_attention(call.query, call.key, call.value, rules, extras, return_lse=True)
    # [B, H, S] there, [B, S, H] here
    return out, jnp.swapaxes(lse, 1, 2)


def _other(call: _DenseCall) -> str:
    """Return the implementation of jax that computes the call, or its gradients, where the Triton kernels do not."""
    how = _chosen(call, None, Feature.MASK)  # which those have not
    assert how in ("xla", "cudnn")
    return how


def _triton(call: _DenseCall) -> tuple[jax.Array, jax.Array]:
    from attn.jax.kernels.gpu.dense_attention import dense_attention, differentiable

    (causal, (left, right), *_), size = call.visible, call.query.shape[-1]
    # a traced scale has been refused (`why_not`): this one is part of the program
    scale = size**-0.5 if call.scale is None else float(call.scale)
    layer = LayerParams(scale, left=left, right=0 if causal else right)

    def fallback(query: jax.Array, key: jax.Array, value: jax.Array, lens: jax.Array | None) -> Any:
        return _of_jax(call._replace(query=query, key=key, value=value, key_lens=lens), _other(call))

    function = differentiable(lambda query, key, value, lens: dense_attention(query, key, value, lens, layer), fallback)
    out, lse = function(call.query, call.key, call.value, call.key_lens)
    return out, lse


def _of_jax(call: _DenseCall, how: str) -> tuple[jax.Array, jax.Array]:
    jax_attention: Any = jax.nn.dot_product_attention
    (causal, window, *_), query, scale = call.visible, call.query, call.scale
    if how == "cudnn" and scale is not None:
        query, scale = fold_sign(query, scale), abs(scale)
    rules: dict[str, Any] = {"is_causal": causal, "local_window_size": None if window == (None, None) else window}
    rules |= zip(_LENGTHS, (call.query_lens, call.key_lens), strict=True)
    arrays = (query, call.key, call.value, call.bias, call.mask)
    out, lse = jax_attention(*arrays, scale=scale, implementation=how, return_residual=True, **rules)
    # every row sees a key then; elsewhere rows without one get what this package returns for them
    if call.mask is None and call.key_lens is None and window == (None, None):
        return out, lse
    seen = call.seen()
    return jnp.where(seen[..., None], out, 0), jnp.where(seen, lse, -jnp.inf)


def _check(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any) -> None:
    """Raise `ShapeError` and `DTypeError` for calls that `jax.nn` does not accept."""
    arrays = (query, key, value)
    shapes = ", ".join(str(list(x.shape)) for x in arrays)
    if query.ndim not in (3, 4) or key.ndim != query.ndim or value.ndim != query.ndim:
        raise ShapeError(f"query, key, value have shapes {shapes}: must be [B, T, heads, head_size], or all without B")
    if key.shape != value.shape or query.shape[:-3] != key.shape[:-3] or query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            f"query, key, value have shapes {shapes}: must be [B, T, N, H] and twice [B, S, K, H], or all without B"
        )
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(f"query has {heads} heads, key {kv_heads}: must be a multiple")
    if not query.dtype == key.dtype == value.dtype:
        raise DTypeError(f"query, key, value have dtypes {query.dtype}, {key.dtype}, {value.dtype}: must be equal")
    if mask is not None and mask.dtype != bool:
        raise DTypeError(f"mask has dtype {mask.dtype}: must be bool, True = attend (numbers to be added are a bias)")


def _of_scores(name: str, extra: Any, query: jax.Array, key: jax.Array) -> jax.Array | None:
    """Return a bias or a mask with four dimensions. Raises `ShapeError` unless it broadcasts to the scores."""
    if extra is None:
        return None
    array = jnp.asarray(extra)
    # [B, N, T, S]; a batch of one where the arrays have none
    full = (*(query.shape[:-3] or (1,)), query.shape[-2], query.shape[-3], key.shape[-3])
    _check_broadcast(name, array, full)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _check_broadcast(name: str, x: jax.Array, full: tuple[int, ...]) -> None:
    """Raise `ShapeError` unless `x` broadcasts to `full`, [..., N, T, S]."""
    if x.ndim > len(full) or any(have not in (want, 1) for have, want in zip(x.shape[::-1], full[::-1], strict=False)):
        raise ShapeError(f"{name} has shape {list(x.shape)}: must broadcast to {list(full)}, [..., heads, rows, keys]")


def _lengths(name: str, lengths: Any, query: jax.Array) -> jax.Array | None:
    if lengths is None:
        return None
    array, batch = jnp.asarray(lengths), query.shape[0] if query.ndim == 4 else 1
    if array.shape != (batch,):
        raise ShapeError(f"{name} has shape {list(array.shape)}: must be [{batch}]")
    if array.dtype != jnp.int32:
        raise DTypeError(f"{name} has dtype {array.dtype}: must be int32")
    return array


def _window(size: Any) -> Window:
    if size is None:
        return None, None
    # jax.nn takes no None for a side, so neither does this
    pair = (size, size) if as_int(size) is not None else size
    sides = [as_int(side) for side in pair] if isinstance(pair, tuple | list) and len(pair) == 2 else [None]
    left, right = sides[0], sides[-1]
    if left is None or right is None:
        raise ValueError(f"local_window_size={size!r} must be an int, a pair (left, right) of ints, or None")
    return left, right


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    promote_dtype: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    attend: Callable[..., Any] = dot_product_attention,
    **more: Any,
) -> jax.Array:
    """`dot_product_attention` as the `attention_fn` of `nnx.MultiHeadAttention` and of linen's.

        nnx.MultiHeadAttention(8, 64, 64, attention_fn=attn.jax.attention_fn, decode=False, rngs=nnx.Rngs(0))

    All arguments that linen may pass are named, since linen silently drops those missing from the signature. mask: as flax
    creates it, of any dtype, non-zero = attend. Softmax is float32. attend: a function that computes the call instead: it takes
    the first five arguments, with the batch dimensions flattened to one, and is_causal.

    Raises `UnsupportedError` for active dropout, `module` (flax's sowing of weights), `precision`, functions for products or
    dtypes, and arguments of later versions of flax, and `ShapeError` for batch dimensions that differ and for a bias or mask
    that does not broadcast.
    """
    _refuse_flax(
        dropout_rate,
        deterministic,
        module,
        promote_dtype,
        precision=precision,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
        **more,
    )
    if dtype is not None:
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    if mask is not None:
        # flax's `make_attention_mask` returns float32 by default
        mask = mask.astype(bool)
    lead = query.shape[:-3]
    if not lead == key.shape[:-3] == value.shape[:-3]:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ShapeError(f"query, key, value have shapes {shapes}: must have equal batch dimensions")
    flat = [x.reshape(math.prod(lead), *x.shape[-3:]) for x in (query, key, value)]
    full = (*lead, query.shape[-2], query.shape[-3], key.shape[-3])
    extras = [None if x is None else _flat_extra(name, x, full) for name, x in (("bias", bias), ("mask", mask))]
    out: jax.Array = attend(*flat, *extras, is_causal=is_causal)
    return out.reshape(*lead, *out.shape[1:])


def _refuse_flax(dropout_rate: float, deterministic: bool, module: Any, promote_dtype: Any, **others: Any) -> None:
    """Raise `UnsupportedError` for options of flax layers that no `attention_fn` of this package supports.

    others: by name, including those of later versions of flax; None and False ask for nothing.
    """
    if dropout_rate and not deterministic:
        raise UnsupportedError(f"dropout_rate={dropout_rate}: dropout of attention weights is not supported")
    if module is not None:
        raise UnsupportedError("module: attention weights are never stored and cannot be sown: pass sow_weights=False")
    # flax always passes one; its own promotes to `dtype`, as `attention_fn` has done
    if promote_dtype is not None and not getattr(promote_dtype, "__module__", "").startswith("flax."):
        raise UnsupportedError("promote_dtype: another function than flax's is not supported: promote the arrays before")
    for name, value in others.items():
        if value is not None and value is not False:
            advice = "use jax.default_matmul_precision" if name == "precision" else "use flax's own attention"
            raise UnsupportedError(f"{name}={value!r} is not supported: products are the backend's ({advice})")


def _flat_extra(name: str, x: jax.Array, full: tuple[int, ...]) -> jax.Array:
    """Return a bias or a mask that broadcasts to `full`, [..., N, T, S], with its batch dimensions flattened to one."""
    _check_broadcast(name, x, full)
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    return jnp.broadcast_to(x, (*full[:-3], *x.shape[-3:])).reshape(math.prod(full[:-3]), *x.shape[-3:])
