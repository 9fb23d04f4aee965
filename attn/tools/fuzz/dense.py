"""The fuzzer's random calls of diffusion backends, drawn from the features that they declare, and their simplifications.

As in `fuzz_cases`, a program consists of sizes, a dtype and features; its cases differ in lengths and numbers. Calls outside
a backend's limits are drawn too and must be rejected.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attn.capabilities import Device, Feature, supports_size
from attn.testing.dense import DenseCase, check_dense
from attn.testing.rules import BUDGETS
from attn.tools.fuzz.cases import HEAD_SIZES, HEADS, SMALLEST_16_BIT

_LENGTHS = (1, 2, 3, 7, 16, 17, 31, 32, 33, 64, 65, 77, 127, 128, 130, 200)
_JOINT = ((0, 1), (0, 9), (7, 7), (1, 1), (16, 16), (33, 33))
_HALVES = ("float16", "bfloat16")

#: The plain values of a dense case's fields.
_SHAPE = ("rows", "keys", "batch", "num_heads", "num_kv_heads", "head_size")
PLAIN = DenseCase.plain((*_SHAPE, "vast", "seed", "refused"), dtype="float32")


@dataclass(frozen=True)
class DenseSubject:
    """A diffusion backend class to test, on a device (None: any)."""

    name: str
    backend: Any
    device: Device | None = None

    def serves(self, case: DenseCase) -> bool:
        """Whether the case's sizes and features are declared.

        Reasons of `why_not_call` do not count: the rejection is then the tested behaviour.
        """
        refused = self.backend.why_not_call(**case.call_facts)
        return not set(self.backend.why_not(case.request(self.backend.error), self.device)).difference(refused)


def check(backend: Any, case: DenseCase) -> None:
    """Run `check_dense` on a drawn case, which must be rejected if it is outside the backend's limits."""
    check_dense(backend, case.replace(refused=tuple(backend.why_not_call(**case.call_facts))))


def program(subject: DenseSubject, seed: int, number: int, cases: int, one_shape: bool = False) -> list[DenseCase]:
    """Return the cases of program `number`, at most `cases` of them; `one_shape`: of the same extents."""
    rng = random.Random(f"{seed}/diffusion/{subject.name}/{number}")
    frame = next((one for one in (_frame(subject, rng) for _ in range(200)) if subject.serves(one)), None)
    if frame is None:
        return []
    drawn = [frame if one_shape else _lengths(rng, frame) for _ in range(cases)]
    drawn = [_numbers(subject, rng, case) for case in drawn]
    return [case.replace(name=f"fuzz {seed}/{number}.{i}") for i, case in enumerate(drawn) if subject.serves(case)]


def _frame(subject: DenseSubject, rng: random.Random) -> DenseCase:
    c = subject.backend.capabilities
    # Only dtypes that have a limit of their error.
    dtype = rng.choice([name for name in c.dtypes if name in BUDGETS])
    sizes = [n for n in HEAD_SIZES if supports_size(n, c.head_sizes) and (n >= SMALLEST_16_BIT or dtype not in _HALVES)]
    heads, kv_heads = rng.choice(HEADS)
    case = DenseCase("", num_heads=heads, num_kv_heads=kv_heads, head_size=rng.choice(sizes or [64]), dtype=dtype)
    case = case.replace(batch=rng.choice((1, 2, 3)), causal=rng.random() < 0.25)
    case = case.replace(scale=rng.choice((None, None, None, 0.31, 0.05, -0.2)))
    if rng.random() < 0.3:
        case = case.replace(joint=rng.choice(_JOINT), rear=rng.random() < 0.5)
    # Not both: a mask of rows and keys has no rows for a joint stream.
    elif Feature.MASK in c.features and rng.random() < 0.3:
        case = case.replace(mask=True)
    return _lengths(rng, case)


def _lengths(rng: random.Random, case: DenseCase) -> DenseCase:
    def length() -> int:
        return rng.choice((*_LENGTHS, rng.randrange(1, 260)))

    rows = length()
    # Many backends serve causality for as many rows as keys only: other lengths must be refused, but not in most cases.
    keys = rows if rng.random() < (0.8 if case.causal else 0.4) else length()
    return case.replace(rows=rows, keys=keys)


def _numbers(subject: DenseSubject, rng: random.Random, case: DenseCase) -> DenseCase:
    """Change fields that a compiled program does not depend on."""
    keys_hidden = rng.choice(("", "", "lens", "holes"))
    # One mask at a time, and causality with hidden keys seldom: few backends serve both.
    if keys_hidden == "lens" and not case.mask and not (case.causal and rng.random() < 0.9):
        case = case.replace(lens=tuple(rng.choice((0, 1, case.keys, rng.randrange(case.keys + 1))) for _ in range(case.batch)))
    elif keys_hidden == "holes" and not case.mask and not (case.causal and rng.random() < 0.9):
        case = case.replace(holes=True)
    on_torch = subject.backend.capabilities.framework == "torch"
    return case.replace(
        seed=rng.randrange(1, 1 << 20),
        inputs=rng.choice(("randn", "randn", "needle")),
        layout=rng.choice(("heads", "heads", "heads_first", "fused")) if on_torch else "heads",
    )


def simpler(case: DenseCase) -> Iterator[DenseCase]:
    """Yield the cases that are one step simpler."""

    def sized(**changes: Any) -> DenseCase:
        changed = case.replace(**changes)
        # Lengths within the fewer keys, of the entries that are left.
        return changed.replace(lens=tuple(min(n, changed.keys) for n in changed.lens[: changed.batch]))

    if case.batch > 1:
        yield sized(batch=1)
    for fewer_rows, fewer_keys in ((case.rows // 2, case.keys // 2), (case.rows - 1, case.keys - 1)):
        for rows, keys in ((fewer_rows, fewer_keys), (fewer_rows, case.keys), (case.rows, fewer_keys)):
            # A call without rows or keys is another failure.
            if rows and keys:
                yield sized(rows=rows, keys=keys)
    if case.num_heads != case.num_kv_heads:
        yield case.replace(num_heads=case.num_kv_heads)
    if case.num_kv_heads > 1:
        yield case.replace(num_heads=case.num_heads // case.num_kv_heads, num_kv_heads=1)
    yield from (case.replace(head_size=size) for size in (16, 64) if size < case.head_size)
