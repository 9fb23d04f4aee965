"""Calls read from recordings (`attn.recording`): run them on a backend, judge them by the oracle, make them smaller."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attn import recording
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import AttentionType
from attn.errors import UnsupportedError
from attn.fields import CheckpointError
from attn.testing import bits
from attn.testing import transform as to
from attn.testing.bits import Array
from attn.testing.case import Case
from attn.testing.draw import Call, Result
from attn.testing.expected import expect
from attn.testing.properties import judged
from attn.testing.rules import Score, Violation
from attn.testing.shrink import minimised

#: Arrays that are stored as they are.
_PLAIN = ("indices", "tree_mask", "spans", "prefix", "is_causal")


@dataclass
class RecordedCall(Call):
    """A call with recorded data instead of data drawn from seeds: also MLA's weights and the keys that an indexer selected."""

    kv_b_proj: Array | None = None
    chosen: Array | None = None

    @property
    def weights(self) -> Array:
        assert self.kv_b_proj is not None
        return self.kv_b_proj

    @property
    def indices(self) -> Array:
        assert self.chosen is not None
        return self.chosen

    def chosen_for(self, rows: Array) -> Array | None:
        """Return the indexer's keys of some rows."""
        return None if self.chosen is None else self.chosen[rows]


@dataclass
class CallOutcome:
    """The result of a call on a backend: `failure` is "" if it passed, else the rule or the type of the exception."""

    failure: str
    text: str
    score: Score


def read(path: Path) -> tuple[RecordedCall, dict[str, str]]:
    """Return a recorded call and what the file says about it: reason, error, backend, device.

    Raises `CheckpointError` for a file that is not a recording, `UnsupportedError` for the arguments of a refused call,
    with which no backend can be called.
    """
    # Here, as the package is optional and only this function needs it.
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path}: no such file (expected a recording from ATTN_RECORD)")
    try:
        with safe_open(path, "numpy") as file:
            # A file without metadata has None.
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    mark, version = recording.MARK
    if metadata.get(mark) != version:
        raise CheckpointError(f"{path}: not a recording of format {version}: record calls with ATTN_RECORD")
    try:
        return call_of(recording.Snapshot(json.loads(metadata["case"]), arrays, json.loads(metadata["dtypes"]))), metadata
    # `call_of` and `Case.from_json` raise it for arguments that no layer takes, which is what a refused call has.
    except ValueError as error:
        refused = f" (the call was refused: {metadata['error']})" if metadata.get("error") else ""
        raise UnsupportedError(f"{path}: its arguments cannot be called: {error}{refused}") from error


def call_of(snapshot: recording.Snapshot) -> RecordedCall:
    """Return the call of a snapshot. Raises ValueError unless its arrays have the shapes and dtypes of its layer."""
    # Through JSON, so that lists become tuples and the lengths are checked.
    case, stored = Case.from_json(json.dumps(snapshot.case)), snapshot.arrays
    total, kv = sum(case.query_lens), (case.num_kv_heads, case.head_size)
    shapes = {
        "query": (total, case.num_heads, case.query_size),
        "key": (total, *kv),
        "value": (total, *kv),
        "alibi_slopes": (case.num_heads,),
        "sinks": (case.num_heads,),
        "indices": (total, case.topk),
    }
    for name, shape in shapes.items():
        if name in stored and stored[name].shape != shape:
            raise ValueError(f"{name} has shape {list(stored[name].shape)}: must be {list(shape)}")
        if name in ("query", "key", "value") and snapshot.dtypes.get(name, case.dtype) != case.dtype:
            raise ValueError(f"{name} has dtype {snapshot.dtypes[name]}, the query {case.dtype}: must be equal")
    # Decoding other bits would give numbers that look right.
    if not case.is_encoder and stored["key_cache"].dtype != bits.raw(case.element):
        raise ValueError(f"the cache has elements of {stored['key_cache'].dtype}: a cache of {case.element} is needed")
    values = {name: bits.decode(stored[name], snapshot.dtypes[name]) for name in snapshot.dtypes if name not in _PLAIN}
    latent, start, seq_lens = bool(case.mla), stored["query_start_loc"], stored["seq_lens"]
    batch = CommonAttentionMetadata(
        query_start_loc=start,
        seq_lens=seq_lens,
        block_table=stored["block_table"],
        slot_mapping=stored["slot_mapping"],
        num_reqs=len(case.query_lens),
        num_actual_tokens=total,
        max_query_len=max(case.query_lens, default=0),
        max_seq_len=max(case.seq_lens, default=0),
        causal=stored.get("is_causal", case.causal),
        tree_mask=stored.get("tree_mask"),
        spans=stored.get("spans"),
        prefix=stored.get("prefix"),
    )
    return RecordedCall(
        case=case,
        query=values["query"],
        key=values.get("key"),
        # A latent row is key and value: recordings hold it once.
        value=values.get("key" if latent else "value"),
        key_cache=stored.get("key_cache"),
        value_cache=stored.get("key_cache" if latent else "value_cache"),
        batch=batch,
        alibi_slopes=values.get("alibi_slopes"),
        sinks=values.get("sinks"),
        kv_b_proj=values.get("up_projection"),
        chosen=stored.get("indices"),
    )


def snapshot_of(call: RecordedCall) -> recording.Snapshot:
    """Return the snapshot of a call: the inverse of `call_of`."""
    case, batch = call.case, call.batch
    named = {"query": call.query, "key": call.key, "value": None if case.mla else call.value, "up_projection": call.kv_b_proj}
    arrays = {name: bits.encode(x, case.dtype) for name, x in named.items() if x is not None}
    dtypes = dict.fromkeys(arrays, case.dtype)
    # Stored in their own dtype; those above in the query's, whose bits `encode` restores.
    named = {"alibi_slopes": call.alibi_slopes, "sinks": call.sinks, "indices": call.chosen, "tree_mask": batch.tree_mask}
    named |= {"spans": batch.spans, "prefix": batch.prefix, "is_causal": batch.causal if case.causal == "mixed" else None}
    arrays |= {name: x for name, x in named.items() if x is not None}
    dtypes |= {name: str(x.dtype) for name, x in named.items() if x is not None}
    named = {"key_cache": call.key_cache, "value_cache": None if case.mla else call.value_cache}
    named |= {name: getattr(batch, name) for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")}
    arrays |= {name: x for name, x in named.items() if x is not None}
    return recording.Snapshot(json.loads(case.json()), {n: np.ascontiguousarray(x) for n, x in arrays.items()}, dtypes)


def outcome_of(call: Call, run: Callable[[Call], Result]) -> CallOutcome:
    """Run a call, and judge its result and its cache by the oracle."""
    score = Score()
    try:
        violations: list[Violation] = judged(call, run, score)[1]
    except Exception as error:  # a backend may raise anything; that is a result
        return CallOutcome(type(error).__name__, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", score)
    first = violations[0] if violations else None
    return CallOutcome(f"rule {first.rule}", str(first).partition("\n")[0], score) if first else CallOutcome("", "", score)


def wild_rows(call: Call) -> int:
    """Return the number of rows (token, head) whose output is not finite by definition, because of what they read."""
    return int((~np.isfinite(expect(call).out[: call.num_tokens]).all(-1)).sum())


def _smaller(call: RecordedCall) -> Iterator[RecordedCall]:
    """Yield calls that are one step smaller."""
    case, count = call.case, call.batch.num_reqs
    half = count // 2
    every = list(range(count))
    # Halves first: most failures need one request, which takes log2(count) steps.
    parts = [every[:half], every[half:]] if count > 2 else []
    parts += [[i for i in every if i != r] for r in every[: count if count > 1 else 0]]
    yield from (_requests(call, part) for part in parts)
    # A cut moves tokens, which is simple only when all are in the cache: so writing is taken out first.
    if call.key is not None and not case.is_encoder:
        yield to.already_written(call)
    elif not case.is_encoder and not (case.tree or case.spans or case.prefix):  # these count positions
        for r, (n, m) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
            for rows, keys in _cuts(n, m, case):
                yield _cut(call, r, rows, keys)
    yield from _fewer_heads(call)
    for name, off in (("logits_soft_cap", None), ("sliding_window", None), ("chunk_size", 0), ("lse", False)):
        if getattr(case, name) != off:
            yield call.but(**{name: off})
    if call.sinks is not None:
        yield replace(call, sinks=None, case=case.replace(sinks=""), memo={})
    if call.alibi_slopes is not None:
        yield replace(call, alibi_slopes=None, case=case.replace(alibi=False), memo={})


def _requests(call: RecordedCall, requests: list[int]) -> RecordedCall:
    return to.picked(call, requests).but(chosen=call.chosen_for(to.rows_of(call, requests)))


def _cuts(n: int, m: int, case: Case) -> Iterator[tuple[range, range]]:
    """Yield the rows and the keys of a request that remain: without its first rows, its first keys or its last tokens."""
    causal = case.causal and case.attn_type == AttentionType.DECODER
    # `fromkeys` without duplicates: a half may be one.
    for less in dict.fromkeys((n // 2, 1)):
        if 0 < less < n:
            yield range(less, n), range(m)
            # Without the last rows: their keys may go as well, as no earlier row sees them if the request is causal.
            yield range(n - less), range(m - less if causal and m - less >= n - less else m)
    for less in dict.fromkeys(((m - n) // 2, 1)):
        # Its first keys less: all positions move by as many, which only chunks notice, and every row keeps its own key.
        if 0 < less <= m - max(n, 1) and not case.topk:  # an indexer's keys are positions
            yield range(n), range(less, m)


def _cut(call: RecordedCall, r: int, rows: range, keys: range) -> RecordedCall:
    """Return the call with some rows and keys of request r; its tokens are in the cache."""
    stored = [to.tokens(call, q) for q in range(call.batch.num_reqs)]
    stored[r] = (stored[r][0][keys.start : keys.stop], stored[r][1][keys.start : keys.stop])
    # [n] of each request: rows of the recorded call, of which request r keeps some.
    rows_of = [np.arange(call.num_tokens)[call.rows(q)] for q in range(call.batch.num_reqs)]
    rows_of[r] = rows_of[r][rows.start : rows.stop]
    kept, lens = np.concatenate(rows_of), np.array([len(x) for x in rows_of], np.int32)
    placed = to.placed(call, stored)
    batch = placed.batch.replace(**to.queries(lens), slot_mapping=placed.batch.slot_mapping[kept])
    chosen, q_lens = call.chosen_for(kept), tuple(map(int, lens))
    return placed.but(query=call.query[kept], chosen=chosen, batch=batch, query_lens=q_lens)


def _fewer_heads(call: RecordedCall) -> Iterator[RecordedCall]:
    """Yield the call with half of its kv heads, or of the query heads of its only one."""
    case = call.case
    heads, kv_heads = case.num_heads, case.num_kv_heads
    group, half = heads // kv_heads, (kv_heads if kv_heads > 1 else heads) // 2
    for part in (slice(half), slice(half, 2 * half)) if half else ():
        # With several kv heads their whole groups of query heads go with them; with one, query heads go alone.
        q, kv = (slice(part.start and part.start * group, part.stop * group), part) if kv_heads > 1 else (part, slice(None))
        of_query = {"alibi_slopes": call.alibi_slopes, "sinks": call.sinks}
        of_keys = {"key": call.key, "value": call.value, "key_cache": call.key_cache, "value_cache": call.value_cache}
        changes: dict[str, Any] = {name: x if x is None else x[q] for name, x in of_query.items()}
        # The kv heads are the second to last axis of rows [T, K, D] and of caches [N, P, K, D].
        changes |= {name: x if x is None else x[..., kv, :] for name, x in of_keys.items()}
        scales = {name: getattr(case, name) for name in ("k_scale", "v_scale")}
        changes |= {name: scale[kv] if isinstance(scale, tuple) else scale for name, scale in scales.items()}
        changes |= {"num_heads": half * (group if kv_heads > 1 else 1), "num_kv_heads": half if kv_heads > 1 else 1}
        kv_b_proj = None if call.kv_b_proj is None else call.kv_b_proj[:, q]
        yield call.but(query=call.query[:, q], kv_b_proj=kv_b_proj, **changes)


def as_smaller(call: RecordedCall, run: Callable[[Call], Result], serves: Callable[[Case], bool]) -> RecordedCall:
    """Return the smallest call found that fails as this one does: fewer requests, rows, keys, heads and features.

    Raises ValueError if this one passes.
    """
    failure = outcome_of(call, run).failure
    if not failure:
        raise ValueError("nothing to shrink: the call passes")

    def fails(smaller: RecordedCall) -> bool:
        # The same failure: a smaller call that fails otherwise would lead to another bug.
        return serves(smaller.case) and outcome_of(smaller, run).failure == failure

    small = minimised(call, fails, 200, plain={}, simpler=_smaller)
    return least if fails(least := _without_spare_pages(small)) else small


def _without_spare_pages(call: RecordedCall) -> RecordedCall:
    if call.key_cache is None or call.value_cache is None:
        return call
    batch, caches = call.batch, (call.key_cache, call.value_cache)
    # As a recording does: pages that no request uses are left out, the others numbered anew.
    pages = recording.UsedPages(batch.block_table, batch.seq_lens, batch.slot_mapping, call.case.block_size, len(caches[0]))
    keys, values = (cache[pages.ids] for cache in caches)
    used = max(1, -(-max(call.case.seq_lens, default=0) // call.case.block_size))
    new = batch.replace(block_table=pages.table[:, :used], slot_mapping=pages.slots)
    return call.but(key_cache=keys, value_cache=values, batch=new, num_blocks=None)


def sizes(call: Call) -> str:
    """Describe a call's size in a line."""
    case = call.case
    size = f"MLA {'+'.join(map(str, case.mla))}" if case.mla else f"head size {case.head_size}"
    return (
        f"{len(case.query_lens)} requests, {sum(case.query_lens)} new tokens, {sum(case.seq_lens)} keys, "
        f"{case.num_heads}/{case.num_kv_heads} heads, {size}, {case.dtype}, cache {case.kv_cache_dtype}"
    )
