"""Batches drawn at random: the same from the same seed, within their bounds, of every kind."""

from collections import Counter
from dataclasses import replace

import pytest

from attn.tools.bench import grammar, parse
from attn.tools.bench.case import KINDS, cache_bytes, kind_of
from attn.tools.bench.sample import CPU_SIZES, SIZES, Sizes, sample, sizes_of, within

GPU = sizes_of([139 << 30])


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("sizes", [sizes_of([None]), GPU, sizes_of([9 << 30])], ids=["cpu", "139 GiB", "9 GiB"])
def test_forty_batches_are_of_every_kind_and_within_the_bounds(sizes: Sizes, mla: bool) -> None:
    if mla:
        sizes = replace(sizes_of([None] if sizes == CPU_SIZES else [1 << 40], mla=True), cache_mib=sizes.cache_mib)
    cases = sample(40, 7, sizes, mla)
    assert len(set(cases)) == 40 and Counter(kind_of(parse(case.batch)) for case in cases) == dict.fromkeys(KINDS, 8)
    for case in cases:
        lens = parse(case.batch)
        assert grammar(lens) == case.batch
        assert within(case, sizes) and cache_bytes(case) <= sizes.cache_mib << 20
        assert 1 <= len(lens) <= sizes.requests and sum(n for n, _ in lens) <= sizes.new_tokens
        assert all(16 <= m <= sizes.length for _, m in lens)
        assert all(n <= sizes.chunk for n, m in lens if n < m)
        assert case.mla == mla and case.heads in sizes.heads and case.block_size in (16, 32, 64, 128)
        assert case.head_size in sizes.head_sizes and case.dtype == sizes.dtype


def test_a_seed_determines_the_batches() -> None:
    assert sample(12, 3, GPU) == sample(12, 3, GPU) == sample(20, 3, GPU)[:12]
    assert not set(sample(12, 3, GPU)) & set(sample(12, 4, GPU))
    assert [case.batch for case in sample(3, 1, CPU_SIZES)] == [
        "q5s136_q5s16_q5s528_q5s3773_q5s1306_q5s670_q5s29",
        "q14s901",
        "q1s153_q1s1993",
    ], "on every machine, with every version of Python"


def test_less_memory_draws_only_the_larger_batches_again() -> None:
    small = replace(GPU, cache_mib=256)
    pairs = list(zip(sample(40, 1, GPU), sample(40, 1, small), strict=True))
    assert all(one == other for one, other in pairs if within(one, small))
    assert any(not within(one, small) for one, _ in pairs) and all(within(other, small) for _, other in pairs)


def test_free_memory_bounds_the_cache_by_a_power_of_two() -> None:
    assert sizes_of([139 << 30]) == sizes_of([131 << 30]) == replace(SIZES, cache_mib=16 << 10)
    assert sizes_of([139 << 30, 64 << 30]).cache_mib == 8 << 10, "the frameworks of a run draw the same batches"
    assert sizes_of([None]) == sizes_of([139 << 30, None]) == CPU_SIZES
    with pytest.raises(ValueError, match="at least 8 MiB of free device memory"):
        sizes_of([1 << 20])


def test_arguments_replace_what_would_be_drawn() -> None:
    cases = sample(10, 1, CPU_SIZES, heads="4/2", head_size=32, window=7)
    assert {(case.heads, case.head_size, case.window) for case in cases} == {("4/2", 32, 7)}
    assert [case.batch for case in cases] == [case.batch for case in sample(10, 1, CPU_SIZES)]
    with pytest.raises(ValueError, match="heads='8/'"):
        sample(1, 1, CPU_SIZES, heads="8/")
    with pytest.raises(ValueError, match="none of 1000 draws of .* is within the bounds: 1 to 16 requests"):
        sample(5, 1, CPU_SIZES, block_size=1 << 22)


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        ("3q1s16_q1s900", "decodes"),
        ("q2s16_q8s900", "speculation"),
        ("q9s16_q2ks4k", "chunks"),
        ("q4_q900", "prompts"),
        ("q1s16_q2s16", "mixtures"),
        ("q9s16_q16", "mixtures"),
        ("q1", "decodes"),
    ],
)
def test_kinds_of_batches(batch: str, kind: str) -> None:
    assert kind_of(parse(batch)) == kind
