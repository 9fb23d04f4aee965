"""The pool does what a list of blocks with their users would do, for any calls in any order, and mistakes change nothing."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from attn.serving import BlockPool, PoolError, block_key

BLOCKS, KEYS = 6, st.integers(0, 4).map(lambda n: bytes([n]))


class Model(RuleBasedStateMachine):
    """A pool beside a plain description of it: users by block, keys by block, free blocks in the order of their release."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.users = dict.fromkeys(range(BLOCKS), 0)
        self.keys: dict[int, bytes] = {}
        self.free = list(range(BLOCKS))

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(PoolError, match=f"{count} blocks requested: {len(self.free)} of {BLOCKS} are free"):
                self.pool.allocate(count)
            return
        wanted, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate(count) == wanted
        for block in wanted:
            self.users[block] = 1
            self.keys.pop(block, None)

    @rule(keys=st.lists(KEYS, max_size=3))
    def find_and_share(self, keys: list[bytes]) -> None:
        by_key = {key: block for block, key in self.keys.items()}
        wanted = []
        for key in keys:
            if key not in by_key:
                break
            wanted.append(by_key[key])
        assert self.pool.find(keys) == wanted
        self.pool.share(wanted)
        for block in wanted:
            self.users[block] += 1
            self.free = [other for other in self.free if other != block]

    @rule(blocks=st.lists(st.integers(-1, BLOCKS), max_size=4))
    def release(self, blocks: list[int]) -> None:
        if any(blocks.count(block) > self.users.get(block, 0) for block in blocks):
            with pytest.raises(PoolError, match=r"released \d+ times|must be an int between 0 and 5"):
                self.pool.release(blocks)
            return
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    @rule(block=st.integers(-1, BLOCKS), key=KEYS)
    def register(self, block: int, key: bytes) -> None:
        if not self.users.get(block) or self.keys.get(block, key) != key:
            with pytest.raises(PoolError, match="is free|another key|must be an int between"):
                self.pool.register(block, key)
            return
        self.pool.register(block, key)
        if key not in self.keys.values():
            self.keys[block] = key

    @invariant()
    def same(self) -> None:
        assert [self.pool.users(block) for block in range(BLOCKS)] == list(self.users.values())
        assert [self.pool.key(block) for block in range(BLOCKS)] == [self.keys.get(block) for block in range(BLOCKS)]
        assert self.pool.num_free == len(self.free) == sum(not n for n in self.users.values())
        assert len({*self.keys.values()}) == len(self.keys)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_the_least_recently_freed_block_is_reused_first_and_a_sequence_from_its_end() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for block in first + second:
        pool.register(block, bytes([block]))
    pool.release(first)
    pool.release(second)
    assert pool.allocate(3) == [1, 0, 3]
    assert pool.find([bytes([2])]) == [2] and pool.find([bytes([0])]) == []


def test_an_undefined_block_cannot_be_shared() -> None:
    pool = BlockPool(2)
    with pytest.raises(PoolError, match="block 1 is free and has no key: its content is undefined; call allocate"):
        pool.share([1])
    assert pool.num_free == 2


@pytest.mark.parametrize("block", [-1, 2, 1.0, "1", None, True, [0]])
def test_a_block_is_an_int(block: Any) -> None:
    """Lists take True for 1, and an iterator that is read twice is empty the second time."""
    pool = BlockPool(2)
    pool.allocate(2)
    one = (pool.users, pool.key, lambda x: pool.register(x, b"k"))
    for call in (*one, lambda x: pool.share([0, x]), lambda x: pool.release([0, x])):
        with pytest.raises(PoolError, match=re.escape(f"block {block!r}: must be an int between 0 and 1")):
            call(block)
    assert [pool.users(0), pool.users(1), pool.key(1)] == [1, 1, None]
    pool.share(iter([0, 1]))  # type: ignore[arg-type]
    pool.release(iter([1]))  # type: ignore[arg-type]
    assert [pool.users(0), pool.users(1)] == [2, 1]


@pytest.mark.parametrize("tokens", [[1.7], ["3"], [1, float("nan")], np.ones(2), [True, False]])
def test_a_key_is_of_ints(tokens: Any) -> None:
    with pytest.raises(ValueError, match="tokens=.* must be ints"):
        block_key(tokens)


def test_keys_are_those_of_whole_prefixes() -> None:
    one, other = block_key([1, 2]), block_key([1, 3])
    assert len(one) == 32 and one == block_key((1, 2)) and one != other
    assert block_key([5, 6], one) != block_key([5, 6], other), "the blocks before it count"
    assert block_key([1, 2], b"tenant") != one
    assert block_key([2], (1).to_bytes(8, "little")) != block_key([1, 2]), "a salt is not a token"


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_the_size_is_a_positive_int(count: object) -> None:
    with pytest.raises(ValueError, match="num_blocks=.* must be a positive int"):
        BlockPool(count)  # type: ignore[arg-type]
