"""Calls of JAX's entry, judged."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn.errors import AttnError
from attn.jax.dot_product import dot_product_attention
from attn.tools.fuzz.entries import CallCase, Compared


def call_entry(case: CallCase) -> str:
    """Judge a call of `attn.jax.dot_product_attention` by `jax.nn`'s (`Compared`)."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in case.shapes.items()}
    if case.extra:
        arrays[case.extra] = arrays.pop("more")
    if case.extra == "mask":
        arrays["mask"] = arrays["mask"] > -0.5
        # A row without keys is 0 here, and not in jax.nn.
        arrays["mask"][..., :1] = True
    if case.extra.endswith("lengths"):
        # At least one key each, for the same reason.
        arrays[case.extra] = rng.integers(1, 9, case.more, np.int32)
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}

    def called(function: Callable[..., Any]) -> Any:
        run = functools.partial(function, scale=case.scale, is_causal=case.causal)
        # Shapes are compared without compiling, which most of a case's time would be.
        return run(**arrays) if case.run else jax.eval_shape(lambda arrays: run(**arrays), arrays)

    def same(got: Any, want: Any) -> None:
        assert (got.shape, got.dtype) == (want.shape, want.dtype), f"{case}: another shape: {got.shape}, not {want.shape}"
        if case.run and want.size and arrays["key"].shape[-3]:  # a row without keys is 0, which is not jax.nn's
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f"{case}: another result")

    theirs, entry = (functools.partial(called, function) for function in (jax.nn.dot_product_attention, dot_product_attention))
    # jax.nn also refuses with an AssertionError and a ZeroDivisionError
    return Compared(theirs, Exception, entry, AttnError, same).judged(case)
