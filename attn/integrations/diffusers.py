"""diffusers: `attn` as a backend of its attention dispatcher.

    from attn.integrations import diffusers as attn_diffusers
    attn_diffusers.register()
    pipe.transformer.set_attention_backend("attn")              # the fastest exact backend for each call
    pipe.transformer.set_attention_backend("attn:SAGE_ATTN")    # this backend, or an error

diffusers' list of backends is a closed enum, to which members are added; everything else (the context manager
`attention_backend`, `set_attention_backend`, `torch.compile`) then works as for its own backends. Written for diffusers
0.42: an incompatible dispatcher raises an error that says so.
"""

import functools
import warnings
from typing import Any

import torch

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.diffusion.selector import make_diffusion_request
from attn.errors import BackendLoadError, DTypeError, ShapeError, UnsupportedError
from attn.torch.autocast import autocast
from attn.torch.diffusion.chosen import impl_for, properties_of

_NAME = "attn"


def register(*, error_budget: float = 0.0) -> tuple[str, ...]:
    """Add "attn" and "attn:<NAME>", for each diffusion backend, to diffusers' dispatcher; may be called repeatedly.

    error_budget: relative RMS error that "attn" allows; 0 excludes approximate backends (unless requested by name).
    Returns the names. Raises `BackendLoadError` if diffusers is missing or its dispatcher is incompatible.
    """
    make_diffusion_request(64, "float32", error_budget=error_budget)  # raises for an invalid budget
    try:
        from diffusers.models import attention_dispatch as dispatch

        enum: Any = dispatch.AttentionBackendName
        add: Any = dispatch._AttentionBackendRegistry.register
    except ImportError as error:
        raise BackendLoadError(
            f"diffusers' attention dispatcher cannot be imported: {error} (pip install diffusers)"
        ) from error
    except AttributeError as error:
        raise BackendLoadError(f"this version of diffusers has an incompatible attention dispatcher: {error}") from error
    known = [name for name in DiffusionAttentionBackendEnum.names() if not _of_jax(name)]
    names = {_NAME: None, **{f"{_NAME}:{name}": name for name in known}}
    for name, backend in names.items():
        value = name.lower()  # `set_attention_backend` looks up lower case, the context manager the name as passed
        # registered before: the member stays, and its function is replaced
        member = enum._value2member_map_.get(value) or _member(enum, value)
        enum._value2member_map_[name] = member
        add(member, constraints=[])(_function(backend, error_budget))
    _warn_of_own_attention()
    return tuple(names)


@functools.cache
def _warn_of_own_attention() -> None:
    """Let `set_attention_backend` warn of layers outside the dispatcher, which diffusers leaves as they are."""
    from diffusers import ModelMixin

    models: Any = ModelMixin
    set_backend = models.set_attention_backend

    @functools.wraps(set_backend)
    def set_and_warn(model: Any, backend: str) -> None:
        set_backend(model, backend)
        processors = [found for module in model.modules() if (found := getattr(module, "processor", None)) is not None]
        own = [type(processor).__name__ for processor in processors if not hasattr(processor, "_attention_backend")]
        if own and backend.lower().partition(":")[0] == _NAME:
            warnings.warn(
                f'{type(model).__name__}: "{backend}" has no effect on {len(own)} of {len(processors)} attention layers '
                f"({', '.join(sorted(set(own)))}): they do not call diffusers' attention dispatcher",
                stacklevel=2,
            )

    models.set_attention_backend = set_and_warn


def _of_jax(name: str) -> bool:
    """Whether a backend belongs to jax, which cannot take diffusers' tensors."""
    return str(DiffusionAttentionBackendEnum[name].value or "").startswith("attn.jax.")


def _member(enum: Any, name: str) -> Any:
    """Add a member to a closed `str` enum."""
    member = str.__new__(enum, name)
    member._name_, member._value_ = name.upper().replace(":", "_"), name
    member.__objclass__ = enum
    enum._member_map_[member._name_] = member
    enum._value2member_map_[name] = member
    enum._member_names_.append(member._name_)
    return member


def _function(backend: str | None, error_budget: float) -> Any:
    """Make diffusers' function for one backend. Its dispatcher drops arguments not in the signature: all are listed."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        """Compute attention. query: [B, S, H, D]; key, value: [B, M, K, D]; attn_mask: bool, or 0 and 1 (attend) of an integer
        dtype, or 0 and -inf or -10000, [B, M] or broadcastable to [B, H, S, M]; is_causal aligns the first row with the first
        key."""
        if dropout_p:
            raise UnsupportedError(f"attn: dropout_p={dropout_p}: dropout of attention weights is not supported")
        if _parallel_config is not None:
            raise UnsupportedError(
                "attn: _parallel_config: diffusers' context parallelism is not supported: attn.torch.diffusion.parallel "
                "shards sequences"
            )
        # before anything is read from shapes below
        if not query.ndim == key.ndim == value.ndim == 4 or key.shape[:3] != value.shape[:3]:
            shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
            raise ShapeError(f"attn: query, key, value have shapes {shapes}: must be [B, S, H, D] and twice [B, M, K, D]")
        # as torch's own function, for which this one stands
        query, key, value = autocast(query, key, value)
        if is_causal and attn_mask is not None:
            raise UnsupportedError("attn: is_causal=True and attn_mask: pass only one of them")
        mask = None if attn_mask is None else _bool(attn_mask)
        if mask is not None and mask.shape != (query.shape[0], key.shape[1]):  # not [B, M] of keys: broadcast, as by torch
            mask = mask[(None,) * (4 - mask.ndim)]
        rows, keys = query.shape[1], key.shape[1]
        if is_causal and keys > rows:
            key, value = key[:, :rows], value[:, :rows]  # keys that no row sees
        elif is_causal and keys < rows:
            mask = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=query.device).tril()
            is_causal = False
        wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        # NumPy's and torch's scalars too: the scale is a part of the choice's key
        scale = None if scale is None else float(scale)
        impl = impl_for(properties_of(query, key, scale, is_causal, mask, wants_grad, backend, error_budget))
        meta = None if mask is None else DiffusionAttentionMetadata(attn_mask=mask)
        if return_lse:
            out, lse = impl.forward_lse(query, key, value, meta)
            # [B, S, H], as diffusers' own functions return it
            return out, lse.transpose(1, 2)
        return impl.forward(query, key, value, meta)

    return attention


#: What models of diffusers add to the scores of padding (LTX-Video, PixArt): beside a key that is kept, its weight is 0.
_DISCARD = -10000.0


def _bool(mask: torch.Tensor) -> torch.Tensor:
    """Convert diffusers' mask to True = attend. Raises `UnsupportedError` for integers other than 0 and 1 and for floats other
    than 0, -10000 and -inf, `DTypeError` for any other dtype. In a graph, values are checked when it runs."""
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype.is_complex:
        raise DTypeError(f"attn: attn_mask has dtype {mask.dtype}: must be bool, integers 0 and 1, or floats 0 and -inf")
    if not mask.dtype.is_floating_point:
        allowed = "an integer attn_mask must have 0 (hidden) and 1 (attend) only: pass a bool mask, or floats 0 and -inf"
        _require((mask == 0) | (mask == 1), mask, allowed)
        return mask == 1
    hidden = mask <= torch.finfo(mask.dtype).min / 2  # -inf, or the lowest number, as in diffusers
    kept, discarded = mask == 0, mask == _DISCARD
    readable = hidden | kept | discarded
    _require(readable, mask, f"a float attn_mask has values other than 0, {_DISCARD:.0f} and -inf: biases are not supported")
    # The softmax of a row whose keys are all discarded is that of its scores, which one number lowers alike.
    return torch.where(kept.any(-1, keepdim=True), kept, discarded)


def _require(allowed: torch.Tensor, mask: torch.Tensor, message: str) -> None:
    """Raise `UnsupportedError` unless `allowed` is true for each element of `mask`."""
    if torch.compiler.is_compiling():
        # a graph has no values to branch on; this one fails when it runs
        torch._assert_async(allowed.all(), f"attn: {message}")
    elif not bool(allowed.all()):
        raise UnsupportedError(f"attn: {message} (got {mask[~allowed][0].item()} of {mask.dtype})")
