"""Absorbed MLA over a paged cache of latents, and the write to it: `attn.kernels` launched by XLA.

Keys are split by all lengths: a launch before the others (`mla_prepare`) fills the table of stream-K from the lengths on the
device, so that one program serves every batch of its shapes; it also stores new latents. Rows of no request are 0, their
log-sum-exp -inf.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn.jax.kernels.gpu.launch import Boxed, dense_strides, launch, target
from attn.kernels import fill, hopper, latent_write, mla_prepare
from attn.kernels.launch import FIELDS, LOG2E, block_of
from attn.kernels.mla_decode import attend, merge
from attn.kernels.mla_launch import Decode, MLALaunches, RopeFrom, fits_hopper, launches_of, prefers_hopper


class Latents(NamedTuple):
    """A batch's keys. cache: [N, P, L + Dr], or [N, P, 656] uint8 (fp8_ds_mla); lens: [R], table: [R, B], int32. k_scale: of
    fp8 codes, float32 0-d, or None."""

    cache: jax.Array
    lens: jax.Array
    table: jax.Array
    k_scale: jax.Array | None = None


class DecodeParams(NamedTuple):
    """Static parameters of a program besides shapes: Dr, the factor of scores, causality, and the most new tokens and the most
    keys of a request."""

    rope: int
    scale: float
    causal: bool
    max_query_len: int
    max_seq_len: int


class New(NamedTuple):
    """Latents to be stored: kv_c [T, L], k_pe [T, Dr], at slots [T] (int32, -1: nowhere)."""

    kv_c: jax.Array
    k_pe: jax.Array
    slots: jax.Array


@functools.partial(jax.jit, static_argnames=("rules", "return_lse"))
def mla_decode(
    absorbed: jax.Array,
    query: jax.Array,
    starts: jax.Array,
    latents: Latents,
    rules: DecodeParams,
    new: New | None = None,
    *,
    return_lse: bool = True,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Return (out [T, H, L] in absorbed's dtype, lse [H, T] float32, natural log, or None unless `return_lse`, cache).

    absorbed: [T, H, L], query: [T, H, Dn + Dr], whose last Dr columns are read; float32, bfloat16 or float16. starts: [R + 1]
    int32, where requests begin. The cache has the `new` latents, before any is attended, in place if it is donated.
    """
    (tokens, heads, rank), num_reqs = absorbed.shape, starts.shape[0] - 1
    if num_reqs < 1 or tokens == 0:
        return jnp.zeros_like(absorbed), jnp.full((heads, tokens), -jnp.inf) if return_lse else None, latents.cache
    args: dict[str, Any] = {
        "out": jnp.empty(absorbed.shape, absorbed.dtype),
        "lse": jnp.empty((heads, tokens), jnp.float32) if return_lse else None,
        "query": absorbed,
        "rope": query,
        "query_start_loc": starts,
        # the number of keys that each row sees, where it is not that of a causal row
        "limits": None if rules.causal else _own_lengths(starts, latents.lens, tokens),
        "indices": None,
    }
    args |= {"cache": latents.cache, "seq_lens": latents.lens, "block_table": latents.table, "k_scale": latents.k_scale}
    call = _decode(args, rules)
    plan = launches_of(call)
    states = plan.states(tokens * heads)
    # The kernel has these parameters in any case, and XLA no empty arrays with an address: one row stands for none.
    args["partial"] = jnp.empty(max(1, states) * rank, jnp.float32)
    args["partial_lse"] = jnp.empty(max(1, states), jnp.float32)
    args |= _numbers(call, plan, args) | {"factor": rules.scale * LOG2E, "v_factor": 1.0}
    # Without a plan the kernel does not read `items`, and any int32 array will do. The latents are written here, so that the
    # launches below read the cache that this one returns.
    args |= {"items": starts} | _prepared(call, plan, args, new)
    try:
        args |= (_attend_on_hopper if call.on_hopper else _attend)(call, plan, args)
    # While the call is traced: nothing has run, and the kernel is off from here on, so the second attempt takes the other.
    except hopper.CannotCompile:
        return mla_decode(absorbed, query, starts, latents, rules, new, return_lse=return_lse)
    if states:
        args |= _run(merge, call.arch, plan.merge_grid(num_reqs, heads, rules.max_query_len), args | plan.merge, _RESULTS)
    return args["out"], args["lse"], args["cache"]


_RESULTS = ("out", "lse")
_STATES = (*_RESULTS, "partial", "partial_lse")


def _attend(call: Decode, plan: MLALaunches, args: dict[str, Any]) -> dict[str, jax.Array]:
    """The first stage."""
    # the same bytes, where the hardware does not convert e4m3 (`number_in`)
    codes = {"cache": "uint8"} if args["cache"].dtype == jnp.float8_e4m3fn and plan.attend["BYTES"] else {}
    return _run(attend, call.arch, (plan.programs(call.requests), plan.max_splits), args | plan.attend, _STATES, **codes)


def _attend_on_hopper(call: Decode, plan: MLALaunches, args: dict[str, Any]) -> dict[str, jax.Array]:
    """The same by the Hopper kernel. Raises `hopper.CannotCompile` if the installed Triton does not compile it, for which the
    kernel is off from then on."""
    from attn.kernels import hopper_mla

    cache = args["cache"]
    flags = {name: args[name] is not None for name in ("limits", "lse")} | {
        "sparse": False,
        "planned": plan.stream_k is not None,
    }
    arguments = args | {
        "desc": Boxed(cache, *hopper_mla.map_of(cache.shape, dense_strides(cache.shape))),
        "row_tiles": plan.tiles,
        # more than any request's keys: the only split has all of them
        "split_size": plan.split_size if plan.max_splits > 1 else 1 << 30,
        "num_pages": cache.shape[0],
        **hopper_mla.constants(call.heads, call.page, rope_from=call.rope_from, **flags),
    }
    try:
        return _run(hopper_mla.attend, call.arch, (plan.programs(call.requests), plan.max_splits), arguments, _STATES)
    except Exception as error:
        hopper.turn_off("hopper_mla", error)
        raise


def _decode(args: dict[str, Any], rules: DecodeParams) -> Decode:
    (_, heads, rank), (_, page, _), (num_reqs, columns) = (args[x].shape for x in ("query", "cache", "block_table"))
    (arch, processors), (_, _, width), cache, dtype = target(), args["rope"].shape, args["cache"], args["query"].dtype
    # by the static extents alone: arrays that XLA allocates are aligned, and dense
    plain = cache.dtype == dtype and dtype.itemsize == 2
    extents = (heads, rank + rules.rope), cache.shape[1:], dense_strides(cache.shape)[:2]
    return Decode(
        arch=arch,
        processors=processors,
        pdl=False,
        on_hopper=plain and prefers_hopper(arch, False) and fits_hopper(*extents, rank, 0, False),
        requests=num_reqs,
        heads=heads,
        rank=rank,
        rope=rules.rope,
        max_query_len=rules.max_query_len,
        # a bucket's bound may exceed what the table can name
        keys=min(rules.max_seq_len, columns * page),
        page=page,
        itemsize=dtype.itemsize,
        stored=cache.dtype.itemsize,
        fixed_split=0,
        sparse=False,
        packed=cache.dtype == jnp.uint8,
        # lengths are not known when the program is made
        uneven=True,
        # the last Dr columns of the layer's own query, so that it is not concatenated with the absorbed part
        rope_from=RopeFrom(heads * width, width, width - rules.rope),
    )


def _numbers(call: Decode, plan: MLALaunches, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of both stages that are neither arrays nor the rule's."""
    (_, page, row), tokens, rank = args["cache"].shape, args["query"].shape[0], call.rank
    return {
        "max_splits": plan.max_splits,
        "split_size": plan.split_size,
        "groups": 0 if plan.stream_k is None else plan.stream_k.groups,
        "max_query": call.max_query_len,
        "lse_h": 0 if args["lse"] is None else tokens,
        "table_r": args["block_table"].shape[1],
        "topk": 0,
        "indices_t": 0,
        **{"o_t": call.heads * rank, "o_h": rank, "q_t": call.heads * rank, "q_h": rank, "c_block": page * row, "c_slot": row},
        # offsets of 64 bits only where a cache needs them
        "WIDE": args["cache"].size >= 2**31,
    }


def _prepared(call: Decode, plan: MLALaunches, args: dict[str, Any], new: New | None) -> dict[str, jax.Array]:
    """Fill the table of stream-K, store new latents, and write the rows of no request; return what it wrote by name."""
    (tokens, _, rank), cache = args["out"].shape, args["cache"]
    groups, _, items = plan.stream_k or (0, 0, 0)
    # No new rows: the programs that would store them are none, and the cache is no operand of this launch.
    kv_c, k_pe, slots = new or (None, None, None)
    code, rows = "" if kv_c is None else latent_write.code_of(kv_c.dtype.name, cache.dtype.name), 0 if kv_c is None else tokens
    arguments = {
        "table": jnp.empty(2 * groups + FIELDS * items, jnp.int32) if groups else None,
        "cache": cache if new else None,
        "output": args["out"],
        "lse": args["lse"],
        "kv_c": kv_c,
        "k_pe": k_pe,
        "slots": slots,
        "k_scale": args["k_scale"],
        "query_start_loc": args["query_start_loc"],
        "seq_lens": args["seq_lens"],
        "factor": 1.0,
        "num_reqs": call.requests,
        "groups": groups,
        "rows": plan.tiles * plan.block_m,
        # rows of new tokens, one program each; then those of no request, ROWS each
        "new": rows,
        "tokens": tokens,
        "lse_h": tokens,
        **{"kv_c_t": rank, "k_pe_t": call.rope, "c_block": args["c_block"], "c_slot": args["c_slot"]},
        **mla_prepare.constants((call.heads, plan.block_n, block_of(call.requests)), (rank, call.rope, call.page), code),
    }
    # the stages' name of each array -> the name of the parameter in this kernel
    written = {"out": "output", "lse": "lse", "items": "table", "cache": "cache"}
    written = {name: parameter for name, parameter in written.items() if arguments[parameter] is not None}
    codes = {"cache": "uint8"} if code in ("e4m3", "e5m2") else {}
    # programs for the table, then for new rows, then for rows of no request: `mla_prepare` tells them apart by number
    grid = (groups + rows - (-tokens // fill.ROWS),)
    arrays = launch(mla_prepare.prepare, call.arch, grid, arguments, [*written.values()], **codes)
    return dict(zip(written, arrays, strict=True))


def _own_lengths(starts: jax.Array, lens: jax.Array, tokens: int) -> jax.Array:
    """[T] the keys of each row's request."""
    # rows of no request get the last one's length, and are not written
    request = jnp.searchsorted(starts[1:], jnp.arange(tokens, dtype=jnp.int32), side="right")
    return lens[jnp.minimum(request, lens.shape[0] - 1)]


def _run(
    kernel: Any, arch: str, grid: tuple[int, int], arguments: dict[str, Any], writes: tuple[str, ...], **types: str
) -> dict[str, jax.Array]:
    """Launch a stage, and return what it writes by name. arguments: also those of the other stage."""
    # `launch` takes a name that is no parameter as an option, so what belongs to the other stage must go
    known = {"num_warps", "num_stages", "enable_fp_fusion", *kernel.arg_names}
    accepted = {name: value for name, value in arguments.items() if name in known}
    written = [name for name in writes if accepted[name] is not None]
    return dict(zip(written, launch(kernel, arch, grid, accepted, written, **types), strict=True))


@jax.jit
def write_latents(
    kv_c: jax.Array, k_pe: jax.Array, cache: jax.Array, slots: jax.Array, k_scale: jax.Array | None = None
) -> jax.Array:
    """Return `cache` [N, P, W] with kv_c [T, L] and k_pe [T, Dr] at `slots` [T] (int32, -1: nowhere), in place if donated.

    k_scale: float32 0-d, which fp8 codes need.
    """
    (tokens, rank), rope, (_, page, row) = kv_c.shape, k_pe.shape[1], cache.shape
    code = latent_write.code_of(kv_c.dtype.name, cache.dtype.name)
    arguments = {
        "kv_c": kv_c,
        "k_pe": k_pe,
        "cache": cache,
        "slots": slots,
        "k_scale": k_scale,
        **dict.fromkeys(("query", "absorbed")),
        "factor": 1.0,
        "tokens": tokens,
        "copied": 0,
        **{"kv_c_t": rank, "k_pe_t": rope, "c_block": page * row, "c_slot": row, "q_t": 0, "q_h": 0, "a_t": 0, "a_h": 0},
        **latent_write.constants(rank, rope, page, code, 0, 0),
    }
    codes = {"cache": "uint8"} if code in ("e4m3", "e5m2") else {}
    return launch(latent_write.write, target()[0], (tokens,), arguments, ["cache"], **codes)[0]
