"""The blocks of a paged cache: which are free, how many requests use each, and the contents of full ones.

A freed block keeps its content and its registration until it is reallocated, in the order in which blocks were freed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks, each free or used by one or more requests, and an index of full ones."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Allocate a free block and remove it from the index."""
        block, _ = self._free.popitem(last=False)
        if (digest := self._digest_of.pop(block, None)) is not None:
            del self._block_of[digest]
        self.holders[block] = 1
        return block

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks registered under `digests`, up to the first that is not registered."""
        found: list[int] = []
        for digest in digests:
            if digest not in self._block_of:
                break
            found.append(self._block_of[digest])
        return found

    def hold(self, block: int) -> None:
        self.holders[block] += 1
        self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one user of each block; the end of a sequence is reused before its beginning, which more requests share."""
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                self._free[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Make a full block available to later requests, unless an equal one is registered."""
        if digest not in self._block_of:
            self._block_of[digest], self._digest_of[block] = block, digest
