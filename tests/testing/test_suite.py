"""Cases follow from capabilities: all declared features, no others, and a rejection for each of the others (20 s)."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attn.capabilities import Capabilities, Device, Feature, MultipleOf
from attn.errors import UnsupportedError
from attn.testing import Case
from attn.testing.draw import _tables
from attn.testing.properties import run_check
from attn.testing.subject import Subject
from attn.testing.suite import cases_of
from tests.compilers import needs_triton, output
from tests.testing.mutants import SUBJECT
from tests.testing.simulated import SimulatedKernel

SMALL = Capabilities("torch", ("cpu",), ("bfloat16",), head_sizes=(128,), features=frozenset({Feature.SLIDING_WINDOW}))


def subject(capabilities: Capabilities = SMALL, **changes: Any) -> Subject:
    return Subject("SMALL", capabilities, **{"block_sizes": (MultipleOf(32),), "lse": False, **changes})


def split(cases: list[Case]) -> tuple[list[Case], list[Case]]:
    refusals = [case for case in cases if case.check.startswith("refusal")]
    return [case for case in cases if case not in refusals], refusals


@pytest.mark.parametrize("level", ["quick", "full"])
def test_only_what_is_declared_is_asked_for(level: str) -> None:
    positive, _ = split(cases_of(subject(), level))
    assert len(positive) > 80
    for case in positive:
        request = case.request()
        assert case.dtype == "bfloat16" and case.head_size == 128 and case.block_size % 32 == 0
        assert request.features <= {"sliding_window"} and not case.lse
        assert case.kv_cache_dtype == "auto" and case.attn_type == "decoder"


def test_everything_declared_is_exercised_by_the_grid() -> None:
    grid = [case for case in cases_of(SUBJECT) if case.name.startswith("grid")]
    assert len(grid) >= 60
    asked = set().union(*(case.request().features for case in grid))
    assert asked == (SUBJECT.capabilities.features | {"lse"}) - {"batch_invariant", "output_scale"}
    for name in ("dtypes", "kv_cache_dtypes", "attn_types"):
        assert {getattr(case, name[:-1]) for case in grid} == set(getattr(SUBJECT.capabilities, name))


def test_everything_undeclared_is_refused_once() -> None:
    _, refusals = split(cases_of(subject()))
    named = [case.check.partition("=")[2] for case in refusals]
    assert len(set(named)) == len(named)
    assert {f.value for f in Feature} - {"sliding_window"} <= set(named)
    assert {"dtype=float32", "kv_cache_dtype=int8", "attn_type=encoder", "head_size=33", "block_size=8"} <= set(named)
    assert not {"sliding_window", "dtype=bfloat16", "head_size=128", "block_size=64"} & set(named)


def test_a_combination_that_a_backend_refuses_is_not_asked_for() -> None:
    def refuses(request: Any) -> list[str]:
        return ["soft cap with sinks"] if {"soft_cap", "sinks"} <= request.features else []

    cases = cases_of(dataclasses.replace(SUBJECT, refuses=refuses))
    assert any(case.sinks for case in cases) and any(case.logits_soft_cap for case in cases)
    assert not any(case.sinks and case.logits_soft_cap for case in cases)
    assert len([case for case in cases if case.name.startswith("grid")]) >= 60


@pytest.mark.parametrize("features", [frozenset(), frozenset({Feature.MLA})])
def test_a_backend_that_serves_nothing_here_is_an_error_with_its_reasons(features: frozenset[Feature]) -> None:
    record = dataclasses.replace(SMALL, platforms=("cuda",), head_sizes=(MultipleOf(64),), features=features)
    here = Device("torch", "cpu", "a laptop")
    nowhere = subject(record, device=here, refuses=lambda request: record.device_reasons(here))
    with pytest.raises(UnsupportedError, match=r"SMALL serves no case .* on a laptop \(torch\): .*kind='interpreted'") as error:
        cases_of(nowhere)
    assert error.value.reasons == ("platform=cpu (supports cuda)",)
    assert cases_of(dataclasses.replace(nowhere, device=None, refuses=lambda request: ()))


def test_an_encoder_only_backend_has_cases() -> None:
    encoder = dataclasses.replace(SMALL, attn_types=("encoder_only",))
    positive, refusals = split(cases_of(subject(encoder)))
    assert len(positive) > 40 and all(case.is_encoder for case in positive)
    assert "attn_type=decoder" in {case.check.partition("=")[2] for case in refusals}


def test_a_block_sparse_backend_has_cases_with_patterns() -> None:
    sparse = subject(dataclasses.replace(SMALL, head_sizes=(16,), features=frozenset({Feature.BLOCK_SPARSE})), lse=True)
    positive, refusals = split(cases_of(sparse, "smoke"))
    assert all(case.sparse for case in positive) and len({case.sparse for case in positive}) == 4
    assert "block_sparse" not in {case.check.partition("=")[2] for case in refusals}
    assert Case.from_json(positive[0].json()) == positive[0]
    for case in positive:
        assert run_check(case, SimulatedKernel()) == []
    dense = {case.check.partition("=")[2] for case in split(cases_of(subject()))[1]}
    assert "block_sparse" in dense


def test_batch_invariance_is_demanded_where_it_is_promised() -> None:
    promised = dataclasses.replace(SMALL, features=frozenset({Feature.BATCH_INVARIANT}))
    cases = cases_of(subject(promised))
    asked = [case for case in cases if "batch_invariant" in case.features]
    assert {"any_batch", "neighbours", "batch_order", "permute_pages"} <= {case.check for case in asked}
    assert len(cases) > 4 * len(asked)  # the default plan is tested too
    assert max(len(case.query_lens) for case in cases_of(subject(promised), "full") if case.features) > 32
    assert not [case for case in cases_of(subject()) if case.check == "any_batch"]


def test_nan_in_what_no_row_sees_is_for_backends_that_promise_to_mask_it() -> None:
    positive, refusals = split(cases_of(subject()))
    assert not any(case.is_wild for case in positive) and "huge" in {case.poison for case in positive}
    assert "nan_safe" in {case.check.partition("=")[2] for case in refusals}
    promised = dataclasses.replace(SMALL, features=frozenset({Feature.NAN_SAFE}))
    assert sum(case.is_wild for case in split(cases_of(subject(promised)))[0]) > 60
    encoder = dataclasses.replace(promised, attn_types=("encoder_only",))
    assert not any(case.is_wild for case in split(cases_of(subject(encoder)))[0])


def test_a_compiled_backend_gets_a_quick_run_that_shares_programs() -> None:
    compiled = Subject("COMPILED", dataclasses.replace(SUBJECT.capabilities, framework="jax"))
    quick = split(cases_of(compiled))[0]
    assert len([case for case in quick if case.name.startswith("grid")]) >= 60
    shapes = {(case.dtype, case.element, case.head_size, case.block_size, case.num_heads) for case in quick}
    assert len(shapes) <= 30
    assert len(split(cases_of(compiled, "full"))[0]) > 2 * len(quick)


def test_scales_of_memory_are_for_gpus_and_the_full_suite() -> None:
    gpu = dataclasses.replace(SUBJECT, device=Device("torch", "cuda", "a GPU", "sm_90"))
    vast = [case for case in cases_of(gpu, "full") if (case.num_blocks or 0) > 65536]
    assert len(vast) == 2
    elements = max(c.num_blocks * c.block_size * c.num_kv_heads * c.head_size for c in vast)
    assert elements > 2**31
    for case in vast:
        table, _ = _tables(case, np.random.default_rng(0))
        used = [int(page) for row, m in zip(table, case.seq_lens, strict=True) for page in row[: -(-m // case.block_size)]]
        first = min(used) * (1 if case.name == "70000 pages" else case.block_size * case.num_kv_heads * case.head_size)
        assert first >= (2**16 if case.name == "70000 pages" else 2**31), (
            "every page that is read or written needs wide indices"
        )
        assert len(set(used)) == len(used)
    assert not [case for case in cases_of(gpu) if (case.num_blocks or 0) > 65536]


def test_a_cache_that_kernels_cannot_count_is_to_be_refused() -> None:
    gpu = dataclasses.replace(SUBJECT, device=Device("torch", "cuda", "a GPU", "sm_90"), max_cache_span=2**31)
    (large,) = [case for case in cases_of(gpu, "full") if case.name == "2**31 elements"]
    assert large.check == "too_large"
    small = large.replace(num_blocks=8)

    def refuses(call: Any) -> Any:
        raise UnsupportedError("too many elements")

    assert run_check(small, refuses) == []
    assert [v.rule for v in run_check(small, SimulatedKernel())] == ["R"]


def test_unknown_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="level='slow'"):
        cases_of(SUBJECT, "slow")


#: Prints the pairs of a launch and a feature that no case of TRITON_ATTN reaches on an H100, which it plans for without one.
UNREACHED = """
from itertools import product
import attn.torch.kernels.paged_attention as module
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Device
from attn.kernels import hopper
from attn.testing import cases_for, runner_for
from attn.testing.bits import SCALED, SELF_SCALED
from attn.testing.properties import run_check
from attn.torch.backends._triton import _UNKNOWN, TritonPagedImpl
from attn.torch.kernels import hopper_prefill

backend, launched = AttentionBackendEnum["TRITON_ATTN"].get_class(), set()

class Prepared:
    def __init__(self, kernel, **constants):
        self.kernel, self.constants = kernel, constants

    def __call__(self, *args, **kwargs):
        if self.kernel is module.merge:
            return
        c, cut = self.constants, "split" if self.constants["BLOCK_R"] else "whole"
        whose = "together" if c["TILED"] else "drafts" if c["BLOCK_Q"] > 1 else f"{'beside' if c['BESIDE'] else 'decode'} {cut}"
        launched.add(whose if c["DECODE"] else "general prefill" if c["PAGED"] else "ragged")

def plan(self, meta, cache):
    starts, lens = meta.query_start_loc_cpu, meta.seq_lens_cpu
    if starts is None or lens is None:
        return _UNKNOWN
    return self._planned(starts[1:] - starts[:-1], lens, meta.max_query_len, cache.element_size(), "sm_90", 132)

module.Prepared, module.arch, module.multiprocessors = Prepared, lambda: "sm_90", lambda device: 132
hopper_prefill.prefill, hopper.is_on = lambda *args: launched.add("hopper prefill"), lambda kernel: True
backend.is_interpreted = staticmethod(lambda: True)  # else tensors on the CPU are an error
TritonPagedImpl._plan, TritonPagedImpl._writes_by_kernel = plan, lambda *args: False

def facts(case):
    yield from case.request().features
    yield from (case.kv_cache_dtype, case.head_size, case.dtype)
    if case.prefix:
        yield "a prefix under a window" if case.sliding_window else "a prefix"
    if case.spans and case.span_window and case.sliding_window:
        yield "spans cut by a window"

quantised = {name for name in backend.capabilities.kv_cache_dtypes if name in SCALED or name in SELF_SCALED}
general = {"alibi", "tree_mask", "per_head_scales", "output_scale", "a prefix under a window", *quantised}
features = {str(x) for x in backend.capabilities.features} - {"batch_invariant"} | general | {"lse", "a prefix"}
features |= {"spans cut by a window", "bfloat16", "float16", 64, 96, 128, 256}
every = {"decode whole", "decode split", "drafts", "together"}
left = set(product(every | {"general prefill"}, general))
left |= set(product(every | {"hopper prefill", "beside whole", "beside split"}, features - general))
left.remove(("together", 256))  # decodes' tiles of 64 rows hold heads of up to 128
run = runner_for(backend, Device("torch", "cpu"))
for case in reversed(cases_for(backend, Device("torch", "cuda", "H100", "sm_90"))):
    if left and case.dtype != "float32" and not case.check.startswith("refusal"):
        launched.clear()
        run_check(case, run)
        left -= set(product(launched, facts(case)))
print(*sorted(f"{launch}: {feature}" for launch, feature in left), sep="\\n", end="")
"""


@needs_triton
def test_every_launch_on_hopper_is_reached_under_every_feature(tmp_path: Path) -> None:
    """In 16 bits, of a paged cache: prompts by either kernel, decodes cut or whole, alone or beside prompts, drafts, and all
    requests in one launch."""
    assert output(UNREACHED, tmp_path, PYTHONWARNINGS="ignore") == ""
