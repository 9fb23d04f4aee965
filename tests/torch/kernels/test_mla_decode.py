"""Decodes of latents by stream-K, against float64: splits anywhere, drafts, limits, no keys. 15 s."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attn.torch.kernels.mla_decode import mla_decode

pytestmark = [pytest.mark.triton_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANK, ROPE, PAGE = 32, 16, 16
CASES: dict[str, dict[str, Any]] = {
    "one long request": {"lens": [(1, 900), (1, 40), (1, 7)]},
    "one request": {"lens": [(1, 700)]},
    "no keys, no tokens": {"lens": [(1, 0), (1, 300), (0, 5), (1, 0)]},
    "more requests than programs": {"lens": [(1, 20 + 37 * i % 300) for i in range(30)]},
    "drafts of several blocks": {"lens": [(1, 300), (4, 260), (0, 9), (3, 66)], "heads": 40},
    "more tokens than keys": {"lens": [(4, 3), (7, 2), (2, 200)]},
    "limits": {"lens": [(2, 150), (1, 64), (3, 40)], "limits": True},
    "bounds beyond the batch": {"lens": [(1, 300), (1, 66)], "most": (4, 2000)},
}


@pytest.mark.parametrize("name", CASES)
def test_stream_k_of_uneven_requests_are_attention(name: str) -> None:
    given: dict[str, Any] = {"heads": 4, "limits": False, "most": None, **CASES[name]}
    lens, heads = given["lens"], given["heads"]
    g = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, *(q for q, _ in lens)]).cumsum(0).int()
    tokens, counts = int(starts[-1]), [-(-s // PAGE) for _, s in lens]
    ids = torch.randperm(sum(counts) + 1, generator=g).int()
    cache = torch.randn(len(ids), PAGE, RANK + ROPE, generator=g)
    cache[ids[-1].long()] = torch.nan
    table = torch.full((len(lens), max(counts) + 1), int(ids[-1]), dtype=torch.int32)
    for r, n in enumerate(counts):
        table[r, :n] = ids[sum(counts[:r]) : sum(counts[:r]) + n]
    query = torch.randn(tokens, heads, RANK + ROPE, generator=g)
    limits = torch.cat([(torch.arange(n) * 5 + s - 5 * n + 2).clamp(-1, s) for n, s in lens]).int()
    out, lse = torch.full((tokens, heads, RANK), torch.nan), torch.full((heads, tokens), torch.nan)
    most = given["most"] or (max(n for n, _ in lens), max(s for _, s in lens))
    there = [x.to(DEVICE) for x in (out, lse, query, cache, starts, torch.tensor([s for _, s in lens]).int(), table)]
    mla_decode(*there, *most, 0.2, limits=limits.to(DEVICE) if given["limits"] else None, uneven=True)
    out, lse = there[0].cpu(), there[1].cpu()
    for r, (n, s) in enumerate(lens):
        own = cache[table[r, : counts[r]].long()].flatten(0, 1)[:s].double()
        for i in range(n):
            t = int(starts[r]) + i
            keys = own[: max(int(limits[t]) if given["limits"] else s - n + i + 1, 0)]
            scores = query[t].double() @ keys.T * 0.2
            torch.testing.assert_close(out[t].double(), scores.softmax(-1) @ keys[:, :RANK], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[:, t].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-5)
