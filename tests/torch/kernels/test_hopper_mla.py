"""The Hopper MLA decode against float64, where there is a Hopper GPU: lengths, pages, splits and poison. 60 s there."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU here", allow_module_level=True)

from attn.kernels import hopper
from attn.torch.kernels import hopper_mla
from attn.torch.kernels.mla_decode import mla_decode

RAGGED = [(1, 1), (1, 63), (1, 65), (1, 1000), (1, 777), (1, 128)]
DRAFTS = [(4, 700), (3, 66), (1, 64), (4, 4), (2, 2000)]
CASES: dict[str, dict[str, Any]] = {
    "one tile": {"lens": [(1, 64)], "heads": 64},
    "less than a tile": {"lens": [(1, 5)], "heads": 64},
    "two and three tiles": {"lens": [(1, 128), (1, 192), (1, 130)]},
    "ragged": {"lens": RAGGED},
    "ragged, one split": {"lens": RAGGED, "split": 4096},
    "empty requests": {"lens": [(1, 0), (1, 300), (0, 5), (1, 0)]},
    "empty requests, one split": {"lens": [(1, 0), (1, 300), (0, 5), (1, 0)], "split": 4096},
    "drafts": {"lens": DRAFTS},
    "drafts of more tokens than keys": {"lens": [(4, 3), (7, 2), (2, 100)], "heads": 32},
    "16 heads, 16 tokens, page 16": {"lens": [(16, 700), *DRAFTS], "heads": 16, "page": 16},
    "40 heads, page 48": {"lens": DRAFTS, "heads": 40, "page": 48},
    "page 128, float16": {"lens": DRAFTS, "page": 128, "dtype": torch.float16},
    "page 32": {"lens": DRAFTS, "page": 32},
    "limits": {"lens": DRAFTS, "heads": 32, "limits": True},
    "limits, 128 heads": {"lens": DRAFTS, "limits": True},
    "a NaN that some rows see": {"lens": [(4, 700), (3, 66)], "wild": (0, 698)},
    "a NaN that all rows see": {"lens": [(4, 700), (3, 66)], "wild": (0, 100)},
    "a NaN that some rows of a tile see": {"lens": [(4, 700), (3, 66)], "wild": (0, 697), "heads": 16},
    "bounds beyond the batch": {"lens": [(1, 700), (1, 66)], "most": (4, 20000)},
    "many splits": {"lens": [(1, 33333)]},
    "chosen keys": {"lens": [(1, 700), (2, 5000), (1, 3), (0, 9), (1, 0), (3, 64)], "topk": 512},
    "chosen keys, one split": {"lens": [(1, 700), (2, 5000), (1, 3)], "topk": 320, "split": 4096},
    "chosen keys, 64 heads, page 1": {"lens": [(1, 700), (2, 300)], "topk": 100, "heads": 64, "page": 1},
    "chosen keys, page 48, float16": {"lens": [(4, 700), (1, 66)], "topk": 2048, "page": 48, "dtype": torch.float16},
    "fewer chosen keys than a tile": {"lens": [(1, 700), (1, 66)], "topk": 7},
    "more programs than multiprocessors": {"lens": [(1, 100 + 37 * i) for i in range(200)]},
    "items of one, two and many tiles": {"lens": [(1, 64 + 128 * (i % 3) + 9000 * (i == 70)) for i in range(150)], "heads": 64},
    "drafts in blocks of row tiles": {"lens": [(1 + 6 * (i % 3), 100 + 531 * (i % 7)) for i in range(40)]},
}


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """General kernels would pass as well: this one was on to the end."""
    yield
    assert hopper.why_off("hopper_mla") == ""


#: Every case as the launch rule cuts it, and, where that is a choice, by a plan on the device.
CUTS = [
    *((name, False) for name in CASES),
    *((name, True) for name, case in CASES.items() if not {"split", "topk"} & set(case)),
]


@pytest.mark.parametrize(("name", "uneven"), CUTS)
def test_it_is_attention(name: str, uneven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {
        "heads": 128, "page": 64, "dtype": torch.bfloat16, "split": 0, "limits": False, "wild": None, "most": None, "topk": 0,
        **CASES[name],
    }  # fmt: skip
    lens, heads, page, dtype = (given[k] for k in ("lens", "heads", "page", "dtype"))
    generator = torch.Generator("cuda").manual_seed(0)
    starts = torch.tensor([0, *(q for q, _ in lens)], device="cuda").cumsum(0).int()
    tokens = int(starts[-1])
    query = torch.randn(tokens, heads, 576, device="cuda", dtype=dtype, generator=generator)
    counts = [-(-s // page) for _, s in lens]
    ids = torch.randperm(sum(counts) + 3, device="cuda", generator=generator).int()
    cache = torch.randn(len(ids), page, 576, device="cuda", dtype=dtype, generator=generator)
    cache[ids[sum(counts) :].long()] = torch.nan
    table = torch.full((len(lens), max(counts) + 2), 1 << 28, dtype=torch.int32, device="cuda")
    for r, (n, (_, s)) in enumerate(zip(counts, lens, strict=True)):
        table[r, :n] = ids[sum(counts[:r]) : sum(counts[:r]) + n]
        if s % page:
            cache[table[r, s // page].long(), s % page :] = torch.nan
    if given["wild"]:
        r, j = given["wild"]
        cache[table[r, j // page].long(), j % page, 7] = torch.nan
    seq_lens = torch.tensor([s for _, s in lens], dtype=torch.int32, device="cuda")
    limits = None
    if given["limits"]:
        limits = torch.cat([(torch.arange(n) * 5 + s - 5 * n + 2).clamp(-1, s) for n, s in lens]).int().cuda()
    chosen = None
    if given["topk"]:
        rows = []
        for n, s in lens:
            for i in range(n):
                # in no order, entries that are none among them and beyond the end; one token has none at all
                some = torch.randperm(s + 40, generator=torch.Generator().manual_seed(s + i))[: given["topk"]]
                some = torch.cat([some, torch.full((given["topk"] - len(some),), -1)])
                some[i::5] = -1
                rows.append(torch.full_like(some, -1) if (n, i) == (2, 1) else some)
        chosen = torch.stack(rows).int().cuda()
    calls = []
    attend = hopper_mla.attend
    monkeypatch.setattr(hopper_mla, "attend", lambda *args: (calls.append(args), attend(*args)))
    most_tokens, most_keys = given["most"] or (max(n for n, _ in lens), max(s for _, s in lens))
    out = torch.full((tokens, heads, 512), torch.nan, dtype=dtype, device="cuda")
    lse = torch.full((heads, tokens), torch.nan, device="cuda")
    mla_decode(
        out, lse, query, cache, starts, seq_lens, table, most_tokens, most_keys, 192**-0.5, limits=limits,
        indices=chosen, fixed_split=given["split"], uneven=uneven,
    )  # fmt: skip
    assert len(calls) == 1, "another kernel served"
    _, _, plan, _ = calls[0]
    assert not uneven or (plan.stream_k is not None) == (most_keys > 128), "a plan, unless the keys are too few"
    for r, (n, s) in enumerate(lens):
        own = cache[table[r, : counts[r]].long()].flatten(0, 1)[:s].double()
        for i in range(n):
            t = int(starts[r]) + i
            if chosen is not None:
                keys = own[[j for j in chosen[t].tolist() if 0 <= j < s]]
            else:
                keys = own[: max(int(limits[t]) if limits is not None else s - n + i + 1, 0)]
            scores = query[t].double() @ keys.T * 192**-0.5
            log = scores.logsumexp(-1)
            want = scores.softmax(-1) @ keys[:, :512]
            got = out[t].double()
            assert bool((got.isnan() == want.isnan()).all())
            if bool(want.isnan().any()):
                continue
            assert float((got - want).norm() / want.norm().clamp_min(1e-30)) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
            torch.testing.assert_close(lse[:, t].double(), log, rtol=1e-5, atol=1e-4)


def test_what_it_declines() -> None:
    query, cache = torch.empty(1, 96, 576, dtype=torch.bfloat16), torch.empty(2, 64, 576, dtype=torch.bfloat16)
    assert hopper_mla.serves(query, cache, 512, 4096, False)
    assert not hopper_mla.serves(query, cache, 512, 4096, True)
    assert hopper_mla.serves(query[:, :64], cache[:, :1], 512, 4096, True)
    for other, rank, split in (
        (cache, 512, 4100),
        (cache.half(), 512, 4096),
        (cache[:, :8].contiguous(), 512, 4096),
        (cache[..., :320], 256, 4096),
        (torch.empty(2, 64, 580, dtype=torch.bfloat16)[..., :576], 512, 4096),
    ):
        assert not hopper_mla.serves(query[..., : other.shape[-1]], other, rank, split, False)
    assert not hopper_mla.serves(query.float(), cache.float(), 512, 4096, False)
