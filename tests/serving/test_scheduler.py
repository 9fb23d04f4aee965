"""Each request attends to exactly its own tokens, for any pool, budget and arrivals, and no block is lost."""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn.serving import GenerationRequest, PoolError, RequestError, Scheduler, Step
from attn.tools.fuzz import serving
from attn.tools.fuzz.serving import EOS, NO_TOKENS, Echo, alone, make, state

#: Step of arrival, prompt, max_new_tokens, and the step at which it is cancelled if it is not finished.
Arrival = tuple[int, list[int], int, int]


def finish(scheduler: Scheduler, model: Echo | None = None) -> list[Step]:
    """Serve everything that was submitted; returns the batches."""
    model, steps = model or Echo(scheduler.pool.num_blocks, scheduler.block_size), []
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(model(step, scheduler))
        steps.append(step)
    return steps


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


@pytest.mark.parametrize("seed", range(20))
def test_bad_calls_among_good_ones_change_nothing(seed: int) -> None:
    """Good requests finish as if alone, whatever else is submitted, committed, or taken from the pool."""
    serving.check(serving.SchedulerCase("", seed))


class Forgetful(Scheduler):
    """Counts a request before it is checked."""

    def submit(self, *given: Any, **more: Any) -> GenerationRequest:
        self._submitted += 1
        try:
            return super().submit(*given, **more)
        finally:
            self._submitted -= 1 if self.stats.steps < 3 else 0


class Lenient(Scheduler):
    """Takes more next tokens than there are requests."""

    def commit(self, next_tokens: Sequence[int]) -> list[tuple[GenerationRequest, int]]:
        assert self._open is not None
        return super().commit(next_tokens[: len(self._open[0].sampled)])


@pytest.mark.parametrize(("wrong", "message"), [(Forgetful, "changed by a refused call"), (Lenient, "taken, but wrong")])
def test_a_scheduler_that_takes_bad_calls_is_noticed(wrong: type, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "Scheduler", wrong)
    with pytest.raises(AssertionError, match=message):
        for seed in range(40):
            serving.check(serving.SchedulerCase("", seed))
