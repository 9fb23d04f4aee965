"""The counts of an MLA prefill's plan, by hand and for a batch whose merges once took the time."""

import pytest

from attn.tools.bench.case import BenchCase
from attn.tools.bench.sample import sample, sizes_of
from benchmarks.mla_plan import counted, decoded


def test_by_hand() -> None:
    found = counted(BenchCase.latent("3q1s4k_q32s1056_q100"))
    assert (found["requests"], found["rows"], found["context"], found["turns"], found["merged"]) == (2, 132, 1024, 1, 32)
    seen, heads = 32 * 1024 + 32 * 33 // 2 + 100 * 101 // 2, 128
    assert found["tflop"] == pytest.approx(2 * heads * (320 * seen + 512 * 256 * (132 + 1024)) / 1e12)
    assert found["absorbed"] == 1 and found["cheaper"] < found["tflop"]
    assert found["written"] == 1024 * heads * 320 * 2 / 1e9
    assert counted(BenchCase.latent("64q1s4k")) == {}


def test_ragged_chunks_over_long_contexts() -> None:
    """A turn for each share of the longest context would be 370, and would merge 16.6 million rows."""
    case = sample(1, 77, sizes_of([80 << 30], mla=True), mla=True)[0]
    found = counted(case)
    assert (found["requests"], found["rows"], found["context"]) == (145, 44_876, 1_305_351)
    assert (found["turns"], found["merged"]) == (61, 53_287)


def test_stream_k_of_decodes() -> None:
    """One request of 512 tiles and 99 of one each: 611 tiles with six more for each request, ten for each of 132 programs."""
    found = decoded(BenchCase.latent("q1s32k_99q1s64", heads="64"))
    assert (found["requests"], found["keys"], found["row_tiles"]) == (100, 32768 + 99 * 64, 1)
    assert found["least"] == pytest.approx(611 / 132) and found["stream_k_time"] == 10 + 6
    assert found["stream_k_splits"] == 52 + 99 and found["stream_k_mb"] == pytest.approx(52 * 64 * 512 * 4 * 2 / 1e6)
    assert decoded(BenchCase.latent("4q4k")) == {}


@pytest.mark.parametrize("seed", [5, 77])
def test_stream_k_ends_sooner_than_equal_splits(seed: int) -> None:
    """Ragged decodes that fill the device: the sum of programs' times is bounded below by `least` in both."""
    cases = sample(21, seed, sizes_of([141 << 30], mla=True), mla=True)
    for found in filter(None, map(decoded, cases)):
        assert min(found["split_time"], found["stream_k_time"]) >= found["least"]
        if found["requests"] > 4 and found["least"] > 20:
            assert found["stream_k_time"] <= 1.01 * found["split_time"]
