"""Each request attends to exactly its own tokens, for any pool, budget and arrivals, and no block is lost."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn.demo.batcher import Batcher, GenerationRequest, Plan, RequestError

VOCAB, EOS = 50, 0


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

    def __call__(self, plan: Plan, batcher: Batcher) -> list[int]:
        batch = plan.attn_metadata.validate(self.block_size, batcher.pool.num_blocks, strict=True)
        assert batch.num_actual_tokens == len(plan.token_ids) == len(plan.positions) <= batcher.token_budget
        assert batch.num_reqs <= batcher.max_num_reqs
        for block in {int(slot) // self.block_size for slot in batch.slot_mapping}:
            assert batcher.pool.holders[block] == 1, "a shared block is written"
            assert block not in batcher.pool._digest_of, "a registered block is written"
        self.tokens[batch.slot_mapping], self.positions[batch.slot_mapping] = plan.token_ids, plan.positions
        chosen = []
        for row, request in zip(plan.sample_rows, plan.sampled, strict=True):
            r = int(np.searchsorted(batch.query_start_loc, row, side="right")) - 1
            assert row == batch.query_start_loc[r + 1] - 1
            at = np.arange(batch.seq_lens[r])
            slots = batch.block_table[r, at // self.block_size] * self.block_size + at % self.block_size
            np.testing.assert_array_equal(self.positions[slots], at)
            np.testing.assert_array_equal(self.tokens[slots], request.tokens)
            chosen.append(successor(self.tokens[slots].tolist()))
        return chosen


def make(num_blocks: int = 8, block_size: int = 4, **options: int) -> Batcher:
    limits = {"vocab_size": VOCAB, "max_position_embeddings": 64, "token_budget": 8, **options}
    return Batcher(num_blocks, block_size, eos_token_ids=(EOS,), **limits)


def finish(batcher: Batcher, model: Echo | None = None) -> list[Plan]:
    """Serve everything that was submitted; returns the batches."""
    model, plans = model or Echo(batcher.pool.num_blocks, batcher.block_size), []
    while (plan := batcher.step()) is not None:
        batcher.commit(model(plan, batcher))
        plans.append(plan)
    return plans


def alone(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    output: list[int] = []
    while len(output) < max_new_tokens and EOS not in output:
        output.append(successor([*prompt, *output]))
    return output


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Batcher, list[tuple[int, list[int], int]]]:
    """A batcher and (step of arrival, prompt, max_new_tokens) for several requests, many with a common beginning."""
    block_size = draw(st.integers(1, 5))
    beginning = draw(st.lists(st.integers(1, 3), max_size=12))
    arrivals = []
    for _ in range(draw(st.integers(1, 8))):
        own = draw(st.lists(st.integers(1, 3), min_size=1, max_size=12))
        shared = beginning[: draw(st.sampled_from([0, len(beginning) // 2, len(beginning)]))]
        arrivals.append((draw(st.integers(0, 6)), shared + own, draw(st.integers(1, 10))))
    longest = max(-(-(len(prompt) + more - 1) // block_size) for _, prompt, more in arrivals)
    batcher = make(
        longest + draw(st.integers(0, 12)),
        block_size,
        token_budget=draw(st.integers(1, 20)),
        max_num_reqs=draw(st.integers(1, 9)),
    )
    return batcher, sorted(arrivals, key=lambda arrival: arrival[0])


def serve(batcher: Batcher, arrivals: list[tuple[int, list[int], int]]) -> list[GenerationRequest]:
    model, left = Echo(batcher.pool.num_blocks, batcher.block_size), list(arrivals)
    requests: list[GenerationRequest] = []
    for step in itertools.count():
        while left and left[0][0] <= step:
            _, prompt, max_new_tokens = left.pop(0)
            requests.append(batcher.submit(prompt, max_new_tokens))
        order = [request.request_id for request in (*batcher.running, *batcher.waiting)]
        assert order == sorted(order), "who came first is served first"
        plan = batcher.step()
        if plan is None and not left:
            return requests
        held = [block for request in batcher.running for block in request.blocks]
        assert all(batcher.pool.holders[block] == held.count(block) for block in range(batcher.pool.num_blocks))
        assert len(set(held)) + batcher.pool.num_free == batcher.pool.num_blocks
        if plan is not None:
            batcher.commit(model(plan, batcher))
        assert step < 5000, "no end"
    raise AssertionError


@settings(max_examples=200, deadline=None)
@given(workloads())
def test_each_request_is_served_as_if_alone(workload: tuple[Batcher, list[tuple[int, list[int], int]]]) -> None:
    batcher, arrivals = workload
    twin = make(
        batcher.pool.num_blocks,
        batcher.block_size,
        token_budget=batcher.token_budget,
        max_num_reqs=batcher.max_num_reqs,
    )
    requests = serve(batcher, arrivals)
    for request, (_, prompt, max_new_tokens) in zip(requests, arrivals, strict=True):
        assert request.prompt == prompt
        assert request.output == alone(prompt, max_new_tokens)
        assert request.finish_reason == ("eos" if request.output[-1] == EOS else "length")
        assert not request.blocks
    assert batcher.pool.num_free == batcher.pool.num_blocks and not any(batcher.pool.holders)
    assert not batcher.running and not batcher.waiting
    assert batcher.stats.peak_blocks <= batcher.pool.num_blocks
    assert batcher.stats.generated_tokens == sum(len(request.output) for request in requests)
    serve(twin, arrivals)
    assert dataclasses.asdict(twin.stats) == dataclasses.asdict(batcher.stats)


def test_a_long_prompt_is_read_in_chunks_beside_decoding() -> None:
    batcher = make(num_blocks=16, token_budget=4)
    batcher.submit([1, 2], 12)
    batcher.submit([3] * 13, 3)
    lens = [plan.attn_metadata.query_lens_cpu().tolist() for plan in finish(batcher)]  # type: ignore[union-attr]
    assert lens[:5] == [[2, 2], [1, 3], [1, 3], [1, 3], [1, 2]]


def test_a_prefix_is_computed_once() -> None:
    batcher, model = make(num_blocks=16, token_budget=32), Echo(16, 4)
    prefix = list(range(1, 10))  # two full blocks of 4 and one token
    batcher.submit([*prefix, 11, 12], 2)
    finish(batcher, model)
    batcher.submit([*prefix, 13, 14, 15], 1)
    (plan,) = finish(batcher, model)
    assert plan.positions.tolist() == [8, 9, 10, 11]
    assert batcher.stats.prefix_hit_tokens == 8


def test_the_last_token_of_a_known_prompt_is_computed_again() -> None:
    batcher, model = make(num_blocks=16, token_budget=32), Echo(16, 4)
    for _ in range(2):
        batcher.submit(range(1, 9), 1)
        plan = finish(batcher, model)[-1]
    assert plan.positions.tolist() == [4, 5, 6, 7], "its own full block is written anew, not the shared one"
    assert batcher.stats.prefix_hit_tokens == 4


def test_the_youngest_makes_room_and_resumes() -> None:
    batcher = make(num_blocks=5, token_budget=32)
    first, second = batcher.submit([1] * 8, 9), batcher.submit([2] * 7, 6)
    finish(batcher)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert first.output == alone([1] * 8, 9) and second.output == alone([2] * 7, 6)
    assert batcher.stats.peak_blocks == 5


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 1, "request 0: the prompt is empty: must have at least one token"),
        ([1], 0, "request 0: max_new_tokens=0: must be at least 1"),
        ([1, 50], 1, "request 0: prompt[1] = 50: must be between 0 and 49"),
        ([-1], 1, "request 0: prompt[0] = -1: must be between 0 and 49"),
        (
            [1] * 60,
            5,
            "request 0: a prompt of 60 tokens and max_new_tokens=5 make 65: must be at most max_position_embeddings=64",
        ),
        (
            [1] * 30,
            4,
            "request 0: a prompt of 30 tokens and max_new_tokens=4 need 9 blocks: the whole pool has 8 blocks of 4",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(prompt: list[int], max_new_tokens: int, message: str) -> None:
    batcher = make()
    with pytest.raises(RequestError) as caught:
        batcher.submit(prompt, max_new_tokens)
    assert str(caught.value) == message
    assert batcher.step() is None and batcher.submit([1], 1).request_id == 0


def test_the_whole_pool_can_serve_one_request() -> None:
    batcher = make()
    request = batcher.submit([1] * 30, 3)  # 32 cached tokens fill 8 blocks of 4
    finish(batcher)
    assert request.output == alone([1] * 30, 3) and batcher.stats.peak_blocks == 8


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "token_budget", "max_num_reqs"])
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        make(**{name: 0})


def test_steps_and_commits_alternate() -> None:
    batcher = make()
    with pytest.raises(RuntimeError, match="without a batch"):
        batcher.commit([])
    batcher.submit([1, 2], 2)
    batcher.step()
    with pytest.raises(RuntimeError, match="before commit"):
        batcher.step()
    with pytest.raises(ValueError, match="2 next tokens: must be 1"):
        batcher.commit([1, 2])
