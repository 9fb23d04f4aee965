"""The Hopper prefill, `attn.kernels.hopper_prefill`, launched by XLA.

It runs on all multiprocessors, since launches do not overlap.
"""

from typing import Any, NamedTuple

import jax

from attn.jax.kernels.gpu.launch import Boxed, dense_strides, launch
from attn.kernels import hopper
from attn.kernels.hopper_prefill import prefill as _prefill
from attn.kernels.hopper_prefill_launch import ONE_PAGE, ROWS, Arrays, PrefillParams, Variant, constants, copies, fits, plan_of
from attn.visibility import PLAIN, BatchMask

_STRIDES = ("o_t", "o_h", "q_t", "q_h", "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head")


class Prompts(NamedTuple):
    """A batch of requests.

    query: [T, H, D]; starts: [R + 1] int32, or None of equal requests (`Variant`): keys [R, M, K, D] and values [R, M, K, Dv]
    then, and no other list. keys: [T, K, D] and values: [T, K, Dv], where each request sees its own rows; or
    [m, K, D] and [m, K, Dv], and key_starts: [R + 1] int32, where each request's keys begin; or keys: [2, N, P, K, D], keys,
    then values, or both as [N, P, K, D] and [N, P, K, Dv], with lens: [R] and table: [R, B], int32. sinks: [H] float32 or None.
    mask: what rows see, without a tree. one_page: whether each request's keys are in one page, of any size.
    """

    query: jax.Array
    starts: Any
    keys: jax.Array
    values: jax.Array | None = None
    key_starts: jax.Array | None = None
    lens: Any = None
    table: Any = None
    sinks: jax.Array | None = None
    mask: BatchMask = PLAIN
    one_page: bool = False

    @property
    def page(self) -> int:
        """Keys of a page, or of a tile where there are no pages."""
        if self.one_page or self.starts is None:
            return ONE_PAGE
        return ROWS if self.table is None else self.keys.shape[-3]


class Out(NamedTuple):
    """Arrays that the kernel writes: output [T, H, Dv]; lse [H, T] float32, natural log, or None; counters: zeros [2], int32,
    which are zeros again at its end."""

    output: jax.Array
    lse: jax.Array | None
    counters: jax.Array


def serves(batch: Prompts, negate: bool = False) -> bool:
    """Whether the kernel supports these shapes and dtypes; the caller checks the architecture and features. negate:
    whether the scale is negative."""
    query, keys = batch.query, batch.keys
    # XLA's arrays are dense and aligned, so strides and addresses follow from shapes.
    values = keys if batch.values is None else batch.values
    if query.dtype.name not in ("bfloat16", "float16") or not query.dtype == keys.dtype == values.dtype:
        return False
    (_, heads, size), kv_heads = query.shape, keys.shape[-2]
    group = heads // kv_heads
    return fits(size, values.shape[-1], copies(group, dense_strides(query.shape), negate, True), group, batch.page)


def prefill(out: Out, batch: Prompts, params: PrefillParams, factor: float, arch: str, processors: int) -> Out:
    """Return `out` with the rows of all requests of more than `params.min_query` tokens.

    factor: as in `attn.torch.kernels.hopper_prefill.prefill`. Raises `hopper.CannotCompile` if the installed Triton does not
    compile it, for which the kernel is off from then on.
    """
    query, keys, values = batch.query, batch.keys, batch.values
    equal = batch.starts is None
    num_reqs = keys.shape[0] if equal else batch.starts.shape[0] - 1
    # keys and values in one array are one list of pages, in which the values' begin at `pages`
    pages = 0
    if values is None:
        pages, keys = keys.shape[1], keys.reshape(-1, *keys.shape[2:])
    shapes = query.shape, keys.shape, (keys if values is None else values).shape
    of = Arrays(*shapes, *map(dense_strides, (*shapes, out.output.shape)))
    paged, ragged = batch.table is not None, batch.key_starts is not None
    plan = plan_of(of, num_reqs, batch.page, equal or paged, params, True)
    q_map, k_map, v_map = plan.maps
    # A kernel without a map of queries still has the parameter: the keys' map takes its place, and is not used.
    k_desc = Boxed(keys, *k_map)
    has = [x is not None for x in (q_map, batch.sinks, out.lse, batch.mask.is_causal)]
    arguments = {
        **out._asdict(),
        "query": query,
        "key_cache": keys,
        "value_cache": values,
        "query_start_loc": batch.starts,
        # one parameter for both: `RAGGED` says that it is where each request's keys begin
        "seq_lens": batch.key_starts if ragged else batch.lens,
        "block_table": batch.table,
        "sinks": batch.sinks,
        **{name: getattr(batch.mask, name) for name in ("spans", "prefix", "is_causal")},
        "q_desc": k_desc if q_map is None else Boxed(query, *q_map),
        "k_desc": k_desc,
        "v_desc": Boxed(keys if values is None else values, *v_map),
        "factor": factor,
        "v_factor": 1.0,
        "num_reqs": num_reqs,
        "num_pages": keys.shape[1 if equal else 0],
        "lse_h": 0 if out.lse is None else out.lse.shape[1],
        "table_r": 0 if batch.table is None else batch.table.shape[1],
        "rows": query.shape[0] // num_reqs if equal else 0,
        **dict(zip(_STRIDES, plan.strides, strict=True)),
        **constants(plan.sizes, params, Variant(paged, ragged, has[0], has[1], has[2], has[3], plan.far, equal), pages),
    }
    writes = [name for name, array in out._asdict().items() if array is not None]
    try:
        outputs = launch(_prefill, arch, (plan.programs(processors),), arguments, writes)
    # `turn_off` raises `CannotCompile` for the compiler's errors; any other is the caller's
    except Exception as error:
        hopper.turn_off("hopper_prefill", error)
        raise
    return out._replace(**dict(zip(writes, outputs, strict=True)))
