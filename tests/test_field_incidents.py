"""35 known bugs of attention libraries, one test each, which must not occur in this one.

A test runs one case of the conformance suite on the backends that a CPU runs at full speed, on vendors' stand-ins where the
cause lies in what an adapter says, and on the simulated kernel with that very bug planted, which must fail the case: so each
shows both that the bug is not here and that it would be seen. Its docstring says what it would catch. About 40 s of one core,
most of it XLA compiling three programs and Triton's interpreter starting.
"""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import attn.reports.report
from attn import distributed, reference
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum, register_backend
from attn.capabilities import AttentionType, Device, Feature, Request
from attn.errors import AttnError, UnsupportedError
from attn.selector import make_request, select
from attn.testing import Case, Violation, cache_spec, check_conformance, draw, fixtures, mla, run_case, runner_for, suite
from attn.testing import transform as to
from attn.testing.draw import _tables
from attn.testing.properties import judged
from attn.testing.rules import Score
from attn.testing.subject import base_case, per_head_scales, subject_of
from tests.testing.mutants import MUTANTS, killers
from tests.testing.simulated import SimulatedKernel

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

ROOT = Path(__file__).parents[1]
COMPILERS = Path(sys.prefix) / "compilers"  # Triton with its own NumPy, beside the environment (see torch/test_interpreted)
PLAIN = ("CPU_ATTN", "TORCH_SDPA")
HERE = (*PLAIN, "XLA_ATTN")
STANDINS = ("fa2", "fa3", "flashinfer_pkg", "aiter_pkg")
H200 = Device("torch", "cuda", "NVIDIA H200", "sm_90")
#: One case with every rule at once: for a compiler, one program.
EVERYTHING: dict[str, Any] = {
    "sliding_window": 16,
    "logits_soft_cap": 2.0,
    "alibi": True,
    "sinks": "log_length",
    "inputs": "needle",
}

#: What of an incident needs more than this machine, and where that is shown.
ELSEWHERE = {
    6: "FlexAttention's int32 on a GPU: the `vast` cases of the full suite, for any backend, on a device",
    7: "compiled Triton: the same `vast` cases on a device; here the kernels run in the interpreter, whose int32 wraps alike",
    8: "FlashInfer's own kernel: its index width is the vendor's; ours are here",
    10: "the capture itself (no engine, no graph here): what it leaves behind, NaN in page 0, is here",
    18: "processes and their collectives: the ranks are simulated one after the other",
    20: "the descriptor that the device refuses: stand-ins check the strides that it wants",
    28: "the vendors' kernels at these sizes: evidence of runs on devices",
    33: "a launch on Turing: limits and launch rules are data, and are asked",
    34: "the model on SM120: what a user can do about it is here",
}


def backend(name: str) -> Any:
    return AttentionBackendEnum[name].get_class()


def case_for(name: str, label: str = "field", *lens: tuple[int, ...], **changes: Any) -> Case:
    """A case of the backend's first choices; `lens` are (query_lens, seq_lens), if not the suite's."""
    return base_case(subject_of(backend(name)), label, *lens, **changes)


def served(names: tuple[str, ...], *lens: tuple[int, ...], **changes: Any) -> None:
    """Every one of them passes the case."""
    for name in names:
        case = case_for(name, "field", *lens, **changes)
        assert subject_of(backend(name)).serves(case), f"{name} does not serve {case.request()}"
        check_conformance(backend(name), case)


def refused(names: tuple[str, ...], feature: Feature, **changes: Any) -> None:
    """Every one of them says, by name, that it does not serve the feature: selection, and constructor or call."""
    for name in names:
        asked = Request(**{**vars(case_for(name).request()), "features": frozenset({feature.value}), **changes})
        assert f"{feature.value} not supported" in "; ".join(backend(name).why_not(asked)), name
        assert run_case(backend(name), case_for(name, f"refuses {feature}").replace(**_ASKING[feature])) == [], name


_ASKING: dict[Feature, dict[str, Any]] = {
    Feature.SLIDING_WINDOW: {"sliding_window": 16, "check": "refusal=sliding_window"},
    Feature.SOFT_CAP: {"logits_soft_cap": 2.0, "check": "refusal=soft_cap"},
    Feature.SINKS: {"sinks": "randn", "check": "refusal=sinks"},
    Feature.ALIBI: {"alibi": True, "check": "refusal=alibi"},
}


def seen(case: Case, *kernels: str | type[SimulatedKernel]) -> None:
    """The unbroken kernel passes the case; every planted bug fails it."""
    assert killers(SimulatedKernel(), [case]) == []
    for kernel in kernels:
        broken = MUTANTS[kernel] if isinstance(kernel, str) else kernel
        assert killers(broken(), [case]), f"{broken.__name__} is not noticed by {case}"


def fails(name: str, case: Case) -> list[Violation]:
    """The violations of a backend that a test has broken; there must be some."""
    found = run_case(backend(name), case)
    assert found, f"{name}, broken on purpose, passes {case}"
    return found


@functools.cache
def _properties() -> dict[str, set[str]]:
    """The properties that each attention backend is held to by its own suite, for those that can serve anything here."""
    found = {}
    for member in AttentionBackendEnum:
        built = member.candidate().backend if member.value else None
        if getattr(built, "capabilities", None) is not None:
            subject = subject_of(built)
            cases = mla.properties(subject, False) if subject.is_latent else suite.properties(subject, False)
            found[member.name] = {case.check.partition("=")[0] for case in cases if subject.serves(case)}
    return {name: checks for name, checks in found.items() if checks}


def in_every_suite(*checks: str) -> None:
    held = _properties()
    assert {*HERE, "TRITON_ATTN", "FLASHINFER", "TORCH_MLA"} <= held.keys()
    for name, own in held.items():
        assert set(checks) <= own, name


@pytest.fixture
def vendors(standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Every vendor's stand-in; `vendors("FlashAttention 2")` leaves FLASH_ATTN that provider alone."""
    from attn.torch.backends import _flash_providers as providers

    def only(name: str) -> None:
        monkeypatch.setattr(providers, "PROVIDERS", [p for p in providers.PROVIDERS if p.name == name])
        providers.chosen.cache_clear()

    standins(*STANDINS)
    yield only
    providers._lacking.cache_clear()
    providers.chosen.cache_clear()


# windows


def test_01_window_w_or_w_plus_1_vllm_3385(vendors: Any) -> None:
    """Catches a backend for which a window of W is W - 1 or W + 1 keys, and an adapter that passes W for (W - 1, 0)."""
    for window in (1, 16, 17):
        served(PLAIN, sliding_window=window, inputs="needle")
        served(("FLASH_ATTN", "FLASHINFER", "ROCM_AITER_UNIFIED_ATTN"), sliding_window=window, inputs="needle")
        seen(case_for("CPU_ATTN", sliding_window=window, inputs="needle"), "WindowLeftOneMore", "WindowLeftOneLess")
    served(("XLA_ATTN",), **EVERYTHING)
    seen(case_for("XLA_ATTN", **EVERYTHING), "WindowLeftOneMore", "WindowLeftOneLess")
    refused(("ROCM_AITER_FA",), Feature.SLIDING_WINDOW)


def test_02_no_window_in_decode_vllm_23969(vendors: Any) -> None:
    """Catches a decode path of its own that was not told of the window."""
    decode: Any = ((1,) * 4, (33, 40, 17, 90))
    served((*PLAIN, "FLASH_ATTN", "FLASHINFER", "ROCM_AITER_UNIFIED_ATTN"), *decode, sliding_window=16, inputs="needle")
    seen(case_for("CPU_ATTN", "decode", *decode, sliding_window=16, inputs="needle"), "WindowInPrefillOnly")
    served(("XLA_ATTN",), **EVERYTHING)  # two of its requests are decodes
    seen(case_for("XLA_ATTN", **EVERYTHING), "WindowInPrefillOnly")


@pytest.mark.parametrize("window", [None, 7])
def test_03_window_of_the_kv_group_vllm_51756_49795(window: int | None, vendors: Any) -> None:
    """Catches a window taken from the cache's group or the batch: here both speak of another window than the layer's."""
    for name in (*PLAIN, "FLASH_ATTN", "FLASHINFER", "XLA_ATTN"):
        if name == "XLA_ATTN" and window is not None:
            continue  # another program; EVERYTHING has a window
        framework = "jax" if name == "XLA_ATTN" else "torch"
        with mock.patch(f"attn.{framework}.testing.cache_spec", lambda call: replace(cache_spec(call), sliding_window=3)):
            served((name,), sliding_window=window, inputs="needle")
    seen(case_for("CPU_ATTN", sliding_window=7, inputs="needle"), "WindowIgnored")


def test_04_window_missing_from_the_plan_sglang_31501(vendors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a FlashInfer plan, of either wrapper, that does not carry the layer's window, cap, scale and causality."""
    from attn.torch.backends.flashinfer import FlashInferImpl

    planned: dict[str, Any] = {"sliding_window": 16, "logits_soft_cap": 2.0, "scale": 0.31}
    served(("FLASHINFER",), **planned, inputs="needle")
    whole = FlashInferImpl._group
    for forgotten in ({"window_left": -1}, {"soft_cap": 0.0}, {"scale": 0.125}):
        monkeypatch.setattr(FlashInferImpl, "_group", lambda self, *a, f=forgotten: whole(self, *a)._replace(**f))
        for lens in (((1,) * 3, (33, 20, 40)), ((6, 18), (9, 40))):
            fails("FLASHINFER", case_for("FLASHINFER", "forgotten", *lens, **planned, inputs="needle"))


def test_05_cascade_and_windows_vllm_14881_15710_17652(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a builder that turns its hint of a common prefix into cascade attention where windows and biases forbid it."""
    for name in HERE:
        case = case_for(name, "prefix", (1, 6, 18, 1, 9), (50, 38, 50, 33, 41), shared_prefix=32, **EVERYTHING)
        builder = backend(name).get_builder_cls()
        build = builder.build
        monkeypatch.setattr(builder, "build", lambda self, prefix, *rest, build=build: build(self, 32, *rest))
        check_conformance(backend(name), case)
    wanted = Request(64, "bfloat16", block_size=16, features=frozenset({Feature.CASCADE}))
    for member in AttentionBackendEnum:
        capabilities = getattr(member.candidate().backend, "capabilities", None) if member.value else None
        assert capabilities is None or "cascade not supported" in "; ".join(capabilities.reasons(wanted)), member.name
    with pytest.raises(ValueError, match="cascade attention supports none"):
        keys = np.zeros((4, 16, 1, 8))
        reference.cascade_attention(
            np.zeros((1, 1, 8)),
            keys,
            keys,
            query_start_loc=[0, 1],
            seq_lens=[33],
            block_table=[[0, 1, 2]],
            common_prefix_len=32,
            scale=1.0,
            window=(7, None),
        )


# caches that outgrow an index


def in_a_vast_cache(name: str) -> None:
    """A case whose pages lie past the 2**31st element of the key cache, and of the value cache; everything before them
    is memory that was never touched."""
    import torch

    from attn.torch import kv_cache as caches
    from attn.torch.testing import TorchRunner

    latent = subject_of(backend(name)).is_latent
    more: dict[str, Any] = {"k_scale": 0.05, "v_scale": 0.05, "kv_cache_dtype": "fp8" if latent else "int8", "num_blocks": 64}
    case = case_for(name, "vast", (1, 3, 1), (33, 20, 70), inputs="needle", **more)
    before = 2**31 // (case.block_size * case.num_kv_heads * case.head_size) + 1

    class Vast(TorchRunner):
        def __call__(self, call: Any) -> Any:
            table, slots = call.batch.block_table, call.batch.slot_mapping
            moved = np.where(slots >= 0, slots + before * case.block_size, -1)
            return super().__call__(call.with_batch(block_table=(table + before).astype(np.int32), slot_mapping=moved))

        def _cache(self, call: Any) -> Any:
            """The small cache's bytes at the end of the vast one."""
            small, _ = super()._cache(call)
            spec = cache_spec(call)
            shape = self.backend.get_kv_cache_shape(
                before + len(call.key_cache), spec.block_size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype
            )
            vast = torch.empty(shape, dtype=small.dtype)
            axis = next(i for i, (a, b) in enumerate(zip(vast.shape, small.shape, strict=True)) if a != b)
            end = vast.narrow(axis, before, len(call.key_cache))
            end.view(torch.uint8).copy_(small.view(torch.uint8))
            return vast, tuple((part,) for part in self.backend.logical_kv_cache(end))

    assert caches.is_quantised(caches.element_type(case.kv_cache_dtype, case.dtype))
    with mock.patch("attn.torch.testing.cache_spec", lambda call: replace(cache_spec(call), num_blocks=None)):
        found = judged(draw(case), Vast(backend(name)), Score())[1]
    assert found == [], "\n".join(map(str, found))


@functools.cache
def _interpreter() -> str:
    """What is left to say of `INTERPRETED` when a process whose Triton interprets has run all of it; "" is nothing."""
    lacking = importlib.util.find_spec("triton") is None
    path = [os.environ.get("PYTHONPATH", ""), str(ROOT), *([str(COMPILERS)] if lacking else [])]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONWARNINGS": "ignore"}
    code = f"import runpy; here = runpy.run_path({__file__!r}); [here[f](*names) for f, names in {INTERPRETED!r}]"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    return "" if done.returncode == 0 else f"exit code {done.returncode}: {done.stdout}{done.stderr}"


#: What the interpreter runs, in one process; an index that wraps is a crash there, not an error.
INTERPRETED = (
    ("in_a_vast_cache", ("TRITON_ATTN",)),
    ("in_a_vast_cache", ("TRITON_MLA",)),
    ("with_one_kv_head", ("TRITON_ATTN",)),
)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None and not (COMPILERS / "triton").is_dir(),
    reason="triton is neither installed nor in the environment's folder compilers (make compilers puts it there)",
)


def test_06_int32_overflow_vllm_50427_50483() -> None:
    """Catches an offset kept in 32 bits in the plain backends; that every backend on a GPU is asked, by the full suite."""
    for name in PLAIN:
        in_a_vast_cache(name)
    for name in ("TRITON_ATTN", "FLASHINFER"):
        vast = [case for case in fixtures.vast(subject_of(backend(name))) if case.num_blocks]
        assert max(c.num_blocks * c.block_size * c.num_kv_heads * c.head_size for c in vast if c.num_blocks) > 2**31


@needs_triton
def test_07_page_times_stride_in_int32_vllm_47671() -> None:
    """Catches page * stride in 32 bits in our Triton kernels, of keys or values, in reading and in writing."""
    assert _interpreter() == ""


@needs_triton
def test_08_latent_pages_in_int32_flashinfer_3130_3136() -> None:
    """Catches the same of latent rows, which are 576 wide: a cache outgrows the index with few pages."""
    in_a_vast_cache("TORCH_MLA")
    assert _interpreter() == ""


@pytest.mark.parametrize(("name", "framework"), [("TRITON_MLA", "torch"), ("FLASHMLA", "torch"), ("XLA_MLA", "jax")])
def test_08_the_full_suite_on_a_gpu_asks_for_latents_beyond_32_bits(name: str, framework: str) -> None:
    """Catches a kernel whose offsets into a cache of latents are 32-bit: no case of the suite had a larger one."""
    subject = subject_of(
        backend(name), device=Device(framework, "cuda" if framework == "torch" else "gpu", "NVIDIA H200", "sm_90")
    )
    (case,) = [case for case in suite.cases_of(subject, "full") if case.name == "2**31 elements"]
    table, num_blocks = _tables(case, np.random.default_rng(0))
    used = [row[: -(-m // case.block_size)] for row, m in zip(table, case.seq_lens, strict=True)]
    page = case.block_size * case.head_size
    assert int(np.concatenate(used).min()) * page > 2**31 and num_blocks * page < 2**31 + 60 * page


# unused rows and memory


def test_09_padding_rows_vllm_37442_38436(vendors: Any) -> None:
    """Catches NaN in requests without tokens or keys, and a kernel that writes the rows which pad a captured batch."""
    empty: Any = ((0, 3, 1, 0, 2, 18, 9), (5, 7, 17, 0, 2, 18, 9))
    no_key: Any = ((3, 1, 2, 18, 9), (0, 0, 5, 18, 0))
    served((*HERE, "FLASH_ATTN", "FLASHINFER"), *empty, padding=5)
    served(HERE, *no_key, padding=2, **EVERYTHING)
    served(("FLASH_ATTN", "FLASHINFER", "ROCM_AITER_UNIFIED_ATTN"), *no_key, padding=2, sinks="randn")
    seen(case_for("CPU_ATTN", "empty", *empty, padding=5), "PaddingRowsWritten")
    seen(case_for("CPU_ATTN", "no key", *no_key, padding=2, **EVERYTHING), "SinkInEmptyRow")


class _NullPageRead(SimulatedKernel):
    """Reads the page of every column, and weighs with 0 what is past the end."""

    def length(self, r: int) -> int:
        return int(self.call.batch.block_table.shape[1]) * self.case.block_size

    def positions(self, n: int, m: int) -> Any:
        return np.arange(n) + self.end - n

    def sequence(self, r: int, query: Any, key: Any, value: Any) -> Any:
        self.end = int(self.call.batch.seq_lens[r])
        return super().sequence(r, query, key, value)

    def weigh(self, weights: Any, allowed: Any, v: Any) -> Any:
        return weights @ v


def test_10_poisoned_null_page_vllm_57156_57158(vendors: Any) -> None:
    """Catches 0 * NaN from page 0, which no request owns and the tail of every table names."""

    def null_page(case: Case) -> Any:
        call = draw(case)
        used = -(-call.batch.seq_lens // case.block_size)
        tail = np.arange(call.batch.block_table.shape[1]) >= used[:, None]
        free = np.setdiff1d(np.arange(len(call.key_cache)), call.batch.block_table[~tail])[0]
        order = np.arange(len(call.key_cache))
        order[[0, free]] = free, 0
        call = to.repaged(call, order)
        assert np.isnan(call.key_cache[0]).any() or case.dtype != "float32"
        return call.with_batch(block_table=np.where(tail, 0, call.batch.block_table).astype(np.int32))

    for name in (*HERE, "FLASH_ATTN", "FLASHINFER"):
        assert judged(null_page(case_for(name)), runner_for(backend(name)), Score())[1] == [], name
    assert judged(null_page(case_for("CPU_ATTN")), _NullPageRead(), Score())[1]


def test_11_nan_past_the_end_vllm_47305_flash_attention_1745_flashinfer_1018() -> None:
    """Catches slots past a sequence's end that are read, and values that are masked by a weight of 0."""
    served(HERE, check="poison")
    served(HERE, check="live_nan")
    seen(case_for("CPU_ATTN", check="poison"), "StaleTailRead")
    seen(case_for("CPU_ATTN"), "StaleTailRead", "ExtraKey")
    seen(case_for("CPU_ATTN", check="live_nan"), "MaskedValueMultiplied", "AdditiveMask")
    in_every_suite("poison", "live_nan")


def test_12_stale_table_tail_vllm_42494(vendors: Any) -> None:
    """Catches table entries past the end that are looked up. FlashAttention 2 does, for a whole tile of keys: its stand-in
    too, so that a page smaller than the tile, were it ever allowed, would show."""
    served((*HERE, "FLASH_ATTN", "FLASHINFER"), check="table_tail")
    vendors("FlashAttention 2")
    served(("FLASH_ATTN",), check="table_tail")
    small = Request(64, "bfloat16", block_size=16)
    assert "block_size=16 (supports multiples of 256)" in "; ".join(backend("FLASH_ATTN").why_not(small))
    seen(case_for("CPU_ATTN", check="table_tail"), _NullPageRead)
    in_every_suite("table_tail")


def test_13_slot_minus_one_is_an_index_vllm_43810() -> None:
    """Catches a cache write at slot -1: the last slot's bytes must stay."""
    served(HERE, check="written_before")
    served(HERE, padding=3)
    seen(case_for("CPU_ATTN", check="written_before"), "PadWritesLastSlot")
    seen(case_for("CPU_ATTN", padding=3), "PadWritesLastSlot")
    in_every_suite("written_before")


# merging


def _merges() -> Iterator[Callable[[Any, Any], tuple[Any, Any]]]:
    """`merge(outputs [2, T, H, D], lses [2, H, T])` of the oracle and of each framework, NumPy in and out."""
    import jax.numpy as jnp
    import torch

    from attn.jax import merge as jax_merge
    from attn.torch import merge as torch_merge

    def under(make: Any, merge: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
        return lambda o, s: tuple(np.asarray(x) for x in merge([make(x) for x in o], [make(x) for x in s]))

    yield under(np.asarray, lambda o, s: reference.merge_states(np.stack(o), np.stack(s)))
    yield under(torch.tensor, torch_merge.merge_attn_states)
    yield under(jnp.asarray, jax_merge.merge_attn_states)


def test_14_merge_of_two_empty_parts_vllm_27491_28181_39148() -> None:
    """Catches exp(-inf - -inf): two empty parts are an empty whole, whatever their outputs hold, and beside full rows."""
    outputs = np.full((2, 2, 1, 3), np.nan, np.float32)
    outputs[0, 1], outputs[1, 1] = 1.0, 3.0
    lses = np.array([[[-np.inf, 0.0]], [[-np.inf, 0.0]]], np.float32)
    for merge in _merges():
        out, lse = merge(outputs, lses)
        np.testing.assert_array_equal(out[0], 0)
        assert np.isneginf(lse[0, 0])
        np.testing.assert_allclose(out[1], 2, rtol=1e-6)
        np.testing.assert_allclose(lse[0, 1], np.log(2), rtol=1e-6)
    seen(case_for("CPU_ATTN", "longer", (5, 20, 3, 2, 4), (3, 1, 0, 2, 30)), "MergeOfEmptyParts")


def test_15_positive_infinity_of_empty_rows_vllm_15492(vendors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches FlashAttention 2's +inf for a row without keys on its way out, and a merge that takes it for a weight."""
    out, lse = np.ones((2, 1, 1, 2), np.float32), np.array([[[np.inf]], [[0.5]]], np.float32)
    out[0] = np.nan
    for merge in list(_merges())[1:]:
        merged, log = merge(out, lse)
        np.testing.assert_array_equal(merged, out[1])
        np.testing.assert_allclose(log, 0.5)
    vendors("FlashAttention 2")
    lens: Any = ((3, 1, 2, 18, 9), (0, 0, 5, 18, 0))
    served(("FLASH_ATTN",), *lens)
    seen(case_for("CPU_ATTN", "no key", *lens), "LsePositiveInfinity")

    def unsettled(out: Any, log: Any, sinks: Any, output: Any, lse: Any) -> None:
        output[...] = out
        lse[...] = log

    monkeypatch.setattr("attn.torch.backends.flash_attn.fill", unsettled)
    assert "A" in {violation.rule for violation in fails("FLASH_ATTN", case_for("FLASH_ATTN", "no key", *lens))}


def test_16_lse_of_an_empty_context_chunk_vllm_49294_49334(vendors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a chunk of context that holds nothing of a request and answers with a finite log-sum-exp."""
    import jax.numpy as jnp
    import torch

    from attn.backends.mla.prefill.abstract import MLAContextChunk, MLAPrefillMetadata
    from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from attn.testing.prefill import PrefillCase, check_prefill
    from attn.torch.backends.mla import _mla

    queries, keys = np.array([0, 5, 6, 13], np.int32), np.array([0, 9, 9, 13], np.int32)  # nothing of the second request
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 2, d), np.float32) for n, d in ((13, 192), (13, 192), (13, 128)))
    for name, put in (("TORCH_SDPA", torch.from_numpy), ("FLASH_ATTN", torch.from_numpy), ("XLA", jnp.asarray)):
        if name == "FLASH_ATTN":
            vendors("FlashAttention 2")  # whose answer is +inf
        chunk = MLAContextChunk(put(keys), keys, 13, 9)
        meta = MLAPrefillMetadata(put(queries), queries, 3, 7, (chunk,))
        prefill = MLAPrefillBackendEnum[name].get_class()(2, 192, 128, 0.07)
        arrays = [put(x).bfloat16() if name == "FLASH_ATTN" else put(x) for x in (q, k, v)]
        _, lse = prefill.run_prefill_context_chunk(0, *arrays, meta)
        np.testing.assert_array_equal(np.isneginf(np.asarray(lse)[0]), np.arange(13) == 5, err_msg=name)

    monkeypatch.setattr(_mla, "_WORKSPACE", 1 << 16)  # many chunks, none of them empty for a request that it comes with
    lens: Any = ((17, 40, 23), (33, 40, 95))
    served(("TORCH_MLA",), *lens)
    prefill = MLAPrefillBackendEnum["TORCH_SDPA"].get_class()
    chunked = prefill.run_prefill_context_chunk

    def finite(self: Any, *arguments: Any) -> Any:
        out, lse = chunked(self, *arguments)
        return out.nan_to_num(0.0), torch.where(lse.isinf(), 0.0, lse)

    monkeypatch.setattr(prefill, "run_prefill_context_chunk", finite)
    served(("TORCH_MLA",), *lens)
    with pytest.raises(AssertionError, match="chunk 0"):
        check_prefill(prefill, PrefillCase("a request without context", (5, 1, 7), ((9, 0, 4),), dtype="float32"))


@pytest.mark.parametrize(
    ("name", "module"), [("FLASHINFER", "flashinfer"), ("FLASHINFER_MLA", "mla.flashinfer_mla")], ids=["dense", "latent"]
)
def test_17_log_base_two_sglang_40903_vllm_28840_43919_flashinfer_2113(
    name: str, module: str, vendors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a base-2 log-sum-exp that an adapter hands on as natural; in 16-bit latent attention too."""
    served((name,))
    monkeypatch.setattr(f"attn.torch.backends.{module}.LN2", 1.0)
    assert {violation.rule for violation in fails(name, case_for(name))} == {"D"}
    seen(case_for("CPU_ATTN"), "LseBaseTwo", "MergeInBaseTwo")


def test_18_empty_shard_of_a_context_parallel_group_vllm_38416_41623() -> None:
    """Catches a rank without a key of a request that contributes anything but (0, -inf), which the others then merge."""
    shards: Any = ((1,) * 5, (33, 20, 7, 40, 2))
    served((*PLAIN, "TORCH_MLA"), *shards, check="split_and_merge")  # an empty part among them
    case = case_for("TORCH_MLA", "a rank without keys", (1, 3), (5, 9))
    distributed.set_dcp_group(distributed.DCPGroup(4, 3, 16))  # tokens 48 to 63, and so on
    none = reference.dcp_local_lens(list(case.seq_lens), 4, 3, 16)
    assert not none.any()
    call = draw(case)
    call = call.with_batch(dcp_local_seq_lens=none.astype(np.int32), slot_mapping=np.full_like(call.batch.slot_mapping, -1))
    result = runner_for(backend("TORCH_MLA"))(call)
    assert not result.output.any() and np.isneginf(result.lse).all()


# scales, strides, plans


def test_19_scales_of_an_fp8_cache_vllm_42580_23813_55670(vendors: Any) -> None:
    """Catches k_scale or v_scale dropped, exchanged, or read with another shape."""
    scales: dict[str, Any] = {"kv_cache_dtype": "fp8", "inputs": "needle", "k_scale": 0.037, "v_scale": 0.0215}
    served((*PLAIN, "FLASHINFER"), **scales)
    seen(case_for("CPU_ATTN", **scales), "KScaleDropped", "VScaleDropped", "ScalesSwapped", "WrittenUnscaled")
    per_head = {**scales, **per_head_scales(2)}
    served(PLAIN, **per_head)
    seen(case_for("CPU_ATTN", **per_head), "FirstScaleForAllHeads", "ScaleOfWrongHead")
    wanted = case_for("FLASHINFER", **per_head).request()
    assert "per_head_scales not supported" in "; ".join(backend("FLASHINFER").why_not(wanted))


def with_one_kv_head(name: str) -> None:
    """One kv head in a cache whose stride over heads says nothing, as views that were permuted have it."""
    from attn.torch import kv_cache as caches

    allocate = caches.allocate

    def degenerate(*arguments: Any) -> Any:
        tensor = allocate(*arguments)
        strides = [1 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
        return tensor.as_strided(tensor.shape, strides)

    case = case_for(name, "one kv head", (1, 6, 18), (33, 9, 18), num_heads=8, num_kv_heads=1)
    with mock.patch.object(caches, "allocate", degenerate):
        check_conformance(backend(name), case)


@needs_triton
def test_20_stride_of_a_dimension_of_one_vllm_40737(vendors: Any) -> None:
    """Catches a stride that no index ever uses handed to a kernel's bulk copies, which want multiples of 16 bytes."""
    for name in (*PLAIN, "FLASHINFER", "FLASH_ATTN"):
        with_one_kv_head(name)
    assert _interpreter() == ""


def test_21_planned_with_the_global_head_count_vllm_41651_42650_56289(vendors: Any) -> None:
    """Catches a plan made for another layer's heads: layers of 8 on 2 and of 4 on 4 heads share one batch."""
    import torch

    from attn.torch import kv_cache as caches

    infer, answers, metas = backend("FLASHINFER"), {}, []
    batch = CommonAttentionMetadata.from_lens([1, 6], [33, 20], [[0, 1, 2], [3, 4]], 16)

    def build() -> Any:
        metas.append(infer.get_builder_cls()(KVCacheSpec(16, 2, 64, "bfloat16")).build(0, batch))
        return metas[-1]

    def run(heads: tuple[int, int], meta: Any) -> Any:
        torch.manual_seed(1)
        cache = caches.allocate(infer, KVCacheSpec(16, heads[1], 64, "bfloat16"), 8)
        cache.copy_(torch.randn(cache.shape))
        query, key = torch.randn(7, heads[0], 64).bfloat16(), torch.randn(7, heads[1], 64).bfloat16()
        layer = mock.Mock(_k_scale_float=1.0, _v_scale_float=1.0)
        return infer.get_impl_cls()(heads[0], 64, 0.125, heads[1]).forward(layer, query, key, key, cache, meta)

    shared = build()
    for heads in ((8, 2), (4, 4)):
        answers[heads] = run(heads, shared)
        assert torch.equal(answers[heads], run(heads, build()))
    assert {(g.num_heads, g.num_kv_heads) for g in shared.plans} == set(answers)


def test_22_reused_physical_pages_vllm_30915(vendors: Any) -> None:
    """Catches a map from physical pages to requests that takes a page to have one owner, or to keep it from batch to batch."""
    page_16: Any = ((1, 6, 18, 1, 9), (50, 38, 50, 33, 41))
    served((*HERE, "FLASH_ATTN", "FLASHINFER"), *page_16, check="shared_pages", shared_prefix=32)
    seen(case_for("CPU_ATTN", "shared", *page_16, check="shared_pages", shared_prefix=32), "PhysicalPagesAssumedUnique")
    for seed in (0, 1, 0):  # the same pages, other owners
        served((*PLAIN, "FLASHINFER"), geometry_seed=seed)
    in_every_suite("permute_pages")


@pytest.mark.parametrize("queries", [1, 4])
def test_23_cross_attention_of_longer_queries_vllm_38321_38450(queries: int, vendors: Any) -> None:
    """Catches cross attention that turns causal once a request has more than one query."""
    lens: Any = ((queries,) * 4, (33, 9, 18, 2))
    crosses: dict[str, Any] = {"attn_type": AttentionType.ENCODER_DECODER, "causal": False, "inputs": "needle"}
    served((*PLAIN, "FLASH_ATTN", "FLASHINFER"), *lens, **crosses)
    if queries > 1:
        seen(case_for("CPU_ATTN", "cross", *lens, **crosses), "NonCausalIgnored")


# batches


def test_24_drafts_taken_for_prefills_vllm_47381_32118(vendors: Any) -> None:
    """Catches a batch whose decodes, drafts and prefills are told apart by where they lie and not by how long they are."""
    orders: Any = (((1, 3, 21, 1), (33, 9, 21, 20)), ((21, 1, 3, 1), (40, 20, 3, 9)), ((4, 2, 16, 4), (20, 2, 16, 40)))
    for lens in orders:
        served((*PLAIN, "FLASHINFER", "TORCH_MLA"), *lens, inputs="needle")
    batch = CommonAttentionMetadata.from_lens(*orders[1], [[0, 1, 2], [3, 4], [5], [6]], 16)
    meta = backend("TORCH_MLA").get_builder_cls()(KVCacheSpec(16, 1, 576, "float32")).build(0, batch)
    assert meta.decode.rows.tolist() == [21, 22, 23, 24, 25] and meta.prefill.query_lens.tolist() == [21]
    infer = backend("FLASHINFER").get_builder_cls()(KVCacheSpec(16, 2, 64, "bfloat16"))
    batches = (batch, _short([1, 1, 3], [9, 9, 9]), _short([1, 0, 1], [9, 0, 9]))
    assert [infer.build(0, b).num_decodes for b in batches] == [0, 2, 1]
    in_every_suite("batch_order")


def _short(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lens(query_lens, seq_lens, [[r] for r in range(len(seq_lens))], 16)


def test_25_causal_alignment_flash_attention_282_436_1778(vendors: Any) -> None:
    """Catches causality counted from the first key, and rows before the sequence that see something."""
    lens: Any = ((5, 20, 3, 2, 4), (3, 1, 0, 2, 30))
    served((*HERE, "FLASH_ATTN", "FLASHINFER", "ROCM_AITER_UNIFIED_ATTN", "TORCH_MLA"), *lens, inputs="needle")
    seen(case_for("CPU_ATTN", "longer", *lens, inputs="needle"), "CausalTopLeft", "LongQueryUnmasked", "SentinelFiniteMin")


# rules that are dropped


def test_26_soft_cap_dropped_vllm_8660_vllm_metal_665(vendors: Any) -> None:
    """Catches a cap that is not applied, or clipped; a cap of 2 bends every score, one of 50 hardly any."""
    served(HERE, **EVERYTHING)
    seen(case_for("XLA_ATTN", **EVERYTHING), "CapMissing", "CapLinear", "CapBeforeScale", "CapAfterBias")
    served(("FLASH_ATTN", "FLASHINFER", "ROCM_AITER_FA"), logits_soft_cap=2.0, inputs="needle")
    refused(("ROCM_AITER_UNIFIED_ATTN",), Feature.SOFT_CAP)
    vendors("PyTorch's varlen_attn")
    wanted = Request(64, "bfloat16", block_size=256, features=frozenset({Feature.SOFT_CAP}))
    assert "soft_cap not supported" in "; ".join(backend("FLASH_ATTN").why_not(wanted))


def test_27_sinks_dropped_vllm_28561_24482_flash_attention_2752_sglang_34463(vendors: Any) -> None:
    """Catches sinks that are taken and forgotten, scaled, put into the log-sum-exp, or counted once a split."""
    served(HERE, **EVERYTHING)
    seen(case_for("XLA_ATTN", **EVERYTHING), "SinkIgnored", "SinkInLse", "SinkPerSplit", "SinkScaled", "SinkCapped")
    served(("FLASH_ATTN", "FLASHINFER", "ROCM_AITER_UNIFIED_ATTN"), sinks="log_length")
    refused(("ROCM_AITER_FA",), Feature.SINKS)
    for member in AttentionBackendEnum:  # a backend that does not declare them must reject them
        capabilities = getattr(member.candidate().backend, "capabilities", None) if member.value else None
        if capabilities is not None and Feature.SINKS not in capabilities.features:
            asked = {case.check for case in suite.refusals(subject_of(backend(member.name)))}
            assert f"refusal={Feature.SINKS.value}" in asked, member.name


@pytest.mark.parametrize("page", [1, 16, 128, 256])
def test_28_pages_and_lengths_flashinfer_4347_3106_aiter_4076(page: int, vendors: Any) -> None:
    """Catches a kernel that is wrong for large pages, for fewer keys than a tile has, or for several latent queries."""
    m = (1, 15, page, page + 1, 2 * page, 17)
    sizes: dict[str, Any] = {"block_size": page, "num_blocks": None, "inputs": "needle"}
    for lens in (((1,) * 6, m), (tuple(min(n, 4) for n in m), m)):
        served((*PLAIN, "TORCH_MLA", "FLASHINFER", "FLASHINFER_MLA"), *lens, **sizes)
    seen(case_for("CPU_ATTN", "page", *lens, **sizes), "PagesOfNeighbour", "WrongSecondPage", "LastKeyDropped")


# selection


_WORDED = re.compile(r"\(supports |not supported|is not installed|not built yet|none of its providers")


def test_29_no_valid_backend_and_no_reason_vllm_30214_31480_32732_55046_36846() -> None:
    """Catches a refusal that does not say what was asked and what would be allowed."""
    for device in (H200, None):
        for asked in (
            {"head_size": 24, "dtype": "float32"},
            {"head_size": 128, "dtype": "bfloat16", "features": ["cascade", "sinks"]},
            {"head_size": 1024, "dtype": "bfloat16", "kv_cache_dtype": "fp8", "block_size": 24},
        ):
            framework = "torch" if device is None else None
            selection = attn.explain(**asked, device=device, framework=framework)  # type: ignore[arg-type]
            for verdict in selection.trace:
                assert verdict.ok or all(map(_WORDED.search, verdict.reasons)), verdict
    selection = attn.explain(128, "float32", features=["cascade"], device=H200)
    with pytest.raises(UnsupportedError) as caught:
        selection.require()
    assert "dtype=float32 (supports bfloat16, float16)" in str(caught.value) and "cascade not supported" in str(caught.value)
    assert all(v.name in str(caught.value) for v in selection.trace)


@pytest.mark.parametrize("variable", ["ATTN_BACKEND", "VLLM_ATTENTION_BACKEND"])
def test_30_explicit_choice_replaced_vllm_13730_27424_18764_50292_tensorrt_llm_17698(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_gpu: None
) -> None:
    """Catches a backend asked for by name that is replaced, a variable that is ignored, and a log that names another."""
    with caplog.at_level("INFO", "attn"):
        monkeypatch.setenv(variable, "TORCH_SDPA")
        assert attn.get_attn_backend(64, "float32", None, 16, False).get_name() == "TORCH_SDPA"
        assert "Using TORCH_SDPA attention backend" in caplog.text and "CPU_ATTN" not in caplog.text
        monkeypatch.setenv(variable, "ROCM_ATTN")
        with pytest.raises(UnsupportedError, match="ROCM_ATTN") as caught:
            attn.get_attn_backend(64, "float32", None, 16, False)
        assert "TORCH_SDPA" not in str(caught.value)
        monkeypatch.setenv(variable, "TORCH_SPDA")
        with pytest.raises(ValueError, match=f"{variable}=TORCH_SPDA"):
            attn.get_attn_backend(64, "float32", None, 16, False)
        monkeypatch.delenv(variable)
        assert attn.get_attn_backend(64, "float32", None, 16, False).get_name() == "CPU_ATTN"
        assert "Using CPU_ATTN attention backend" in caplog.text


@pytest.mark.parametrize("error", ["OSError('libcudart')", "ImportError('ABI')", "RuntimeError('driver')", "SystemExit(3)"])
def test_31_a_probe_that_raises_vllm_51658(error: str, standins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a broken vendor package that ends the process, or takes a working provider of the same backend with it."""
    from attn.torch.backends import _flash_providers as providers

    monkeypatch.setattr(providers, "PROVIDERS", [p for p in providers.PROVIDERS if p.name.startswith("FlashAttention")])
    (tmp_path / "flash_attn_interface.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))

    def choice(block_size: int | None = None, backend: str | None = None) -> Any:
        """With the packages of this host: `attn.explain` assumes those of a machine that is not here."""
        return select(make_request(128, "bfloat16", None, block_size), device=H200, backend=backend)

    alone = choice()
    told = next(verdict for verdict in alone.trace if verdict.name == "FLASH_ATTN")
    assert error.partition("(")[0] in str(told) and "FlashAttention 3" in str(told), told
    with pytest.raises(AttnError, match=error.partition("(")[0]):
        choice(backend="FLASH_ATTN").require()
    standins("fa2")
    monkeypatch.syspath_prepend(str(tmp_path))
    # By name: where Triton is installed too, the list prefers TRITON_ATTN.
    assert choice(256, backend="FLASH_ATTN").require().name == "FLASH_ATTN"
    providers._lacking.cache_clear()
    sys.modules.pop("flash_attn_interface", None)


def test_32_custom_is_an_alias_vllm_30869(make_backend: Any) -> None:
    """Catches two members that are one: registering CUSTOM must leave TORCH_SDPA alone."""
    for registry in attn.reports.report.REGISTRIES.values():
        assert len(set(registry.__members__.values())) == len(registry.__members__)
    before = AttentionBackendEnum.TORCH_SDPA.get_path()
    register_backend(AttentionBackendEnum.CUSTOM, make_backend("CUSTOM"))
    assert AttentionBackendEnum.CUSTOM is not AttentionBackendEnum.TORCH_SDPA
    assert AttentionBackendEnum.TORCH_SDPA.get_path() == before and not AttentionBackendEnum.TORCH_SDPA.is_overridden()


def test_33_shared_memory_at_head_512_vllm_57712() -> None:
    """Catches a head size or an architecture that is found out by the launch and not by the choice."""
    turing = Device("torch", "cuda", "NVIDIA T4", "sm_75")
    wide = Request(512, "float16", block_size=16)
    triton = backend("TRITON_ATTN")
    assert triton.why_not(wide, H200) == []
    assert triton.why_not(replace(wide, dtype="float32"), H200) == ["head_size=512 in float32 on sm_90 (supports up to 256)"]
    (why,) = triton.why_not(replace(wide, head_size=520), H200)
    assert why == "head_size=520 (supports multiples of 8 from 32 up to 256, 512)"
    assert "arch=sm_75 (supports sm_80+" in "; ".join(triton.why_not(replace(wide, head_size=128), turing))
    chosen = attn.explain(512, "float16", device=turing)
    assert chosen.name == "TORCH_SDPA" and all(map(_WORDED.search, (r for v in chosen.trace for r in v.reasons)))


def test_34_a_deny_list_vllm_53481(vendors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a backend that a user has ruled out and gets, a refusal of it by name, and a fall to the next without a word."""
    first = attn.explain(128, "bfloat16", device=H200).name
    monkeypatch.setenv("ATTN_DISABLE", first)
    chosen = attn.explain(128, "bfloat16", device=H200)
    second = chosen.name
    assert second not in (first, None) and f"{first}: disabled by ATTN_DISABLE" in chosen.reasons
    assert "disabled by ATTN_DISABLE" in str(chosen)
    assert attn.explain(128, "bfloat16", device=H200, backend=first).name == first  # a name goes before the list
    quantised = attn.explain(128, "bfloat16", "fp8", device=H200, disable=[second])
    assert quantised.name not in (first, second) and f"{second}: disabled by the caller" in quantised.reasons


def test_35_slopes_computed_per_rank_flashinfer_5101_1606(vendors: Any) -> None:
    """Catches ALiBi slopes that a kernel computes from the heads it has: half of a model's heads keep their own slopes."""
    served(PLAIN, alibi=True, check="head_groups")
    served(("XLA_ATTN",), **EVERYTHING)
    served(("ROCM_AITER_UNIFIED_ATTN",), alibi=True, check="head_groups")
    vendors("FlashAttention 2")
    served(("FLASH_ATTN",), alibi=True)
    refused(("FLASHINFER",), Feature.ALIBI)
    seen(case_for("CPU_ATTN", alibi=True, check="head_groups"), "AlibiRecomputed", "AlibiOfNextHead")


# the list itself


def test_every_incident_has_its_test() -> None:
    numbers = set()
    for name, function in list(globals().items()):
        if match := re.match(r"test_(\d\d)_", name):
            numbers.add(int(match[1]))
            assert (function.__doc__ or "").startswith("Catches "), name
    assert numbers == set(range(1, 36)) and ELSEWHERE.keys() <= numbers
