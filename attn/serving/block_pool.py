"""The blocks of a paged cache: which are free, how many requests use each, and which can be found by their content.

This is the design of vLLM's KV cache manager (https://docs.vllm.ai/en/latest/design/prefix_caching/): a full block is
identified by a key computed from its tokens and the key of the block before it; users are counted; a freed block keeps its
content and its key until it is allocated again, least recently freed first.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from attn.arguments import as_int, natural_int, positive_int
from attn.errors import AttnError


class PoolError(AttnError):
    """A caller asks for more blocks than are free, names a block that does not exist, or releases one once too often."""


def block_key(tokens: Sequence[int], previous: bytes = b"") -> bytes:
    """Return the key of a full block from its tokens and the key of the block before it: 32 bytes.

    Equal keys mean equal tokens from the first on. For a first block, `previous` is b"", or any bytes that separate contents
    whose tokens are equal: an adapter, an image, a tenant (vLLM's `cache_salt`). The hash is BLAKE2b: requests must not be
    able to construct a collision, which would read another request's keys and values.

    Raises ValueError unless the tokens are ints.
    """
    import numpy as np

    # Through NumPy, so that lists, arrays and any integer type with the same tokens give the same bytes.
    ids = np.asarray(tokens)
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"tokens={tokens!r} must be ints")
    content = ids.astype(np.int64).tobytes()
    # The length goes first: without it a salt that ends in the bytes of a token would be the same content as one more token.
    return hashlib.blake2b(len(previous).to_bytes(8, "little") + previous + content, digest_size=32).digest()


class BlockPool:
    """`num_blocks` blocks, numbered from 0, each free or used by one or more requests.

    Always true: a block is free if and only if it has no user. A key belongs to at most one block, and a block has at most
    one key. A free block keeps its key until `allocate` returns it. The caller writes only to blocks that it allocated and
    that have no key: others read the rest.

    Methods raise `PoolError`, and then change nothing; a `count` that is not an int of at least 0 is a ValueError.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = positive_int("num_blocks", num_blocks)
        self._users = [0] * self.num_blocks
        # An ordered set: taking the oldest, and taking any block out when it is shared again, are both O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))  # the next to allocate first
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return, those that can still be found by their keys included."""
        return len(self._free)

    def users(self, block: int) -> int:
        """Return how many requests use `block`."""
        return self._users[self._known(block)]

    def key(self, block: int) -> bytes | None:
        """Return the key under which `find` returns `block`, or None."""
        return self._key_of.get(self._known(block))

    def allocate(self, count: int = 1) -> list[int]:
        """Return `count` free blocks, which then have one user each and no key: the least recently freed ones."""
        if natural_int("count", count) > self.num_free:
            raise PoolError(f"{count} blocks requested: {self.num_free} of {self.num_blocks} are free; release some first")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
            # From now on its content may change, so it must not be found any more.
            if (key := self._key_of.pop(block, None)) is not None:
                del self._block_of[key]
        return blocks

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks registered under `keys`, up to the first key without one. They may be free: see `share`."""
        blocks: list[int] = []
        for key in keys:
            if key not in self._block_of:
                break
            blocks.append(self._block_of[key])
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one user to each of `blocks`, which `find` returned; free blocks are taken off the free list."""
        blocks = [self._known(block) for block in blocks]
        for block in blocks:
            # All blocks are checked before the first is changed, here and in `release`: an error changes nothing.
            if not self._users[block] and block not in self._key_of:
                raise PoolError(
                    f"block {block} is free and has no key: its content is undefined; call allocate() for a new one"
                )
        for block in blocks:
            self._users[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one user from each of `blocks`, in a request's order; the last of them is allocated again first.

        The end of a sequence is thus reused before its beginning, which more requests share.
        """
        blocks = [self._known(block) for block in blocks]
        # Counted, because a list with one block twice would pass a check of each entry alone.
        for block, times in Counter(blocks).items():
            if times > (users := self._users[block]):
                raise PoolError(f"block {block} released {times} times: it has {users} users, and each releases it once")
        # The last block of the sequence enters the free list first, and so loses its content first; a beginning is
        # worth more, since a prefix is found from its first block on.
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def register(self, block: int, key: bytes) -> None:
        """Let `find` return a full block in use under `key`, unless another block has that key already."""
        block = self._known(block)
        if not self._users[block]:
            raise PoolError(f"block {block} is free: register it before it is released")
        # A registered block may have other readers, whose keys would no longer be those of their tokens.
        if self._key_of.get(block, key) != key:
            raise PoolError(f"block {block} has another key: a registered block must not be written again")
        # Two requests may compute the same prefix at the same time: the first block is found from then on, the second
        # stays without a key and is free for anything after its release.
        if key not in self._block_of:
            self._block_of[key], self._key_of[block] = block, key

    def _known(self, block: int) -> int:
        number = as_int(block)
        if number is None or not 0 <= number < self.num_blocks:
            raise PoolError(f"block {block!r}: must be an int between 0 and {self.num_blocks - 1}")
        return number
