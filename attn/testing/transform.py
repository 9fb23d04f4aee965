"""Transform calls into equivalent or related ones: other pages, another order, other lengths.

Functions take a `Call` and return another; `attn.testing.properties` states the relations between their results.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from attn.testing.bits import Array, decode, encode, poisoned
from attn.testing.draw import Call
from attn.testing.expected import specified_cache, stored_rows

C = TypeVar("C", bound=Call)

Tokens = tuple[Array, Array]  #: stored (keys, values) [m, K, D] of one request


def queries(lens: Array) -> dict[str, Any]:
    """Return the fields of a batch that follow from the numbers of new tokens, [R] int32."""
    start = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    starts = dict.fromkeys(("query_start_loc", "query_start_loc_cpu"), start)
    return {**starts, "num_actual_tokens": int(start[-1]), "max_query_len": int(lens.max(initial=0))}


def already_written(call: C) -> C:
    """Return the call with its new tokens in the cache already and nothing to write."""
    keys, values = specified_cache(call)
    slots = np.full_like(call.batch.slot_mapping, -1)
    return call.but(key=None, value=None, key_cache=keys, value_cache=values).with_batch(slot_mapping=slots)


def tokens(call: Call, r: int) -> Tokens:
    """Return request r's stored keys and values in order, its new tokens included."""
    keys, values = specified_cache(call)
    return stored_rows(call, r, keys), stored_rows(call, r, values)


def placed(call: C, sequences: Sequence[Tokens], block_size: int | None = None) -> C:
    """Return the call with these keys and values, already written to new pages; all other memory is poisoned.

    The number of pages stays the same if it is sufficient, since some backends compile for it.
    """
    page = block_size or call.case.block_size
    assert call.key_cache is not None
    used = [-(-len(keys) // page) for keys, _ in sequences]
    # As many tokens as before, whatever the new page size.
    available = call.key_cache.shape[0] * call.case.block_size // page
    num_blocks = available if sum(used) <= available else 1 << sum(used).bit_length()
    shape = (num_blocks, page, *call.key_cache.shape[2:])
    caches = [poisoned(shape, call.case.element, call.case.poison) for _ in range(2)]
    ids = np.random.default_rng([7, call.case.geometry_seed]).permutation(num_blocks).astype(np.int32)
    # At least as wide as before, since the width is part of a compiled shape.
    table = np.full((len(used), max(max(used, default=0), call.batch.block_table.shape[1])), -1, np.int32)
    for r, both in enumerate(sequences):
        table[r, : used[r]], ids = ids[: used[r]], ids[used[r] :]
        j = np.arange(len(both[0]))
        for cache, stored in zip(caches, both, strict=True):
            cache[table[r, j // page], j % page] = stored
    lens = np.array([len(keys) for keys, _ in sequences], np.int32)
    batch = call.batch.replace(
        block_table=table,
        seq_lens=lens,
        seq_lens_cpu=lens,
        max_seq_len=int(lens.max(initial=0)),
        # All tokens are in the cache, so nothing is left to write; key and value go for the same reason.
        slot_mapping=np.full_like(call.batch.slot_mapping, -1),
    )
    changes = {"block_size": page, "seq_lens": tuple(map(int, lens)), "num_blocks": num_blocks}
    return call.but(key=None, value=None, key_cache=caches[0], value_cache=caches[1], batch=batch, **changes)


def picked(call: C, requests: Sequence[int]) -> C:
    """Return the call with these requests only, in this order, over the same cache. Each request may be taken once."""
    batch, chosen = call.batch, list(requests)
    rows = rows_of(call, chosen)
    lens = np.array([call.case.query_lens[r] for r in chosen], np.int32)
    new = batch.replace(
        **queries(lens),
        seq_lens=batch.seq_lens[chosen],
        seq_lens_cpu=batch.seq_lens[chosen],
        block_table=batch.block_table[chosen],
        slot_mapping=batch.slot_mapping[rows],
        num_reqs=len(chosen),
        max_seq_len=int(batch.seq_lens[chosen].max(initial=0)),
        tree_mask=None if batch.tree_mask is None else batch.tree_mask[chosen],
        causal=batch.causal[chosen] if isinstance(batch.causal, np.ndarray) else batch.causal,
        spans=None if batch.spans is None else batch.spans[rows],
        prefix=None if batch.prefix is None else batch.prefix[chosen],
    )
    return call.but(
        query=call.query[rows],
        key=None if call.key is None else call.key[rows],
        value=None if call.value is None else call.value[rows],
        batch=new,
        query_lens=tuple(map(int, lens)),
        seq_lens=tuple(call.case.seq_lens[r] for r in chosen),
        padding=0,
    )


def rows_of(call: Call, requests: Sequence[int]) -> Array:
    """Return the rows of these requests, in their order."""
    return np.concatenate([np.arange(call.num_tokens)[call.rows(r)] for r in requests] or [np.zeros(0, np.int64)])


def repaged(call: Call, order: Array) -> Call:
    """Return the call with page i moved to order[i] and the block table and slots changed accordingly."""
    assert call.key_cache is not None and call.value_cache is not None
    page, batch = call.case.block_size, call.batch
    back = np.argsort(order)
    # Page i moves to order[i], so the new cache's page j is the old one's back[j]. Padding of -1 stays.
    table = np.where(batch.block_table >= 0, order[batch.block_table], -1).astype(np.int32)
    slots = np.where(batch.slot_mapping >= 0, order[batch.slot_mapping // page] * page + batch.slot_mapping % page, -1)
    moved = call.but(key_cache=call.key_cache[back], value_cache=call.value_cache[back])
    return moved.with_batch(block_table=table, slot_mapping=slots.astype(np.int64))


def chunk(call: Call, begin: Sequence[int], end: Sequence[int], caches: Tokens) -> Call:
    """Return the call with only the new tokens begin[r]..end[r] of each request r, over the caches after the earlier chunks."""
    batch, count = call.batch, range(call.batch.num_reqs)
    rows = chunk_rows(call, begin, end)
    lens = np.array([end[r] - begin[r] for r in count], np.int32)
    # the first rows of a request that is shorter than its query have no keys
    seq = np.array([max(call.case.seq_lens[r] - call.case.query_lens[r] + end[r], 0) for r in count], np.int32)
    assert call.key is not None and call.value is not None
    # `max_seq_len` stays that of the whole call, an upper bound. Trees and spans are of whole batches: no case with one is cut.
    new = batch.replace(**queries(lens), seq_lens=seq, seq_lens_cpu=seq, slot_mapping=batch.slot_mapping[rows])
    changes = {"query_lens": tuple(map(int, lens)), "seq_lens": tuple(map(int, seq)), "padding": 0}
    return call.but(
        query=call.query[rows],
        key=call.key[rows],
        value=call.value[rows],
        # A call's arrays become read-only, and these are a result's.
        key_cache=caches[0].copy(),
        value_cache=caches[1].copy(),
        batch=new,
        **changes,
    )


def chunk_rows(call: Call, begin: Sequence[int], end: Sequence[int]) -> Array:
    """Return the rows of the whole call that `chunk` selects."""
    start = call.batch.query_start_loc
    parts = [np.arange(start[r] + begin[r], start[r] + end[r]) for r in range(call.batch.num_reqs)]
    return np.concatenate(parts or [np.zeros(0, np.int64)])


def scaled(stored: Array, element: str, factor: float) -> Array:
    """Multiply stored values, poison included, by a power of two; finite values that would overflow stay the same."""
    values = decode(stored, element)
    with np.errstate(all="ignore"):
        product = encode(values * np.float32(factor), element)
    # Poison near the largest number would become an infinity, which a backend that multiplies by 0 may not meet.
    return np.where(np.isfinite(values) & ~np.isfinite(decode(product, element)), stored, product)
