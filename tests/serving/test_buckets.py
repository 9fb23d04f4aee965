"""Every step of a scheduler fits a bucket, and its padding is neither read nor written."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn.backends.block_table import PAD_SLOT_ID
from attn.errors import AttnError
from attn.serving import Buckets, Scheduler, Step


def shape(step: Step) -> tuple[Any, ...]:
    """What a compiled program depends on."""
    batch = step.attn_metadata
    arrays = (step.token_ids, step.positions, step.sample_rows, batch.query_start_loc, batch.seq_lens, batch.block_table)
    return (*(x.shape for x in arrays), batch.slot_mapping.shape, batch.max_query_len, batch.max_seq_len)


@settings(max_examples=100, deadline=None)
@given(
    budget=st.integers(1, 40),
    reqs=st.integers(1, 9),
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    limited=st.booleans(),
)
def test_steps_have_the_shapes_of_the_buckets_and_their_own_values(
    budget: int, reqs: int, prompts: list[int], limited: bool
) -> None:
    scheduler = Scheduler(24, 4, token_budget=budget, max_num_reqs=reqs, max_model_len=40 if limited else None)
    buckets = Buckets(scheduler)
    compiled = [shape(step) for step in buckets.empty_steps()]
    assert len({*compiled}) == len(compiled) == len(buckets)
    for i, length in enumerate(prompts):
        scheduler.submit([i] * length, 4)
    while (step := scheduler.schedule()) is not None:
        padded, batch = buckets.pad(step), step.attn_metadata
        assert shape(padded) in compiled
        assert (padded.attn_metadata.max_query_len == 1) == (batch.max_query_len == 1), "decodes have a program of their own"
        own = padded.attn_metadata.validate(4, 24)
        rows, count = batch.num_actual_tokens, batch.num_reqs
        assert own.num_actual_tokens == rows and padded.sampled == step.sampled
        np.testing.assert_array_equal(own.query_start_loc, [*batch.query_start_loc, *[rows] * (own.num_reqs - count)])
        np.testing.assert_array_equal(own.seq_lens, [*batch.seq_lens, *[0] * (own.num_reqs - count)])
        np.testing.assert_array_equal(own.block_table[:count, : batch.block_table.shape[1]], batch.block_table)
        np.testing.assert_array_equal(own.slot_mapping[:rows], batch.slot_mapping)
        assert (own.slot_mapping[rows:] == PAD_SLOT_ID).all()
        for x, before in ((padded.token_ids, step.token_ids), (padded.positions, step.positions)):
            np.testing.assert_array_equal(x, [*before, *[0] * (len(x) - rows)])
        np.testing.assert_array_equal(padded.sample_rows[: len(step.sample_rows)], step.sample_rows)
        np.testing.assert_array_equal(padded.positions, own.positions())
        scheduler.commit([1] * len(step.sampled))


def test_the_programs_are_few_and_chosen_by_the_tokens() -> None:
    scheduler = Scheduler(64, 16, token_budget=100, max_num_reqs=6)
    buckets = Buckets(scheduler)
    assert [*buckets] == [(8, 1), (16, 16), (32, 32), (64, 64), (128, 128)]
    assert [*Buckets(scheduler, [128])] == [(8, 1), (128, 128)]
    scheduler.submit([1] * 30, 2)
    (step,) = [scheduler.schedule()]
    assert step is not None
    padded = buckets.pad(step)
    assert len(padded.token_ids) == 32 and len(padded.sample_rows) == 8 and padded.attn_metadata.block_table.shape == (8, 64)
    scheduler.commit([1])
    step = scheduler.schedule()
    assert step is not None and len(buckets.pad(step).token_ids) == 8
    assert len(Buckets(Scheduler(4, 16, token_budget=1, max_num_reqs=1))) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([48, 128], r"num_tokens: 48 must be a power of two"),
        ([16, 64], r"num_tokens=\[16, 64\]: the largest must be at least the scheduler's token_budget=100"),
        ([], r"num_tokens=\[\]: the largest must be at least"),
        ([16.0, 128.0], r"num_tokens: 16.0 must be a power of two"),
    ],
)
def test_sizes_hold_every_step(sizes: list[int], message: str) -> None:
    with pytest.raises(AttnError, match=message):
        Buckets(Scheduler(64, 16, token_budget=100), sizes)


def test_a_step_of_a_larger_scheduler_is_refused() -> None:
    larger = Scheduler(64, 16, token_budget=100)
    larger.submit([1] * 90, 1)
    step = larger.schedule()
    assert step is not None
    buckets = Buckets(Scheduler(2, 16, token_budget=16, max_num_reqs=1))
    with pytest.raises(AttnError, match="1 requests, 90 tokens and 6 blocks in a request: must be at most 1, 16 and 2"):
        buckets.pad(step)


def test_sizes_may_be_an_array() -> None:
    scheduler = Scheduler(64, 16, token_budget=100)
    assert [*Buckets(scheduler, np.array([16, 128]))] == [*Buckets(scheduler, [16, 128])]  # type: ignore[arg-type]
