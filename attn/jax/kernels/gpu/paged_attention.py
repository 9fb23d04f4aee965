"""Attention of a ragged batch over a paged cache, and the write to it: `attn.kernels` launched by XLA.

The plan of the batch is part of the kernel, which computes it from the lengths on the device, so that one program serves every
batch of its shapes. Launches write one output after the other: rows of no request, prompts, decodes.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn.jax.kernels.gpu.launch import dense_strides, launch, target
from attn.kernels import fill as filling
from attn.kernels import hopper, kv_write
from attn.kernels.launch import SplitKV, converts_e4m3, format_of
from attn.kernels.paged_attention import attention, merge
from attn.kernels.paged_launch import ARRAYS, OF_MERGE, Kinds, Launches, LayerParams, bound, strides_of
from attn.visibility import PLAIN, BatchMask

#: Tokens of a request, beyond which all are alike to the launch rules.
_FEW = 16


class KVInputs(NamedTuple):
    """Where a call's keys are.

    cache: [2, N, P, K, D], keys, then values; lens: [R], table: [R, B], int32. Or keys, values: [T, K, D], where each request
    sees its own rows; or [S, K, D] with lens and table [R, 1], the row of each request's first key. k_scale, v_scale: of codes,
    float32, 0-d or [K], or None.
    """

    cache: jax.Array | None = None
    lens: Any = None
    table: Any = None
    keys: jax.Array | None = None
    values: jax.Array | None = None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None


class PerHead(NamedTuple):
    """Numbers of query heads, [H] float32 or None: ALiBi's slopes, and sinks."""

    slopes: Any = None
    sinks: Any = None


class BatchBounds(NamedTuple):
    """Bounds of a batch: the most new tokens of a request, and the most keys."""

    max_query_len: int
    max_seq_len: int


_NO_HEADS = PerHead()


@functools.partial(jax.jit, static_argnames=("layer", "extents", "return_lse"))
def paged_attention(
    query: jax.Array,
    starts: Any,
    keys: KVInputs,
    layer: LayerParams,
    extents: BatchBounds,
    mask: BatchMask = PLAIN,
    per_head: PerHead = _NO_HEADS,
    return_lse: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Return (output [T, H, D], lse [H, T] float32, natural log, sinks excluded, or None unless `return_lse`).

    query: [T, H, D], float32, bfloat16 or float16; starts: [R + 1] int32, where requests begin; layer: the rules, whose
    `invariant` and `sparse` are as `attn.torch.kernels.paged_attention` has them.
    """
    (tokens, heads, size), num_reqs, (arch, processors) = query.shape, starts.shape[0] - 1, target()
    # no launch: the kernels' grids and searches assume a request
    if num_reqs < 1 or tokens == 0:
        return jnp.zeros_like(query), jnp.full((heads, tokens), -jnp.inf) if return_lse else None
    stored = keys.keys if keys.cache is None else keys.cache
    assert stored is not None
    # One array has the keys and, behind them, the values (`values_at`): slices of it would be copies of half a cache.
    held = stored.shape if keys.cache is None else stored.shape[1:]
    arrays = dict.fromkeys(ARRAYS) | {
        # not filled: the launches together write every row
        "output": jnp.empty(query.shape, query.dtype),
        "lse": jnp.empty((heads, tokens), jnp.float32) if return_lse else None,
        "query_start_loc": starts,
        "v_scale": keys.v_scale,
        "query": query,
        "key_cache": stored,
        "value_cache": keys.values,
        "seq_lens": keys.lens,
        "block_table": keys.table,
        **per_head._asdict(),
        **mask._asdict(),
        "k_scale": keys.k_scale,
    }
    read = {}
    # Triton would reject or emulate the conversion there, so the same bytes are read as integers (`number_in`).
    if stored.dtype == jnp.float8_e4m3fn and not converts_e4m3(arch):
        read = {"key_cache": "uint8"} | ({} if keys.values is None else {"value_cache": "uint8"})
    dtypes = {name: None if array is None else read.get(name, array.dtype.name) for name, array in arrays.items()}
    dense, of_rows, blocks = dense_strides(held), dense_strides(query.shape), held[0]
    strides, same, wide = strides_of(of_rows, of_rows, dense, dense, blocks, keys.table is not None)
    kinds = Kinds(
        arch=arch,
        processors=processors,
        # XLA's call cannot start a kernel before the last one has ended
        pdl=False,
        dtypes=tuple(dtypes.values()),
        shape=(heads, size, *held[1:]),
        scales=(_scale_strides(keys.k_scale), _scale_strides(keys.v_scale)),
        # the bucket's bound, as the longest query is not known when the program is made
        queries=min(extents.max_query_len, _FEW + 1),
        same=same,
        wide=wide,
        hopper=arch == "sm_90" and extents.max_query_len > 1 and _serves(arrays, layer.scale < 0),
    )
    rules = Launches(kinds, layer)
    call = _LaunchSequence(rules, arch, arrays, read, strides, blocks if keys.cache is not None else 0)
    try:
        return call.run(num_reqs, extents.max_seq_len)
    # While the call is traced: nothing has run, and the kernel is off from here on, so the second attempt takes others.
    except hopper.CannotCompile:
        return paged_attention(query, starts, keys, layer, extents, mask, per_head, return_lse)


def _prompts(arrays: dict[str, Any]) -> Any:
    """The arrays as `hopper_prefill.Prompts`; that module is imported on Hopper only."""
    from attn.jax.kernels.gpu.hopper_prefill import Prompts

    keys = {
        "keys": arrays["key_cache"],
        "values": arrays["value_cache"],
        "lens": arrays["seq_lens"],
        "table": arrays["block_table"],
    }
    mask = BatchMask(**{name: arrays[name] for name in BatchMask._fields})
    return Prompts(arrays["query"], arrays["query_start_loc"], sinks=arrays["sinks"], mask=mask, **keys)


def _serves(arrays: dict[str, Any], negate: bool) -> bool:
    """Whether the Hopper prefill supports the arrays."""
    if not hopper.is_on("hopper_prefill"):
        return False
    from attn.jax.kernels.gpu import hopper_prefill

    return hopper_prefill.serves(_prompts(arrays), negate)


_STRIDES = ("o_t", "o_h", "q_t", "q_h", "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head")


class _LaunchSequence:
    """The launches of one call in order: each continues with the arrays that the previous ones wrote."""

    def __init__(
        self, rules: Launches, arch: str, arrays: dict[str, Any], read: dict[str, str], strides: Sequence[int], blocks: int
    ) -> None:
        self.rules, self.arch, self.arrays, self.read = rules, arch, arrays, read
        tree, table, lse = arrays["tree"], arrays["block_table"], arrays["lse"]
        # All of these are constants of the program; lengths, tables and scales are arrays.
        numbers = dict(zip(_STRIDES, strides, strict=True))
        self.numbers = numbers | {
            "factor": float(rules.layer.factor(1.0)),
            "k_factor": 1.0,
            "v_factor": 1.0,
            "num_reqs": arrays["query_start_loc"].shape[0] - 1,
            "lse_h": 0 if lse is None else lse.shape[1],
            "table_r": 0 if table is None else table.shape[1],
            "tree_w": 0 if tree is None else tree.shape[1],
            "states": 0,
            "split_tiles": 0,
            "max_splits": 0,
            "whole_from": 0,
            "scratch": None,
            "key_t": 0,
            "value_t": 0,
        }
        #: elements between keys and values of one array
        self.values_at = {"values_at": blocks * self.numbers["k_block"]}

    def run(self, num_reqs: int, max_seq_len: int) -> tuple[jax.Array, jax.Array | None]:
        rules = self.rules
        # Whether decodes are better left whole depends on lengths, so `_fill` decides on the device.
        split_kv = rules.split_kv(num_reqs, max_seq_len, False) if rules.paged else None
        outputs = self._fill(num_reqs, split_kv)
        if rules.on_hopper:
            self._on_hopper(outputs["counters"])
        elif rules.prefill is not None:
            # a bound by extents: each request may end in a tile that is not full (`request_of`)
            tiles = self.arrays["query"].shape[0] // rules.prefill_tokens + num_reqs
            self._attend(tiles * rules.kv_heads, rules.prefill)
        if not rules.paged:
            return self.arrays["output"], self.arrays["lse"]
        # Both launches are in the program where either may have the decodes: one of them finds requests without tokens, by its
        # list.
        if split_kv is None or "whole" in outputs:
            self.arrays["query_start_loc"] = outputs.get("whole", self.arrays["query_start_loc"])
            self._attend(num_reqs * rules.kv_heads, rules.decode(0))
        if split_kv is not None:
            self.arrays["query_start_loc"] = outputs.get("split", self.arrays["query_start_loc"])
            self._attend_splits(num_reqs, split_kv)
        return self.arrays["output"], self.arrays["lse"]

    def _fill(self, num_reqs: int, split_kv: SplitKV | None) -> dict[str, jax.Array]:
        """Write rows of no request. Return the counters that a Hopper prefill needs, and, where decodes may be either, `whole`
        and `split` (`attn.kernels.fill`)."""
        rules, arrays, (tokens, heads, size) = self.rules, self.arrays, self.arrays["query"].shape
        chooses: dict[str, Any] = {"counters": jnp.empty(2, jnp.int32) if rules.on_hopper else None}
        # fewer requests are always split (`plan.item_of`)
        if split_kv is not None and num_reqs >= split_kv.whole_from:
            chooses |= {name: jnp.empty(num_reqs + 1, jnp.int32) for name in ("whole", "split")}
            chooses |= {"seq_lens": arrays["seq_lens"], "left": bound(None if rules.free else rules.layer.left)}
            chooses |= {
                "most": rules.tokens,
                "keys_per_tile": rules.keys_per_tile(split_kv.crowded),
                "whole_from": split_kv.whole_from,
            }
            chooses |= {"BLOCK_R": split_kv.block_r}
        of_rows = {name: arrays[name] for name in ("output", "lse", "query_start_loc")}
        numbers = {"tokens": tokens, "num_reqs": num_reqs, "lse_h": self.numbers["lse_h"]}
        arguments = filling.constants(heads, size) | of_rows | numbers | chooses
        return self._launch(filling.fill, -(-tokens // filling.ROWS), arguments, "counters", "whole", "split")

    def _on_hopper(self, counters: Any) -> None:
        from attn.jax.kernels.gpu.hopper_prefill import Out, prefill

        layer, arrays, kinds = self.rules.layer, self.arrays, self.rules.kinds
        rules, factor = layer.of_prompts(self.rules.tokens), self.numbers["factor"]
        out = Out(arrays["output"], arrays["lse"], counters)
        arrays["output"], arrays["lse"], _ = prefill(out, _prompts(arrays), rules, factor, self.arch, kinds.processors)

    def _attend_splits(self, num_reqs: int, split_kv: SplitKV) -> None:
        rules = self.rules
        states, floats = rules.states(num_reqs, split_kv)
        # `attention` returns it written, and `merge` takes that: XLA runs them in this order because one needs the other's
        # result.
        self.numbers |= {"states": states, "scratch": jnp.empty(floats, jnp.float32)}
        self.numbers |= {name: getattr(split_kv, name) for name in ("split_tiles", "max_splits", "whole_from")}
        self._attend(split_kv.items * rules.kv_heads, rules.decode(split_kv.block_r, split_kv.crowded))
        of_merge = {name: self.arrays[name] for name in OF_MERGE}
        numbers = {name: self.numbers[name] for name in ("scratch", "v_factor", "num_reqs", "states", "lse_h", "o_t", "o_h")}
        self._launch(merge, rules.merge_programs(num_reqs, split_kv), of_merge | numbers | rules.merge(split_kv))

    def _attend(self, programs: int, constants: dict[str, Any]) -> None:
        arguments = self.arrays | self.numbers | constants | self.values_at
        self.numbers |= self._launch(attention, programs, arguments, "scratch", **self.read)

    def _launch(self, kernel: Any, programs: int, arguments: dict[str, Any], *more: str, **read: str) -> dict[str, jax.Array]:
        """Launch `kernel`, which writes the output, and return what it writes of `more`."""
        # Every launch takes what the one before returned, in the same memory, and keeps the rows that it does not write.
        writes = [name for name in ("output", "lse", *more) if arguments[name] is not None]
        outputs = dict(zip(writes, launch(kernel, self.arch, (programs,), arguments, writes, **read), strict=True))
        self.arrays |= {name: outputs.pop(name) for name in ("output", "lse") if name in outputs}
        return outputs


@jax.jit
def write_kv(
    key: jax.Array, value: jax.Array, kv_cache: jax.Array, slots: jax.Array, k_scale: Any = None, v_scale: Any = None
) -> jax.Array:
    """Return `kv_cache` [2, N, P, K, D] with key, value [T, K, D] at `slots` [T] (int32, -1: nowhere), in place if donated.

    k_scale, v_scale: float32, 0-d or [K], which a cache of codes needs. Keys and values of its dtype are stored as they are.
    """
    (tokens, heads, size), (blocks, page) = key.shape, kv_cache.shape[1:3]
    # A program has the scales' shapes but not their values: two layers of a model share it.
    stored, code = kv_cache.dtype, format_of(key.dtype.name, kv_cache.dtype.name)
    scales = tuple(None if x is None or not code else jnp.asarray(x, jnp.float32) for x in (k_scale, v_scale))
    block, slot, head, _ = dense_strides(kv_cache.shape[1:])
    arguments = {
        "key": key,
        "value": value,
        "key_cache": kv_cache,
        "value_cache": None,
        "slots": slots,
        "k_scale": scales[0],
        "v_scale": scales[1],
        "key_t": heads * size,
        "value_t": heads * size,
        "kc_block": block,
        "kc_slot": slot,
        "kc_head": head,
        "vc_block": block,
        "vc_slot": slot,
        "vc_head": head,
        **kv_write.constants(heads, size, page, code, tuple(() if x is None else (1,) * x.ndim for x in scales), False),
        "values_at": blocks * block,
    }
    # codes are stored by their bits (`kv_write.code_in`)
    read = {"key_cache": {1: "uint8", 2: "uint16"}[stored.itemsize]} if code else {}
    return launch(kv_write.write, target()[0], (tokens,), arguments, ["key_cache"], **read)[0]


def _scale_strides(scale: Any) -> tuple[int, ...] | None:
    return None if scale is None else (1,) * scale.ndim
