"""The jax driver of the conformance suite: layouts of any kind, padded rows, the whole layer, planted races (about 10 s)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn.jax.backends.xla_attn import XLAAttentionBackend, XLAAttentionImpl
from attn.jax.testing import DMA_MODES, JaxRunner, KernelRace, compiling_fast, watched
from attn.testing import Case, bits, draw, run_case
from attn.testing.expected import specified_cache

EXACT = True
CASE = Case("mixed", (1, 6, 18), (33, 9, 18), padding=2, lse=True, num_blocks=16)


def test_the_cache_goes_in_and_out_byte_for_byte() -> None:
    for kv_cache_dtype in ("auto", "bfloat16", "fp8", "int8"):
        call = draw(CASE.replace(kv_cache_dtype=kv_cache_dtype))
        result = JaxRunner(XLAAttentionBackend)(call)
        assert result.key_cache is not None and result.value_cache is not None
        for stored, want in zip((result.key_cache, result.value_cache), specified_cache(call), strict=True):
            assert np.array_equal(bits.as_bytes(stored), bits.as_bytes(want))


def test_a_layout_with_holes_is_filled_through_its_logical_view() -> None:
    class Padded(XLAAttentionBackend):
        """[N, P, K, 2, D + 8]: what no logical view shows is poison too."""

        @staticmethod
        def get_kv_cache_shape(n: int, p: int, k: int, d: int, cache_dtype_str: str = "auto") -> tuple[int, ...]:
            return (n, p, k, 2, d + 8)

        @staticmethod
        def logical_kv_cache(kv_cache: Any) -> tuple[Any, Any]:
            return kv_cache[..., 0, :-8], kv_cache[..., 1, :-8]

    call, runner = draw(CASE), JaxRunner(Padded)
    kv_cache = runner._cache(call)
    keys, values = Padded.logical_kv_cache(kv_cache)
    assert call.key_cache is not None and call.value_cache is not None
    assert np.array_equal(np.asarray(keys), call.key_cache, equal_nan=True)
    assert np.array_equal(np.asarray(values), call.value_cache, equal_nan=True)
    assert jnp.isnan(kv_cache[..., -8:]).any()


def test_padded_rows_that_are_not_zero_are_seen() -> None:
    class Backend(XLAAttentionBackend):
        pass

    class Impl(XLAAttentionImpl, backend=Backend):
        def apply(self, *args: Any, **kwargs: Any) -> Any:
            (out, lse), kv_cache = super().apply(*args, **kwargs)
            return (out.at[-1].set(1.0), lse), kv_cache

    (violation,) = run_case(Backend, CASE)  # 27 rows, padded to 32
    assert violation.rule == "A" and "beside the output" in str(violation)
    assert "padding row" in str(run_case(Backend, CASE.replace(padding=7))[0])


def test_the_layer_compiled_whole_gives_the_same() -> None:
    assert run_case(XLAAttentionBackend, CASE.replace(check="captured")) == []


def launch(wait: bool = True, source: int = 1) -> jax.Array:
    """Twice the row of [[0...], [1...]] that a kernel fetches by DMA."""

    def body(row: Any, x: Any, y: Any, buffer: Any, sem: Any) -> None:
        copy = pltpu.make_async_copy(x.at[pl.ds(row[0], 1)], buffer, sem)
        copy.start()
        if wait:
            copy.wait()
        y[...] = 2 * buffer[...]

    rows = jnp.arange(2, dtype=jnp.float32)[:, None] * jnp.ones((1, 128))
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((1, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.HBM)],
        scratch_shapes=[pltpu.VMEM((1, 128), jnp.float32), pltpu.SemaphoreType.DMA(())],
    )(jnp.array([source]), rows).block_until_ready()


def test_what_is_planted_is_caught() -> None:
    """A copy that is not waited for is a race in one mode and NaN in the other, a row that is not there raises in both."""
    for mode in DMA_MODES:
        with watched(mode):
            assert (launch() == 2).all()
        with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)out.of.bounds"), watched(mode):
            launch(source=2)
    with watched("on_wait"):
        assert jnp.isnan(launch(wait=False)).all()
    with pytest.raises(KernelRace, match="dma_execution_mode=eager: RACE DETECTED"), watched("eager"):
        launch(wait=False)


def test_what_compiles_fast_leaves_the_options_as_they_were() -> None:
    option = "jax_disable_most_optimizations"
    before = jax.config.read(option)
    try:
        for usual in (True, False):
            jax.config.update(option, usual)
            with compiling_fast():
                assert jax.config.read(option)
            assert jax.config.read(option) is usual
    finally:
        jax.config.update(option, before)
