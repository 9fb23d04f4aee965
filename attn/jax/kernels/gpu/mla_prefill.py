"""Attention of MLA's expanded heads: `attn.kernels.mla_prefill` launched by XLA, on Hopper `hopper_prefill`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attn.jax.kernels.gpu.launch import dense_strides, launch, target
from attn.kernels import fill as filling
from attn.kernels import hopper
from attn.kernels.hopper_prefill_launch import PrefillParams
from attn.kernels.launch import LOG2E, UNBOUNDED
from attn.kernels.mla_launch import mla_prefill_launch
from attn.kernels.mla_prefill import attend, constants

_STRIDES = ("o_t", "o_h", "q_t", "q_h", "k_t", "k_h", "v_t", "v_h")


@functools.partial(jax.jit, static_argnames=("scale", "causal"))
def mla_prefill(
    query: jax.Array, key: jax.Array, value: jax.Array, starts: jax.Array, key_starts: jax.Array, *, scale: float, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Return (out [T, H, Dv] in query's dtype, lse [H, T] float32, natural log): each request's queries over its own keys.

    query: [T, H, D]; key: [m, H, D]; value: [m, H, Dv]; starts, key_starts: [R + 1] int32. Causal calls align both ends. Rows
    of no request are 0, their log-sum-exp -inf.
    """
    (tokens, heads, _), num_reqs, arch = query.shape, starts.shape[0] - 1, target()[0]
    out, lse = jnp.empty((tokens, heads, value.shape[2]), query.dtype), jnp.empty((heads, tokens), jnp.float32)
    if num_reqs < 1 or tokens == 0:
        return jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    # asked in this order: the last one imports Gluon
    on_hopper = arch == "sm_90" and hopper.is_on("hopper_prefill") and _serves(query, starts, key, value, key_starts)
    # rows of no request first: the kernels below write the rows of requests only
    results: dict[str, Any] = {"output": out, "lse": lse, "query_start_loc": starts}
    results |= {"counters": jnp.empty(2, jnp.int32) if on_hopper else None}
    numbers = {"tokens": tokens, "num_reqs": num_reqs, "lse_h": tokens, **filling.constants(heads, value.shape[2])}
    writes = ["output", "lse", *(["counters"] if on_hopper else [])]
    out, lse, *counters = launch(filling.fill, arch, (-(-tokens // filling.ROWS),), results | numbers, writes)
    try:
        if on_hopper:
            return _on_hopper(out, lse, counters[0], _prompts(query, starts, key, value, key_starts), scale, causal)
    except hopper.CannotCompile:
        pass  # the general kernel writes all of their rows
    sizes, itemsize = (query.shape[2], value.shape[2]), query.dtype.itemsize
    rule = mla_prefill_launch(arch, *sizes, itemsize)
    # the last dimension is dense, so its stride is no argument
    strides = [n for x in (out, query, key, value) for n in dense_strides(x.shape)[:2]]
    arguments = {
        **{"out": out, "lse": lse, "query": query, "key": key, "value": value, "query_start_loc": starts},
        "key_start_loc": key_starts,
        "factor": scale * LOG2E,
        "num_reqs": num_reqs,
        "lse_h": tokens,
        **dict(zip(_STRIDES, strides, strict=True)),
        **constants(rule, arch, sizes, itemsize, causal),
    }
    return launch(attend, arch, (tokens // rule.block_m + num_reqs, heads), arguments, ["out", "lse"])  # type: ignore[return-value]


def _prompts(*arrays: Any) -> Any:
    """The arrays as `hopper_prefill.Prompts`; that module is imported on Hopper only."""
    from attn.jax.kernels.gpu.hopper_prefill import Prompts

    return Prompts(*arrays)


def _serves(*arrays: Any) -> bool:
    from attn.jax.kernels.gpu.hopper_prefill import serves

    return serves(_prompts(*arrays))


def _on_hopper(
    out: jax.Array, lse: jax.Array, counters: jax.Array, prompts: Any, scale: float, causal: bool
) -> tuple[jax.Array, jax.Array]:
    from attn.jax.kernels.gpu.hopper_prefill import Out, prefill

    tokens, num_reqs = prompts.query.shape[0], prompts.starts.shape[0] - 1
    # Lengths are not known when the program is made: tiles are chosen for the mean of the padded batch.
    params = PrefillParams(right=0 if causal else UNBOUNDED).seeing(prompts.keys.shape[0] / num_reqs, tokens / num_reqs)
    outputs = prefill(Out(out, lse, counters), prompts, params, scale * LOG2E, *target())
    assert outputs.lse is not None
    return outputs.output, outputs.lse
