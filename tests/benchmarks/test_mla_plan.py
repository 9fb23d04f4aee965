"""The counts of an MLA prefill's plan, by hand and for a batch whose merges once took the time."""

import pytest

from attn.tools.bench.case import BenchCase
from attn.tools.bench.sample import sample, sizes_of
from benchmarks.mla_plan import counted


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
