"""User mistakes: wrong arguments, batches and arrays, each of which the library must reject with its own error.

The error must come from a `raise` in this package (`AttnError`, ValueError, TypeError or KeyError), before anything is
computed. An error from the framework, a crash, or no error is a failure.
"""

import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import attn
from attn.capabilities import AttentionType
from attn.errors import AttnError
from attn.testing.case import Case
from attn.testing.draw import Call, draw
from attn.testing.properties import Runner, check
from attn.testing.rules import Score, Violation

_ROOT = Path(attn.__file__).parent

#: Constructor arguments of any layer.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "no heads": {"num_heads": 0},
    "half a head": {"num_heads": 2.5},
    "heads as text": {"num_heads": "4"},
    "scale of nan": {"scale": float("nan")},
    "scale of 0": {"scale": 0},
    "infinite scale": {"scale": float("inf")},
    "scale as text": {"scale": "auto"},
    "unknown kv_cache_dtype": {"kv_cache_dtype": "fp9"},
    "unknown dtype": {"dtype": "float13"},
    "integer dtype": {"dtype": "int32"},
    "block_size of 0": {"block_size": 0},
    "block_size as text": {"block_size": "16"},
    "unknown backend": {"backend": "NO_SUCH_BACKEND"},
    "features as text": {"features": "lse"},
    "unknown feature": {"features": ["flying"]},
    "k_scale of 0": {"k_scale": 0.0},
    "negative k_scale": {"k_scale": -0.5},
    "k_scale of nan": {"k_scale": float("nan")},
    "k_scale as text": {"k_scale": "1"},
}
#: Constructor arguments of a layer with separate keys and values (not MLA).
_MORE: dict[str, dict[str, Any]] = {
    "kv heads that do not divide": {"num_heads": 5, "num_kv_heads": 3},
    "negative head_size": {"head_size": -64},
    "window of 0": {"sliding_window": 0},
    "negative window": {"sliding_window": -1},
    "negative side": {"sliding_window": (-2, 0)},
    "window as text": {"sliding_window": "4"},
    "window of one side": {"sliding_window": (4,)},
    "window of three": {"sliding_window": (1, 2, 3)},
    "negative cap": {"logits_soft_cap": -1.0},
    "cap of nan": {"logits_soft_cap": float("nan")},
    "slopes of another length": {"alibi_slopes": [0.5] * 99},
    "slopes of nan": {"alibi_slopes": "nan"},
    "slopes as text": {"alibi_slopes": "yes"},
    "sinks of another length": {"sinks": [0.5] * 99},
    "sinks as text": {"sinks": "yes"},
    "unknown attn_type": {"attn_type": "decoding"},
    "k_scale of another length": {"k_scale": [0.5] * 99},
    "v_scale of 0": {"v_scale": 0.0},
}


def _set(array: Any, index: Any, value: Any) -> Any:
    changed = np.array(array)
    changed[index] = value
    return changed


#: Wrong fields of a batch, made from those of a right one.
_BATCHES: dict[str, Callable[[Any], dict[str, Any]]] = {
    # With the host's copies: a check may read either, and they must not contradict each other.
    "starts that fall": lambda b: _lens(query_start_loc=_set(b.query_start_loc, 1, 99)),
    "starts from 1": lambda b: _lens(query_start_loc=_set(b.query_start_loc, 0, 1)),
    "a request too many": lambda b: {"num_reqs": b.num_reqs + 1},
    "a length too many": lambda b: _lens(seq_lens=np.append(b.seq_lens, b.seq_lens.dtype.type(0))),
    "a negative length": lambda b: _lens(seq_lens=_set(b.seq_lens, 0, -1)),
    "a length beyond the table": lambda b: {**_lens(seq_lens=_set(b.seq_lens, 0, 10**6)), "max_seq_len": 10**6},
    "lengths of int64": lambda b: _lens(seq_lens=b.seq_lens.astype(np.int64)),
    "lengths of float": lambda b: _lens(seq_lens=b.seq_lens.astype(np.float32)),
    "lengths as a list": lambda b: {"seq_lens": b.seq_lens.tolist()},
    "max_query_len too small": lambda b: {"max_query_len": 1},
    "max_seq_len too small": lambda b: {"max_seq_len": 1},
    "max_seq_len as text": lambda b: {"max_seq_len": "20"},
    "too few slots": lambda b: {"slot_mapping": b.slot_mapping[:-1]},
    "slots of float": lambda b: {"slot_mapping": b.slot_mapping.astype(np.float64)},
    "a flat table": lambda b: {"block_table": b.block_table.reshape(-1)},
    "a table row too few": lambda b: {"block_table": b.block_table[:-1]},
    "more tokens than rows": lambda b: {"num_actual_tokens": b.num_actual_tokens + 50},
    "causal as text": lambda b: {"causal": "no"},
    "causal as a list": lambda b: {"causal": [False] * b.num_reqs},
    "a tree that is not square": lambda b: {"tree_mask": np.ones((b.num_reqs, 2, 3), np.bool_)},
    "a tree of ints": lambda b: {"tree_mask": np.ones((b.num_reqs, 4, 4), np.int32)},
}
#: Wrong pages and slots, for layers with a cache.
_PAGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "a page beyond the cache": lambda b: {"block_table": _set(b.block_table, (0, 0), 1 << 24)},
    "a negative page": lambda b: {"block_table": _set(b.block_table, (0, 0), -1)},
    "a slot beyond the cache": lambda b: {"slot_mapping": _set(b.slot_mapping, 0, 1 << 30)},
    "a slot of -2": lambda b: {"slot_mapping": _set(b.slot_mapping, 0, -2)},
    "a slot written twice": lambda b: {"slot_mapping": _set(b.slot_mapping, 0, b.slot_mapping[1])},
}


def _lens(**arrays: Any) -> dict[str, Any]:
    """Return arrays of a batch together with their host copies."""
    return arrays | {f"{name}_cpu": array for name, array in arrays.items()}


#: Calls that are meant for another layer.
_CALLS: dict[str, Callable[[Call], Call]] = {
    "query of fewer heads": lambda call: (
        call.but(query=call.query[:, :-1]) if call.case.num_heads > 1 else call.but(query=call.query.repeat(2, 1))
    ),
    "query of another size": lambda call: call.but(query=np.concatenate([call.query, call.query], 2)),
    "query of too few rows": lambda call: call.but(query=call.query[:-1]),
    "key of too few rows": lambda call: call.but(key=np.array(call.key)[:-1], value=np.array(call.value)[:-1]),
    "rows of another dtype": lambda call: call.but(dtype="bfloat16" if call.case.dtype == "float32" else "float32"),
}


def wrongs_for(case: Case, framework: str) -> list[str]:
    """Return the mistakes that apply to a layer like the case's. Under jax, missing rows are padded before the call."""
    names = [*_ARGUMENTS, *_BATCHES, *_CALLS]
    if not case.mla:
        names += list(_MORE)
    if not case.is_encoder:
        names += list(_PAGES)
    if case.attn_type == AttentionType.ENCODER_DECODER or framework == "jax":
        names.remove("key of too few rows")  # in cross attention these rows are the encoder's
    if framework == "jax":
        names.remove("query of too few rows")
    if case.is_encoder or case.kv_cache_dtype != "auto":
        names.remove("rows of another dtype")  # no array of the layer then has its dtype
    if case.attn_type == AttentionType.ENCODER_DECODER:
        names.remove("a slot written twice")  # no slot is written
    return names


@check
def wrong(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """`wrong=<mistake>`: the library rejects the mistake with its own error."""
    name, call = case.check.partition("=")[2], draw(case)
    try:
        _make(name, call, run)
    except Exception as error:
        if not is_own_error(error):
            yield Violation("R", f"{name}: an error that is not the library's own: {type(error).__name__}: {error}", case)
    else:
        yield Violation("R", f"{name}: accepted without an error", case)


def _make(name: str, call: Call, run: Any) -> None:
    """Make the mistake."""
    arguments = {**_ARGUMENTS, **_MORE}.get(name)
    if arguments is not None:
        # As many as the layer has heads, or the number of slopes would be the mistake.
        if name == "slopes of nan":
            arguments = {"alibi_slopes": [float("nan")] * call.case.num_heads}
        run.layer(call, **arguments)
    elif name in _CALLS:
        run.open(call)(_CALLS[name](call))
    else:
        edit = {**_BATCHES, **_PAGES}[name]
        run.open(call)(call.with_batch(**edit(call.batch)))


def is_own_error(error: Exception) -> bool:
    """Whether an error was raised by this package itself and has a type for users' mistakes."""
    if isinstance(error, AttnError):
        return True
    if not isinstance(error, ValueError | TypeError | KeyError):
        return False
    trace = error.__traceback__
    # The innermost frame is where the error was raised: an error that passes through this package is the framework's.
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    path = trace.tb_frame.f_code.co_filename
    inside = within_package(path)
    if not inside or "/testing" in f"/{inside}":  # the drivers and this suite, `attn/testing` and `attn/torch/testing.py`
        return False
    return linecache.getline(path, trace.tb_lineno).strip().startswith("raise")


def within_package(path: str) -> str:
    """Return a file's path within this package, or "" for a file outside it, such as one of an environment beside it."""
    return Path(path).relative_to(_ROOT).as_posix() if Path(path).is_relative_to(_ROOT) else ""
