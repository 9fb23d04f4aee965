"""The conformance suites on TRITON_ATTN_JAX and TRITON_MLA_JAX, their kernels in Triton's interpreter, in a process that
tests/torch/test_interpreted.py starts.

XLA's custom call is replaced by a callback of the host that gives the kernel tensors of torch. The rest is the backend's own:
metadata, launches, what is aliased, jitted steps with a donated cache.
"""

import dataclasses
import importlib
import importlib.util
import os
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp

from attn import reference
from attn.jax.backends.mla.prefill.triton import TritonPrefillBackend
from attn.jax.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl
from attn.jax.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from attn.jax.diffusion.backends import triton_attn as dense
from attn.testing import Case, cases_for, run_case
from attn.testing.dense import DenseCase, check_dense, dense_cases
from attn.testing.prefill import check_prefill, prefill_cases
from tests.levels import sampled

pytestmark = [
    pytest.mark.triton_interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
#: XLA runs callbacks that do not depend on one another in several threads; the interpreter has one grid.
_ONE = threading.Lock()
_BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


class Interpreted(TritonAttentionBackend):
    """The backend on the host, where it does not run."""

    capabilities = dataclasses.replace(TritonAttentionBackend.capabilities, platforms=("cpu",), archs=())


class InterpretedImpl(TritonAttentionImpl, backend=Interpreted):
    pass


class InterpretedMLA(TritonMLABackend):
    capabilities = dataclasses.replace(TritonMLABackend.capabilities, platforms=("cpu",), archs=())


class InterpretedMLAImpl(TritonMLAImpl, backend=InterpretedMLA):
    pass


class InterpretedDense(dense.TritonAttentionBackend):
    """The backend on the host, where it does not run."""

    capabilities = dataclasses.replace(dense.TritonAttentionBackend.capabilities, platforms=("cpu",), archs=())


class InterpretedDenseImpl(dense.TritonAttentionImpl, backend=InterpretedDense):
    pass


class InterpretedPrefill(TritonPrefillBackend):
    capabilities = dataclasses.replace(TritonPrefillBackend.capabilities, platforms=("cpu",), archs=())


def _tensor(value: Any, dtype: str) -> Any:
    """A tensor of torch with a copy of an array's bits, read as `dtype`."""
    import torch

    value = np.array(value)
    if value.dtype == np.bool_:
        return torch.from_numpy(value)
    return torch.from_numpy(value.view(_BITS[value.dtype.itemsize])).view(getattr(torch, dtype))


def _launch(kernel: Any, arch: str, grid: Any, arguments: Any, writes: Any, **types: str) -> tuple[Any, ...]:
    """`attn.jax.kernels.gpu.launch.launch`, interpreted."""
    given = {name: arguments[name] for name in kernel.arg_names}
    arrays = {name: value for name, value in given.items() if isinstance(value, jax.Array | np.ndarray)}
    if not np.prod(grid):
        return tuple(jnp.asarray(arrays[name]) for name in writes)

    def run(*values: Any) -> tuple[Any, ...]:
        kinds = {name: types.get(name, array.dtype.name) for name, array in arrays.items()}
        tensors = {name: _tensor(value, kinds[name]) for name, value in zip(arrays, values, strict=True)}
        with _ONE:
            kernel[grid](**{**given, **tensors})
        return tuple(_array(tensors[name], arrays[name].dtype) for name in writes)

    results = [jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in writes]
    return tuple(jax.pure_callback(run, results, *arrays.values()))


def _array(tensor: Any, dtype: Any) -> Any:
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    return tensor.view(bits).numpy().view(dtype)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn.torch.interpreter import correct_bfloat16

    correct_bfloat16()
    # uninitialized memory
    monkeypatch.setattr(
        jnp, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 7, dtype)
    )
    names = "kernels.gpu.paged_attention", "kernels.gpu.mla_attention", "kernels.gpu.mla_prefill", "kernels.gpu.dense_attention"
    for name in (*names, "diffusion.backends.triton_attn"):
        module = importlib.import_module(f"attn.jax.{name}")
        monkeypatch.setattr(module, "launch", _launch, raising=False)
        monkeypatch.setattr(module, "target", lambda: ("interpreter", 8))


def _cases() -> list[Any]:
    found = []
    for backend in (Interpreted, InterpretedMLA):
        cases = cases_for(backend) if INTERPRETS else []
        given = [pytest.param(backend, case, id=f"{backend.name}-{case}") for case in cases]
        found += sampled(given, 8, backend.name)
    return found


def _dense_cases() -> list[Any]:
    cases = [case for case in dense_cases(InterpretedDense) if not case.vast] if INTERPRETS else []
    return sampled([pytest.param(case, id=str(case)) for case in cases], 3, "TRITON_ATTN_JAX, dense")


@pytest.mark.parametrize("case", _dense_cases())
def test_dense(case: DenseCase, interpreted: None) -> None:
    check_dense(InterpretedDense, case)


@pytest.mark.parametrize(("rows", "keys", "lens"), [(20, 20, None), (20, 33, (33, 5)), (1, 40, (0, 7))])
def test_vmap_and_gradients_are_those_of_jax(rows: int, keys: int, lens: Any, interpreted: None) -> None:
    """A mapped axis is part of the batch; a differentiated call is computed by the other implementation alone."""
    from attn.jax import dot_product

    rng, calls = np.random.default_rng(0), list[str]()
    shapes = (3, 2, rows, 4, 32), (3, 2, keys, 2, 32), (3, 2, keys, 2, 32)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    options = {"is_causal": rows == keys, "return_residual": True}
    given = None if lens is None else jnp.asarray(lens, jnp.int32)

    def chosen(call: Any, backend: Any, *features: Any) -> str:
        calls.append("other" if features else "ours")
        return "xla" if features else "TRITON_ATTN_JAX"

    def ours(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return dot_product.dot_product_attention(query, key, value, key_value_seq_lengths=given, **options)

    def theirs(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        more = {"key_value_seq_lengths": given, "implementation": "xla"}
        return dot_product.dot_product_attention(query, key, value, **more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dot_product, "_chosen", chosen)
        for axes in ((0, 0, 0), (0, None, 0)):
            some = [x if axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True)]
            (got, got_lse), (want, want_lse) = (jax.vmap(f, axes)(*some) for f in (ours, theirs))
            np.testing.assert_allclose(got, want, atol=2e-5)
            np.testing.assert_allclose(got_lse, want_lse, atol=2e-5)
        assert set(calls) == {"ours"}

        def gradients(function: Any, *arrays: jax.Array) -> Any:
            def loss(*arrays: jax.Array) -> jax.Array:
                out, lse = function(*arrays)
                return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

            return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

        for one in (True, False):
            some = [x[0] for x in arrays] if one else arrays
            got, want = (gradients(f if one else jax.vmap(f), *some) for f in (ours, theirs))
            for mine, other in zip(got, want, strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-6)
    assert "other" in calls


@pytest.mark.parametrize(("backend", "case"), _cases())
def test_conformance(backend: Any, case: Case, interpreted: None) -> None:
    violations = run_case(backend, case)
    assert not violations, "\n".join(map(str, violations))


def _prefills() -> list[Any]:
    cases = prefill_cases(InterpretedPrefill) if INTERPRETS else []
    return sampled([pytest.param(case, id=str(case)) for case in cases], 4, "TRITON_JAX")


@pytest.mark.parametrize("case", _prefills())
def test_prompts_of_expanded_heads_conform(case: Any, interpreted: None) -> None:
    check_prefill(InterpretedPrefill, case)


def test_requests_of_equal_length_stay_whole_and_others_are_cut(interpreted: None) -> None:
    """By one of two launches of one program, which the lengths choose."""
    from attn.jax.kernels.gpu.paged_attention import BatchBounds, KVInputs, paged_attention
    from attn.kernels.paged_launch import LayerParams

    requests, page, columns = 8, 16, 13
    rng, layer = np.random.default_rng(0), LayerParams(32**-0.5, 0.0, None, 0, 0, None, False, 0, None)
    query = rng.standard_normal((requests, 2, 32), np.float32)
    cache = rng.standard_normal((2, requests * columns, page, 2, 32), np.float32)
    table = np.arange(requests * columns, dtype=np.int32).reshape(requests, columns)
    starts = np.arange(requests + 1, dtype=np.int32)
    for lens in ([70] * requests, [200, *rng.integers(1, 60, requests - 1)]):
        seq_lens = np.asarray(lens, np.int32)
        batch = {"query_start_loc": starts, "seq_lens": seq_lens, "block_table": table}
        want, want_lse = reference.paged_attention(query, *cache, **batch)
        keys = KVInputs(jnp.asarray(cache), seq_lens, table)
        out, lse = paged_attention(jnp.asarray(query), starts, keys, layer, BatchBounds(1, 208))
        np.testing.assert_allclose(out, want, atol=2e-5)
        np.testing.assert_allclose(lse, want_lse, atol=2e-5)


MANY, EVEN = 40, [900] * 40
UNEVEN = [*EVEN[1:], 90_000]


@pytest.mark.parametrize(
    ("tokens", "lens", "left", "whole"),
    [
        ([1] * MANY, EVEN, None, True),
        ([1] * MANY, UNEVEN, None, False),
        ([1] * MANY, UNEVEN, 500, True),  # rows of a window see about equally many keys
        ([1] * MANY + [0] * 9, EVEN + [0] * 9, None, True),  # padding is no request
        ([40] + [1] * MANY, [90_000, *EVEN], None, True),  # a prompt has its own launch
        ([1] * 20 + [0] * 29, EVEN[:20] + [0] * 29, None, False),  # too few to fill the device
    ],
)
def test_one_of_two_launches_has_a_batchs_decodes(
    tokens: list[int], lens: list[int], left: int | None, whole: bool, interpreted: None
) -> None:
    from attn.kernels import fill

    starts = np.cumsum([0, *tokens]).astype(np.int32)
    made = [jnp.empty(len(starts), jnp.int32) for _ in range(2)]
    output = jnp.empty((int(starts[-1]) + 3, 2, 40), jnp.bfloat16)
    given = {
        **fill.constants(2, 40), "output": output, "lse": jnp.empty((2, len(output)), jnp.float32), "counters": None,
        "whole": made[0], "split": made[1], "query_start_loc": starts, "seq_lens": np.asarray(lens, np.int32),
        "num_reqs": len(lens), "tokens": len(output), "lse_h": len(output), "left": 1 << 30 if left is None else left,
        "most": 1, "keys_per_tile": 64, "whole_from": 26, "BLOCK_R": 256,
    }  # fmt: skip
    names = ["output", "lse", "whole", "split"]
    output, lse, *made = _launch(fill.fill, "interpreter", (-(-len(output) // fill.ROWS),), given, names)
    for of, wanted in zip(made, (whole, not whole), strict=True):
        assert np.asarray(of).tolist() == (starts.tolist() if wanted else [0] * len(starts))
    assert not np.asarray(output[starts[-1] :]).any() and np.isneginf(lse[:, starts[-1] :]).all()
    assert np.isnan(np.asarray(output[: starts[-1]], np.float32)).all() and np.isnan(lse[:, : starts[-1]]).all()
