"""A scheduler's test model, and calls of a scheduler drawn at random, some of them wrong.

A wrong call must raise the documented error and change nothing: a second scheduler, which gets the right calls only, makes the
same batches, and every request ends as if it were alone.
"""

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn.serving import GenerationRequest, PoolError, Scheduler, Step
from attn.testing.case import Recipe

VOCAB, EOS = 50, 0
#: Values outside the vocabulary.
# Among them what Python or NumPy would take for an index: True, 3.0, NumPy scalars.
NO_TOKENS: list[Any] = [-1, VOCAB, 2**31, 1.7, 3.0, math.nan, math.inf, "3", b"3", None, True, [1], np.float32(2)]
NO_TOKENS += [np.bool_(True), 10**30]
_OTHERS = [None, 2.5, math.inf, math.nan, "3", -1]  #: neither a number of tokens nor a salt
_TOO_LONG = [10**6, 2**63, 64]


def successor(context: Sequence[int]) -> int:
    """A token that depends on every token before it and on their order; EOS every now and then."""
    state = 7
    for token in context:
        # `+ 1`, so that a token of 0 counts. A prime modulus, so that no token is forgotten early.
        state = (state * 31 + token + 1) % 10007
    return state % VOCAB


def alone(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """The output of a request that is served alone."""
    output: list[int] = []
    while len(output) < max_new_tokens and EOS not in output:
        output.append(successor([*prompt, *output]))
    return output


class Echo:
    """A model whose cache holds what was written to it, and whose next token is read back through the block table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.full(num_blocks * block_size, -1)
        self.positions = np.full(num_blocks * block_size, -1)

    def __call__(self, step: Step, scheduler: Scheduler) -> list[int]:
        # With the number of blocks, slots and pages are checked too; `strict` refuses requests of more rows than tokens, which
        # a scheduler never makes.
        batch = step.attn_metadata.validate(self.block_size, scheduler.pool.num_blocks, strict=True)
        assert batch.num_actual_tokens == len(step.token_ids) == len(step.positions) <= scheduler.token_budget
        assert batch.num_reqs <= scheduler.max_num_reqs
        for block in {int(slot) // self.block_size for slot in batch.slot_mapping}:
            # Before anything is written: blocks with two users, or with a key, are a prefix that others read.
            assert scheduler.pool.users(block) == 1, "a shared block is written"
            assert scheduler.pool.key(block) is None, "a registered block is written"
        self.tokens[batch.slot_mapping], self.positions[batch.slot_mapping] = step.token_ids, step.positions
        chosen = []
        for row, request in zip(step.sample_rows, step.sampled, strict=True):
            r = int(np.searchsorted(batch.query_start_loc, row, side="right")) - 1
            assert row == batch.query_start_loc[r + 1] - 1
            position = np.arange(batch.seq_lens[r])
            slots = batch.block_table[r, position // self.block_size] * self.block_size + position % self.block_size
            # Tokens alone could agree by chance: there are few different ones.
            np.testing.assert_array_equal(self.positions[slots], position)
            np.testing.assert_array_equal(self.tokens[slots], request.tokens)
            chosen.append(successor(self.tokens[slots].tolist()))
        return chosen


def make(num_blocks: int = 8, block_size: int = 4, **options: int) -> Scheduler:
    """A scheduler of the test model."""
    limits = {"vocab_size": VOCAB, "max_model_len": 64, "token_budget": 8, **options}
    return Scheduler(num_blocks, block_size, eos_token_ids=(EOS,), **limits)


def state(scheduler: Scheduler) -> Any:
    """Everything that a scheduler and its pool remember, except keys computed from it."""
    pool = scheduler.pool
    return (
        # Keys are computed when they are needed, which a refused call may cause.
        [{**dataclasses.asdict(request), "keys": None} for request in (*scheduler.running, *scheduler.waiting)],
        [len(scheduler.running), scheduler._submitted, scheduler._open is None, dataclasses.asdict(scheduler.stats)],
        [(pool.users(block), pool.key(block)) for block in range(pool.num_blocks)],
        [*pool._free],
    )


@dataclass(frozen=True)
class SchedulerCase(Recipe):
    """`requests` good requests, everything drawn from `seed`.

    bad: whether wrong calls are made too. held: whether other code takes blocks from the pool.
    """

    option = " --registry entries"

    name: str
    seed: int
    requests: int = 6
    bad: bool = True
    held: bool = True


def draw(rng: random.Random) -> SchedulerCase:
    """A case of the fuzzer."""
    return SchedulerCase("", rng.randrange(1 << 30), rng.randint(1, 12))


def simpler(case: SchedulerCase) -> Iterator[SchedulerCase]:
    """Yield the cases that are one step simpler."""
    yield from (case.replace(requests=n) for n in (case.requests // 2, case.requests - 1) if n)


def refused(
    scheduler: Scheduler, call: Callable[..., Any], *arguments: Any, why: str = r"request \d+|next.tokens", **more: Any
) -> None:
    """Assert that a call raises the documented error and changes nothing."""
    before, words = state(scheduler), f"{call.__name__}{arguments}{more or ''}"
    try:
        result = call(*arguments, **more)
    except (ValueError, RuntimeError) as error:
        # RuntimeError is for calls at the wrong time, ValueError for wrong arguments.
        early = str(error).partition("() called")[0] in ("schedule", "cancel") and " before commit()" in str(error)
        assert early if isinstance(error, RuntimeError) else re.search(why, str(error)), f"another error of {words}: {error!r}"
    else:
        raise AssertionError(f"taken, but wrong: {words} gave {result!r}")
    assert state(scheduler) == before, f"changed by a refused call: {words}"


def check(case: SchedulerCase) -> str:
    """Run the case. Raises AssertionError."""
    rng = random.Random(case.seed)
    sizes = (rng.randint(6, 14), rng.randint(1, 4))
    limits = {"token_budget": rng.randint(1, 16), "max_num_reqs": rng.randint(1, 5)}
    scheduler, twin = make(*sizes, **limits), make(*sizes, **limits)
    models = [Echo(*sizes), Echo(*sizes)]
    good: list[tuple[GenerationRequest, list[int], int]] = []
    held: list[list[int]] = []
    both = (scheduler, twin)

    def chance(share: float, allowed: bool = case.bad) -> bool:
        return rng.random() < share and allowed

    # A scheduler that starves a request would never end.
    for turn in itertools.count():
        assert turn < 400 * case.requests, "no end"
        if len(good) < case.requests and chance(0.5, True):
            prompt, limit = [rng.randrange(1, 4) for _ in range(rng.randint(1, 3))], rng.randint(1, 3)
            good.append((scheduler.submit(prompt, limit), prompt, limit))
            twin.submit(prompt, limit)
        if chance(0.4):
            refused(scheduler, scheduler.submit, **_bad_request(rng))
        if chance(0.1):
            done = next((request for request, _, _ in good if request.finish_reason), None)
            # Also a request that has ended, and one of another scheduler.
            nothing = rng.choice([None, 0, "request 0", done, make().submit([1], 1)])
            refused(scheduler, scheduler.cancel, nothing, why=r"request \d+|must be a request")
        if chance(0.2, case.held) and not held:
            count = rng.randint(0, scheduler.pool.num_free)
            # The same blocks from both pools, as they were used alike.
            held = [one.pool.allocate(count) for one in both]
        try:
            step = scheduler.schedule()
        # Only blocks that other code holds can make a schedule impossible: they are given back, and it goes on.
        except PoolError as error:
            assert held and f"request {scheduler.waiting[0].request_id} needs" in str(error) and not scheduler.running
            try:
                raise AssertionError(f"the twin has a batch: {twin.schedule()}")
            except PoolError as expected:
                assert str(expected) == str(error)
            _release(both, held)
            continue
        same = twin.schedule()
        if step is None or same is None:
            assert step is same and not scheduler.waiting and not scheduler.running
            if len(good) == case.requests:
                break
            continue
        for name in ("token_ids", "positions", "sample_rows"):
            np.testing.assert_array_equal(getattr(step, name), getattr(same, name), f"another schedule: {name}")
        tables = (step.attn_metadata.block_table, same.attn_metadata.block_table)
        np.testing.assert_array_equal(*tables, "another schedule: blocks")
        tokens: list[Any] = models[0](step, scheduler)
        if chance(0.2):
            refused(scheduler, *rng.choice([(scheduler.schedule,), (scheduler.cancel, good[0][0])]))
        if chance(0.4):
            refused(scheduler, scheduler.commit, [*tokens, 1])
        if tokens and chance(0.6):
            spoilt = list(tokens)
            spoilt[rng.randrange(len(spoilt))] = rng.choice(NO_TOKENS)
            refused(scheduler, scheduler.commit, spoilt)
        scheduler.commit(tokens)
        twin.commit(models[1](same, twin))
        assert state(scheduler) == state(twin), "another state than without the wrong calls"
    _release(both, held)
    # Whatever was refused, preempted or shared in between.
    assert [request.output for request, _, _ in good] == [alone(prompt, limit) for _, prompt, limit in good], "another output"
    assert scheduler.pool.num_free == scheduler.pool.num_blocks, "blocks are lost"
    return "served"


def _bad_request(rng: random.Random) -> dict[str, Any]:
    """Arguments of `submit`, one of which is wrong."""
    prompt: Any = [rng.randrange(1, 4) for _ in range(rng.randint(1, 6))]
    bad: dict[str, Any] = {"prompt": prompt, "max_new_tokens": 2}
    # "length": a number of tokens that is one, but too large for the model or the pool.
    field = rng.choice([*bad, "cache_salt", "length"])
    if field == "prompt":
        prompt[rng.randrange(len(prompt))] = rng.choice(NO_TOKENS)
    elif field == "length":
        bad["max_new_tokens"] = rng.choice(_TOO_LONG)
    else:
        bad[field] = rng.choice(_OTHERS)
    return bad


def _release(both: Sequence[Scheduler], held: list[list[int]]) -> None:
    for one, blocks in zip(both, held, strict=False):
        one.pool.release(blocks)
    held.clear()
