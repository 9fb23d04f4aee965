"""Packed rows: a call over several sequences in one row, without padding (`cu_seq_lens_q`, `cu_seq_lens_k`)."""

from typing import Any

import torch

from attn.integrations.transformers.call import Call, replaced, widened
from attn.integrations.transformers.packing import attend_packed
from attn.integrations.transformers.ways import drawn

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")


def is_packed(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) is not None for name in BOUNDARIES)


def packed(
    call: Call, attention_mask: torch.Tensor | None, kwargs: dict[str, Any], output_only: bool
) -> torch.Tensor | tuple[Call, torch.Tensor]:
    """Return the output [1, S, H, Dv] of packed rows, computed sequence by sequence; or, if the call needs more than an output
    without gradients (not `output_only`), has other sizes or a mask that hides more, return (call, mask) to compute instead.

    Raises `UnsupportedError` for boundaries that do not divide the call's rows and keys into equally many sequences.
    """
    allowed = None
    if attention_mask is not None:
        call, allowed = drawn(call, attention_mask)
    starts = _checked(call, kwargs)
    if call.window is not None and not call.causal:
        raise call.non_causal_window()
    seen = _seen(call, starts)
    if output_only and not torch.compiler.is_compiling() and not call.wants_grad:
        lens = [(q, k) for q, k in zip(*map(_lens, starts), strict=True) if q or k]
        whole = allowed is None or bool((allowed | ~seen).all())
        if whole and all(q and k for q, k in lens) and call.value.shape[-1] <= call.query.shape[-1]:
            q_lens, k_lens = (list(x) for x in zip(*lens, strict=True))
            out = attend_packed(call, call.query[0], call.key[0], widened(call)[0], q_lens, k_lens)
            return out[None, ..., : call.value.shape[-1]]
    return replaced(call, causal=False, window=None), seen if allowed is None else seen & allowed


def _checked(call: Call, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the boundaries of rows and of keys. In a graph, values are checked when it runs."""
    starts: list[torch.Tensor] = []
    for name in BOUNDARIES:
        x = kwargs.get(name)
        if not isinstance(x, torch.Tensor) or x.ndim != 1 or x.dtype not in (torch.int32, torch.int64):
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise call.refusal(f"{name} of {got}", f"pass {' and '.join(BOUNDARIES)}, [n + 1] of int32 or int64, or neither")
        starts.append(x)
    if len(call.query) != 1 or len(starts[0]) != len(starts[1]):
        got = f"{len(starts[0]) - 1} sequences of rows and {len(starts[1]) - 1} of keys in a batch of {len(call.query)}"
        raise call.refusal(f"cu_seq_lens_q, cu_seq_lens_k: {got}", "pass equally many, in one row [1, T]")
    ends = (("rows", call.query.shape[1]), ("keys", call.key.shape[1]))
    for name, x, (what, end) in zip(BOUNDARIES, starts, ends, strict=True):
        if torch.compiler.is_compiling():
            increasing = (x[0] == 0) & (x[-1] == end) & (x.diff() >= 0).all()
            torch._assert_async(increasing, f"{call.place}: {name} must increase from 0 to the number of {what}")
        elif min(_lens(x), default=0) < 0 or sum(_lens(x)) != end or int(x[0]):
            advice = f"it must increase from 0 to {end}; a call over cached keys needs a mask instead"
            raise call.refusal(f"{name} = {x.tolist()} over {end} {what}", advice)
    return starts


def _lens(starts: torch.Tensor) -> list[int]:
    """Return the sequences' lengths. Waits for the device once: the layers of a model get the same tensor."""
    known: tuple[int, list[int]] | None = getattr(starts, "attn_lens", None)
    if known is None or known[0] != starts._version:
        known = starts._version, starts.diff().tolist()
        starts.attn_lens = known  # type: ignore[attr-defined]
    return known[1]


def _seen(call: Call, starts: list[torch.Tensor]) -> torch.Tensor:
    """Return bool [1, 1, S, T]: which keys of its own sequence a row sees, the last row of each being at its last key."""
    q_at, k_at = (torch.arange(x.shape[1], device=x.device) for x in (call.query, call.key))
    q_starts, k_starts = (x.to(call.query.device) for x in starts)
    q_of, k_of = (torch.searchsorted(x[1:], at, right=True) for x, at in ((q_starts, q_at), (k_starts, k_at)))
    seen = q_of[:, None] == k_of
    # a row's distance to the end of its sequence, and a key's
    ahead = (q_starts[1:][q_of] - q_at)[:, None] - (k_starts[1:][k_of] - k_at)
    if call.causal:
        seen = seen & (ahead <= 0)
    if call.window is not None:
        seen = seen & (ahead > -call.window)
    return seen[None, None]
