"""Paged attention called as a kernel, where magnitudes leave what the product's dtype holds. 10 s on one core, interpreted."""

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from attn.kernels import paged_attention as device_code
from attn.kernels import paged_launch
from attn.kernels.codes import number_in
from attn.kernels.launch import UNBOUNDED, Launch, most_stretches, split_kv_for, split_tiles_of
from attn.kernels.plan import item_of
from attn.torch.interpreter import correct_bfloat16
from attn.torch.kernels import paged_attention as module
from attn.torch.kernels.direct import arch
from attn.torch.kernels.kv_write import write_kv
from attn.torch.kernels.paged_attention import paged_attention
from tests.levels import sampled

pytestmark = [pytest.mark.triton_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, SIZE, PAGE, KEYS = 4, 32, 16, 80


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float = SIZE**-0.5,
    cap: float = 0.0,
    slopes: float = 0.0,
) -> None:
    """`query` [T, H, D], the last of one request's KEYS positions, against float64; keys and values [KEYS, 1, D] as stored."""
    if DEVICE == "cpu":
        correct_bfloat16()
    tokens = len(query)
    bias = torch.full((HEADS,), slopes, device=DEVICE) if slopes else None
    output, lse = torch.full_like(query, torch.nan), torch.full((HEADS, tokens), torch.nan, device=DEVICE)
    paged_attention(
        output, lse, query, key.unflatten(0, (-1, PAGE)), value.unflatten(0, (-1, PAGE)),
        torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE), torch.tensor([KEYS], dtype=torch.int32, device=DEVICE),
        torch.arange(KEYS // PAGE, dtype=torch.int32, device=DEVICE)[None], tokens, KEYS, scale, right=0, soft_cap=cap,
        slopes=bias,
    )  # fmt: skip
    scores = torch.einsum("thd,sd->hts", query.double(), key[:, 0].double()) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    behind = torch.arange(KEYS - tokens, KEYS, device=DEVICE)[:, None] - torch.arange(KEYS, device=DEVICE)
    scores = (scores - slopes * behind).masked_fill(behind < 0, -torch.inf)
    want = torch.einsum("hts,sd->thd", scores.softmax(-1), value[:, 0].double())
    wrong = (output.double() - want).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()
    assert float(wrong.max()) < (2**-7 if query.dtype == torch.bfloat16 else 2**-10)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)


def _stored(dtype: torch.dtype, seed: int) -> torch.Tensor:
    noise = torch.randn(KEYS, 1, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return (noise * 30 if dtype == torch.int8 else noise).to(dtype).to(DEVICE)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(
    ("tokens", "cap", "slopes"),
    sampled([pytest.param(*x) for x in ((1, 0.0, 0.0), (20, 0.0, 0.0), (20, 30.0, 0.0), (1, 0.0, 0.1))], 2, "magnitudes"),
)
def test_queries_of_every_magnitude(stored: torch.dtype, tokens: int, cap: float, slopes: float) -> None:
    """bfloat16 holds numbers that float16, in which codes of bytes are multiplied, does not: heads of one tile have either."""
    noise = torch.randn(tokens, HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([1.0, 1e12, 3e30, 1e-12])[:, None]
    key, value = _stored(stored, 2), _stored(stored, 3)
    _check((noise * sizes).bfloat16().to(DEVICE), key, value, SIZE**-0.5 * (0.03 if stored == torch.int8 else 1), cap, slopes)


@triton.jit
def _convert(codes, numbers):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    tl.store(numbers + at, number_in(tl.load(codes + at), numbers.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_e4m3_code_taken_as_a_byte_is_its_number(dtype: torch.dtype) -> None:
    """What architectures run that have no instruction for it (`launch.converts_e4m3`)."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    numbers = torch.zeros(256, dtype=dtype, device=DEVICE)
    _convert[(1,)](codes, numbers)
    torch.testing.assert_close(numbers, codes.view(torch.float8_e4m3fn).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cache_taken_as_bytes(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn.torch.kernels import paged_attention as kernel

    monkeypatch.setattr(kernel, "converts_e4m3", lambda arch: False)
    query = torch.randn(tokens, HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    _check(query, _stored(torch.float8_e4m3fn, 2), _stored(torch.float8_e4m3fn, 3), SIZE**-0.5, 0.0)


@pytest.mark.parametrize(("dtype", "stored"), [(torch.bfloat16, torch.float8_e4m3fn), (torch.float16, torch.float16)])
@pytest.mark.parametrize("cap", [0.0, 50.0])
def test_weights_below_float16(dtype: torch.dtype, stored: torch.dtype, cap: float) -> None:
    """A first key that is worth 2**25 of the others, and whose value is zero, leaves the result to them."""
    key, value = torch.zeros(KEYS, 1, SIZE), (_stored(torch.float32, 4).cpu() + 4) * 50
    key[0], value[0] = 4.0, 0.0
    query = torch.full((1, HEADS, SIZE), 4.0)
    score = cap * math.atanh(17.5 / cap) if cap else 17.5
    _check(query.to(DEVICE, dtype), key.to(DEVICE, stored), value.to(DEVICE, stored), score / (16 * SIZE), cap)


def test_heads_of_queries_that_are_far_apart() -> None:
    """More than 2**31 elements from the first: of the 4 GiB, a CPU backs with memory only what is written."""
    far, tokens, heads = 2**30, 5, 3
    query, key, value = torch.randn(3, tokens, heads, SIZE, dtype=torch.float16, device=DEVICE)
    memory = torch.empty(2 * far + tokens * SIZE, dtype=torch.float16, device=DEVICE)
    apart = memory.as_strided(query.shape, (SIZE, far, 1)).copy_(query)
    starts, outputs = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE), []
    for x in (query, apart):
        outputs.append(torch.zeros_like(query))
        paged_attention(outputs[-1], None, x, key, value, starts, None, None, tokens, tokens, 0.2)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("tokens", [1, 20])
def test_keys_of_a_request_that_are_far_apart(tokens: int) -> None:
    """More than 2**31 elements from its first: keys without pages are in one row, as long as the request."""
    far, keys = 2**25, 70
    query, key, value = (
        torch.randn(n, heads, SIZE, dtype=torch.float16, device=DEVICE) for n, heads in ((tokens, HEADS), (keys, 1), (keys, 1))
    )
    memory = torch.empty((keys - 1) * far + 2 * SIZE, dtype=torch.float16, device=DEVICE)
    apart = [memory[at:].as_strided(x.shape, (far, SIZE, 1)).copy_(x) for at, x in ((0, key), (SIZE, value))]
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, tokens], [keys]))
    table, outputs = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), []
    for caches in ((key, value), apart):
        outputs.append(torch.zeros_like(query))
        paged_attention(outputs[-1], None, query, *caches, starts, lens, table, tokens, keys, 0.2, right=0)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_bound_of_a_window_beyond_every_key_is_none(tokens: int) -> None:
    """A kernel adds it to positions, in 32 bits."""
    query = torch.randn(tokens, HEADS, SIZE, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    key, value = (_stored(torch.float32, seed).unflatten(0, (-1, PAGE)) for seed in (1, 2))
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, tokens], [KEYS]))
    table, outputs = torch.arange(KEYS // PAGE, dtype=torch.int32, device=DEVICE)[None], []
    for side in (None, 2**31 - 1, 2**31, 2**62):
        outputs.append(torch.full_like(query, torch.nan))
        paged_attention(outputs[-1], None, query, key, value, starts, lens, table, tokens, KEYS, 0.5, left=side, right=side)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


def test_splits_of_a_decode_have_the_scales_of_their_kv_head() -> None:
    """A decode is the same in one split and in several, which are merged."""
    query = torch.randn(1, HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    key, value = (torch.cat([_stored(torch.int8, seed), _stored(torch.int8, seed + 9)], 1) for seed in (2, 3))
    scales = (torch.tensor([0.03, 0.06], device=DEVICE), torch.tensor([0.5, 8.0], device=DEVICE))
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1], [KEYS]))
    table = torch.arange(KEYS // PAGE, dtype=torch.int32, device=DEVICE)[None]
    assert split_kv_for(1, 2, KEYS // 32 + 1, 0, 8) is not None
    outs = [torch.full_like(query, torch.nan) for _ in range(2)]
    for out, whole in zip(outs, (False, True), strict=True):
        paged_attention(
            out, None, query, key.unflatten(0, (-1, PAGE)), value.unflatten(0, (-1, PAGE)), starts, lens, table, 1, KEYS,
            SIZE**-0.5, right=0, k_scale=scales[0], v_scale=scales[1], whole=whole,
        )  # fmt: skip
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)


_TOGETHER: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"left": 100},  # more keys than `MIN_SPLIT_TILES` tiles of any launch
    "not causal": {"right": None},
    "some causal": {"right": None, "is_causal": [True, False, True, True, False]},
    "spans": {"spans": (6, 12)},
    "prefixes": {"prefix": [0, 50, 3, 0, 100]},
    "chunks": {"chunk_size": 176},
    "trees": {"tree": 4},
    "cap and sinks": {"soft_cap": 3.0, "sinks": [0.5, -1.0]},
    "a quantized cache": {"stored": torch.float8_e4m3fn, "k_scale": 0.5, "v_scale": 2.0},
}


@pytest.mark.parametrize(
    ("case", "whole"),
    sampled([pytest.param(case, False) for case in _TOGETHER], 2, "batches together, split")
    + sampled([pytest.param(case, True) for case in _TOGETHER], 1, "batches together"),
)
def test_a_batch_in_one_launch(case: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several tiles of rows, a request without tokens and decodes, as in launches of their own; nothing else is
    launched but the merge of splits."""
    q_lens, seq_lens, page, size = [70, 1, 0, 3, 33], [70, 150, 9, 35, 200], 16, 32
    tokens, columns, choice = sum(q_lens), -(-max(seq_lens) // page), dict(_TOGETHER[case])
    generator = torch.Generator().manual_seed(7)
    noise = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    stored, dtype = choice.pop("stored", torch.float16), torch.float16
    query = noise(tokens, 2, size).to(DEVICE, dtype)
    caches = [noise(5 * columns, page, 1, size).to(stored).to(DEVICE) for _ in "kv"]
    starts = torch.tensor([0, *np.cumsum(q_lens)], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    table = torch.randperm(5 * columns, generator=generator).int().view(5, columns).to(DEVICE)
    kinds = {"prefix": torch.int32, "is_causal": torch.bool, "sinks": torch.float32, "k_scale": None, "v_scale": None}
    choice |= {name: torch.tensor(choice[name], dtype=kind, device=DEVICE) for name, kind in kinds.items() if name in choice}
    if "spans" in choice:
        at, spans = choice["spans"], torch.full((tokens, 2), -1, dtype=torch.int32)
        spans[at[0] : at[1] + 1] = torch.tensor(at)
        choice["spans"] = spans.to(DEVICE)
    if "tree" in choice:
        choice["tree"] = torch.eye(4, dtype=torch.bool, device=DEVICE).tril().expand(5, 4, 4).contiguous()
        choice["tree"][..., 0] = True
    found, launched, call = [], list[module.Prepared](), module.Prepared.__call__
    monkeypatch.setattr(module.Prepared, "__call__", lambda *a, **k: launched.append(a[0]) or call(*a, **k))
    of_prompts = "hopper" if arch() == "sm_90" and case not in ("trees", "a quantized cache") else "prompts"
    for together in (False, True):
        launched.clear()
        output, lse = torch.full_like(query, torch.nan), torch.full((2, tokens), torch.nan, device=DEVICE)
        of = (output, lse, query, *caches, starts, lens, table, max(q_lens), max(seq_lens), size**-0.5)
        paged_attention(*of, **{"right": 0, **choice}, whole=whole, together=together)
        found.append((output, lse))
        kernels = {device_code.merge: "merge", device_code.attention: "prompts"}
        names = ["decodes" if x._constants.get("DECODE") else kernels.get(x._kernel, "hopper") for x in launched]
        assert names == [of_prompts] * (not together) + ["decodes"] + ["merge"] * (not whole)
    assert not any(bool(x.isnan().any()) for pair in found for x in pair)
    for ours, apart in zip(*found, strict=True):
        torch.testing.assert_close(ours, apart, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("merged", "size"), [(16, 80), (64, 256)])
def test_a_merge_in_several_steps_and_blocks_of_columns(merged: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 1, 16 and 70 splits, a tile of 32 keys each: fewer than a program merges at once, as many, and more."""
    rule = paged_launch.split_kv_for
    monkeypatch.setattr(
        paged_launch, "split_kv_for", lambda *of: replace(rule(*of) or rule(*of[:2], 9, *of[3:]), merged=merged)
    )
    launches = paged_launch.Launches.split_kv
    monkeypatch.setattr(
        paged_launch.Launches,
        "split_kv",
        lambda *of: replace(launches(*of), split_tiles=1, max_splits=300, whole_from=100, items=303, stored=303),
    )
    module._launches.cache_clear()
    keys, dtype, generator = [30, 16 * 32, 70 * 32 - 7], torch.float16, torch.Generator().manual_seed(3)
    columns = -(-max(keys) // PAGE)
    noise = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE, dtype)  # noqa: E731
    query, caches = noise(3, 2, size), [noise(3 * columns, PAGE, 1, size) for _ in "kv"]
    table = torch.randperm(3 * columns, generator=generator).int().view(3, columns).to(DEVICE)
    starts, lens = torch.arange(4, dtype=torch.int32, device=DEVICE), torch.tensor(keys, dtype=torch.int32, device=DEVICE)
    output, lse = torch.full_like(query, torch.nan), torch.full((2, 3), torch.nan, device=DEVICE)
    paged_attention(output, lse, query, *caches, starts, lens, table, 1, max(keys), size**-0.5, right=0)
    module._launches.cache_clear()
    for r, number in enumerate(keys):
        key, value = (x[table[r].long()].flatten(0, 1)[:number, 0].double() for x in caches)
        scores = query[r].double() @ key.T * size**-0.5
        torch.testing.assert_close(output[r].double(), scores.softmax(-1) @ value, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse[:, r].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("q_lens", [[20, 0, 33], [3, 2, 0]])
def test_a_batch_without_requests_of_one_token(q_lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts alone are one launch, and a few tokens of each request are decodes whatever is known of single ones."""
    seq_lens, generator = [45, 9, 200], torch.Generator().manual_seed(7)
    query = torch.randn(sum(q_lens), 2, SIZE, generator=generator).to(DEVICE, torch.float16)
    caches = [torch.randn(39, PAGE, 1, SIZE, generator=generator).to(DEVICE, torch.float16) for _ in "kv"]
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, *np.cumsum(q_lens)], seq_lens))
    table = torch.randperm(39, generator=generator).int().view(3, 13).to(DEVICE)
    found, launched, call = [], list[bool](), module.Prepared.__call__
    monkeypatch.setattr(module.Prepared, "__call__", lambda *a, **k: launched.append(True) or call(*a, **k))
    counts = []
    for singles in (True, False):
        launched.clear()
        output = torch.full_like(query, torch.nan)
        paged_attention(
            output, None, query, *caches, starts, lens, table, max(q_lens), 200, 0.2, right=0, whole=True, singles=singles
        )
        found.append(output)
        counts.append(len(launched))
    assert counts == ([2, 1] if max(q_lens) > 16 else [1, 1])
    assert not bool(found[0].isnan().any()) and torch.equal(*found)


_WRITES: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"dtype": torch.float32},
    "bfloat16, slices of one projection": {"dtype": torch.bfloat16, "sliced": True},
    "heads of 40": {"size": 40},
    "window, cap and sinks": {"left": 40, "soft_cap": 3.0, "sinks": True},
    "chunks": {"chunk_size": 48},
    "not causal, prefixes": {"right": None, "prefix": True},
    "e4m3, a scale per head": {"stored": torch.float8_e4m3fn, "k_scale": [0.5, 0.02], "v_scale": [0.03, 0.1]},
    "e4m3 taken as bytes": {"stored": torch.float8_e4m3fn, "k_scale": 0.3, "v_scale": [0.03, 0.1], "converts": False},
    "e5m2, numbers of the host": {"stored": torch.float8_e5m2, "k_factor": 0.3, "v_factor": 0.7},
    "int8, a number of each": {"stored": torch.int8, "k_factor": 0.03, "v_scale": 0.01, "dtype": torch.bfloat16},
    "bfloat16 in float32": {"stored": torch.bfloat16, "dtype": torch.float32},
    "speculation": {"rows": [1, 8, 5, 3, 6, 2]},
    "speculation, 16 rows": {"rows": [1, 16, 16, 15, 9, 2], "size": 80, "left": 100},
    "speculation, float32, stretches": {"rows": [1, 8, 5, 3, 8, 2], "dtype": torch.float32, "invariant": True},
    "speculation, e4m3": {"rows": [1, 4, 4, 4, 4, 4], "stored": torch.float8_e4m3fn, "k_scale": [0.5, 0.02], "v_scale": 0.1},
    "speculation, not causal": {"rows": [1, 4, 7, 4, 4, 2], "right": None, "sliced": True},
    "speculation, a tree": {"rows": [1, 8, 3, 4, 4, 2], "tree": True},
    "speculation, chunks": {"rows": [1, 8, 8, 3, 8, 2], "chunk_size": 48},
    "together": {"rows": [1, 17, 40, 33, 6, 2], "together": True},
    "together, a window, sinks": {"rows": [1, 5, 60, 1, 20, 2], "together": True, "left": 20, "sinks": True},
    "together, int8": {"rows": [1, 5, 30, 1, 40, 2], "together": True, "stored": torch.int8, "k_factor": 0.03, "v_scale": 0.01},
}


#: New rows in two splits, and rows that several programs write.
_ALWAYS = ("speculation, float32, stretches", False), ("together", False)


@pytest.mark.parametrize(
    ("case", "whole"),
    sampled(
        [pytest.param(*x) for x in itertools.product(_WRITES, (True, False))], 6, "writes of decodes",
        lambda case: case.values in _ALWAYS,
    ),
)  # fmt: skip
def test_decodes_write_the_new_tokens_before_they_read_them(case: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the cache, the output and the log-sum-exp are those of a write in a launch of its own, in whichever order
    programs run."""
    choice, heads, kv_heads = dict(_WRITES[case]), 4, 2
    # The last request has more rows than keys; in others, new rows lie in two pages, and in two splits.
    q_lens = choice.pop("rows", [1] * 6)
    if choice.get("invariant"):
        monkeypatch.setattr(paged_launch, "STRETCH", 32)
        module._launches.cache_clear()
    seq_lens = [1, 17, 150, 33, 99, max(q_lens[5] - 1, 0)]
    dtype, size = choice.pop("dtype", torch.float16), choice.pop("size", SIZE)
    requests, columns, generator = len(seq_lens), -(-max(seq_lens) // PAGE), torch.Generator().manual_seed(7)
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        correct_bfloat16()
    noise = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE, dtype)  # noqa: E731
    projection = noise(tokens := sum(q_lens), heads + 2 * kv_heads, size)
    query, key, value = projection.split((heads, kv_heads, kv_heads), 1)
    if not choice.pop("sliced", False):
        query, key, value = (x.contiguous() for x in (query, key, value))
    stored = noise(2, requests * columns, PAGE, kv_heads, size) * 30 ** ("stored" in choice)
    stored = stored.to(choice.pop("stored", dtype))
    if not choice.pop("converts", True):
        monkeypatch.setattr(module, "converts_e4m3", lambda arch: False)
    scales = []
    for name in "kv":
        if f"{name}_scale" in choice:
            choice[f"{name}_scale"] = torch.tensor(choice[f"{name}_scale"], device=DEVICE)
        factor = torch.tensor(choice.get(f"{name}_factor", 1.0), device=DEVICE)
        scales.append(choice.get(f"{name}_scale", factor))
    table = torch.randperm(requests * columns, generator=generator).int().view(requests, columns)
    positions = [(r, m - n + i) for r, (n, m) in enumerate(zip(q_lens, seq_lens, strict=True)) for i in range(n)]
    slots = torch.tensor([int(table[r, p // PAGE]) * PAGE + p % PAGE if p >= 0 else -1 for r, p in positions])
    slots[sum(q_lens[:3])] = -1  # one that is there already
    starts, lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, *itertools.accumulate(q_lens)], seq_lens))
    for name, numbers in (("sinks", torch.rand(heads)), ("prefix", torch.tensor([0, 5, 100, 33, 0, 0], dtype=torch.int32))):
        if choice.get(name):
            choice[name] = numbers.to(DEVICE)
    if choice.get("tree"):  # of the requests of at most 4 tokens, which are drafts
        choice["tree"] = (torch.rand(requests, 4, 4, generator=generator) < 0.5).logical_or(torch.eye(4)).to(DEVICE)
    found, builder, number = [], interpreter_builder, interpreter_builder.set_grid_idx
    for writes in (False, True, True):
        if len(found) == 2 and arch() == "interpreter":
            monkeypatch.setattr(builder, "set_grid_idx", lambda x, *yz: number(builder.grid_dim[0] - 1 - x, *yz))
        caches, output = stored.clone(), torch.full((tokens, heads, size), torch.nan, dtype=dtype, device=DEVICE)
        lse = torch.full((heads, tokens), torch.nan, device=DEVICE)
        new = {"key": key, "value": value, "slots": slots.to(DEVICE)} if writes else {}
        if not writes:
            write_kv(key, value, *caches, slots.to(DEVICE), *scales)
        of = output, lse, query, *caches, *(x.to(DEVICE) for x in (starts, lens, table)), max(q_lens), max(seq_lens), size**-0.5
        paged_attention(*of, **{"right": 0, **choice, **new}, whole=whole)
        found.append((caches.view(torch.uint8), output, lse))
    assert not torch.equal(found[0][0], stored.view(torch.uint8)) and not bool(found[0][1].isnan().any())
    for apart, *together in zip(*found, strict=True):
        assert all(torch.equal(apart, x) for x in together)


@triton.jit
def _items(
    found,
    query_start_loc,
    seq_lens,
    num_reqs,
    max_query,
    left,
    split_tiles,
    max_splits,
    whole_from,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    STRETCH: tl.constexpr,
    STRETCHES: tl.constexpr,
):  # type: ignore[no-untyped-def]
    item = tl.program_id(0)
    r, block, first, last, part, count, place = item_of(
        item,
        query_start_loc,
        seq_lens,
        num_reqs,
        0,
        max_query,
        left,
        0,
        0,
        0,
        0,
        split_tiles,
        max_splits,
        whole_from,
        BLOCK_N,
        BLOCK_R,
        BLOCK_Q,
        False,
        False,
        STRETCH,
        STRETCHES,
    )
    tl.store(found + 7 * item, r)
    tl.store(found + 7 * item + 1, first)
    tl.store(found + 7 * item + 2, last)
    tl.store(found + 7 * item + 3, part)
    tl.store(found + 7 * item + 4, count)
    tl.store(found + 7 * item + 5, block)
    tl.store(found + 7 * item + 6, place)


@pytest.mark.parametrize(("stretch", "rows"), [(0, 0), (3, 0), (0, 3)])
@pytest.mark.parametrize("left", [UNBOUNDED, 700])
@pytest.mark.parametrize("seed", sampled(range(3), 1, "batches of items"))
def test_items_are_every_tile_of_every_decode_once(seed: int, left: int, stretch: int, rows: int) -> None:
    """Requests without rows or with too many have none; a decode without keys has one item, which writes its zeros. rows: of a
    block, where requests may have several. With stretches, items begin and end where one of the request's does."""
    rng = np.random.default_rng(seed)
    num_reqs, block_n = (1, 17, 7)[seed], 32
    q_lens, seq_lens = rng.integers(0, 6, num_reqs), (2 ** rng.uniform(0, 11, num_reqs)).astype(int)
    q_lens[0], seq_lens[-1] = 1, 0
    chosen = (q_lens > 0) & (q_lens <= (UNBOUNDED if rows else 4))
    blocks = -(-q_lens // rows) if rows else chosen.astype(int)
    lows = np.maximum(seq_lens - q_lens - left, 0) // block_n
    tiles = np.where(chosen & (seq_lens > 0), -(-seq_lens // block_n) - lows, 0)
    split_kv = split_kv_for(max(num_reqs, int(blocks.sum())), 2, max(3, int(tiles.max())), stretch, 16)
    assert split_kv is not None
    found = torch.full((split_kv.items + 3, 7), -1, dtype=torch.int32, device=DEVICE)
    start, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, *np.cumsum(q_lens)], seq_lens))
    _items[(split_kv.items + 3,)](
        found,
        start,
        lens,
        num_reqs,
        UNBOUNDED if rows else 4,
        left,
        split_kv.split_tiles,
        split_kv.max_splits,
        split_kv.whole_from,
        block_n,
        split_kv.block_r,
        rows,
        stretch,
        most := most_stretches(2, 16),
    )
    items = [item for item in found.tolist() if item[0] < num_reqs]
    assert items == found.tolist()[: len(items)], "the rest of the grid has none"
    split_tiles, stored = split_tiles_of(np.repeat(tiles[chosen], blocks[chosen]), split_kv), 0
    wanted = [(r, block) for r in range(num_reqs) for block in range(blocks[r])]
    assert sorted({(item[0], item[5]) for item in items}) == wanted
    for r, block in wanted:
        own = [item[1:5] for item in items if item[0] == r and item[5] == block]
        assert [part for _, _, part, _ in own] == list(range(len(own))) and {count for *_, count in own} == {len(own)}
        assert [tile for first, last, _, _ in own for tile in range(first, last)] == list(range(tiles[r]))
        if stretch:
            tiles_of_one = max(stretch, -(-tiles[r] // most))
            stretches = -(-tiles[r] // tiles_of_one)
            assert len(own) == max(1, min(-(-tiles[r] // split_tiles), stretches))
            assert all(first % tiles_of_one == 0 for first, *_ in own)
            if len(own) > 1:  # the first item has one result, the others have one for each of their stretches
                assert {item[6] for item in items if item[0] == r} == {stored}
                stored += 1 + stretches - own[0][1] // tiles_of_one
        elif num_reqs == chosen.sum():  # else the device has room for more items than the host assumes
            assert len(own) == max(1, -(-tiles[r] // split_tiles))
    assert stored <= split_kv.stored


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {"left": 300, "sinks": True}), ("bfloat16", {"odd": True}), ("float16", {"soft_cap": 3.0})],
)
def test_bits_of_a_request_are_the_same_whatever_the_batch_and_its_plan(
    dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests whole, or in any number of splits of one stretch of keys or several, beside prompts and under loose bounds."""
    monkeypatch.setattr(paged_launch, "STRETCH", 32)
    module._launches.cache_clear()
    choice, heads, kv_heads, generator = dict(options), 4, 2, torch.Generator().manual_seed(5)
    number = getattr(torch, dtype)
    if number == torch.bfloat16 and DEVICE == "cpu":
        correct_bfloat16()
    q_lens, seq_lens = [1, 1, 3, 1, 20], [350, 37, 130, 600, 70]
    columns = [-(-n // PAGE) for n in seq_lens]
    tables = torch.randperm(sum(columns), generator=generator).int().split(columns)
    caches = [torch.randn(sum(columns), PAGE, kv_heads, SIZE, generator=generator).to(DEVICE, number) for _ in "kv"]
    queries = torch.randn(sum(q_lens), heads, SIZE, generator=generator).to(DEVICE, number).split(q_lens)
    if choice.pop("odd", False):  # the stretch of a value that is not finite is computed in another way
        caches[1][tables[3][20], 3, :, 5] = torch.inf
    if choice.pop("sinks", False):
        choice["sinks"] = torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)

    def run(requests: list[int], more: int = 0, whole: bool = False) -> list[list[torch.Tensor]]:
        query = torch.cat([queries[r] for r in requests])
        output, lse = torch.full_like(query, torch.nan), torch.full((heads, len(query)), torch.nan, device=DEVICE)
        table = torch.nn.utils.rnn.pad_sequence([tables[r] for r in requests], batch_first=True).to(DEVICE)
        lens, rows = ([of[r] for r in requests] for of in (seq_lens, q_lens))
        starts = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32, device=DEVICE)
        paged_attention(
            output, lse, query, *caches, starts, torch.tensor(lens, dtype=torch.int32, device=DEVICE), table, max(rows) + more,
            max(lens) + more, SIZE**-0.5, **{"right": 0, **choice}, invariant=True, whole=whole,
        )  # fmt: skip
        return [list(x) for x in zip(output.split(rows), lse.split(rows, 1), strict=True)]

    want = run(every := list(range(len(q_lens))))
    batches = [([0], 0, False), ([3], 40, False), ([3, 0], 0, False), ([2, 4], 0, False), ([1, 0, 1, 3], 9, False)]
    for requests, more, whole in [*batches, (every[::-1], 0, True)]:
        for r, got in zip(requests, run(requests, more, whole), strict=True):
            for one, other in zip(got, want[r], strict=True):
                kind = torch.int32 if one.dtype == torch.float32 else torch.int16
                assert torch.equal(one.contiguous().view(kind), other.contiguous().view(kind)), (requests, whole, r)


class _Recorded:
    """Stands for a kernel: records what each launch compiles, which is constants, options, strides and dtypes.

    Of BLOCK_R only whether a decode is split: its size changes the integers of the plan alone.
    """

    def __init__(self, kernel: Any) -> None:
        signature = inspect.signature(kernel.fn).parameters
        self.names = list(signature)
        self.programs: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            given = dict(zip(self.names, args, strict=False))
            dtypes = {n: getattr(v, "dtype", type(v)) for n, v in given.items()}
            strides = {n: v for n, v in given.items() if isinstance(v, int) and n not in device_code._BATCH}
            compiled = {**constants, "BLOCK_R": constants.get("BLOCK_R", 0) > 0}
            self.programs.add(tuple(sorted([*compiled.items(), *dtypes.items(), *strides.items()], key=str)))

        return launch


#: (new tokens, lengths, bound on the lengths): decodes of any length, drafts, mixed batches, 1501 requests.
_BATCHES = [
    ([1], [5], 5), ([1] * 3, [5, 4000, 70], 4000), ([1, 3], [9, 9], 131072), ([1, 200, 2], [9, 300, 4], 300),
    ([1, 500], [30000, 500], 30000), ([1] * 1500 + [40], [7] * 1500 + [40], 40),
]  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("left", [None, 100])
def test_an_invariant_layer_compiles_the_same_programs_for_any_batch(
    arch: str, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the batch nor launches that were measured meanwhile change a program; in other layers both do."""
    monkeypatch.setattr(module, "arch", lambda: arch)
    monkeypatch.setattr(module.hopper, "is_on", lambda kernel: False)
    shape, attention, merge = (arch, 4, 128, 2, 2), module.attention, module.merge

    def programs(invariant: bool) -> list[set[tuple[Any, ...]]]:
        module._launches.cache_clear()
        kernels = _Recorded(attention), _Recorded(merge)
        monkeypatch.setattr(module, "attention", kernels[0])
        monkeypatch.setattr(module, "merge", kernels[1])
        for i, (q_lens, k_lens, bound) in enumerate(_BATCHES):
            if i == 3:
                for kind in ("decode", "prefill"):
                    monkeypatch.setitem(module.TUNED, (kind, *shape), Launch(64, 16, 8, 2))
            query = torch.zeros(sum(q_lens), 8, 128, dtype=torch.bfloat16)
            start = torch.tensor([0, *q_lens]).cumsum(0).int()
            table, cache = torch.zeros(len(q_lens), -(-bound // 16)).int(), torch.zeros(4, 16, 2, 128, dtype=torch.bfloat16)
            lens = torch.tensor(k_lens).int()
            module.paged_attention(
                query.clone(), None, query, cache, cache, start, lens, table, max(q_lens), bound, 1.0, left=left, right=0,
                invariant=invariant,
            )  # fmt: skip
        return [kernel.programs for kernel in kernels]

    # prefill, decodes that are split and such that are not, and the merge
    assert [len(kernel) for kernel in programs(True)] == [3, 1]
    monkeypatch.undo()
    monkeypatch.setattr(module, "arch", lambda: arch)
    monkeypatch.setattr(module.hopper, "is_on", lambda kernel: False)
    assert len(programs(False)[0]) > 3
    module._launches.cache_clear()
