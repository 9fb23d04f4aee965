"""Each request attends to exactly its own tokens, for any pool, budget and arrivals, and no block is lost."""

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn.serving import GenerationRequest, PoolError, RequestError, Scheduler, Step

VOCAB, EOS = 50, 0
#: Step of arrival, prompt, max_new_tokens, and the step at which it is cancelled if it is not finished.
Arrival = tuple[int, list[int], int, int]


def successor(context: Sequence[int]) -> int:
    """A token that depends on every token before it and on their order; EOS every now and then."""
    state = 7
    for token in context:
        state = (state * 31 + token + 1) % 10007
    return state % VOCAB


class Echo:
    """A model whose cache holds what was written to it, and whose next token is read back through the block table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.full(num_blocks * block_size, -1)
        self.positions = np.full(num_blocks * block_size, -1)

    def __call__(self, step: Step, scheduler: Scheduler) -> list[int]:
        batch = step.attn_metadata.validate(self.block_size, scheduler.pool.num_blocks, strict=True)
        assert batch.num_actual_tokens == len(step.token_ids) == len(step.positions) <= scheduler.token_budget
        assert batch.num_reqs <= scheduler.max_num_reqs
        for block in {int(slot) // self.block_size for slot in batch.slot_mapping}:
            assert scheduler.pool.users(block) == 1, "a shared block is written"
            assert scheduler.pool.key(block) is None, "a registered block is written"
        self.tokens[batch.slot_mapping], self.positions[batch.slot_mapping] = step.token_ids, step.positions
        chosen = []
        for row, request in zip(step.sample_rows, step.sampled, strict=True):
            r = int(np.searchsorted(batch.query_start_loc, row, side="right")) - 1
            assert row == batch.query_start_loc[r + 1] - 1
            at = np.arange(batch.seq_lens[r])
            slots = batch.block_table[r, at // self.block_size] * self.block_size + at % self.block_size
            np.testing.assert_array_equal(self.positions[slots], at)
            np.testing.assert_array_equal(self.tokens[slots], request.tokens)
            chosen.append(successor(self.tokens[slots].tolist()))
        return chosen


def make(num_blocks: int = 8, block_size: int = 4, **options: int) -> Scheduler:
    limits = {"vocab_size": VOCAB, "max_model_len": 64, "token_budget": 8, **options}
    return Scheduler(num_blocks, block_size, eos_token_ids=(EOS,), **limits)


def finish(scheduler: Scheduler, model: Echo | None = None) -> list[Step]:
    """Serve everything that was submitted; returns the batches."""
    model, steps = model or Echo(scheduler.pool.num_blocks, scheduler.block_size), []
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(model(step, scheduler))
        steps.append(step)
    return steps


def alone(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    output: list[int] = []
    while len(output) < max_new_tokens and EOS not in output:
        output.append(successor([*prompt, *output]))
    return output


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Scheduler, list[Arrival]]:
    """A scheduler and several requests, many with a common beginning."""
    block_size = draw(st.integers(1, 5))
    beginning = draw(st.lists(st.integers(1, 3), max_size=12))
    arrivals = []
    for _ in range(draw(st.integers(1, 8))):
        own = draw(st.lists(st.integers(1, 3), min_size=1, max_size=12))
        shared = beginning[: draw(st.sampled_from([0, len(beginning) // 2, len(beginning)]))]
        until = draw(st.one_of(st.just(9999), st.integers(0, 20)))
        arrivals.append((draw(st.integers(0, 6)), shared + own, draw(st.integers(1, 10)), until))
    longest = max(-(-(len(prompt) + more - 1) // block_size) for _, prompt, more, _ in arrivals)
    scheduler = make(
        longest + draw(st.integers(0, 12)),
        block_size,
        token_budget=draw(st.integers(1, 20)),
        max_num_reqs=draw(st.integers(1, 9)),
    )
    return scheduler, sorted(arrivals, key=lambda arrival: arrival[0])


def serve(scheduler: Scheduler, arrivals: list[Arrival]) -> list[GenerationRequest]:
    model, left = Echo(scheduler.pool.num_blocks, scheduler.block_size), list(arrivals)
    requests: list[GenerationRequest] = []
    for turn in itertools.count():
        while left and left[0][0] <= turn:
            _, prompt, max_new_tokens, _ = left.pop(0)
            requests.append(scheduler.submit(prompt, max_new_tokens))
        for request, (_, _, _, until) in zip(requests, arrivals, strict=False):
            if turn == until and request.finish_reason is None:
                scheduler.cancel(request)
        order = [request.request_id for request in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order), "who came first is served first"
        step = scheduler.schedule()
        if step is None and not left:
            return requests
        held = [block for request in scheduler.running for block in request.blocks]
        assert all(scheduler.pool.users(block) == held.count(block) for block in range(scheduler.pool.num_blocks))
        assert len(set(held)) + scheduler.pool.num_free == scheduler.pool.num_blocks
        if step is not None:
            scheduler.commit(model(step, scheduler))
        assert turn < 5000, "no end"
    raise AssertionError


@settings(max_examples=200, deadline=None)
@given(workloads())
def test_each_request_is_served_as_if_alone(workload: tuple[Scheduler, list[Arrival]]) -> None:
    scheduler, arrivals = workload
    twin = make(
        scheduler.pool.num_blocks,
        scheduler.block_size,
        token_budget=scheduler.token_budget,
        max_num_reqs=scheduler.max_num_reqs,
    )
    requests = serve(scheduler, arrivals)
    for request, (_, prompt, max_new_tokens, until) in zip(requests, arrivals, strict=True):
        assert request.prompt == prompt
        whole = alone(prompt, max_new_tokens)
        if request.finish_reason == "cancelled":
            assert until < 9999 and request.output == whole[: len(request.output)] != whole
        else:
            assert request.output == whole
            assert request.finish_reason == ("eos" if request.output[-1] == EOS else "length")
        assert not request.blocks
    assert scheduler.pool.num_free == scheduler.pool.num_blocks and not any(
        map(scheduler.pool.users, range(scheduler.pool.num_blocks))
    )
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.stats.peak_blocks <= scheduler.pool.num_blocks
    assert scheduler.stats.generated_tokens == sum(len(request.output) for request in requests)
    serve(twin, arrivals)
    assert dataclasses.asdict(twin.stats) == dataclasses.asdict(scheduler.stats)


def test_a_long_prompt_is_read_in_chunks_beside_decoding() -> None:
    scheduler = make(num_blocks=16, token_budget=4)
    scheduler.submit([1, 2], 12)
    scheduler.submit([3] * 13, 3)
    lens = [step.attn_metadata.query_lens_cpu().tolist() for step in finish(scheduler)]  # type: ignore[union-attr]
    assert lens[:5] == [[2, 2], [1, 3], [1, 3], [1, 3], [1, 2]]


def test_a_prefix_is_computed_once() -> None:
    scheduler, model = make(num_blocks=16, token_budget=32), Echo(16, 4)
    prefix = list(range(1, 10))  # two full blocks of 4 and one token
    scheduler.submit([*prefix, 11, 12], 2)
    finish(scheduler, model)
    scheduler.submit([*prefix, 13, 14, 15], 1)
    (step,) = finish(scheduler, model)
    assert step.positions.tolist() == [8, 9, 10, 11]
    assert scheduler.stats.prefix_hit_tokens == 8


def test_the_last_token_of_a_known_prompt_is_computed_again() -> None:
    scheduler, model = make(num_blocks=16, token_budget=32), Echo(16, 4)
    for _ in range(2):
        scheduler.submit(range(1, 9), 1)
        step = finish(scheduler, model)[-1]
    assert step.positions.tolist() == [4, 5, 6, 7], "its own full block is written anew, not the shared one"
    assert scheduler.stats.prefix_hit_tokens == 4


def test_requests_of_another_salt_share_nothing() -> None:
    scheduler, model, hits = make(num_blocks=16, token_budget=32), Echo(16, 4), []
    for salt in (b"", b"a", b"a", b"b", b""):
        scheduler.submit(range(1, 10), 1, cache_salt=salt)
        finish(scheduler, model)
        hits.append(scheduler.stats.prefix_hit_tokens)
    assert hits == [0, 0, 8, 8, 16]


def test_what_is_cancelled_gives_its_blocks_back() -> None:
    scheduler = make(num_blocks=4, token_budget=16)
    first, second = scheduler.submit([1] * 13, 3), scheduler.submit([2] * 13, 3)
    step = scheduler.schedule()
    assert step is not None and step.sampled == (first,)
    with pytest.raises(RuntimeError, match="before commit"):
        scheduler.cancel(first)
    scheduler.commit([1])
    scheduler.cancel(first)
    assert first.finish_reason == "cancelled" and not first.blocks and scheduler.pool.num_free == 4
    finish(scheduler)
    assert second.output == alone([2] * 13, 3)
    with pytest.raises(RequestError, match=r"request 0 cannot be cancelled: it has finished \(cancelled\)"):
        scheduler.cancel(first)
    with pytest.raises(RequestError, match="request 0 cannot be cancelled: it is another scheduler's"):
        make().cancel(make().submit([1], 1))


def test_the_youngest_makes_room_and_resumes() -> None:
    scheduler = make(num_blocks=5, token_budget=32)
    first, second = scheduler.submit([1] * 8, 9), scheduler.submit([2] * 7, 6)
    finish(scheduler)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert first.output == alone([1] * 8, 9) and second.output == alone([2] * 7, 6)
    assert scheduler.stats.peak_blocks == 5


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 1, "request 0: the prompt is empty: must have at least one token"),
        ([1], 0, "request 0: max_new_tokens=0: must be an int of at least 1"),
        ([1, 50], 1, "request 0: prompt[1] = 50: must be an int between 0 and 49"),
        ([-1], 1, "request 0: prompt[0] = -1: must be an int between 0 and 49"),
        (
            [1] * 60,
            5,
            "request 0: a prompt of 60 tokens and max_new_tokens=5 make 65: must be at most max_model_len=64",
        ),
        (
            [1] * 30,
            4,
            "request 0: a prompt of 30 tokens and max_new_tokens=4 need 9 blocks: the whole pool has 8 blocks of 4",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(prompt: list[int], max_new_tokens: int, message: str) -> None:
    scheduler = make()
    with pytest.raises(RequestError) as caught:
        scheduler.submit(prompt, max_new_tokens)
    assert str(caught.value) == message
    assert scheduler.schedule() is None and scheduler.submit([1], 1).request_id == 0


def test_the_whole_pool_can_serve_one_request() -> None:
    scheduler = make()
    request = scheduler.submit([1] * 30, 3)  # 32 cached tokens fill 8 blocks of 4
    finish(scheduler)
    assert request.output == alone([1] * 30, 3) and scheduler.stats.peak_blocks == 8


def test_without_limits_the_pool_decides() -> None:
    scheduler = Scheduler(2, 4)
    assert scheduler.submit([10**6] * 8, 1).tokens[0] == 10**6
    with pytest.raises(RequestError, match=r"prompt\[0\] = -1: must be an int between 0 and 2147483647"):
        scheduler.submit([-1], 1)
    with pytest.raises(RequestError, match="need 3 blocks: the whole pool has 2 blocks of 4"):
        scheduler.submit([1] * 8, 2)


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "token_budget", "max_num_reqs"])
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be a positive int"):
        make(**{name: 0})


def test_steps_and_commits_alternate() -> None:
    scheduler = make()
    with pytest.raises(RuntimeError, match="without a batch"):
        scheduler.commit([])
    scheduler.submit([1, 2], 2)
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="before commit"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="2 next tokens: must be 1"):
        scheduler.commit([1, 2])


def state(scheduler: Scheduler) -> Any:
    """Everything that a scheduler and its pool remember, except keys computed from it."""
    pool = scheduler.pool
    return (
        [{**dataclasses.asdict(request), "keys": None} for request in (*scheduler.running, *scheduler.waiting)],
        [len(scheduler.running), scheduler._submitted, scheduler._open is None, dataclasses.asdict(scheduler.stats)],
        [(pool.users(block), pool.key(block)) for block in range(pool.num_blocks)],
        [*pool._free],
    )


#: What is no token of a vocabulary of 50.
NO_TOKENS: list[Any] = [
    -1, VOCAB, 2**31, 1.7, 3.0, math.nan, math.inf, "3", b"3", None, True, [1], np.float32(2), np.bool_(True), 10**30,
]  # fmt: skip


@pytest.mark.parametrize("token", NO_TOKENS, ids=repr)
def test_what_is_no_token_is_refused_at_once(token: Any) -> None:
    """In a prompt, and from the model: nothing is converted, and nothing has changed."""
    scheduler, bound = make(), "must be an int between 0 and 49"
    scheduler.submit([1] * 6, 2)
    before = state(scheduler)
    with pytest.raises(RequestError, match=re.escape(f"request 1: prompt[1] = {token!r}: {bound}")):
        scheduler.submit([1, token], 2)
    assert state(scheduler) == before
    request = scheduler.submit([2] * 2, 2)
    assert scheduler.schedule() is not None
    before = state(scheduler)
    with pytest.raises(RequestError, match=re.escape(f"request 1: next_tokens[1] = {token!r}: {bound}")):
        scheduler.commit([7, token])
    assert state(scheduler) == before
    assert [token for _, token in scheduler.commit([7, 8])] == [7, 8], "the batch can be committed still"
    assert scheduler.schedule() is not None
    scheduler.commit([9, 9])
    assert scheduler.schedule() is None and request.output == [8, 9]


def test_a_token_of_2_to_the_31_is_refused_where_no_vocabulary_is_given() -> None:
    scheduler = Scheduler(4, 4)
    with pytest.raises(RequestError, match=r"request 0: prompt\[0\] = 2147483648: must be an int between 0 and 2147483647"):
        scheduler.submit([2**31], 1)
    scheduler.submit([2**31 - 1], 2)
    step = scheduler.schedule()
    assert step is not None and step.token_ids.tolist() == [2**31 - 1]
    with pytest.raises(RequestError, match=r"request 0: next_tokens\[0\] = 2147483648"):
        scheduler.commit([2**31])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"max_new_tokens": bad}, f"request 0: max_new_tokens={bad!r}: must be an int of at least 1")
            for bad in (0, -1, 2.5, 2.0, math.inf, math.nan, "3", None, True)
        ),
        *(({"cache_salt": bad}, f"request 0: cache_salt={bad!r}: must be bytes") for bad in ("tenant", None, 7, [1])),
        *(
            ({"prompt": bad}, f"request 0: prompt={bad!r}: must be a list or an array of token ids")
            for bad in (None, 3, 1.5, {5: 6}, {5}, np.int64(3))
        ),
        ({"prompt": "12"}, "request 0: prompt[0] = '1': must be an int"),
        ({"prompt": np.ones((1, 2), int)}, "request 0: prompt[0] = [1, 1]: must be an int"),
        ({"prompt": np.ones(2)}, "request 0: prompt[0] = 1.0: must be an int"),
    ],
    ids=str,
)
def test_arguments_of_other_types_are_refused_at_once(changes: Any, message: str) -> None:
    scheduler = make()
    before = state(scheduler)
    with pytest.raises(RequestError, match=re.escape(message.replace("np.int64(3)", "3"))):
        scheduler.submit(**{"prompt": [1], "max_new_tokens": 2, **changes})
    assert state(scheduler) == before and scheduler.schedule() is None


def test_ints_of_any_kind_are_taken() -> None:
    for prompt in (range(1, 4), (1, 2, 3), np.arange(1, 4, dtype=np.uint8), [np.int64(1), np.int32(2), 3], iter([1, 2, 3])):
        scheduler = make()
        request = scheduler.submit(prompt, np.int32(2))  # type: ignore[arg-type]
        assert request.prompt == [1, 2, 3] and all(type(token) is int for token in request.tokens)
        scheduler.schedule()
        ((_, token),) = scheduler.commit(np.array([7], np.int64))  # type: ignore[arg-type]
        assert token == 7 and type(token) is int


@pytest.mark.parametrize("wrong", [7, None, 1.5, {7}, np.int64(7)], ids=repr)
def test_next_tokens_are_a_list(wrong: Any) -> None:
    scheduler = make()
    scheduler.submit([1], 2)
    scheduler.schedule()
    before = state(scheduler)
    with pytest.raises(RequestError, match="next_tokens=.*: must be a list or an array of token ids"):
        scheduler.commit(wrong)
    assert state(scheduler) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 2.5}, "vocab_size=2.5 must be a positive int"),
        ({"vocab_size": 0}, "vocab_size=0 must be a positive int"),
        ({"max_model_len": math.inf}, "max_model_len=inf must be a positive int"),
        ({"eos_token_ids": ["2"]}, "an entry of eos_token_ids='2' must be an int of at least 0"),
        ({"eos_token_ids": [2.0]}, "an entry of eos_token_ids=2.0 must be an int of at least 0"),
        ({"eos_token_ids": 2}, "eos_token_ids=2: must be a list or an array of token ids"),
    ],
)
def test_options_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Scheduler(8, 4, **options)
    assert Scheduler(8, 4, eos_token_ids={2, 3}).eos_token_ids == {2, 3}


@pytest.mark.parametrize("nothing", [None, 0, "request 0"])
def test_what_is_no_request_cannot_be_cancelled(nothing: Any) -> None:
    with pytest.raises(RequestError, match=re.escape(f"cancel({nothing!r}): must be a request that submit() returned")):
        make().cancel(nothing)


def test_a_request_never_waits_silently_for_blocks_that_other_code_holds() -> None:
    """`schedule` returns None only if nothing waits: a service's loop ends there."""
    scheduler = make(num_blocks=4)
    held = scheduler.pool.allocate(2)
    request = scheduler.submit([1] * 10, 4)
    before = state(scheduler)
    for _ in range(2):
        with pytest.raises(PoolError, match="request 0 needs 3 blocks: 2 of 4 are free, and the others are not used by"):
            scheduler.schedule()
        assert state(scheduler) == before
    scheduler.pool.release(held)
    model = Echo(4, 4)
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(model(step, scheduler))
    held = scheduler.pool.allocate(1)
    steps = 1
    with pytest.raises(PoolError, match="request 0 needs 4 blocks: 3 of 4 are free"):  # it grew, and was preempted
        while (step := scheduler.schedule()) is not None:
            scheduler.commit(model(step, scheduler))
            steps += 1
    assert scheduler.stats.steps == steps and not scheduler.running
    scheduler.cancel(scheduler.submit([1], 1))
    scheduler.pool.release(held)
    finish(scheduler, model)
    assert request.output == alone([1] * 10, 4)


@pytest.mark.parametrize("seed", range(40))
def test_bad_calls_among_good_ones_change_nothing(seed: int) -> None:
    """Good requests finish as if alone, whatever else is submitted, committed, or taken from the pool."""
    draw = random.Random(seed)
    scheduler = make(draw.randint(6, 14), draw.randint(1, 4), token_budget=draw.randint(1, 16), max_num_reqs=draw.randint(1, 5))
    model, good = Echo(scheduler.pool.num_blocks, scheduler.block_size), []

    def refused(call: Any, *arguments: Any, **options: Any) -> None:
        before = state(scheduler)
        with pytest.raises(ValueError, match=r"request \d+|next.tokens"):
            call(*arguments, **options)
        assert state(scheduler) == before

    def submit_a_bad_one() -> None:
        prompt: Any = [draw.randrange(1, 4) for _ in range(draw.randint(1, 6))]
        bad: dict[str, Any] = {"prompt": prompt, "max_new_tokens": 2}
        what = draw.choice([*bad, "cache_salt", "length"])
        if what == "prompt":
            prompt[draw.randrange(len(prompt))] = draw.choice(NO_TOKENS)
        elif what == "length":
            bad["max_new_tokens"] = draw.choice([10**6, 2**63, 64])
        else:
            bad[what] = draw.choice([None, 2.5, math.inf, math.nan, "3", -1])
        refused(scheduler.submit, **bad)

    held: list[int] = []
    for turn in itertools.count():
        assert turn < 2000, "no end"
        if len(good) < 6 and draw.random() < 0.5:
            prompt = [draw.randrange(1, 4) for _ in range(draw.randint(1, 3))]
            good.append((scheduler.submit(prompt, limit := draw.randint(1, 3)), prompt, limit))
        if draw.random() < 0.4:
            submit_a_bad_one()
        if draw.random() < 0.2 and not held:
            held = scheduler.pool.allocate(draw.randint(0, scheduler.pool.num_free))
        try:
            step = scheduler.schedule()
        except PoolError as error:
            assert held and f"request {scheduler.waiting[0].request_id} needs" in str(error) and not scheduler.running
            scheduler.pool.release(held)
            held = []
            continue
        if step is None:
            assert not scheduler.waiting and not scheduler.running
            if len(good) == 6:
                break
            continue
        tokens: list[Any] = model(step, scheduler)
        if draw.random() < 0.4:
            refused(scheduler.commit, [*tokens, 1])
        if tokens and draw.random() < 0.6:
            spoilt = list(tokens)
            spoilt[draw.randrange(len(spoilt))] = draw.choice(NO_TOKENS)
            refused(scheduler.commit, spoilt)
        scheduler.commit(tokens)
    scheduler.pool.release(held)
    assert [request.output for request, _, _ in good] == [alone(prompt, limit) for _, prompt, limit in good]
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
