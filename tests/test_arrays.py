"""Conversion between frameworks: arrays share memory or are rejected by name, in every direction."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from attn.arrays import framework_of, to_framework
from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import DTypeError

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")
jnp = jax.numpy
ml_dtypes = pytest.importorskip("ml_dtypes")

SHARED = ("float32", "float16", "bfloat16", "int32", "int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2")
VALUES = [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]]  # exact in every dtype, bool included


def numpy_dtype(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, name))


def make(framework: str, name: str) -> Any:
    array = np.array(VALUES).astype(numpy_dtype(name))
    if framework == "numpy":
        return array
    return torch.tensor(VALUES).to(getattr(torch, name)) if framework == "torch" else jnp.asarray(array)


def address(array: Any) -> int:
    kind = framework_of(array)
    if kind == "torch":
        return int(array.data_ptr())
    return int(array.unsafe_buffer_pointer() if kind == "jax" else array.__array_interface__["data"][0])


def values(array: Any) -> Any:
    kind = framework_of(array)
    return np.asarray(array.double() if kind == "torch" else array).astype(np.float64)


@pytest.fixture
def x64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


# whose array is it


@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
def test_framework_of(framework: str) -> None:
    assert framework_of(make(framework, "float32")) == framework


def test_framework_of_relatives() -> None:
    assert framework_of(torch.nn.Parameter(torch.ones(2))) == "torch"
    assert framework_of(np.float32(1)) == "numpy"
    seen = []
    jax.jit(lambda x: seen.append(framework_of(x)))(jnp.ones(2))
    assert seen == ["jax"]
    with pytest.raises(TypeError, match="expected an array of torch, jax or numpy, got builtins.list"):
        framework_of([1.0])


def test_own_framework_is_the_same_object() -> None:
    for framework in ("torch", "jax", "numpy"):
        array = make(framework, "float32")
        assert to_framework(array, framework) is array
    with pytest.raises(ValueError, match=r"framework='mlx' \(supports torch, jax, numpy\)"):
        to_framework(np.ones(2), "mlx")


# what crosses, and without a copy


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("source", "target"), [("torch", "jax"), ("jax", "torch"), ("torch", "numpy"), ("numpy", "torch")])
def test_crosses_without_a_copy(source: str, target: str, name: str) -> None:
    array = make(source, name)
    crossed = to_framework(array, target)
    assert framework_of(crossed) == target
    assert str(crossed.dtype).removeprefix("torch.") == name
    assert address(crossed) == address(array)
    np.testing.assert_array_equal(values(crossed), VALUES)


@pytest.mark.parametrize("name", SHARED)
def test_numpy_and_jax(name: str) -> None:
    crossed = to_framework(make("numpy", name), "jax")
    assert crossed.dtype == numpy_dtype(name)
    back = to_framework(crossed, "numpy")
    assert back.dtype == numpy_dtype(name)
    np.testing.assert_array_equal(values(back), VALUES)


@pytest.mark.parametrize("target", ["torch", "jax", "numpy"])
@pytest.mark.parametrize("source", ["torch", "jax", "numpy"])
def test_empty_and_scalar(source: str, target: str) -> None:
    for shape in ((0, 3), ()):
        array = to_framework(np.ones(shape, np.float32), source)
        assert tuple(to_framework(array, target).shape) == shape


def test_a_torch_write_shows_through_a_jax_array() -> None:
    tensor = torch.zeros(4, 16)
    crossed = to_framework(tensor, "jax")
    tensor[0, 0] = 5
    assert float(crossed[0, 0]) == 5


# layouts


@pytest.mark.parametrize(
    "view", [lambda t: t[:, ::2], lambda t: t[1:], lambda t: t.t(), lambda t: t[:1].expand(4, 6), lambda t: t[:, 1:4]]
)
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["jax", "numpy"])
def test_views_of_a_tensor_cross(view: Any, name: str, target: str) -> None:
    tensor = view(torch.arange(24.0).view(4, 6).to(getattr(torch, name)))
    np.testing.assert_array_equal(values(to_framework(tensor, target)), values(tensor))


@pytest.mark.parametrize(
    "view",
    [lambda a: a[:, ::2], lambda a: a[1:], lambda a: a.T, lambda a: a[::-1], lambda a: np.broadcast_to(a[:1], (4, 6))],
)
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["jax", "torch"])
def test_views_of_a_numpy_array_cross(view: Any, name: str, target: str) -> None:
    array = view(np.arange(24.0).reshape(4, 6).astype(numpy_dtype(name)))
    np.testing.assert_array_equal(values(to_framework(array, target)), array.astype(np.float64))


def test_foreign_byte_order_crosses() -> None:
    array = np.arange(3, dtype=">i4")
    for target in ("torch", "jax"):
        np.testing.assert_array_equal(values(to_framework(array, target)), [0, 1, 2])


def test_read_only_numpy_is_copied_to_torch() -> None:
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    tensor = to_framework(array, "torch")
    tensor.zero_()
    np.testing.assert_array_equal(array, np.arange(6))


def test_numpy_scalar_crosses() -> None:
    assert to_framework(np.float32(3), "torch").item() == 3
    assert float(to_framework(ml_dtypes.bfloat16(3), "torch")) == 3


# what does not cross


def test_int64_becomes_int32_only_when_it_fits() -> None:
    for wide in (torch.tensor([2**31 - 1, -(2**31)]), np.array([2**31 - 1, -(2**31)])):
        crossed = to_framework(wide, "jax")
        assert crossed.dtype == jnp.int32 and crossed.tolist() == [2**31 - 1, -(2**31)]
    for wide in (torch.tensor([2**33 + 5]), np.array([2**33 + 5])):
        with pytest.raises(DTypeError, match="does not fit"):
            to_framework(wide, "jax")


@pytest.mark.parametrize("wide", [torch.ones(2, dtype=torch.float64), np.ones(2)], ids=["torch", "numpy"])
def test_float64_is_not_narrowed(wide: Any) -> None:
    with pytest.raises(DTypeError, match="float64 would be narrowed by jax"):
        to_framework(wide, "jax")


def test_64_bits_cross_in_64_bit_mode(x64: None) -> None:
    for wide in (torch.ones(2, dtype=torch.float64), np.ones(2), torch.tensor([2**33 + 5]), np.array([2**33 + 5])):
        crossed = to_framework(wide, "jax")
        assert crossed.dtype.itemsize == 8
        np.testing.assert_array_equal(values(crossed), values(wide))


@pytest.mark.parametrize("target", ["jax", "numpy"])
def test_gradients_do_not_cross(target: str) -> None:
    with pytest.raises(ValueError, match=r"gradients do not cross: pass tensor.detach\(\)"):
        to_framework(torch.ones(2, requires_grad=True), target)
    assert to_framework(torch.nn.Parameter(torch.ones(2), requires_grad=False), target).shape == (2,)


@pytest.mark.parametrize("target", ["torch", "numpy"])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_a_tracer_does_not_cross(target: str, transform: Any) -> None:
    def crossing(x: Any) -> Any:
        to_framework(x, target)
        return x

    with pytest.raises(TypeError, match="a JAX tracer has no memory and cannot cross"):
        transform(crossing)(jnp.ones(3))


def test_dtypes_without_a_counterpart() -> None:
    with pytest.raises(DTypeError, match="int4 cannot cross to torch"):
        to_framework(jnp.ones(2, jnp.int4), "torch")
    for array in (np.array(["a"]), np.ones(2, np.longdouble), np.array([object()])):
        with pytest.raises(DTypeError, match="has no counterpart in torch"):
            to_framework(array, "torch")


def test_numpy_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(DTypeError, match="NumPy needs ml_dtypes for bfloat16: install ml_dtypes, or pass tensor.float"):
        to_framework(torch.ones(2, dtype=torch.bfloat16), "numpy")


# an implementation called with arrays of another framework


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_a_torch_implementation_takes_and_returns_what_it_is_given(framework: str, name: str) -> None:
    from attn.torch import Attention

    layer = Attention(4, 32, num_kv_heads=2, dtype=getattr(torch, name), backend="CPU_ATTN")
    layer.impl.need_to_return_lse_for_decode = True
    batch = CommonAttentionMetadata.from_lens([5, 1], [5, 20], [[0], [3, 1]], 16)
    metadata = layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, batch)
    native = [torch.randn(6, heads, 32).to(getattr(torch, name)) for heads in (4, 2, 2)]
    caches = [layer.new_kv_cache(4) for _ in range(2)]
    want, want_lse = layer(*native, caches[0], metadata)
    inputs = [to_framework(x.clone(), framework) for x in native]
    out, lse = layer.impl(layer, *inputs, caches[1], metadata)
    assert framework_of(out) == framework_of(lse) == framework
    assert str(out.dtype).removeprefix("torch.") == name and str(lse.dtype).removeprefix("torch.") == "float32"
    np.testing.assert_array_equal(values(out), values(want))
    np.testing.assert_array_equal(values(lse), values(want_lse))
    assert torch.equal(caches[0], caches[1])
    for given, original in zip(inputs, native, strict=True):  # inputs are never written to
        np.testing.assert_array_equal(values(given), values(original))


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_a_jax_implementation_takes_and_returns_what_it_is_given(framework: str) -> None:
    nnx = pytest.importorskip("flax.nnx")
    from attn.jax import Attention

    layer = Attention(4, 32, num_kv_heads=2, backend="XLA_ATTN")
    batch = CommonAttentionMetadata.from_lens([5, 1], [5, 20], [[0], [3, 1]], 16)
    metadata = layer.backend.get_builder_cls()(layer.kv_cache_spec, config={"bucket": False}).build(0, batch)
    native = [jnp.asarray(np.random.default_rng(0).standard_normal((6, heads, 32), np.float32)) for heads in (4, 2, 2)]
    want, want_cache = layer(*native, layer.new_kv_cache(4), metadata)
    inputs = [to_framework(jnp.copy(x), framework) for x in native]
    cache = nnx.Variable(layer.new_kv_cache(4))
    out = layer.impl(layer, *inputs, cache, metadata)
    assert framework_of(out) == framework
    np.testing.assert_allclose(values(out), values(want), atol=1e-6)
    np.testing.assert_array_equal(values(cache[...]), values(want_cache))


def test_an_output_buffer_does_not_cross() -> None:
    from attn.torch import Attention

    layer = Attention(2, 16, backend="TORCH_SDPA")
    with pytest.raises(ValueError, match="cannot be converted: call forward"):
        layer.impl(layer, np.ones((1, 2, 16), np.float32), None, None, None, None, np.ones((1, 2, 16), np.float32))
