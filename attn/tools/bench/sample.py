"""Batches drawn at random, for `attn bench --random`: how a backend does on batches that it was not tuned for.

Five consecutive batches are of the five kinds (`attn.tools.bench.case.KINDS`), in random order. The number of requests and each
request's length are log-uniform, as is a chunk's number of rows; the rows of speculation are uniform and the same for all
requests of a batch. A mixture has a log-uniform number of chunks and prompts among decodes or speculation, in random order.

A batch depends on the seed, its number and the sizes only, so the first batches of a longer run are those of a shorter one.
A batch that exceeds a bound is drawn again, number of requests and shape included. The bound on the cache is a power of
two, since machines of a kind differ a little in free memory.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attn.tools.bench.case import KINDS, SPECULATED, BenchCase, cache_bytes, grammar, parse

_TRIES = 1000  #: draws of one batch before its bounds count as impossible
_SHARE = 8  #: the cache takes at most 1 / _SHARE of the free memory; peers and the check hold copies, some in float32


@dataclass(frozen=True)
class Sizes:
    """The distribution's bounds and shapes. `requests`, `new_tokens` and `cache_mib` are maxima per batch; `length` (tokens in
    the cache) and `chunk` (rows of a chunk) are maxima per request."""

    requests: int
    length: int
    chunk: int
    new_tokens: int
    cache_mib: int
    heads: tuple[str, ...]
    head_sizes: tuple[int, ...]
    dtype: str
    shortest: int = 16
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)

    def __str__(self) -> str:
        return (
            f"1 to {self.requests} requests of {self.shortest} to {self.length} tokens, chunks of at most {self.chunk} rows; "
            f"drawn again above {self.new_tokens} new tokens or {self.cache_mib} MiB of cache per batch"
        )


SIZES = Sizes(256, 65536, 2048, 65536, 0, ("32/8", "64/8", "28/4", "40/8", "16/16", "8/1"), (64, 128, 256), "bfloat16")
#: A quarter of the heads, and batches that take at most seconds; the cache's bound is fixed.
CPU_SIZES = Sizes(16, 4096, 256, 512, 128, ("8/2", "16/2", "7/1", "10/2", "4/4", "8/1"), (64, 128, 256), "float32")
_LATENT = {"heads": ("128", "64", "32", "16"), "head_sizes": (576,)}
_CPU_LATENT = {"heads": ("16", "8", "4", "2"), "head_sizes": (576,)}


def sizes_of(free: Sequence[int | None], mla: bool = False) -> Sizes:
    """Return the sizes for devices with `free` bytes of memory each (None: a CPU); all draw the smallest device's batches.

    Raises ValueError if less than 8 MiB are free.
    """
    known = [each for each in free if each is not None]
    if len(known) < len(free):
        return replace(CPU_SIZES, **_CPU_LATENT) if mla else CPU_SIZES  # type: ignore[arg-type]
    mib = min(known) // _SHARE >> 20
    if mib < 1:
        raise ValueError(f"--random needs at least {_SHARE} MiB of free device memory, not {min(known)} bytes")
    return replace(SIZES, cache_mib=1 << (mib.bit_length() - 1), **(_LATENT if mla else {}))  # type: ignore[arg-type]


def sample(count: int, seed: int, sizes: Sizes, mla: bool = False, **fixed: Any) -> list[BenchCase]:
    """Draw `count` distinct cases; `fixed` are fields of `BenchCase` that are not drawn.

    Raises ValueError if `fixed` makes an invalid case, or one of which no batch is within the bounds.
    """
    cases: dict[BenchCase, None] = {}
    for number in range(count):
        # Five batches are one permutation of the kinds: any multiple of five has each equally often.
        turn, index = divmod(number, len(KINDS))
        batch_type = Draw(f"{seed} kinds {turn}").shuffled(KINDS)[index]
        # A generator for each batch: how often another one was drawn again changes nothing.
        draw = Draw(f"{seed} batch {number}")
        for _ in range(_TRIES):
            case = _case(batch_type, draw, sizes, mla, fixed)
            # Distinct, since equal cases would be one row in a report.
            if case not in cases and within(case, sizes):
                break
        else:
            raise ValueError(f"--random: none of {_TRIES} draws of {batch_type} is within the bounds: {sizes}")
        cases[case] = None
    return list(cases)


def within(case: BenchCase, sizes: Sizes) -> bool:
    """Whether a batch is within the bounds on new tokens and cache."""
    return sum(n for n, _ in parse(case.batch)) <= sizes.new_tokens and cache_bytes(case) <= sizes.cache_mib << 20


def _case(batch_type: str, draw: "Draw", sizes: Sizes, mla: bool, fixed: dict[str, Any]) -> BenchCase:
    shape = {
        "heads": draw.one_of(sizes.heads),
        "head_size": draw.one_of(sizes.head_sizes),
        "block_size": draw.one_of(sizes.block_sizes),
        "dtype": sizes.dtype,
    }
    batch = grammar(_lens(batch_type, draw, sizes))
    return (BenchCase.latent if mla else BenchCase)(batch, **{**shape, **fixed})


def _lens(batch_type: str, draw: "Draw", sizes: Sizes) -> list[tuple[int, int]]:
    rows = draw.uniform(2, SPECULATED)

    def request(batch_type: str) -> tuple[int, int]:
        m = draw.log_uniform(sizes.shortest, sizes.length)
        if batch_type == "chunks":
            # At most m - 1 rows, as a chunk has context; `shortest` is above SPECULATED + 1.
            return draw.log_uniform(SPECULATED + 1, min(sizes.chunk, m - 1)), m
        return {"decodes": 1, "speculation": rows, "prompts": m}[batch_type], m

    if batch_type != "mixtures":
        return [request(batch_type) for _ in range(draw.log_uniform(1, sizes.requests))]
    count = draw.log_uniform(2, sizes.requests)
    # At least one of each, or it would be no mixture.
    prefills, short = draw.log_uniform(1, count - 1), draw.one_of(("decodes", "speculation"))
    long = [draw.one_of(("chunks", "prompts")) for _ in range(prefills)]
    return draw.shuffled([request(each) for each in [short] * (count - prefills) + long])


class Draw:
    """Random numbers from `random.Random.random()` alone, the one method whose numbers Python keeps in every version."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed).random

    def uniform(self, low: int, high: int) -> int:
        return low + int((high + 1 - low) * self.random())

    def log_uniform(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, whose logarithm is uniform."""
        return min(high, int(low * ((high + 1) / low) ** self.random()))

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[self.uniform(0, len(values) - 1)]

    def shuffled(self, values: Sequence[Any]) -> list[Any]:
        # A permutation, since each value draws its key once.
        return sorted(values, key=lambda _: self.random())
