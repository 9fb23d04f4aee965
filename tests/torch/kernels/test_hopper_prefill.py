"""The Hopper prefill against float64, where there is a Hopper GPU: every shape, mask and poison that it takes. 90 s there."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU here", allow_module_level=True)

from attn.kernels import hopper
from attn.kernels.launch import UNBOUNDED
from attn.torch.kernels import hopper_prefill
from attn.torch.kernels.paged_attention import paged_attention
from attn.visibility import BatchMask, LayerMask, Visibility
from tests.kernels.test_hopper_prefill import spans_of

CASES: dict[str, dict[str, Any]] = {
    "one": {"lens": [(300, 300)]},
    "many": {"lens": [(300, 300), (1, 50), (77, 1000), (0, 10), (128, 128), (5, 3)]},
    "more tiles than programs": {"lens": [(150 + 7 * i, 200 + 31 * i) for i in range(40)]},
    "more tiles than programs, head size 256": {
        "size": 256,
        "lens": [(530 - 9 * i, 530 - 9 * i) for i in range(40)],
        "paged": False,
    },
    "stale slots": {"stale": True},
    "page 48, group of 3": {"heads": (6, 2), "page": 48, "stale": True},
    "page 64": {"page": 64, "stale": True},
    "page 128, float16": {"heads": (8, 8), "page": 128, "dtype": torch.float16, "stale": True},
    "page 256": {"page": 256, "stale": True},
    "head size 64, soft cap": {"heads": (16, 2), "size": 64, "cap": 20.0},
    "head size 256": {"size": 256, "stale": True},
    "head size 256, many": {"size": 256, "lens": [(300, 300), (1, 50), (77, 1000), (0, 10), (128, 128), (5, 3)]},
    "head size 256, soft cap, window": {"heads": (8, 4), "size": 256, "cap": 20.0, "left": 100, "page": 32, "stale": True},
    "head size 256, own keys": {"size": 256, "right": None, "paged": False, "lens": [(300, 300), (1, 1), (530, 530)]},
    "head size 256, not finite": {"size": 256, "wild": True, "left": 90},
    "head size 32": {"size": 32, "stale": True},
    "head size 72, own keys": {"size": 72, "paged": False, "lens": [(300, 300), (1, 1), (530, 530)]},
    "head size 40": {"heads": (4, 4), "size": 40, "page": 64, "stale": True, "wild": True},
    "head size 72, window": {"size": 72, "left": 100, "stale": True, "wild": True},
    "head size 72, a head a unit": {"heads": (14, 2), "size": 72, "right": None},
    "head size 136": {"size": 136, "stale": True, "wild": True},
    "head size 248, own keys": {"size": 248, "paged": False, "lens": [(300, 300), (1, 1), (530, 530)]},
    "head size 96": {"heads": (4, 4), "size": 96, "stale": True, "wild": True},
    "head size 80, soft cap": {"size": 80, "cap": 20.0, "stale": True},
    "head size 112, not finite": {"size": 112, "stale": True, "wild": True},
    "head size 160": {"size": 160, "stale": True},
    "head size 224, own keys": {"size": 224, "paged": False, "right": None, "lens": [(300, 300), (1, 1), (530, 530)]},
    "head size 192, window, sinks": {"size": 192, "left": 100, "sinks": True, "stale": True},
    "window, sinks": {"left": 100, "sinks": True, "stale": True},
    "two-sided window": {"left": 200, "right": 50, "page": 32},
    "bidirectional": {"right": None},
    "own keys": {"right": None, "paged": False, "lens": [(300, 300), (1, 1), (530, 530)]},
    "values that are not finite": {"wild": True},
    "the same, window": {"wild": True, "left": 50, "size": 64},
    "chunks": {"chunk": 128, "stale": True},
    "chunks, head size 64, not finite": {"chunk": 100, "size": 64, "wild": True},
    "chunks in a window, head size 256": {"chunk": 200, "left": 150, "size": 256, "right": 3, "page": 32},
    "chunks longer than a sequence": {"chunk": 5000, "heads": (6, 2)},
    "mixed causality": {"right": None, "mixed": True, "stale": True},
    "mixed causality in a window": {"right": 50, "left": 200, "mixed": True, "size": 64, "wild": True},
    "prefix": {"prefix": [120, 55, 400], "stale": True, "wild": True},
    "prefix in chunks, head size 256": {"prefix": [120, 0, 1003], "chunk": 200, "size": 256},
    "images": {"spans": (64, 40, False), "stale": True, "wild": True},
    "images, head size 64": {"spans": (100, 90, False), "heads": (16, 2), "size": 64},
    "images, head size 256, page 48": {"spans": (300, 256, False), "size": 256, "page": 48, "stale": True},
    "images in a window, head size 192": {"spans": (64, 40, False), "left": 50, "size": 192, "wild": True},
    "images cut by a window": {"spans": (300, 256, False), "left": 100, "right": 30, "cut": True, "heads": (4, 4)},
    "ranges": {"spans": (64, 40, True), "stale": True, "wild": True},
    "ranges in a window, sinks": {"spans": (300, 200, True), "left": 30, "sinks": True},
    "everything": {"spans": (64, 40, True), "prefix": [120, 5, 400], "mixed": True, "right": None, "chunk": 200, "cap": 20.0},
    "head size 512": {"size": 512, "stale": True, "wild": True},
    "head size 512, own keys": {"size": 512, "paged": False, "lens": [(300, 300), (1, 1), (530, 530)]},
    "head size 512, float16, sinks, window": {
        "size": 512,
        "dtype": torch.float16,
        "sinks": True,
        "left": 100,
        "heads": (16, 1),
    },
    "head size 320, soft cap, both directions": {"size": 320, "cap": 20.0, "right": None, "page": 64},
    "head size 512, everything": {
        "size": 512,
        "spans": (64, 40, True),
        "prefix": [120, 5, 400],
        "mixed": True,
        "right": None,
        "chunk": 200,
    },
    "scores larger at first": {"scores": lambda at: (1003.0 - at) / 8},
    "scores larger at first, head size 64": {"scores": lambda at: (1003.0 - at) / 8, "size": 64, "right": None},
    "scores beyond float32 at first": {"scores": lambda at: torch.where(at < 40, 300.0, 0.0)},
    "scores beyond float32 at first, head size 256": {"scores": lambda at: torch.where(at < 40, 300.0, 0.0), "size": 256},
    "small scores": {"scores": lambda at: -200.0 + 0 * at, "lens": [(300, 427), (77, 1003)]},
    "everything, many": {
        "spans": (64, 40, True),
        "prefix": [7 * i for i in range(40)],
        "mixed": True,
        "right": None,
        "lens": [(150 + 7 * i, 200 + 31 * i) for i in range(40)],
    },
}


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """General kernels would pass as well: this one was on to the end."""
    yield
    assert hopper.why_off("hopper_prefill") == ""


def _bounds(size: int) -> tuple[int, ...]:
    """Numbers of keys below which tiles differ."""
    return (190, 1000, UNBOUNDED) if size <= 128 else (UNBOUNDED,)


@pytest.mark.parametrize(("name", "keys_below"), [(n, below) for n in CASES for below in _bounds(CASES[n].get("size", 128))])
def test_it_is_attention(name: str, keys_below: int) -> None:
    given: dict[str, Any] = {
        "lens": [(300, 301), (1, 55), (77, 1003)], "heads": (8, 2), "size": 128, "page": 16, "dtype": torch.bfloat16,
        "cap": 0.0, "left": None, "right": 0, "sinks": False, "stale": False, "wild": False, "paged": True, "chunk": None,
        "mixed": False, "prefix": None, "spans": None, "cut": False, "scores": None, **CASES[name],
    }  # fmt: skip
    (heads, kv_heads), size, page, lens, dtype = (given[k] for k in ("heads", "size", "page", "lens", "dtype"))
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    starts = torch.tensor([0, *(q for q, _ in lens)], device="cuda").cumsum(0).int()
    tokens = int(starts[-1])
    query, sinks = random(tokens, heads, size), random(heads).float() if given["sinks"] else None
    table = seq_lens = None
    if given["paged"]:
        counts = [-(-s // page) for _, s in lens]
        ids = torch.randperm(sum(counts) + 3, device="cuda", generator=generator).int()
        table = torch.full((len(lens), max(counts)), -1, dtype=torch.int32, device="cuda")
        for r, n in enumerate(counts):
            table[r, :n] = ids[sum(counts[:r]) : sum(counts[:r]) + n]
        key, value = random(len(ids), page, kv_heads, size), random(len(ids), page, kv_heads, size)
        seq_lens = torch.tensor([s for _, s in lens], dtype=torch.int32, device="cuda")
        for r, (_, s) in enumerate(lens):
            if given["stale"] and s % page:
                for cache in (key, value):
                    cache[table[r, s // page].long(), s % page :] = torch.nan
        if given["wild"]:
            value[table[0, 0].long(), 3] = torch.nan
            value[table[0, (lens[0][1] - 1) // page].long(), (lens[0][1] - 1) % page, :, :5] = torch.inf
    else:
        key, value = random(tokens, kv_heads, size), random(tokens, kv_heads, size)
    if given["scores"] is not None:  # added to those of keys by position
        query[..., 0] = size**0.5
        for r, (_, s) in enumerate(lens):
            at = torch.arange(s, device="cuda")
            key[table[r, at // page].long(), at % page, :, 0] = given["scores"](at.float())[:, None].to(dtype)
    window = given["left"], given["right"]
    spans = None if given["spans"] is None else spans_of(lens, *given["spans"])
    prefix = None if given["prefix"] is None else np.array(given["prefix"], np.int32)
    is_causal = np.arange(len(lens)) % 2 == 0 if given["mixed"] else None
    batch = BatchMask(spans=spans, prefix=prefix, is_causal=is_causal)
    mask = Visibility(LayerMask(window[1] == 0, window, given["chunk"], given["cut"]), batch)
    reach = batch.map(lambda array: torch.from_numpy(array).cuda())._asdict() | {"chunk_size": given["chunk"]}
    assert hopper_prefill.serves(query, key, value, heads // kv_heads, page)
    output = torch.full_like(query, torch.nan)
    lse = torch.full((heads, tokens), torch.nan, device="cuda")
    bounds = max(q for q, _ in lens), max(s for _, s in lens), size**-0.5
    rules = {"soft_cap": given["cap"], "sinks": sinks, "span_window": given["cut"], "keys_below": keys_below, **reach}
    for _ in range(2):  # the second launch finds the counters as the first one left them
        paged_attention(output, lse, query, key, value, starts, seq_lens, table, *bounds, *window, window[1], **rules)
    for r, (n, s) in enumerate(lens):
        rows = slice(int(starts[r]), int(starts[r + 1]))
        own = (
            part[rows] if table is None else part[table[r, : -(-s // page)].long()].flatten(0, 1)[:s] for part in (key, value)
        )
        k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in own)
        scores = torch.einsum("thd,shd->hts", query[rows].double(), k) * size**-0.5
        if given["cap"]:
            scores = given["cap"] * torch.tanh(scores / given["cap"])
        seen = torch.from_numpy(mask.select(r, rows).as_array(n, s)).cuda()
        scores = scores.masked_fill(~seen, -torch.inf)
        log = scores.logsumexp(-1)
        weights = (scores - log.masked_fill(log.isinf(), 0.0)[..., None]).exp()
        if sinks is not None:
            weights = weights / (1 + (sinks[:, None].double() - log).exp())[..., None]
        want = torch.einsum("hts,shd->thd", weights, v.where(v.isfinite(), 0.0))
        for kind, wild in ((v.isnan(), torch.nan), (v == torch.inf, torch.inf)):
            want = torch.where(torch.einsum("ts,shd->thd", seen.double(), kind.double()) > 0, want + wild, want)
        got = output[rows].double()
        assert bool(((got.isnan() == want.isnan()) & (got.isinf() == want.isinf())).all())
        finite = want.isfinite()
        error = (got - want)[finite].square().sum() / want[finite].square().sum().clamp_min(1e-30)
        assert float(error.sqrt()) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
        torch.testing.assert_close(lse[:, rows].double(), log, rtol=1e-5, atol=1e-4)


RAGGED = {  # rows and keys of each request
    "the same tokens": [(300, 300), (1, 1), (530, 530)],
    "context": [(77, 1000), (128, 129), (5, 4000), (400, 400)],
    "no keys, no rows": [(20, 0), (0, 40), (200, 333)],
    "fewer keys than rows": [(300, 100), (64, 63)],
    "more tiles than programs": [(150 + 7 * i, 200 + 31 * i) for i in range(40)],
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "sizes", [(192, 128), (128, 64), (256, 128), (192, 192), (136, 24), (64, 64), (200, 96), (512, 128), (320, 264)]
)
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_keys_and_values_of_another_size(name: str, sizes: tuple[int, int], causal: bool) -> None:
    """MLA's prefill; values that other requests' rows must not see are NaN where their keys are the next request's."""
    from attn.torch.kernels.mla_prefill import mla_prefill

    lens, (size, width), heads = RAGGED[name], sizes, 3
    generator = torch.Generator("cuda").manual_seed(0)
    starts, key_starts = (torch.tensor([0, *(x[i] for x in lens)], device="cuda").cumsum(0).to(torch.int32) for i in (0, 1))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    tokens, keys = int(starts[-1]), int(key_starts[-1])
    query, key = random(tokens, heads, size), random(keys, heads, size)
    value = random(keys, heads, 2 * width)[..., width:]  # as one part of a projection
    if len(lens) > 2:
        value[key_starts[1] : key_starts[2]] = torch.nan
    output, lse = (
        torch.full((tokens, heads, width), 9.0, device="cuda").to(torch.bfloat16),
        torch.zeros(heads, tokens, device="cuda"),
    )
    for _ in range(2):
        mla_prefill(output, lse, query, key, value, starts, key_starts, size**-0.5, causal)
    for r, (n, m) in enumerate(lens):
        rows, own = slice(int(starts[r]), int(starts[r + 1])), slice(int(key_starts[r]), int(key_starts[r + 1]))
        q, k, v = query[rows].double(), key[own].double(), value[own].double()
        scores = torch.einsum("thd,shd->hts", q, k) * size**-0.5
        if causal:
            ahead = torch.arange(m, device="cuda")[None] > torch.arange(n, device="cuda")[:, None] + m - n
            scores = scores.masked_fill(ahead, -torch.inf)
        log = scores.logsumexp(-1)
        torch.testing.assert_close(lse[:, rows].double(), log, rtol=1e-5, atol=1e-4)
        want = torch.einsum("hts,shd->thd", (scores - log.masked_fill(log.isinf(), 0.0)[..., None]).exp(), v)
        got = output[rows].double()
        assert bool((got.isnan() == want.isnan()).all()) or bool(v.isnan().any())
        if n and not bool(v.isnan().any()):
            error = (got - want).square().sum() / want.square().sum().clamp_min(1e-30)
            assert float(error.sqrt()) < 5e-3, (r, n, m)
