"""Conformance of MLA prefill backends: compared with the float64 oracle, cases derived from capabilities.

Cases cover the calls of the MLA template: causal attention of new tokens, context in chunks without a mask, requests without
tokens or without keys in a chunk, values that are a strided view next to their keys. All parts, merged by their log-sum-exps,
must equal attention over everything. A framework's driver (`attn.torch.testing.prefill`, `attn.jax.testing.prefill`) says how
arrays are converted; the rules are those of the paged family.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attn import reference
from attn.backends.mla.prefill.abstract import MLAContextChunk, MLAPrefillMetadata
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
from attn.backends.mla.prefill.selector import make_mla_prefill_request
from attn.capabilities import supports_size
from attn.imports import resolve_obj_by_qualname
from attn.testing.bits import Array, drawn, rounded
from attn.testing.case import Case
from attn.testing.conformance import Family, Report, run_family
from attn.testing.draw import Result
from attn.testing.expected import Expected
from attn.testing.rules import BUDGETS, compare, require
from attn.testing.subject import Subject

State = tuple[Array, Array]  #: out [T, H, Dv], lse [H, T]
#: Head sizes (D, Dv) to test, DeepSeek's first.
_SIZES = ((192, 128), (96, 64), (40, 24), (128, 128), (256, 256), (192, 192))


@dataclass(frozen=True)
class PrefillCase:
    """The number of new tokens of each request and, for each chunk of the context, its number of keys of each request.

    layout: "heads", or "fused": the arrays are views of wider rows, at odd addresses and strides (torch only).
    """

    name: str
    query_lens: tuple[int, ...] = (5, 1, 17, 40)
    chunks: tuple[tuple[int, ...], ...] = ((9, 0, 33, 4), (0, 0, 64, 0))
    num_heads: int = 4
    sizes: tuple[int, int] = (192, 128)
    dtype: str = "bfloat16"
    scale: float | None = None
    layout: str = "heads"

    def __str__(self) -> str:
        return self.name


@dataclass
class PrefillArrays:
    """A case's arrays: float32 values representable in the case's dtype.

    query: [T, H, D].
    parts: (keys [m, H, D], values [m, H, Dv], key_start_loc [R + 1]) of the new tokens, then of each chunk.
    """

    case: PrefillCase
    scale: float
    query: Array
    query_start_loc: Array
    parts: list[tuple[Array, Array, Array]]


def prefill_cases(backend: Any) -> list[PrefillCase]:
    """Return the cases that a backend class must pass, from its capabilities."""
    c = backend.capabilities
    allowed = c.head_sizes, backend.v_head_dims
    sizes = [size for size in _SIZES if all(map(supports_size, size, allowed))]
    sizes = sizes or [(Subject.sizes((), allowed[0])[0], Subject.sizes((), allowed[1])[0])]
    dtypes = [d for d in ("bfloat16", "float32", "float16", "float64") if d in c.dtypes and d in BUDGETS]
    plain = PrefillCase("new tokens and context", sizes=sizes[0], dtype=dtypes[0])
    # One row: a view of it may look contiguous although its stride is not.
    one = replace(plain, query_lens=(1,), chunks=((1,),))
    cases = [
        plain,
        replace(plain, name="no context", chunks=()),
        replace(plain, name="one request", query_lens=(70,), chunks=((33,),)),
        replace(plain, name="longer than a tile", query_lens=(130, 257), chunks=((1, 200),)),
        replace(plain, name="requests without tokens", query_lens=(7, 0, 3), chunks=((4, 0, 0),)),
        replace(plain, name="explicit scale", scale=0.31),
        *(replace(plain, name=f"{heads} heads", num_heads=heads) for heads in (1, 5, 16)),
        *(replace(plain, name=dtype, dtype=dtype) for dtype in dtypes),
        *(
            replace(case, name=f"{dtype}, {words}, views at odd addresses", dtype=dtype, layout="fused")
            for dtype in dtypes
            if c.framework == "torch"
            for words, case in (("a batch", plain), ("one token", one))
        ),
        *(replace(plain, name=f"heads of {size[0]} and {size[1]}", sizes=size) for size in sizes),
    ]
    return [case for case in cases if not backend.why_not(_request(case))]


def _request(case: PrefillCase) -> Any:
    return make_mla_prefill_request(*case.sizes, case.dtype, num_heads=case.num_heads)


def draw_prefill(case: PrefillCase) -> PrefillArrays:
    """Return the arrays of a case, deterministically."""
    rng = np.random.default_rng((11, *case.query_lens, *case.sizes, case.num_heads))

    def normal(rows: int, size: int) -> Array:
        return drawn(rng.standard_normal((rows, case.num_heads, size), np.float32), case.dtype)

    def starts(lens: Sequence[int]) -> Array:
        return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)

    size, value_size = case.sizes
    query = normal(sum(case.query_lens), size)
    # Packed as the queries are: request r has the rows starts[r] to starts[r + 1] of a part.
    parts = [(normal(sum(n), size), normal(sum(n), value_size), starts(n)) for n in (case.query_lens, *case.chunks)]
    return PrefillArrays(case, size**-0.5 if case.scale is None else case.scale, query, starts(case.query_lens), parts)


def results(
    backend: Any,
    call: PrefillArrays,
    put: Callable[[Array], Any],
    rows: Callable[[Array], Any],
    pair: Callable[[Array, Array], tuple[Any, Any]],
    numbers: Callable[[Any], Array],
) -> tuple[Array, list[State]]:
    """Return a backend's results in NumPy: (new tokens' output, [(out, lse)] of new tokens and each chunk).

    put, rows, pair: convert an index, a query, and keys with their values, in the case's dtype; numbers: converts back.
    """

    def longest(starts: Array) -> int:
        return int(np.diff(starts).max(initial=0))

    starts = call.query_start_loc
    chunks = tuple(MLAContextChunk(put(at), at, int(at[-1]), longest(at)) for *_, at in call.parts[1:])
    meta = MLAPrefillMetadata(put(starts), starts, len(starts) - 1, longest(starts), chunks)
    impl = backend(call.case.num_heads, *call.case.sizes, call.scale)
    query, new = rows(call.query), pair(*call.parts[0][:2])
    # Without the LSE first: a backend may take another path for it, which must give the same output.
    alone = impl.run_prefill_new_tokens(query, *new, meta, False)
    require(alone.dtype == query.dtype, f"{call.case}: an output of {alone.dtype}, of queries of {query.dtype}")
    states = [impl.run_prefill_new_tokens(query, *new, meta, True)]
    for i, (keys, values, _) in enumerate(call.parts[1:]):
        states.append(impl.run_prefill_context_chunk(i, query, *pair(keys, values), meta))
    return numbers(alone), [(numbers(out), numbers(lse)) for out, lse in states]


def _expected(call: PrefillArrays, parts: Sequence[int], causal: bool) -> State:
    """Return the oracle's result over some parts of the keys; `causal` masks the last part."""
    out = np.zeros((len(call.query), call.case.num_heads, call.case.sizes[1]))
    lse = np.full((call.case.num_heads, len(call.query)), -np.inf)
    for r in range(len(call.case.query_lens)):
        rows = slice(call.query_start_loc[r], call.query_start_loc[r + 1])
        # The causal part comes last, so that its diagonal is at the bottom right of all keys.
        slices = [tuple(x[starts[r] : starts[r + 1]] for x in (k, v)) for k, v, starts in (call.parts[i] for i in parts)]
        keys, values = (np.concatenate([part[i] for part in slices]) for i in (0, 1))
        if rows.stop > rows.start:
            out[rows], lse[:, rows] = reference.attention(call.query[rows], keys, values, scale=call.scale, causal=causal)
    return out, lse


def check_prefill(backend: Any, case: PrefillCase) -> None:
    """Run one case on a backend class.

    Raises AssertionError with all broken rules.
    """
    call = draw_prefill(case)
    run: Callable[[Any, PrefillArrays], tuple[Array, list[State]]] = resolve_obj_by_qualname(
        f"attn.{backend.capabilities.framework}.testing.prefill"
    )
    alone, states = run(backend, call)
    expected = [_expected(call, [i], i == 0) for i in range(len(call.parts))]
    violations = _broken(case, "new tokens, without lse", (alone, expected[0][1]), expected[0])
    for i, (state, want) in enumerate(zip(states, expected, strict=True)):
        violations += _broken(case, f"chunk {i - 1}" if i else "new tokens", state, want)
    outs, logs = zip(*states, strict=True)
    # As the MLA template merges them: a wrong base or shift of an LSE shows here even if every part is right.
    merged = reference.merge_states(list(outs), list(logs))
    # The context's parts, then the new tokens: `_expected` masks the last part.
    violations += _broken(case, "everything, merged", merged, _expected(call, [*range(1, len(call.parts)), 0], True))
    require(not violations, f"{case}: {'; '.join(violations)}")


def _broken(case: PrefillCase, state_name: str, state: State, want: State) -> list[str]:
    """Return the rules that a state breaks. The output of a row without keys is never read and is not checked."""
    out = np.where(np.isneginf(want[1]).T[..., None], 0, state[0])
    # The rules need a paged case only for its lengths, dtype and name.
    as_case = Case(state_name, case.query_lens, case.query_lens, num_heads=case.num_heads, dtype=case.dtype, lse=True)
    result = Result(rounded(out, case.dtype), state[1], None, None, case.dtype)
    return [f"rule {v.rule} ({state_name}): {v.what}" for v in compare(as_case, result, Expected(*want, None))]


def run_prefill(names: Sequence[str] | None = None, **options: Any) -> Report:
    """Run the suite on the named MLA prefill backends, or on all that run here; `options` are those of `run_family`."""
    cases = lambda backend, _: prefill_cases(backend)  # noqa: E731
    family = Family.checked("mla_prefill", "prefill", MLAPrefillBackendEnum, cases, check_prefill)
    return run_family(family, names, **options)
