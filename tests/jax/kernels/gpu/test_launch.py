"""The custom call that launches a compiled kernel: its message, its aliases, and which versions of jaxlib take it. 3 s."""

import importlib
import struct
import zlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn.jax.kernels.gpu import launch as module
from attn.kernels.compiled import Boxes, Pointer, Program
from tests.compilers import without_barriers

NUMBERS = (("i32", 5), ("i32", -3), ("i64", 1 << 40), ("fp32", 0.5), ("i32", 0))
BOXES = Boxes("bfloat16", (1, 300, 8, 128), (307200, 1024, 128, 1), (1, 16, 1, 64))
PROGRAM = Program("kernel", b"\x7fELF code" * 40, 12, 2, 4096, ("x", *NUMBERS[:2], "y", BOXES, *NUMBERS[2:]))


def _varint(data: bytes) -> tuple[int, bytes]:
    for length, byte in enumerate(data, 1):
        if byte < 128:
            return sum((b & 127) << 7 * i for i, b in enumerate(data[:length])), data[length:]
    raise ValueError("cut off")


def _fields(data: bytes) -> list[tuple[int, Any]]:
    """(field, value) pairs of a message in the wire format of protocol buffers."""
    found = []
    while data:
        key, data = _varint(data)
        value: Any
        if key & 7 == 0:
            value, data = _varint(data)
        elif key & 7 == 2:
            size, data = _varint(data)
            value, data = data[:size], data[size:]
        else:
            assert key & 7 == 5
            value, data = data[:4], data[4:]
        found.append((key >> 3, value))
    return found


def _varints(data: bytes) -> list[int]:
    found = []
    while data:
        value, data = _varint(data)
        found.append(value)
    return found


def test_the_message_has_the_fields_that_jaxlib_reads() -> None:
    (_, call), (user, name) = _fields(zlib.decompress(module.payload(PROGRAM, "sm_90", (7, 300, 1))))
    assert (user, name) == (4, b"kernel")
    (_, kernel), *rest = _fields(call)
    assert rest[:3] == [(2, 7), (3, 300), (4, 1)]
    fields = dict(_fields(kernel))
    assert (fields[1], fields[2], fields[3], fields[6], fields[10]) == (b"kernel", 12, 4096, 90, 2)
    assert dict(_fields(fields[11])) == {1: PROGRAM.image, 2: b"kernel", 3: 4096}
    passed = [_fields(message) for field, message in rest[3:] if field == 5]
    assert passed == [
        [(1, b"\x10\x10")], [(3, 5)], [(3, (1 << 64) - 3)], [(1, b"\x10\x10")], passed[4], [(5, 1 << 40)],
        [(7, struct.pack("<f", 0.5))], [(3, 0)],
    ]  # fmt: skip
    (field, boxes), *_ = passed[4]
    elements, swizzle, shape, strides, box = _fields(dict(_fields(boxes))[1])
    assert (field, elements, swizzle) == (9, (1, 9), (2, 3)), "the driver's numbers of bfloat16 and of rows of 128 bytes"
    assert [_varints(part) for _, part in (shape, strides, box)] == [list(part) for part in BOXES[1:]]


def test_programs_of_one_name_do_not_share_a_module() -> None:
    """jaxlib keeps modules by the name, the shared memory, the architecture and the field that else holds PTX."""
    keys = set()
    for image in (b"one", b"two"):
        call = _fields(zlib.decompress(module.payload(PROGRAM._replace(image=image), "sm_90", (1, 1, 1))))[0][1]
        keys.add(dict(_fields(_fields(call)[0][1]))[4])
    assert len(keys) == 2


def test_the_message_is_the_one_that_jaxlib_makes() -> None:
    """But for the code, which jaxlib's own constructors do not take."""
    gpu = None
    for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        try:
            gpu = importlib.import_module(f"{name}._triton")
            break
        except ImportError:
            continue
    if gpu is None:
        pytest.skip("no GPU plugin of jaxlib is installed: pip install --no-deps jax-cuda13-plugin (no GPU is needed)")
    call = _fields(zlib.decompress(module.payload(PROGRAM, "sm_90", (7, 300, 1))))[0][1]
    text = dict(_fields(_fields(call)[0][1]))[4].decode()
    makes = {"i32": "i32", "i64": "i64", "fp32": "fp32"}

    def made(parameter: Any) -> Any:
        if isinstance(parameter, Boxes):
            return gpu.create_tma_descriptor_parameter(9, 3, *parameter[1:], 0)
        if isinstance(parameter, str):
            return gpu.create_array_parameter(0, 16)
        return gpu.create_scalar_parameter(parameter[1], makes[parameter[0]])

    params = [made(parameter) for parameter in PROGRAM.parameters]
    kernel = gpu.TritonKernel(PROGRAM.name, PROGRAM.num_warps, PROGRAM.num_ctas, PROGRAM.shared, text, "", 90)
    theirs = _fields(gpu.TritonKernelCall(kernel, 7, 300, 1, params).to_proto("kernel", b""))
    ours = _fields(zlib.decompress(module.payload(PROGRAM, "sm_90", (7, 300, 1))))

    def comparable(message: list[tuple[int, Any]]) -> list[Any]:
        """Without the code; absent fields are 0 or empty."""
        (_, call), *name = message
        (_, kernel), *rest = _fields(call)
        return [sorted((f, v) for f, v in _fields(kernel) if f != 11 and v not in (0, b"")), rest, [x for x in name if x[1]]]

    assert comparable(ours) == comparable(theirs)


def test_versions_that_were_not_tried_are_refused() -> None:
    assert [module.why_not(version) for version in ("0.11.1", "0.11.2", "0.12.0.1", "0.12.0")] == [""] * 4
    for version in ("0.10.2", "0.11.0", "0.13.0", "1.0"):
        words = "its launch of compiled kernels is known from 0.11.1 up to, not including, 0.13"
        assert module.why_not(version) == f"jaxlib={version} ({words})"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that were compiled; a stand-in for the compiler."""
    found: list[dict[str, Any]] = []

    def compile_kernel(kernel: Any, arch: str, given: dict[str, Any], options: dict[str, Any]) -> Program:
        found.append({**given, **options, "arch": arch})
        return PROGRAM._replace(parameters=tuple(name for name, value in given.items() if isinstance(value, Pointer)))

    monkeypatch.setattr(module, "compile_kernel", compile_kernel)
    return found


KERNEL: Any = SimpleNamespace(arg_names=["scratch", "out", "x", "n"])


def _call(x: jax.Array, out: jax.Array, grid: tuple[int, ...] = (3,), **more: Any) -> Any:
    arguments = {"x": x, "out": out, "scratch": None, "n": 4, "num_warps": 2, **more}
    return module.launch(KERNEL, "sm_90", grid, arguments, ["out"], x="uint8")


def test_arrays_are_operands_in_the_kernels_order_and_written_ones_are_aliased(compiled: list[dict[str, Any]]) -> None:
    x, out = jnp.zeros((4, 8), jnp.bfloat16), jnp.ones(5)
    text = jax.jit(_call, donate_argnums=1).trace(x, out).lower(lowering_platforms=("cuda",)).as_text()
    assert compiled == [dict(scratch=None, out=Pointer("float32"), x=Pointer("uint8"), n=4, num_warps=2, arch="sm_90")]
    assert "stablehlo.custom_call @triton_kernel_call_ffi(%arg1, %arg0)" in without_barriers(text)
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 0" in text
    assert "tf.aliasing_output = 0" in text, "a donated array is the result's memory"


def test_a_grid_without_programs_launches_nothing(compiled: list[dict[str, Any]]) -> None:
    x, out = jnp.zeros((4, 8), jnp.bfloat16), jnp.ones(5)
    assert "custom_call" not in jax.jit(_call, static_argnums=2).trace(x, out, (0, 1)).lower().as_text()


def test_a_launch_has_no_rule_for_vmap_and_none_for_derivatives(compiled: list[dict[str, Any]]) -> None:
    """The grid is part of the program: neither may be guessed."""
    x, out = jnp.zeros((3, 4), jnp.bfloat16), jnp.ones(5)
    with pytest.raises(NotImplementedError):
        jax.make_jaxpr(jax.vmap(_call, (0, None)))(x, out)
    with pytest.raises((NotImplementedError, ValueError)):
        jax.make_jaxpr(jax.grad(lambda out: _call(x, out)[0].sum()))(out)


def test_what_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=114)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert module.target() == ("sm_90", 114)
    device.compute_capability = "gfx942:sramecc+:xnack-"
    assert module.target() == ("gfx942", 114)
    device.compute_capability = ""
    with pytest.raises(RuntimeError, match="no GPU"):
        module.target()
