"""Choose the way to compute a call: dense, packed, by the formula, or by torch's SDPA (see the package's docstring)."""

import enum
from typing import Any

import torch
import torch.nn.functional as F

import attn
from attn.capabilities import Feature
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.functional import Extras, Rules
from attn.integrations.transformers.call import NAME, Call, dropout_name, replaced, widened
from attn.integrations.transformers.masks import Padding
from attn.integrations.transformers.packing import pack
from attn.integrations.transformers.reading import as_bool, as_drawn, read, recognised
from attn.torch.diffusion.chosen import chosen_impl
from attn.weights import dense


class Way(enum.Enum):
    """How a call is computed that has neither a bias nor dropout (see the package's docstring)."""

    DENSE = "dense"
    PACKED = "packed"
    FORMULA = "formula"


def classify(call: Call, square: bool, masked: bool, gaps: bool = False) -> Way:
    """Return the way to compute a call, by what it requires.

    square: as many rows as keys; masked: whether some keys are not valid; gaps: whether others lie between valid ones.
    """
    wide = call.value.shape[-1] > call.query.shape[-1]
    if call.plain and call.backend is None and (not call.causal or (square and not masked)):
        return Way.FORMULA if wide else Way.DENSE
    if call.wants_grad or wide or (gaps and call.window is not None):
        return Way.FORMULA
    return Way.PACKED


def attend(call: Call, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Compute the call in the way that its requirements determine."""
    if attention_mask is not None and attention_mask.ndim != 2:
        described = None if torch.compiler.is_compiling() else getattr(attention_mask, "attn_described", None)
        padding = getattr(described, "attn_padding", None)
        if described is not None and padding is not None and padding.draw is not None:
            return _reaching(call, described, padding)
        if described is None:
            if attention_mask.ndim == 4 and not attention_mask.shape[2]:
                raise call.refusal(
                    "a copy of a mask of chunks or spans",
                    'a copy (to another device, for example) has no description: use one device, or attn_implementation="sdpa"',
                )
            drawn = as_bool(call, attention_mask)
            if call.plain and call.backend is None:
                return _under(replaced(call, causal=False), drawn[..., : call.key.shape[1]])
            described = recognised(call, drawn)
            if described is None:
                return _masked(call, drawn)
        attention_mask = described
    call, attention_mask, padding = read(call, attention_mask)
    rows, keys = call.query.shape[1], call.key.shape[1]
    if call.window is not None and call.window >= keys:
        call = replaced(call, window=None)
    if call.window is not None and not call.causal:
        raise call.non_causal_window()
    if rows == 1:
        if call.window is not None:  # one row: its last keys
            keys = call.window
            call = replaced(call, key=call.key[:, -keys:], value=call.value[:, -keys:], window=None)
            attention_mask = None if attention_mask is None else attention_mask[:, -keys:]
            padding = None if attention_mask is None else Padding(None)
        call = replaced(call, causal=False)
    square, masked = rows == keys, attention_mask is not None
    if classify(call, square, masked) is Way.DENSE:
        return by_dense(call, attention_mask)
    if attention_mask is None:
        q_lens, k_lens = [rows] * len(call.query), [keys] * len(call.query)
        firsts: list[int] | None = [0] * len(call.query)
    else:
        assert padding is not None
        own = (call.causal or square) and not padding.all_rows  # rows are the last keys' tokens
        q_lens, k_lens, firsts = padding.lens(attention_mask, rows if own else 0)
        q_lens = q_lens if own else [rows] * len(call.query)
    if classify(call, square, masked, gaps=firsts is None) is Way.FORMULA:
        return by_formula(call, as_drawn(call, attention_mask))
    return pack(call, attention_mask, q_lens, k_lens, firsts)


def _reaching(call: Call, described: torch.Tensor, padding: Padding) -> torch.Tensor:
    """Compute under chunks or spans. The mask includes causality, whatever the module says."""
    if call.wants_grad or call.value.shape[-1] > call.query.shape[-1]:
        assert padding.draw is not None
        return attend(call, padding.draw())
    call = replaced(call, causal=True)
    if padding.chunk is None and padding.spans is None:
        return attend(call, described)
    rows = call.query.shape[1]
    call, present, _ = read(call, described)
    q_lens, k_lens, firsts = padding.lens(described, rows)
    call = replaced(call, chunk=padding.chunk, spans=padding.spans, span_window=padding.span_window)
    return pack(call, present, q_lens, k_lens, firsts)


def _masked(call: Call, drawn: torch.Tensor) -> torch.Tensor:
    """Compute under a materialised mask, which includes causality and window."""
    drawn = drawn[..., : call.key.shape[1]]
    call = replaced(call, causal=False, window=None)
    if call.backend is not None:
        raise call.by_name(f"{Feature.MASK.value} (other than a causal or windowed pattern)", Feature.MASK)
    return by_dense(call, drawn) if call.plain else by_formula(call, drawn)


def _under(call: Call, drawn: torch.Tensor) -> torch.Tensor:
    """Compute a plain call under a materialised mask; that of a single row is one of keys, where a backend reads no others."""
    if drawn.shape[1] == 1 and drawn.shape[2] == 1 and call.value.shape[-1] <= call.query.shape[-1] and not call.wants_grad:
        of_keys = drawn[:, 0, 0].expand(len(call.query), -1)
        if chosen_for(call, of_keys).masks_rows:
            return by_dense(call, of_keys)
    return by_dense(call, drawn)


def by_dense(call: Call, mask: torch.Tensor | None) -> torch.Tensor:
    """Compute by the diffusion registry's choice; mask: [B, T] of keys, or materialised."""
    if call.value.shape[-1] > call.query.shape[-1]:
        return by_formula(call, as_drawn(call, mask) if mask is None or mask.ndim == 2 else mask)
    impl = chosen_for(call, mask)
    out: torch.Tensor = impl.forward(call.query, call.key, widened(call), DiffusionAttentionMetadata(attn_mask=mask))
    return out[..., : call.value.shape[-1]]


def chosen_for(call: Call, mask: torch.Tensor | None, backend: str | None = None) -> Any:
    """Return the implementation that the diffusion registry chooses for a call with this mask, or that of `backend`."""
    return chosen_impl(
        backend,
        0.0,
        call.query.device.type,
        call.query.shape[2],
        call.key.shape[2],
        call.query.shape[3],
        call.query.dtype,
        call.scale,
        call.causal,
        mask is not None and mask.ndim != 2,
        call.wants_grad,
        mask is not None and mask.ndim == 2,
        call.query.shape[1],
        call.key.shape[1],
    )


def by_formula(call: Call, drawn: torch.Tensor) -> torch.Tensor:
    """Compute by `attn.attention`; the mask includes causality and window."""
    if call.backend is not None:
        if call.wants_grad:
            raise call.by_name("gradients", Feature.BACKWARD)
        raise call.by_name("values wider than keys, or a window over keys with gaps", Feature.MASK)
    out: torch.Tensor = attn.attention(
        call.query,
        call.key,
        call.value,
        scale=call.scale,
        logits_soft_cap=call.soft_cap,
        sinks=call.sinks,
        mask=drawn,
        layout="BSHD",
    )
    return out


def drawn(call: Call, attention_mask: torch.Tensor | None) -> tuple[Call, torch.Tensor]:
    """Return (the call over the keys of its mask, its mask [B, 1, S, T], materialised, with causality and window)."""
    padding = getattr(getattr(attention_mask, "attn_described", None), "attn_padding", None)
    if padding is not None and padding.draw is not None:
        attention_mask = padding.draw()
    if attention_mask is not None and attention_mask.ndim == 4:
        return call, as_bool(call, attention_mask)[..., : call.key.shape[1]]
    call, present, _ = read(call, attention_mask)
    if call.window is not None and not call.causal:
        raise call.non_causal_window()
    return call, as_drawn(call, present)


def selected(call: Call, attention_mask: torch.Tensor | None, indices: torch.Tensor) -> tuple[Call, torch.Tensor]:
    """Return (call, mask) of a layer that sees the keys `indices` [B, S, n] only (DeepSeek-V3.2), within its mask."""
    call, allowed = drawn(call, attention_mask)
    seen = indices.new_zeros(*indices.shape[:2], call.key.shape[1], dtype=torch.bool).scatter(-1, indices.long(), True)
    return replaced(call, causal=False, window=None), allowed & seen[:, None]


@torch.no_grad()
def weights(call: Call, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return the attention weights [B, H, S, T] by the formula, in the query's dtype; a row without keys is 0."""
    keys = call.key.shape[1]
    call, allowed = drawn(call, attention_mask)
    rules = Rules(causal=False, scale=call.scale, window=(None, None), cap=call.soft_cap)
    found = dense(call.query, call.key, rules, Extras(None, call.sinks, allowed))
    return F.pad(found, (0, keys - found.shape[-1])).to(call.query.dtype)


def by_sdpa(
    call: Call, attention_mask: torch.Tensor | None, bias: torch.Tensor | None = None, dropout: float = 0.0
) -> torch.Tensor:
    """Compute with a bias added to scores (T5), or with dropout of weights, which only torch's SDPA supports.

    bias: broadcastable to [B, H, S, T].
    """
    if call.backend is not None or call.soft_cap is not None or call.sinks is not None:
        what, advice = "position_bias", f'use "{NAME}" without these'
        if dropout:
            what = f"dropout of attention weights ({dropout})"
            advice += f", set {dropout_name(call, dropout)} to 0 in the model's config, or use eager"
        raise call.refusal(f"{what} with a cap, sinks or a backend by name", advice)
    call, allowed = drawn(call, attention_mask)
    added = allowed if bias is None else torch.where(allowed, bias[..., : allowed.shape[-1]].to(call.query.dtype), -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=dropout, scale=call.scale, enable_gqa=True)
    return torch.where(allowed.any(-1)[..., None], out, 0).transpose(1, 2)
