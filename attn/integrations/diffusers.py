"""diffusers: `attn` as a backend of its attention dispatcher.

    from attn.integrations import diffusers as attn_diffusers
    attn_diffusers.register()
    pipe.transformer.set_attention_backend("attn")              # the fastest exact backend for each call
    pipe.transformer.set_attention_backend("attn:SAGE_ATTN")    # one by name, obeyed or refused

diffusers' list of backends is a closed enum, so that members are added to it; everything else (the context manager
`attention_backend`, `set_attention_backend`, `torch.compile`) then works as for its own. Written against diffusers
0.42: a dispatcher that has changed is a sentence, not a crash.
"""

from typing import Any

import torch

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.diffusion.selector import make_diffusion_request
from attn.errors import BackendLoadError, UnsupportedError
from attn.torch.diffusion.chosen import chosen_impl

_NAME = "attn"


def register(*, error_budget: float = 0.0) -> tuple[str, ...]:
    """Add "attn" and "attn:<NAME>", for each diffusion backend, to diffusers' dispatcher; again is harmless.

    error_budget: relative RMS error that "attn" allows; 0 keeps approximate backends out (by name they are taken).
    Returns the names. Raises `BackendLoadError` where diffusers is missing or its dispatcher is not as expected.
    """
    make_diffusion_request(64, "float32", error_budget=error_budget)  # a budget that makes no sense is told now
    try:
        from diffusers.models import attention_dispatch as dispatch

        enum: Any = dispatch.AttentionBackendName
        add: Any = dispatch._AttentionBackendRegistry.register
    except ImportError as error:
        raise BackendLoadError(
            f"diffusers' attention dispatcher cannot be imported: {error} (pip install diffusers)"
        ) from error
    except AttributeError as error:
        raise BackendLoadError(f"this diffusers has another attention dispatcher: {error}") from error
    known = [name for name in DiffusionAttentionBackendEnum.names() if not _of_jax(name)]
    names = {_NAME: None, **{f"{_NAME}:{name}": name for name in known}}
    for name, backend in names.items():
        value = name.lower()  # `set_attention_backend` looks for lower case, the context manager for what it is given
        member = enum._value2member_map_.get(value) or _member(enum, value)
        enum._value2member_map_[name] = member
        add(member, constraints=[])(_function(backend, error_budget))
    return tuple(names)


def _of_jax(name: str) -> bool:
    """Whether a backend belongs to the other wing, which diffusers' tensors do not reach."""
    return str(DiffusionAttentionBackendEnum[name].value or "").startswith("attn.jax.")


def _member(enum: Any, name: str) -> Any:
    """A new member of a closed `str` enum."""
    member = str.__new__(enum, name)
    member._name_, member._value_ = name.upper().replace(":", "_"), name
    member.__objclass__ = enum
    enum._member_map_[member._name_] = member
    enum._value2member_map_[name] = member
    enum._member_names_.append(member._name_)
    return member


def _function(backend: str | None, error_budget: float) -> Any:
    """diffusers' call for one backend. Its dispatcher drops arguments that a signature does not name: all are named."""

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
        """query: [B, S, H, D]; key, value: [B, M, K, D]; attn_mask: bool, or of 0 and -inf, [B, M] or [B, H, S, M]."""
        if dropout_p:
            raise UnsupportedError(f"attn: dropout_p={dropout_p}: dropout of attention weights is not supported")
        if _parallel_config is not None:
            raise UnsupportedError(
                "attn: diffusers' context parallelism is not supported: attn.torch.diffusion.parallel shards sequences"
            )
        wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        full = attn_mask is not None and attn_mask.ndim != 2
        impl = chosen_impl(
            backend, error_budget, query.device.type, query.shape[2], key.shape[2], query.shape[3], query.dtype,
            None if scale is None else float(scale), is_causal, full, wants_grad, attn_mask is not None and not full,
            query.shape[1], key.shape[1],
        )  # fmt: skip
        meta = DiffusionAttentionMetadata(attn_mask=None if attn_mask is None else _bool(attn_mask))
        if return_lse:
            out, lse = impl.forward_lse(query, key, value, meta)
            return out, lse.transpose(1, 2)
        return impl.forward(query, key, value, meta)

    return attention


def _bool(mask: torch.Tensor) -> torch.Tensor:
    """A mask in diffusers' way as True = attend. Raises `UnsupportedError` for one that adds anything but 0 or -inf."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.dtype.is_floating_point:
        return mask != 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2  # -inf, or the largest negative number, as diffusers writes it
    if bool((~hidden & (mask != 0)).any()):
        raise UnsupportedError("attn: a float attn_mask adds numbers other than 0 and -inf: biases are not supported")
    return ~hidden
