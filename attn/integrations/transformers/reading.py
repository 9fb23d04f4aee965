"""Interpret a call's mask: which keys are valid, and whether it is a pattern."""

import torch

from attn.integrations.transformers.call import Call, replaced, require
from attn.integrations.transformers.masks import Padding


def read(call: Call, described: torch.Tensor | None) -> tuple[Call, torch.Tensor | None, Padding | None]:
    """Return (the call over the keys of a described mask [B, T'], that mask unless all its keys are valid, its padding).

    Raises `UnsupportedError` for causal rows without a mask whose positions are ambiguous.
    """
    rows, keys = call.query.shape[1], call.key.shape[1]
    if described is None:
        if call.causal and rows > 1 and keys != rows:
            raise call.refusal(
                f"{rows} causal rows over {keys} keys without a mask",
                "the rows' positions are ambiguous: let transformers make the mask, or pass one",
            )
        return call, None, None
    padding = getattr(described, "attn_padding", None) or Padding(call.window)
    keys = described.shape[1]
    call = replaced(call, key=call.key[:, :keys], value=call.value[:, :keys], window=padding.window)
    if described.dtype != torch.bool:
        is_padding = (described == 0) | (described == 1)
        require(call, is_padding, f"a mask [B, T] of {described.dtype} with values other than 0 and 1", "pass a bool mask")
    return call, None if padding.whole else described.bool(), padding


def as_bool(call: Call, given: torch.Tensor) -> torch.Tensor:
    """Convert a mask to True = attend. Raises `UnsupportedError` for one with values other than 0 and the lowest number, and
    for integers: 1 attends in a mask of flags, and does not hide in a mask that is added."""
    if given.dtype == torch.bool:
        return given
    if not given.dtype.is_floating_point:
        raise call.refusal(
            f"a mask {list(given.shape)} of {given.dtype}", "pass a bool mask, True = attend, or floats to be added"
        )
    hidden = given <= torch.finfo(given.dtype).min / 2
    require(call, hidden | (given == 0), "a mask with values other than 0 and -inf", "pass it as position_bias")
    return ~hidden


def as_drawn(call: Call, present: torch.Tensor | None) -> torch.Tensor:
    """Return bool [B, 1, S, T] of a described mask: the call's causality and window, and the valid keys."""
    rows, keys = call.query.shape[1], call.key.shape[1]
    ahead = torch.arange(keys, device=call.query.device) - torch.arange(keys - rows, keys, device=call.query.device)[:, None]
    allowed = torch.ones_like(ahead, dtype=torch.bool) if not call.causal else ahead <= 0
    if call.window is not None:
        allowed = allowed & (ahead > -call.window)
    return allowed[None, None] if present is None else allowed & present[:, None, None, :]


def recognised(call: Call, drawn: torch.Tensor) -> torch.Tensor | None:
    """Return the valid keys, bool [B, T'], if `drawn` is this call's causality and window over them; else None.

    Keys at and after T' are unused slots of a static cache. Compares the mask with the expected one; waits for the device.
    """
    if drawn.ndim != 4 or drawn.shape[1] != 1 or (call.window is not None and not call.causal):
        return None
    drawn = drawn[:, 0].expand(len(call.query), -1, -1)
    rows, seen = drawn.shape[1], drawn.any(1)
    some = seen.any(0).nonzero()
    end = max(int(some[-1]) + 1 if len(some) else 0, rows if call.causal else 1)
    if end > drawn.shape[2]:
        return None
    present, drawn = seen[:, :end], drawn[..., :end]
    if call.window is not None:  # keys before the first row's window are seen by no row, and may be valid
        present = present | (torch.arange(end, device=present.device) <= end - rows - call.window)
    expected = as_drawn(replaced(call, key=call.key[:, :end]), present)[:, 0].expand(drawn.shape)
    if call.causal:  # a padding row sees nothing; a row that sees a key is valid, even if no row sees its own key
        expected = expected & present[:, -rows:, None]
    if not torch.equal(expected, drawn):
        return None
    present = present.clone()
    present.attn_padding = Padding(call.window, bool(present.all()), all_rows=not call.causal)  # type: ignore[attr-defined]
    return present
