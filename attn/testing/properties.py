"""Metamorphic properties, by name: relations between results of one backend for related calls.

Each property takes a case and a runner and yields violations. `same` compares bits, where IEEE arithmetic (rule X) or the
backend (`batch_invariant`, rule I) guarantees equality; all other results are checked against the oracle, so that a property
also tests the batch shapes that it makes. A property's base case requests every feature that its variants use.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from attn.capabilities import Feature
from attn.errors import UnsupportedError
from attn.reference import merge_states
from attn.testing import transform as to
from attn.testing.bits import Array, as_bytes, rounded
from attn.testing.case import Case
from attn.testing.draw import Call, Result, draw
from attn.testing.expected import Expected, expect
from attn.testing.rules import BUDGETS, Score, Violation, check_cache, compare

Runner = Callable[[Call], Result]
Check = Callable[[Case, Runner, Score], Iterator[Violation]]

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a property under the name of its function."""
    CHECKS[function.__name__] = function
    return function


def run_check(case: Case, run: Runner, score: Score | None = None) -> list[Violation]:
    """Return all violations of the case's property. Raises what the runner raises."""
    name = case.check.partition("=")[0]
    if name not in CHECKS:
        raise ValueError(f"check={name!r} must be one of {', '.join(CHECKS)}")
    return list(CHECKS[name](case, run, score or Score()))


# building blocks


def judged(call: Call, run: Runner, score: Score, want: Expected | None = None) -> tuple[Result, list[Violation]]:
    """Run a call and compare its result, cache included, with the oracle (or with `want`)."""
    result = run(call)
    violations = list(check_cache(call, result))
    return result, violations + compare(call.case, result, want or expect(call, result), score)


def mapped(want: Expected, rows: Array | slice = slice(None), heads: Array | slice = slice(None)) -> Expected:
    """Return the expected result of some rows and heads."""
    # In two steps: one index with two arrays would pair rows with heads.
    noise = None if want.noise is None else want.noise[heads][:, rows]
    return Expected(want.out[rows][:, heads], want.lse[heads][:, rows], want.slack, noise)


def part_of(result: Result, rows: Array | slice = slice(None), heads: Array | slice = slice(None)) -> Result:
    """Return some rows and heads of a result, without its cache."""
    lse = None if result.lse is None else result.lse[heads][:, rows]
    return Result(result.output[rows][:, heads], lse, None, None, result.dtype)


def same(
    case: Case, change: str, one: Result, other: Result, rows: Array | slice | None = None, rule: str = "X"
) -> Iterator[Violation]:
    """Check that row i of `other` has the same bits as row rows[i] of `one`; by default for all live rows."""
    # Rows of padding are rule A's (`rules._padding`).
    live = slice(0, sum(case.query_lens)) if rows is None else rows
    pairs = [("output", one.output[live], other.output[: len(one.output[live])])]
    if case.lse and one.lse is not None and other.lse is not None:
        lse = one.lse[:, live]
        pairs.append(("lse", lse.T, other.lse[:, : lse.shape[1]].T))
    for name, a, b in pairs:
        # Bytes, not values: a NaN would equal nothing and -0 would equal 0. The lse is transposed, and a view needs contiguous
        # rows.
        differ = as_bytes(np.ascontiguousarray(a)) != as_bytes(np.ascontiguousarray(b))
        if differ.any():
            index = tuple(int(i) for i in np.argwhere(differ)[0])
            row = int(np.arange(len(one.output))[live][index[0]])
            yield Violation(
                rule, f"{name} bits changed: {change} ({int(differ.sum())} elements)", case, row, index[1], b[index], a[index]
            )


def invariant(case: Case, change: str, one: Result, other: Result, rows: Array | None = None) -> Iterator[Violation]:
    """Check `same` if the case requests batch invariance."""
    if Feature.BATCH_INVARIANT.value in case.features:
        yield from same(case, change, one, other, rows, "I")


def oracle_of(call: Call, run: Runner, score: Score) -> tuple[Result, Expected, list[Violation]]:
    """Return the base of a comparison: the call's result, the expected one, and its violations."""
    result = run(call)
    want = expect(call, result)
    return result, want, list(check_cache(call, result)) + compare(call.case, result, want, score)


def equal(variants: Callable[[Case, Call], Iterable[tuple[str, Call]]]) -> Check:
    """Register a property whose variants of a call all have the call's expected result.

    `variants` yields (change, the changed call). Where the change is not empty, the bits are equal too if the case
    requests batch invariance.
    """

    @functools.wraps(variants)
    def compared(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
        call = draw(case)
        base, want, violations = oracle_of(call, run, score)
        yield from violations
        for change, changed in variants(case, call):
            # The expected result is computed once: all variants must match the oracle's answer to the unchanged call.
            result, violations = judged(changed, run, score, want)
            yield from violations
            if change:
                yield from invariant(case, change, base, result)

    return check(compared)


# comparison with the oracle, and refinements of it


@check
def oracle(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """The float64 reference, rules A-D and W."""
    yield from judged(draw(case), run, score)[1]


@check
def single_key(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """With one visible key, the output is its value, bit for bit, for any score."""
    call = draw(case)
    result, violations = judged(call, run, score)
    yield from violations
    want = expect(call, result)
    # The only weight of such a row is exp(s - s) = 1, which leaves nothing to round. Rows without a key are rule A's.
    seeing = np.flatnonzero(np.isfinite(want.lse).all(0))
    exact = Result(rounded(want.out, case.dtype), None, None, None, case.dtype)
    part = Result(result.output[seeing], None, None, None, case.dtype)
    yield from same(case, "of a single key's value", exact, part, seeing)


@check
def constant_value(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """If all of V is one number, the output is that number; it never leaves V's range."""
    result, violations = judged(draw(case), run, score)
    yield from violations
    # 1.625 is exact in every dtype; weights that are rounded before they are summed need not sum to 1, hence the budget.
    low, high = 1.625 * (1 - BUDGETS[case.dtype].hard), 1.625 * (1 + BUDGETS[case.dtype].hard)
    out = result.output[: sum(case.query_lens)]
    outside = (out < low) | (out > high)
    if outside.any():
        row, head, d = (int(i) for i in np.argwhere(outside)[0])
        yield Violation("B", "the average of one number is another", case, row, head, out[row, head, d], 1.625)


@check
def rerun(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """The same call twice gives the same bits."""
    call = draw(case)
    yield from same(case, "run again", run(call), run(call))


@check
def live_nan(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """A NaN (for backends without `nan_safe`, a large number) in a live value affects exactly the rows that attend to it."""
    call = draw(case)
    assert call.value is not None and call.key is not None
    # One tensor at a time: a NaN in a value enters by the product with the weights, one in a key by the softmax, and either
    # could hide the other.
    for names in (("key", "value"),) if case.mla else (("value",), ("key",)):  # MLA's rows are keys and values
        edited = np.array(getattr(call, names[0]))
        # Only the last two rows of that request see this token, so all rows before it and every other request must stay finite.
        edited[call.rows(len(case.query_lens) - 1).stop - 2, 0, 3] = case.hidden  # the second to last token of the last request
        yield from judged(call.but(**dict.fromkeys(names, edited)), run, score)[1]


@check
def without_mirrors(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """A batch without host copies of its lengths gives the same bits."""
    yield from judged(draw(case.replace(arrays="bare")), run, score)[1]


@equal
def empty_tree(case: Case, call: Call) -> Iterator[tuple[str, Call]]:
    """A tree mask without nodes, [R, 0, 0], has no effect."""
    yield "", call.with_batch(tree_mask=np.zeros((call.batch.num_reqs, 0, 0), np.bool_))


@check
def captured(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """The layer compiled as a whole, with its cache donated, agrees with the layer called step by step."""
    call = draw(case)
    _, want, violations = oracle_of(call, run, score)
    yield from violations + judged(call, run.captured, score, want)[1]  # type: ignore[attr-defined]


@check
def too_large(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """A cache that spans more elements than a backend's kernels can index (`max_cache_span`) is rejected."""
    try:
        run(draw(case))
    except UnsupportedError:
        return
    yield Violation("R", "the call accepts a cache beyond max_cache_span", case)


# memory: pages, slots, tables


@check
def poison(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """The contents of unused memory change no bit."""
    base = run(draw(case))
    # Equal bits are exact arithmetic: a masked key has the weight 0 and adds nothing, whatever its finite contents.
    for contents in ("zero", "huge"):
        yield from same(case, f"poison {case.poison} against {contents}", base, run(draw(case.replace(poison=contents))))


@equal
def permute_pages(case: Case, call: Call) -> Iterator[tuple[str, Call]]:
    """Permuting the pages together with the block table changes no bit."""
    assert call.key_cache is not None
    # The first number is another one than those in `draw`, whose permutation this must not undo.
    order = np.random.default_rng([8, case.geometry_seed]).permutation(call.key_cache.shape[0])
    yield "pages permuted", to.repaged(call, order)


@equal
def table_tail(case: Case, call: Call) -> Iterator[tuple[str, Call]]:
    """Entries past a row's last page are never read, even if they are out of range."""
    used = -(-call.batch.seq_lens // case.block_size)
    tail = np.arange(call.batch.block_table.shape[1]) >= used[:, None]
    # -2**31 times an even page size is 0 in int32, a valid offset; the other two are far outside the cache.
    for garbage in (-1, -(2**31), 2**31 - 1):
        table = np.where(tail, garbage, call.batch.block_table).astype(np.int32)
        yield f"table tail of {garbage}", call.with_batch(block_table=table)


def _requests(call: Call) -> list[tuple[Array, Array]]:
    """Return each request's keys and values."""
    return [to.tokens(call, r) for r in range(call.batch.num_reqs)]


@equal
def shared_pages(case: Case, call: Call) -> Iterator[tuple[str, Call]]:
    """A prefix in shared pages gives the same bits as private copies of it."""
    yield "private copies of a prefix", to.placed(call, _requests(call))


@equal
def page_size(case: Case, call: Call) -> Iterator[tuple[str, Call]]:
    """`page_size=<other>`: the same tokens in pages of another size give the same result."""
    yield "", to.placed(call, _requests(call), int(case.check.partition("=")[2]))


@equal
def written_before(case: Case, call: Call) -> Iterator[tuple[str, Call]]:
    """Tokens that are in the cache already (all slots -1) give the same result, and the cache is not changed."""
    ready = to.already_written(call)
    yield "", ready
    # Keys that are passed but have no slot are in the cache, so that attention must not count them twice.
    yield "", ready.but(key=call.key, value=call.value)


@check
def ignored_keys(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """With KV sharing, the call's own keys and values are not read."""
    call = draw(case)
    base, _, violations = oracle_of(call, run, score)
    yield from violations
    # The base call has NaN in its keys (`draw._tokens`); both ways to pass nothing must give its bits.
    for replacement, fresh in (("zeros", np.zeros_like(call.query[:, : case.num_kv_heads])), ("nothing", None)):
        yield from same(case, f"own keys NaN against {replacement}", base, run(call.but(key=fresh, value=fresh)))


# the batch: order, neighbours, chunks


@check
def batch_order(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """Requests in another order, each request alone, and decodes and prefills separately give the same results."""
    call = draw(case)
    base, want, violations = oracle_of(call, run, score)
    yield from violations
    everyone = range(call.batch.num_reqs)
    decodes = [r for r in everyone if case.query_lens[r] == 1]
    for order, requests in (
        ("batch reversed", everyone[::-1]),
        ("first request alone", [0]),
        ("last request alone", [everyone[-1]]),
        ("decodes apart", decodes),
        ("prefills apart", [r for r in everyone if r not in decodes]),
    ):
        if requests:
            rows = to.rows_of(call, requests)
            result, more = judged(to.picked(call, requests), run, score, mapped(want, rows))
            # a part's cache lacks the tokens that the other requests would have written
            yield from more
            yield from invariant(case, order, base, result, rows)


@check
def neighbours(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """Further requests in the batch (empty, short, with long queries or contexts) do not affect the others."""
    call = draw(case)
    base, want, violations = oracle_of(call, run, score)
    yield from violations
    rows = np.arange(call.num_tokens)
    # An empty request shifts indices, a decode of more than three pages raises the longest context, and the last two are a
    # prompt and a chunk beside requests of which some are decodes.
    for extra in ((0, 5), (1, 3 * case.block_size + 1), (9, 9), (17, 40)):
        other = case.replace(query_lens=(*case.query_lens, extra[0]), seq_lens=(*case.seq_lens, extra[1]), padding=0)
        result, more = judged(draw(other), run, score)
        yield from more
        part = part_of(result, rows)
        yield from compare(case.replace(padding=0), part, mapped(want, rows))
        yield from invariant(case, f"a neighbour of (q, kv) lengths {extra}", base, part, rows)


@check
def any_batch(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """Requests have the same bits alone, among any others, in any order, and under the loose bounds of a captured graph.

    Rule I only, and the oracle for the whole batch: for backends that declare `batch_invariant` (docs/semantics.md §17).
    """
    call = draw(case)
    base, violations = judged(call, run, score)
    yield from violations
    rng = np.random.default_rng([13, case.geometry_seed])
    order = rng.permutation(call.batch.num_reqs).tolist()
    decodes, drafts = ([r for r in order if case.query_lens[r] in lens] for lens in ((1,), (1, 2, 3, 4)))
    # Seven at random, and the longest context, which is most likely to be split.
    batches = [("alone", [r]) for r in (*order[:7], int(np.argmax(case.seq_lens)))]
    batches += [
        (f"among {size - 1} others", rng.permutation(order)[:size].tolist()) for size in (2, 7, 16) if size < len(order)
    ]
    batches += [("among decodes", decodes[:4]), ("among drafts", drafts), ("in reverse", sorted(order, reverse=True))]
    for i, (change, requests) in enumerate(batches):
        part = to.picked(call, requests)
        # A captured graph is replayed for shorter batches than it was captured for, with the bounds of its capture. Other steps
        # of i give other bounds.
        if i % 2:
            bounds = {name: getattr(part.batch, name) + 37 * i for name in ("max_query_len", "max_seq_len")}
            part, change = part.with_batch(**bounds), f"{change}, in a graph for longer requests"
        yield from same(case, f"requests {change}", base, run(part), to.rows_of(call, requests), "I")


def _in_chunks(
    call: Call, cuts: Iterable[Sequence[int]], run: Runner, score: Score, want: Expected | None = None
) -> Iterator[Violation]:
    """Run the new tokens between each two `cuts`, over the cache that the chunk before left; want: the whole call's result."""
    assert call.key_cache is not None and call.value_cache is not None
    caches = (call.key_cache, call.value_cache)
    for begin, end in itertools.pairwise(cuts):
        expected = None if want is None else mapped(want, to.chunk_rows(call, begin, end))
        result, violations = judged(to.chunk(call, begin, end, caches), run, score, expected)
        yield from violations
        # The next chunk would read a cache that is known to be wrong, and repeat the failure.
        if violations or result.key_cache is None or result.value_cache is None:
            return
        caches = (result.key_cache, result.value_cache)


@check
def chunked(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """A prefill in chunks, the last one a single token, gives the result of the whole prefill."""
    call = draw(case)
    _, want, violations = oracle_of(call, run, score)
    yield from violations
    lens = case.query_lens
    yield from _in_chunks(call, [[0] * len(lens), [n // 3 for n in lens], [n - 1 for n in lens], lens], run, score, want)


@check
def steps(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """One layer and one cache serve consecutive batches, as in an engine: parts of each prompt, then single tokens.

    A step reads what earlier steps wrote to the cache; a runner keeps layer and cache by its method `open`.
    """
    call = draw(case)
    # A runner without `open` (the simulated kernel) makes a layer for each call, which tests the cache alone.
    run = getattr(run, "open", lambda call: run)(call)
    rng, lens = np.random.default_rng([12, case.geometry_seed]), np.array(case.query_lens, np.int64)
    # Two cuts per request, which may coincide: a step in which a request has no token.
    inner = np.sort(rng.integers(0, np.maximum(lens, 1), (2, len(lens))), 0)
    cuts = [np.zeros_like(lens), *inner, np.maximum(lens - 1, 0), lens]
    yield from _in_chunks(call, [cut.tolist() for cut in cuts], run, score)


@check
def layers_in_turn(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """Layers that share a batch, and then another one of its kind, give the same bits in turn as each of them alone.

    Two differ in the contents of their vectors only, so that what a layer keeps of a batch serves the other; the third has
    another scale. A runner has layers by its method `open`, and the batch that they share by `metadata`.
    """
    call = draw(case)
    changes = {name: x[::-1].copy() for name in ("sinks", "alibi_slopes") if (x := getattr(call, name)) is not None}
    changes |= {name: _times(getattr(case, name), 2) for name in ("k_scale", "v_scale") if case.is_quantized}
    # The second has the same launches as the first, with other addresses in them; the third may not reuse them.
    calls = [call, call.but(**changes), call.but(scale=-0.7 * call.scale)]
    alone = []
    for each in calls:
        result, violations = judged(each, run, score)
        yield from violations
        alone.append(result)
    # Rules A-D above apply to any runner; only drivers of a framework have layers that can share a batch.
    if not (hasattr(run, "open") and hasattr(run, "metadata")):
        return
    layers = [run.open(each) for each in calls]
    for batch, turns in (("a batch", 2), ("another batch", 1)):
        metadata = run.metadata(call)
        for turn, i in itertools.product(range(turns), range(len(calls))):
            change = f"layer {i} of {len(calls)} over {batch}, call {turn + 1}"
            yield from same(case, change, alone[i], layers[i](calls[i], metadata))


@check
def split_and_merge(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """Attention over splits of the keys, one of them empty, merged by lse in any order, is attention over all keys."""
    call = draw(case)
    _, want, violations = oracle_of(call, run, score)
    yield from violations
    whole = _requests(call)
    states = []
    # Uneven splits, one of no keys; each is a call of its own, whose decodes see every key of their split.
    for a, b in ((0.0, 0.3), (0.3, 0.3), (0.3, 0.9), (0.9, 1.0)):
        split = to.placed(call, [tuple(x[int(a * len(x)) : int(b * len(x))] for x in both) for both in whole])  # type: ignore[misc]
        result, more = judged(split, run, score)
        yield from more
        if result.lse is None:
            return
        states.append(
            (result.output[: call.num_tokens].astype(np.float64), result.lse[:, : call.num_tokens].astype(np.float64))
        )
    one, two, three, four = states
    # A merge of all states at once, and one in steps and in another order (docs/semantics.md §6: associative, commutative).
    for order in ([one, two, three, four], [four, merge_states(*zip(three, one, strict=True)), two]):
        out, lse = merge_states(*zip(*order, strict=True))
        merged = Result(rounded(out, case.dtype), lse.astype(np.float32), None, None, case.dtype)
        live = np.arange(call.num_tokens)
        yield from compare(case.replace(padding=0), merged, mapped(want, live))


# mathematical identities


@check
def window_of_everything(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """A window as long as the sequence masks nothing."""
    _, want, violations = oracle_of(draw(case.replace(sliding_window=None)), run, score)
    # Not `case` with another window: it would draw other poison, since the keys outside a window are not in its cache.
    wide = draw(case.replace(sliding_window=None)).but(sliding_window=max(case.seq_lens) + 1)
    yield from violations + judged(wide, run, score, want)[1]


@equal
def hidden_keys(case: Case, call: Call) -> Iterator[tuple[str, Call]]:
    """Context to the left of every window has no effect, of any contents and length."""
    left = case.window[0]
    assert left is not None
    longer = []
    for r, both in enumerate(_requests(call)):
        hidden = case.seq_lens[r] - case.query_lens[r] - left
        if hidden >= 0:  # otherwise the first row would attend to the added keys
            # Replaced by another number of copies of the last key, so that the positions of the visible keys shift.
            both = tuple(np.concatenate([x[-1:].repeat(case.block_size + 3, 0), x[hidden:]]) for x in both)  # type: ignore[assignment]
        longer.append(both)
    yield "", to.placed(call, longer)


@check
def causal_by_window(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """Non-causal attention with a right bound of 0 is causal attention."""
    # Both calls have the arrays of the non-causal case: `causal` takes part in no draw.
    causal = draw(case).but(causal=True).with_batch(causal=True)
    _, want, violations = oracle_of(causal, run, score)
    window = draw(case).but(sliding_window=(None, 0))
    yield from violations + judged(window, run, score, want)[1]


@equal
def reach_limits(case: Case, call: Call) -> Iterator[tuple[str, Call]]:
    """Spans of rows alone, prefixes of no key, one causality for all requests, blocks of one token and chunks as long as the
    sequence change nothing."""
    spans = draw(case.replace(spans=-1)).batch.spans
    nothing = np.zeros(call.batch.num_reqs, np.int32)
    yield "", call.with_batch(spans=spans, prefix=nothing)
    yield "", call.with_batch(causal=nothing == 0)
    yield "", call.but(chunk_size=max(case.seq_lens) + 1)


@check
def whole_span(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """A span, or a prefix, of the whole request is non-causal attention."""
    call = draw(case)
    _, want, violations = oracle_of(call.with_batch(causal=False), run, score)
    yield from violations
    # [T]: the last position of each row's request, the end of a span that begins at 0.
    last = np.repeat(call.batch.seq_lens, case.query_lens) - 1
    spans = np.stack([np.zeros_like(last), last], 1)
    yield from judged(call.with_batch(spans=spans), run, score, want)[1]
    yield from judged(call.with_batch(prefix=call.batch.seq_lens), run, score, want)[1]


@check
def soft_cap_limits(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """A huge cap has no effect; a tiny one gives all keys the same weight."""
    call = draw(case)
    free = expect(call.but(logits_soft_cap=None))
    yield from judged(call.but(logits_soft_cap=1e4), run, score, free)[1]
    # The oracle of the capped call, not equal weights: the scores of up to 1e-3 are ten times rule D's tolerance.
    yield from judged(call.but(logits_soft_cap=1e-3), run, score)[1]


@check
def flat_alibi(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """Slopes of zero have no effect."""
    call = draw(case)
    assert call.alibi_slopes is not None
    plain = expect(call.but(alibi_slopes=None))
    yield from judged(call.but(alibi_slopes=np.zeros_like(call.alibi_slopes)), run, score, plain)[1]


@check
def powers_of_two(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """Scaling V by a power of two scales the output exactly; scaling query and key by inverse powers of two changes no bit."""
    call = draw(case)
    base = run(call)
    assert call.key is not None and call.value is not None and call.key_cache is not None and call.value_cache is not None
    louder = run(call.but(value=call.value * 4, value_cache=to.scaled(call.value_cache, case.element, 4)))
    # Exact: a power of two changes the exponent only, unless a number overflows or becomes subnormal (the suite leaves float16
    # out).
    quarter = Result(louder.output / 4, louder.lse, None, None, louder.dtype)
    yield from same(case, "V scaled by 4 (output / 4)", base, quarter)
    # Every product q * k has the bits it had, so all that follows has.
    traded = call.but(query=call.query * 2, key=call.key / 2, key_cache=to.scaled(call.key_cache, case.element, 0.5))
    yield from same(case, "q * 2 and k / 2", base, run(traded))


@check
def scales_fold(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """k_scale multiplies the softmax scale and v_scale the output, exactly for powers of two."""
    # The codes must stay the same while the scale changes, so nothing may be written with the new scale.
    call = to.already_written(draw(case))
    base = run(call)
    keys = run(call.but(k_scale=_times(case.k_scale, 2), scale=call.scale / 2))
    yield from same(case, "k_scale doubled, scale halved", base, keys)
    values = run(call.but(v_scale=_times(case.v_scale, 4)))
    yield from same(case, "v_scale times 4 (output / 4)", base, Result(values.output / 4, values.lse, None, None, values.dtype))


def _times(scale: float | tuple[float, ...], factor: float) -> float | tuple[float, ...]:
    return tuple(s * factor for s in scale) if isinstance(scale, tuple) else scale * factor


@check
def head_groups(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """Kv heads and their query heads in another order, or half of them, as on a tensor-parallel rank, give the same results."""
    call = draw(case)
    base, want, violations = oracle_of(call, run, score)
    yield from violations
    group = case.num_heads // case.num_kv_heads
    # With one kv head the second is a call of no heads at all, which no layer has; the base case has two.
    for kv_heads in (np.arange(case.num_kv_heads)[::-1], np.arange(case.num_kv_heads // 2)):
        heads = (kv_heads[:, None] * group + np.arange(group)).reshape(-1)
        part = _with_heads(call, heads, kv_heads)
        result, more = judged(part, run, score, mapped(want, heads=heads))
        yield from more
        # Half of the heads are another layer, which may run other tiles: only the reordered ones must have equal bits.
        if len(heads) == case.num_heads:
            yield from invariant(case, "head groups reversed", part_of(base, heads=heads), result)


@equal
def repeated_heads(case: Case, call: Call) -> Iterator[tuple[str, Call]]:
    """Grouped-query attention equals multi-head attention with every kv head repeated."""
    kv_heads = np.arange(case.num_heads) // (case.num_heads // case.num_kv_heads)
    yield "", _with_heads(call, np.arange(case.num_heads), kv_heads)


def _with_heads(call: Call, heads: Array, kv_heads: Array) -> Call:
    def taken(array: Array | None, axis: int, chosen: Array) -> Array | None:
        return None if array is None else np.take(array, chosen, axis)

    scales = {
        # A scale of each head moves with its head.
        n: s if isinstance(s := getattr(call.case, n), float) else tuple(s[i] for i in kv_heads)
        for n in ("k_scale", "v_scale")
    }
    return call.but(
        query=call.query[:, heads],
        key=taken(call.key, 1, kv_heads),
        value=taken(call.value, 1, kv_heads),
        key_cache=taken(call.key_cache, 2, kv_heads),
        value_cache=taken(call.value_cache, 2, kv_heads),
        alibi_slopes=taken(call.alibi_slopes, 0, heads),
        sinks=taken(call.sinks, 0, heads),
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        **scales,
    )


@check
def key_order(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """Without causality the order of keys has no effect, and repeating all keys adds ln 2 to the lse."""
    call = draw(case)
    _, want, violations = oracle_of(call, run, score)
    yield from violations
    whole = _requests(call)
    yield from judged(to.placed(call, [(k[::-1], v[::-1]) for k, v in whole]), run, score, want)[1]
    twice = to.placed(call, [(np.concatenate([k, k]), np.concatenate([v, v])) for k, v in whole])
    # No bits are compared: the sums run over other tiles.
    yield from judged(twice, run, score, Expected(want.out, want.lse + np.log(2), want.slack))[1]


@check
def sinks_off(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """A sink of -inf has no effect; any other multiplies the output without sinks by sigmoid(lse - sink)."""
    call = draw(case)
    assert call.sinks is not None
    plain = expect(call.but(sinks=None))
    yield from judged(call.but(sinks=np.full_like(call.sinks, -np.inf)), run, score, plain)[1]
    factor = 1 / (1 + np.exp(call.sinks[:, None] - plain.lse))
    sunk = Expected(plain.out * factor.T[..., None], plain.lse, plain.slack)
    yield from judged(call, run, score, sunk)[1]


@check
def tree_paths(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """A chain equals causal attention; a branch's rows ignore the contents of other branches, even NaN (`Case.hidden`).

    Not bit for bit: a kernel may recompute a block with non-finite values in another way.
    """
    call = draw(case)
    _, want, violations = oracle_of(call, run, score)
    yield from violations
    assert call.batch.tree_mask is not None and call.key is not None and call.value is not None
    chain = np.broadcast_to(np.tri(case.tree, dtype=np.bool_), call.batch.tree_mask.shape)
    causal = expect(call.with_batch(tree_mask=None))
    yield from judged(call.with_batch(tree_mask=chain.copy()), run, score, causal)[1]
    key, value = np.array(call.key), np.array(call.value)
    rows = []
    for r, n in enumerate(case.query_lens):
        request_rows = call.rows(r)
        rows.append(request_rows.stop - 1)
        # Of the request's last node. A request with more rows than the tree has nodes is causal (`reference.paged_attention`),
        # and its last row sees every key.
        hidden = ~call.batch.tree_mask[r, n - 1, :n] if n <= case.tree else np.zeros(n, np.bool_)
        key[request_rows][hidden], value[request_rows][hidden] = case.hidden, case.hidden
    poisoned = run(call.but(key=key, value=value))
    last = np.array(rows)
    # As a case of one row per request, so that `compare` takes the rows for live ones and names their request.
    yield from compare(case.replace(query_lens=(1,) * len(rows), padding=0), part_of(poisoned, last), mapped(want, last), score)


@check
def future_edit(case: Case, run: Runner, score: Score) -> Iterator[Violation]:
    """The contents of later tokens change no bit of the rows before them."""
    call = draw(case)
    base = run(call)
    assert call.key is not None and call.value is not None
    key, value = np.array(call.key), np.array(call.value)
    before = []
    for r, n in enumerate(case.query_lens):
        request_rows = call.rows(r)
        # At least the request's first row; of a decode nothing is edited.
        before.append(np.arange(request_rows.start, request_rows.start + (n + 1) // 2))
        key[request_rows.start + (n + 1) // 2 : request_rows.stop] = 3.0
        value[request_rows.start + (n + 1) // 2 : request_rows.stop] = -5.0
    edited = run(call.but(key=key, value=value))
    rows = np.concatenate(before)
    yield from same(case, "later tokens edited", base, part_of(edited, rows), rows)
