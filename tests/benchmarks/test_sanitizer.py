"""What memcheck runs on a GPU is the suite's, and covers what only a GPU shows."""

from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Device
from attn.testing import cases_for
from benchmarks import sanitizer

H100 = Device("torch", "cuda", "H100", "sm_90")


def test_memcheck_runs_every_feature_and_what_repeats_launches() -> None:
    backend = AttentionBackendEnum["TRITON_ATTN"].get_class()
    suite = cases_for(backend, H100)
    chosen = sanitizer.chosen(suite)
    assert {case.name for case in chosen} <= {case.name for case in suite}
    assert {case.arrays for case in chosen} == {"device"}  # each in memory of its own
    with_prompts = [case for case in chosen if case.check == "oracle" and max(case.query_lens, default=0) > 64]
    asked = set().union(*(case.request().features for case in with_prompts))
    assert asked == {str(feature) for feature in backend.capabilities.features} - {"batch_invariant"} | {"lse"}
    assert any(max(case.seq_lens) > 400 for case in with_prompts) and any(max(case.seq_lens) < 100 for case in with_prompts)
    assert {"layers_in_turn", "any_batch"} <= {case.check for case in chosen}
    mla = sanitizer.chosen(cases_for(AttentionBackendEnum["TRITON_MLA"].get_class(), H100))
    assert len({case.name for case in mla}) == sanitizer.CASES
