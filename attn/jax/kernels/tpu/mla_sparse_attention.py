"""Multi-head latent attention for TPUs in which each query row names the keys of a paged cache that it attends.

Each key is one DMA. Only SparseCores have indirect DMAs, and those write to HBM, so the scalar unit starts a copy for every key
of every row: six scalar instructions in 3.5 bundles, which take several times as long as the products. The copies of later
keys are therefore started in the code that multiplies earlier ones, without branches and with addresses known at compile time.

Layout. The cache is [N, P, words, 2, 128] of bfloat16: a row of L + Dr values, padded with zeros, is whole 32-bit words (3
registers' rows of them for 576 values), contiguous in HBM. In [N, P, 640], two tokens share words, and a copy would have to
read both. Shifts turn two registers of words of eight tokens into two registers of bfloat16; keys are copied to rows that
this permutes into the order of the list.

Entries of the list that are not keys are copied from the slot of one that is, and have weight 0: nothing else is read.

Guaranteed: the kernel reads only rows of the cache that are named. Rows without keys are 0 and -inf.

Shape letters: T rows, H query heads, L kv_lora_rank, Dr rope size, W = L + Dr, N pages of P tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels import xla, xla_mla
from attn.jax.kernels.tpu import _launch
from attn.jax.kernels.tpu._chips import chip_of
from attn.jax.kernels.tpu._refs import LANES, LOG2_E, Ref, dot, sublanes, widen

#: Pipeline stages of a step. Each has its own buffer, so that copies into one need not wait for loads from another.
STAGES = 4
#: Stages between the start of a copy and its use.
AHEAD = 2
#: Keys of a stage at most, and those of a matrix of scores.
STAGE_KEYS, TILE = 512, 256
_PACKED = 2  # values in a word
_PAIR = 16  # keys of two registers of words


class SparseConfig(NamedTuple):
    """The static configuration. A step is STAGES * `stage_keys` keys of a row's list."""

    stage_keys: int
    words: int  # registers' rows of words that hold a token
    columns: int  # W, in whole registers
    values: int  # L, in whole registers
    scale: float  # of scores, into units of log2


class SparseRefs(NamedTuple):
    """Refs passed to the kernel, for the row of a grid step where they are in VMEM."""

    first: Ref  # [T + 1] the number of each row's first step, in SMEM
    source: Ref  # [T * S] where each step's list is; S: steps of a row at most
    slots: Ref  # [T * S, STAGES, stage_keys] int32 in HBM
    cache: Ref  # [N * P, words, 1, 128] int32 in HBM
    query: Ref  # [1, H, columns]
    bias: Ref  # [1, S, STAGES, 1, stage_keys] float32: 0, or -inf where there is no key
    out: Ref  # [1, H, values]
    lse: Ref  # [1, H, 128] float32
    m: Ref  # [H, 128] float32, as is the next
    l: Ref  # noqa: E741
    acc: Ref  # [H, values] float32
    list_sem: Ref  # [STAGES], as is the next
    key_sem: Ref
    lists: tuple[Ref, ...]  # STAGES of [stage_keys] int32 in SMEM
    keys: tuple[Ref, ...]  # STAGES of [stage_keys * words, 128] int32

    @property
    def total(self) -> jax.Array:
        """The number of steps of all rows."""
        return self.first[self.first.shape[0] - 1]  # type: ignore[no-any-return]


def row_shape(width: int) -> tuple[int, int, int]:
    """The shape of a token of `width` = L + Dr values in the cache."""
    return (-(-width // (_PACKED * LANES)), _PACKED, LANES)


def mla_sparse_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    indices: jax.Array,
    requests: xla.Requests,
    *,
    kv_lora_rank: int,
    scale: float,
    chip: str | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute (out [T, H, L] of query's dtype, lse [H, T] float32, natural log).

    query: [T, H, W] bfloat16, absorbed; kv_cache: [N, P, *row_shape(W)] bfloat16, which holds the new tokens already; indices:
    [T, topk] int32, the positions of each row's keys in its own request. -1, or a position at or past the request's length,
    is not a key; order does not matter, and a repeated position counts repeatedly. A row takes the steps up to its last key.
    `chip` and `interpret`: as for `mla_attention`. Raises ValueError if the scalars of the rows exceed the chip's SMEM.
    """
    (num_rows, heads, width), topk, words = query.shape, indices.shape[1], kv_cache.shape[2]
    if 0 in (num_rows, topk, kv_cache.shape[0], *requests.block_table.shape):
        return jnp.zeros((num_rows, heads, kv_lora_rank), query.dtype), jnp.full((heads, num_rows), -jnp.inf, jnp.float32)
    device = _launch.device(chip, interpret)
    size = min(STAGE_KEYS, _round_up(-(-topk // STAGES), _PAIR))
    cfg = SparseConfig(size, words, _round_up(width, LANES), _round_up(kv_lora_rank, LANES), scale * LOG2_E)
    slots, valid = xla_mla.slots_of(indices, requests, kv_cache.shape[1])
    # a weight of 0 would not keep a NaN of another page out of the sums
    slots = jnp.where(valid, slots, jnp.max(jnp.where(valid, slots, 0), axis=1, keepdims=True))
    last = jnp.max(jnp.where(valid, jnp.arange(1, topk + 1, dtype=jnp.int32), 0), axis=1)
    steps = -(-topk // (STAGES * size))
    pad = ((0, 0), (0, steps * STAGES * size - topk))
    first = jnp.pad(jnp.cumsum(-(-last // (STAGES * size)), dtype=jnp.int32), (1, 0))
    scalars, smem = 4 * (first.size + num_rows * steps), chip_of(device.chip).smem
    if scalars > smem:
        raise ValueError(f"indices of {num_rows} rows take {scalars} bytes of SMEM: {device.chip} has {smem}")
    step = jnp.arange(num_rows * steps, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(first[1:], step, side="right").astype(jnp.int32), num_rows - 1)
    arrays = {
        "first": first,
        "source": row * steps + jnp.clip(step - first[row], 0, steps - 1),
        "slots": jnp.pad(slots, pad, mode="edge").reshape(-1, STAGES, size),
        "cache": kv_cache.reshape(-1, *kv_cache.shape[2:]),
        "query": jnp.pad(query, ((0, 0), (0, -heads % sublanes(query.dtype.itemsize)), (0, cfg.columns - width))),
        "bias": jnp.where(jnp.pad(valid, pad), 0.0, -jnp.inf).astype(jnp.float32).reshape(num_rows, steps, STAGES, 1, size),
    }
    out, lse = _launch_rows(cfg, arrays, device)
    return out[:, :heads, :kv_lora_rank], lse[:, :heads, 0].T


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _launch_rows(cfg: SparseConfig, arrays: dict[str, jax.Array], device: _launch.TpuDevice) -> tuple[jax.Array, jax.Array]:
    """The pallas_call, one row a grid step: (out, lse), as in `SparseRefs` for all rows."""
    interpreted = device.interpret is not False
    if interpreted:  # the interpreter has no views of a ref as another type
        arrays["cache"] = lax.bitcast_convert_type(arrays["cache"].swapaxes(-1, -2), jnp.int32)[:, :, None]
    num_rows, heads, _ = arrays["query"].shape

    def kernel(first: Ref, source: Ref, slots: Ref, cache: Ref, query: Ref, bias: Ref, out: Ref, lse: Ref, *refs: Ref) -> None:
        words = cache if interpreted else cache.bitcast(jnp.int32)
        m, total, acc, list_sem, key_sem, *stages = refs
        sums, lists, keys = (m, total, acc), tuple(stages[:STAGES]), tuple(stages[STAGES:])
        run(cfg, SparseRefs(first, source, slots, words, query, bias, out, lse, *sums, list_sem, key_sem, lists, keys))

    def of_row(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape[1:]), lambda t, *_: (t, *(0 for _ in shape[1:])))

    shapes = ((num_rows, heads, cfg.values), arrays["query"].dtype), ((num_rows, heads, LANES), jnp.float32)
    made = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    of_heads = [pltpu.VMEM((heads, lanes), jnp.float32) for lanes in (LANES, LANES, cfg.values)]
    semaphores = [pltpu.SemaphoreType.DMA((STAGES,))] * 2
    lists, keys = pltpu.SMEM((cfg.stage_keys,), jnp.int32), pltpu.VMEM((cfg.stage_keys * cfg.words, LANES), jnp.int32)
    return pl.pallas_call(  # type: ignore[no-any-return]
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_rows,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2 + [of_row(arrays[name].shape) for name in ("query", "bias")],
            out_specs=[of_row(x.shape) for x in made],
            scratch_shapes=[*of_heads, *semaphores, *[lists] * STAGES, *[keys] * STAGES],
        ),
        out_shape=made,
        compiler_params=_launch.compiler_params(device.chip, "arbitrary"),
        interpret=device.interpret,
        name="mla_sparse_attention",
    )(*arrays.values())


def run(cfg: SparseConfig, refs: SparseRefs) -> None:
    """Attend one row. Copies run ahead, into the next rows too."""
    t = pl.program_id(0)

    @pl.when((t == 0) & (refs.total > 0))
    def _() -> None:
        for stage in range(STAGES):
            _list(refs, jnp.int32(0), stage).start()
        for stage in range(AHEAD):
            _list(refs, jnp.int32(0), stage).wait()
            for start in _starts(cfg, refs, stage):
                start()
            _list(refs, jnp.minimum(1, refs.total - 1), stage).start()

    refs.m[...] = jnp.full(refs.m.shape, -jnp.inf, jnp.float32)
    refs.l[...] = jnp.zeros(refs.l.shape, jnp.float32)
    refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)

    def step(g: jax.Array, _: None) -> None:
        more = g + 1 < refs.total
        pl.when(more)(lambda: _step(cfg, refs, g, more=True))
        pl.when(jnp.logical_not(more))(lambda: _step(cfg, refs, g, more=False))

    lax.fori_loop(refs.first[t], refs.first[t + 1], step, None)
    _finish(cfg, refs)


def _list(refs: SparseRefs, g: jax.Array, stage: int) -> Any:
    """The copy of a stage's slots in step g."""
    return pltpu.make_async_copy(refs.slots.at[refs.source[g], stage], refs.lists[stage], refs.list_sem.at[stage])


def _starts(cfg: SparseConfig, refs: SparseRefs, stage: int) -> list[Callable[[], None]]:
    """Functions that each start the copy of one key of a stage, from its slot in `lists`."""

    def start(n: int) -> None:
        # even keys of sixteen go to the first register of words, odd ones to the second
        position = n // _PAIR * _PAIR + n % 2 * 8 + n % _PAIR // 2
        target = refs.keys[stage].at[pl.ds(position * cfg.words, cfg.words)]
        pltpu.make_async_copy(refs.cache.at[refs.lists[stage][n], :, 0], target, refs.key_sem.at[stage]).start()

    return [functools.partial(start, n) for n in range(cfg.stage_keys)]


def _step(cfg: SparseConfig, refs: SparseRefs, g: jax.Array, *, more: bool) -> None:
    """Process the stages of step g. more: whether another step follows, whose first copies are started."""
    for stage in range(STAGES):
        pltpu.make_async_copy(refs.keys[stage], refs.keys[stage], refs.key_sem.at[stage]).wait()
        later, target = divmod(stage + AHEAD, STAGES)
        _list(refs, g, target).wait()  # at the end of the launch, of a list that was loaded in vain
        _attend(cfg, refs, g, stage, _starts(cfg, refs, target) if more or not later else [])
        if more:
            _list(refs, jnp.minimum(g + later + 1, refs.total - 1), target).start()


def _attend(cfg: SparseConfig, refs: SparseRefs, g: jax.Array, stage: int, starts: list[Callable[[], None]]) -> None:
    """Process the keys of a stage, and call `starts` between its products."""
    step, tile = g - refs.first[pl.program_id(0)], min(cfg.stage_keys, TILE)
    tiles = cfg.stage_keys // tile
    count = -(-len(starts) // (2 * tiles))
    keys: list[jax.Array] = []
    scores: list[jax.Array] = []

    def start_copies() -> None:
        for start in starts[:count]:
            start()
        del starts[:count]

    for n in range(tiles + 1):
        start_copies()
        if n < tiles:
            bias = refs.bias[0, step, stage, :, n * tile : (n + 1) * tile]
            keys.append(_keys(cfg, refs, stage, pl.ds(n * tile, tile)))
            scores.append(dot(refs.query[0], keys[n], 1, 1) * cfg.scale + bias)
        if n:
            start_copies()
            _weigh(cfg, refs, scores[n - 1], keys[n - 1][:, : cfg.values])


def _keys(cfg: SparseConfig, refs: SparseRefs, stage: int, at: Any) -> jax.Array:
    """Keys `at` of a stage: [keys, columns]."""
    columns = []
    for word in range(cfg.words):
        words = refs.keys[stage][pl.ds(at.start * cfg.words + word, at.size, stride=cfg.words), :]
        even, odd = (words.reshape(-1, 2, 8, LANES)[:, i].reshape(-1, LANES) for i in range(2))
        columns += [(even & 0xFFFF) | (odd << 16), lax.shift_right_logical(even, 16) | (odd & -0x10000)]
    return jnp.concatenate([pltpu.bitcast(x, jnp.bfloat16) for x in columns[: cfg.columns // LANES]], axis=1)


def _weigh(cfg: SparseConfig, refs: SparseRefs, scores: jax.Array, values: jax.Array) -> None:
    """Add a tile's weighted values to the row's sums."""
    m, width = refs.m[...], scores.shape[1]
    new = jnp.maximum(m, jnp.max(scores, axis=1, keepdims=True))
    safe = jnp.where(new == -jnp.inf, 0.0, new)
    p, rescale = jnp.exp2(scores - widen(safe, width)), jnp.exp2(m - safe)
    refs.m[...], refs.l[...] = new, refs.l[...] * rescale + jnp.sum(p, axis=1, keepdims=True)
    refs.acc[...] = refs.acc[...] * widen(rescale, cfg.values) + dot(p.astype(values.dtype), values, 1, 0)


def _finish(cfg: SparseConfig, refs: SparseRefs) -> None:
    """Write acc / l and the natural log-sum-exp."""
    total = refs.l[...]
    normaliser = jnp.where(total == 0.0, 0.0, 1.0 / jnp.where(total == 0.0, 1.0, total))
    refs.out[0] = (refs.acc[...] * widen(normaliser, cfg.values)).astype(refs.out.dtype)
    refs.lse[0] = (refs.m[...] + jnp.log2(total)) * (1 / LOG2_E)
