"""The jax driver of the conformance suite: layouts of any kind, padded rows, the layer as a whole (about 10 s)."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from attn.jax.backends.xla_attn import XLAAttentionBackend, XLAAttentionImpl
from attn.jax.testing import Runner
from attn.testing import Case, bits, draw, run_case
from attn.testing.expected import specified_cache

CASE = Case("mixed", (1, 6, 18), (33, 9, 18), padding=2, lse=True, num_blocks=16)


def test_the_cache_goes_in_and_out_byte_for_byte() -> None:
    for kv_cache_dtype in ("auto", "bfloat16", "fp8", "int8"):
        call = draw(CASE.replace(kv_cache_dtype=kv_cache_dtype))
        result = Runner(XLAAttentionBackend)(call)
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

    call, runner = draw(CASE), Runner(Padded)
    kv_cache = runner._cache(call)
    keys, values = Padded.logical_kv_cache(kv_cache)
    assert call.key_cache is not None and call.value_cache is not None
    assert np.array_equal(np.asarray(keys), call.key_cache, equal_nan=True)
    assert np.array_equal(np.asarray(values), call.value_cache, equal_nan=True)
    assert jnp.isnan(kv_cache[..., -8:]).any()


def test_padded_rows_that_are_not_zero_are_seen() -> None:
    class Impl(XLAAttentionImpl):
        def apply(self, *args: Any, **kwargs: Any) -> Any:
            (out, lse), kv_cache = super().apply(*args, **kwargs)
            return (out.at[-1].set(1.0), lse), kv_cache

    class Backend(XLAAttentionBackend):
        get_impl_cls = staticmethod(lambda: Impl)

    (violation,) = run_case(Backend, CASE)  # 27 rows, padded to 32
    assert violation.rule == "A" and "beside the output" in str(violation)
    assert "padding row" in str(run_case(Backend, CASE.replace(padding=7))[0])


def test_the_layer_compiled_whole_gives_the_same() -> None:
    assert run_case(XLAAttentionBackend, CASE.replace(check="captured")) == []
