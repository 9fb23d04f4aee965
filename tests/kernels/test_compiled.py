"""Specialisation of a kernel's arguments, as Triton's own launches do it. Compiles nothing: 10 s on one core."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attn.kernels.compiled import Pointer, specialise
from tests.compilers import needs_triton, output


def _kernel(**kinds: str) -> Any:
    """Stands for a Triton function. kinds: of its parameters: "", "constexpr" or "unspecialised"."""
    params = [
        SimpleNamespace(name=name, is_constexpr=kind == "constexpr", do_not_specialize=kind == "unspecialised")
        for name, kind in kinds.items()
    ]
    return SimpleNamespace(__name__="kernel", params=params)


def test_arrays_are_aligned_and_only_specialised_numbers_are_known() -> None:
    kernel = _kernel(out="", absent="", stride="", one="", odd="", plain="unspecialised", factor="", size="constexpr", far="")
    made = specialise(
        kernel, dict(out=Pointer("bfloat16"), absent=None, stride=32, one=1, odd=33, plain=16, factor=1.0, size=1, far=1 << 32)
    )
    assert made.signature == dict(
        out="*bf16", absent="constexpr", stride="i32", one="constexpr", odd="i32", plain="i32", factor="fp32",
        size="constexpr", far="i64",
    )  # fmt: skip
    assert made.constants == {(1,): None, (3,): 1, (7,): 1}
    assert sorted(made.attributes) == [(0,), (2,), (8,)]
    assert made.parameters == ("out", ("i32", 32), ("i32", 33), ("i32", 16), ("fp32", 1.0), ("i64", 1 << 32))


@pytest.mark.parametrize(("arguments", "words"), [({}, "x: must"), ({"x": 1, "y": 2}, "y: must"), ({"x": "1"}, "x='1'")])
def test_arguments_that_no_launch_takes(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        specialise(_kernel(x=""), arguments)


#: What Triton makes of the arguments of torch's launches, beside what `specialise` makes of them.
SCRIPT = """
import torch, triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from attn.kernels.compiled import Boxes, Pointer, specialise
from attn.kernels.memory import SHARED_MEMORY
from attn.tools.aot import triton as aot
from attn.kernels import hopper
from attn.torch.kernels import kv_write, merge_states, paged_attention

on_hopper = False
hopper.is_on = lambda kernel: on_hopper

triton.runtime.driver.set_active(aot._placeholder("sm_90", SHARED_MEMORY["sm_90"]))
jit, seen = triton.runtime.jit.JITFunction, []
jit._do_compile = lambda self, *args: None
pack = jit._pack_args

def packed(self, backend, kwargs, bound, specialization, options):
    made = pack(self, backend, kwargs, bound, specialization, options)
    assert all(x.data_ptr() % 16 == 0 for x in bound.values() if isinstance(x, torch.Tensor))
    def name(x):
        if isinstance(x, TensorDescriptor):
            return Boxes(str(x.base.dtype).removeprefix("torch."), *map(tuple, (x.shape, x.strides, x.block_shape)))
        return Pointer(str(x.dtype).removeprefix("torch.")) if isinstance(x, torch.Tensor) else x

    ours = specialise(self, {key: name(x) for key, x in bound.items()})
    _, signature, constants, attributes = made
    attributes = {at: words for at, words in attributes.items() if words}  # a constant of type str has an empty list
    for mine, its in zip(ours, (signature, constants, attributes)):
        differ = [(key, mine.get(key), its.get(key)) for key in {**mine, **its} if mine.get(key) != its.get(key)]
        assert mine == its, (self.__name__, differ)
    seen.append(self.__name__)
    return made

jit._pack_args = packed

def attend(lens, tokens, dtype, stored, **options):
    R, page, at = len(lens), 16, torch.tensor([0, *tokens]).cumsum(0).int()
    query = torch.zeros(sum(tokens), 8, 64, dtype=dtype)
    cache = torch.zeros(2, 8, page, 2, 64, dtype=stored)
    for whole in (False, True):
        paged_attention.paged_attention(
            torch.empty_like(query), torch.empty(8, len(query)), query, cache[0], cache[1], at, torch.tensor(lens).int(),
            torch.zeros(R, -(-max(lens) // page)).int(), max(tokens), max(lens), 0.3, right=0, whole=whole, **options)

kinds = (torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.float16, torch.float8_e4m3fn), (torch.bfloat16, torch.int8)
for dtype, stored in kinds:
    codes = dict(k_scale=torch.ones(()), v_scale=torch.ones(2)) if stored.itemsize == 1 else {}
    attend([900, 70], [1, 1], dtype, stored, **codes)
    attend([900, 70], [20, 1], dtype, stored, left=100, soft_cap=5.0, sinks=torch.zeros(8), **codes)
    attend([90, 70], [3, 2], dtype, stored, tree=torch.ones(2, 4, 4, dtype=torch.bool), **codes)
    attend([90, 70], [3, 2], dtype, stored, spans=torch.zeros(5, 2).int(), prefix=torch.zeros(2).int(), **codes)
    key = torch.zeros(3, 2, 64, dtype=dtype)
    cache = torch.zeros(2, 8, 16, 2, 64, dtype=stored)
    kv_write.write_kv(key, key, cache[0], cache[1], torch.arange(3), codes.get("k_scale"), codes.get("v_scale"))
merge_states.merge_states(torch.zeros(2, 3, 2, 64), torch.zeros(2, 2, 3))
on_hopper = True
for dtype in (torch.bfloat16, torch.float16):
    attend([900, 70], [20, 1], dtype, dtype, left=100, soft_cap=5.0, sinks=torch.zeros(8))
    mask = dict(spans=torch.zeros(21, 2).int(), prefix=torch.zeros(2).int(), is_causal=torch.ones(2, dtype=torch.bool))
    attend([900, 70], [20, 1], dtype, dtype, chunk_size=512, **mask)
assert {"attention", "merge", "write", "prefill"} <= set(seen), seen
print("equal", len(seen))
"""


@needs_triton
def test_triton_specialises_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert output(SCRIPT, tmp_path).startswith("equal")
