"""The grammar of batches, and what a case must move and compute."""

import re
from dataclasses import replace

import pytest

from attn.selector import make_request
from attn.tools.bench import CPU_SUITE, MLA_CPU_SUITE, MLA_SUITE, SUITE, BenchCase, flops, grammar, nbytes, parse


def test_the_grammar() -> None:
    assert parse("q2k") == [(2048, 2048)]
    assert parse("8q1s1k") == [(1, 1024)] * 8
    assert parse("2q2k_3q1s1k") == [(2048, 2048)] * 2 + [(1, 1024)] * 3
    assert parse("1q512s8k") == [(512, 8192)]
    assert all(parse(case.batch) for case in SUITE + CPU_SUITE + MLA_SUITE + MLA_CPU_SUITE)


@pytest.mark.parametrize("case", SUITE + CPU_SUITE + MLA_SUITE + MLA_CPU_SUITE, ids=str)
def test_lengths_have_a_shortest_batch(case: BenchCase) -> None:
    assert parse(grammar(parse(case.batch))) == parse(case.batch) and len(grammar(parse(case.batch))) <= len(case.batch)
    assert grammar([(1, 37), (1, 37), (5, 5), (1, 2048)]) == "2q1s37_q5_q1s2k"


@pytest.mark.parametrize("batch", ["", "q", "s4", "q1s4m", "2q1__q1", "q-1", "0q1x", "q8s4", "q0", "0q5", "q1_0q1s4"])
def test_what_has_no_reading_is_refused(batch: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"batch={batch!r}")):
        parse(batch)


def test_what_is_counted() -> None:
    decode = BenchCase("2q1s100", "8/2", 64)
    assert flops(decode) == 4 * 8 * 64 * 2 * 100
    assert nbytes(decode) == 2 * 2 * 64 * 2 * 200 + 2 * 8 * 64 * 2 * 2
    assert nbytes(BenchCase("2q1s100", "8/2", 64, kv_cache_dtype="int8")) == 2 * 2 * 64 * 200 + 2 * 8 * 64 * 2 * 2
    assert flops(BenchCase("q3", "1/1", 32)) == 4 * 32 * (1 + 2 + 3)


@pytest.mark.parametrize("window", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("batch", ["q1s9", "q4s9", "q9", "2q3s4_q1s30"])
def test_what_a_window_leaves_is_counted_as_a_loop_would(batch: str, window: int) -> None:
    pairs = keys = 0
    for n, m in parse(batch):
        seen = [set(range(max(0, row - window + 1), row + 1)) for row in range(m - n, m)]
        pairs += sum(map(len, seen))
        keys += len(set().union(*seen))
    case = BenchCase(batch, "2/1", 32, dtype="float32", window=window)
    rows = sum(n for n, _ in parse(batch))
    assert flops(case) == 4 * 2 * 32 * pairs and nbytes(case) == 4 * 32 * (2 * keys + 2 * 2 * rows)


def test_what_a_latent_layer_is_counted_as() -> None:
    decode = BenchCase.latent("2q1s100", heads="4")
    assert flops(decode) == 2 * 4 * (576 + 512) * 200, "absorbed"
    assert nbytes(decode) == 2 * (576 * 200 + 4 * (192 + 128) * 2)
    assert nbytes(replace(decode, kv_cache_dtype="fp8")) == 576 * 200 + 2 * 4 * (192 + 128) * 2
    assert nbytes(replace(decode, kv_cache_dtype="fp8_ds_mla")) == 656 * 200 + 2 * 4 * (192 + 128) * 2
    assert flops(BenchCase.latent("q400", heads="4")) == 2 * 4 * (192 + 128) * 400 * 401 // 2, (
        "expanded: a prompt makes its own heads"
    )
    verified = BenchCase.latent("q4s400", heads="4")
    assert flops(verified) == 2 * 4 * (576 + 512) * (397 + 398 + 399 + 400)
    chunk = BenchCase.latent("q300s400", heads="4")
    pairs = sum(range(101, 401))
    assert flops(chunk) == 2 * 4 * ((192 + 128) * pairs + 512 * 256 * 100), "expanded, its context too"
    asked = make_request(576, "bfloat16", "auto", 64, use_mla=True, num_heads=4, num_kv_heads=1)
    assert verified.request() == asked and "mla" in str(verified), "what the layer asks: attn tune's times are kept under it"
    assert BenchCase.of({"batch": "q4"}) == BenchCase("q4"), "rows of older files"


def test_an_invalid_shape_is_reported() -> None:
    for changes, said in (
        ({"heads": "8/"}, "heads='8/'"),
        ({"window": 0}, "window=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"head_size": -64}, "head_size=-64"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"mla": True}, "heads='32/8' with mla"),
        ({"mla": True, "heads": "4", "head_size": 64}, "head_size=64 with mla"),
    ):
        with pytest.raises(ValueError, match=said):
            BenchCase("q4", **changes)  # type: ignore[arg-type]
