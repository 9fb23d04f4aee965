"""The figures of a compiled program: a copy of the whole cache is found, and nothing else is taken for one."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.programs import jax_serving

LOOP = """
  %cache = bf16[64,2,2,128,128]{4,3,2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %one = (bf16[4,16]{1,0}, bf16[64,2,2,128,128]{4,3,2,1,0}) custom-call(%cache), custom_call_target="tpu_custom_call"
  %sum = bf16[64,4096]{1,0} all-reduce(%x), channel_id=1
  %gathered = (bf16[8,4]{1,0}, bf16[8,16]{1,0}) all-gather-start(%y), channel_id=2
  %done = bf16[8,16]{1,0} all-gather-done(%gathered)
  %small = bf16[64,2]{1,0} copy(%z)
"""
COPY = "  %copy.1 = bf16[64,2,2,128,128]{4,3,2,1,0:T(8,128)(2,1)} copy(%cache)\n"
ASYNC = "  %copy.2 = (bf16[64,2,2,128,128]{4,3,2,1,0}, bf16[64,2,2,128,128]{4,3,2,1,0}, u32[]) copy-start(%cache)\n"

#: As libtpu changes the tiles of an array on v7x.
FORMAT = """
  %format = ((bf16[64,2,2,128,128]{4,3:T(8,128)}), bf16[64,2,2,128,128]{4,3:T(16,128)}, (s32[8]{0})) async-start(%cache)
"""


def figures(text: str) -> dict[str, Any]:
    sharding = SimpleNamespace(shard_shape=lambda shape: (shape[0], shape[1], shape[2] // 4, *shape[3:]))
    caches = SimpleNamespace(shape=(64, 2, 8, 128, 128), dtype=SimpleNamespace(itemsize=2), sharding=sharding)
    names = ("argument", "alias", "temp")
    memory = SimpleNamespace(**{f"{name}_size_in_bytes": i for i, name in enumerate(names)})
    return jax_serving.figures(SimpleNamespace(memory_analysis=lambda: memory), text, caches)


@pytest.mark.parametrize(("text", "copies"), [(LOOP, 0), (LOOP + COPY, 1), (LOOP + COPY + ASYNC, 2), (LOOP + FORMAT, 1)])
def test_copies_of_the_cache_are_counted(text: str, copies: int) -> None:
    found = figures(text)
    assert found["cache_copies"] == copies
    assert found["collectives"] == {"all-reduce": 1, "all-gather": 1} and found["kernels"] == 1
    assert found["cache_bytes"] == 64 * 2 * 2 * 128 * 128 * 2
