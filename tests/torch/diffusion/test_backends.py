"""The diffusion backends under torch: the dense suite, on the device at hand or on stand-ins."""

import copy
import importlib.util
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attn.capabilities import Device
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.errors import DTypeError, ShapeError, UnsupportedError
from attn.testing.dense import DenseCase, check_dense, dense_cases, run_dense
from attn.torch import DiffusionAttention
from attn.torch.backends import _flash_providers as providers
from attn.torch.diffusion.backends.sage_attn import SageAttentionBackend
from attn.torch.diffusion.backends.sage_attn3 import SageAttention3Backend
from attn.torch.diffusion.backends.sdpa import SDPABackend, SDPAImpl

VENDORS = [
    ("FLASH_ATTN", "fa2"),
    ("FLASH_ATTN", "fa3"),
    ("FLASH_ATTN", "fa4"),
    ("FLASH_ATTN", "vllm_fa"),
    ("FLASHINFER_ATTN", "flashinfer_pkg"),
    ("SAGE_ATTN", "sage_pkg"),
    ("SAGE_ATTN_3", "sage_pkg"),
    ("ASCEND_ATTN", "npu_pkg"),
]

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no triton here: tests/torch/test_interpreted.py runs it"
)
#: Backends with a log-sum-exp, and the stand-in that they need.
EMPTY = [
    ("TORCH_SDPA", ""),
    pytest.param("TRITON_ATTN", "", marks=NEEDS_TRITON),
    ("FLASH_ATTN", "fa3"),
    ("FLASHINFER_ATTN", "flashinfer_pkg"),
]


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch, standins: Callable[..., None]) -> Callable[[str], None]:
    """One vendor's stand-in, and of FlashAttention's providers no other."""

    def install(root: str) -> None:
        standins(root)
        providers.chosen.cache_clear()
        monkeypatch.setattr(providers, "PROVIDERS", [p for p in providers.PROVIDERS if not p.install.startswith("torch")])

    return install


@pytest.mark.parametrize("case", dense_cases(SDPABackend), ids=str)
def test_torch_sdpa_conforms(case: DenseCase) -> None:
    check_dense(SDPABackend, case)


@pytest.mark.parametrize(("name", "root"), VENDORS)
def test_an_adapter_conforms_on_a_stand_in(name: str, root: str, standin: Callable[[str], None]) -> None:
    standin(root)
    backend: Any = DiffusionAttentionBackendEnum[name].get_class()
    cases = dense_cases(backend)
    assert sum(not case.refused for case in cases) >= 12
    for case in cases:
        check_dense(backend, case)


@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (3, 7)])
def test_flash_attention_copies_no_lengths_of_equal_requests(
    rows: int, keys: int, standin: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a copy waits for the device, and cannot be captured in a graph."""
    standin("fa4")
    calls, attend = list[Any](), providers.Provider.attend
    monkeypatch.setattr(providers.Provider, "attend", lambda self, *args: calls.append(args[1]) or attend(self, *args))
    impl: Any = DiffusionAttentionBackendEnum.FLASH_ATTN.get_class().get_impl_cls()(2, 64)
    for _ in range(2):
        impl.forward(*(torch.randn(3, n, 2, 64, dtype=torch.bfloat16) for n in (rows, keys, keys)))
    one, other = calls
    assert one.starts is other.starts and one.starts.tolist() == [0, rows, 2 * rows, 3 * rows]
    assert one.key_starts is other.key_starts and one.key_starts.tolist() == [0, keys, 2 * keys, 3 * keys]


def test_sage_attention_leaves_its_callers_keys_alone(standin: Callable[[str], None]) -> None:
    """The package subtracts the mean of the keys in place."""
    standin("sage_pkg")
    impl = SageAttentionBackend.get_impl_cls()(2, 64)
    q, k, v = (torch.randn(1, 64, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    before = k.clone()
    impl.forward(q, k, v)
    assert torch.equal(k, before)
    one = torch.randn(1, 64, 1, 64, dtype=torch.bfloat16)  # of one head, [B, H, S, D] is no copy
    before = one.clone()
    SageAttention3Backend.get_impl_cls()(1, 64).forward(one, one, one)
    assert torch.equal(one, before)


@pytest.mark.parametrize(("name", "root"), EMPTY)
@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 3, 5), (0, 4, 4), (2, 0, 0), (2, 0, 3), (2, 3, 0)])
@torch.no_grad()
def test_calls_without_rows_or_keys_have_a_log_sum_exp(
    name: str, root: str, batch: int, rows: int, keys: int, standin: Callable[[str], None]
) -> None:
    """A ring gives its members such parts; no kernel is asked."""
    if root:
        standin(root)
    impl = DiffusionAttentionBackendEnum[name].get_class().get_impl_cls()(4, 64, None, False, 2)
    query, key = torch.ones(batch, rows, 4, 64, dtype=torch.bfloat16), torch.ones(batch, keys, 2, 64, dtype=torch.bfloat16)
    out, lse = impl.forward_lse(query, key, key)
    assert out.shape == query.shape and not out.any() and out.dtype == query.dtype
    assert lse.shape == (batch, 4, rows) and lse.isneginf().all()
    assert impl.forward(query, key, key).shape == query.shape


@pytest.mark.parametrize("changed", ["nothing", "length", "strides", "dtype", "mask", "grad"])
def test_a_call_like_one_before_is_not_checked_again(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    impl, checked = SDPABackend.get_impl_cls()(2, 64, -0.2), list[int]()
    prepare = SDPAImpl._prepared
    monkeypatch.setattr(SDPAImpl, "_prepared", lambda *args: checked.append(1) or prepare(*args))
    tensors = [torch.randn(2, 8, 2, 64) for _ in range(3)]
    outputs = [impl.forward(*tensors) for _ in range(4)]
    assert len(checked) == 2 and all(torch.equal(out, outputs[0]) for out in outputs)  # once by the call, once for its launch
    others, meta = [torch.randn(2, 8, 2, 64) for _ in range(3)], None
    if changed == "length":
        others[1:] = (x[:, :5] for x in others[1:])
    if changed == "strides":
        others = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in others]
    if changed == "dtype":
        others = [x.double() for x in others]
    if changed == "mask":
        meta = DiffusionAttentionMetadata(kv_lens=[3, 8])
    if changed == "grad":
        others[0].requires_grad_()
    got = impl.forward(*others, meta)
    assert torch.equal(got, SDPABackend.get_impl_cls()(2, 64, -0.2).forward(*others, meta))
    assert len(checked) == (3 if changed == "nothing" else 4)
    assert got.requires_grad == (changed == "grad")


@pytest.mark.parametrize("name", ["TORCH_SDPA", pytest.param("TRITON_ATTN", marks=pytest.mark.triton_kernels)])
@pytest.mark.parametrize("rows", [1, 7, 20])
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of Triton's interpreter
@torch.no_grad()
def test_padded_calls_like_one_before_are_not_checked_again(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cls: Any = DiffusionAttentionBackendEnum[name].get_class().get_impl_cls()
    impl, checked, prepare = cls(2, 64, -0.2), list[int](), cls._prepared
    tensors = [torch.randn(2, n, 2, 64) for n in (rows, 20, 20)]
    tensors[1][1, 5:] = tensors[2][1, 5:] = torch.nan
    few, other = (DiffusionAttentionMetadata(kv_lens=lens) for lens in ([3, 5], (20, 4)))
    want = [cls(2, 64, -0.2).forward(*tensors, meta) for meta in (few, other)]
    monkeypatch.setattr(cls, "_prepared", lambda *args: checked.append(1) or prepare(*args))
    for i, meta in ((0, few), (1, other)) * 4:
        torch.testing.assert_close(impl.forward(*tensors, meta), want[i], rtol=1e-5, atol=1e-5)
    assert len(checked) == 4  # each once by the call, once for its launch
    full = DiffusionAttentionMetadata(kv_lens=[20, 20])
    others = [torch.randn(2, n, 2, 64) for n in (rows, 20, 20)]
    for _ in range(3):
        assert torch.equal(impl.forward(*others, full), cls(2, 64, -0.2).forward(*others))
    joint = replace(few, **dict.fromkeys(("joint_query", "joint_key", "joint_value"), others[0]))
    assert impl.forward(*tensors, joint).shape[1] == 2 * rows
    for wrong in (replace(few, kv_lens=[True, 5]), replace(few, attn_mask=torch.ones(2, 20, dtype=torch.bool))):
        for _ in range(3):
            with pytest.raises(ValueError, match="kv_lens"):
                impl.forward(*tensors, wrong)


def test_an_invalid_call_is_refused_each_time() -> None:
    impl = SDPABackend.get_impl_cls()(2, 64)
    query, short = torch.zeros(2, 8, 2, 64), torch.zeros(2, 7, 2, 64)
    for _ in range(3):
        with pytest.raises(ShapeError, match="key has 8 rows, value 7"):
            impl.forward(query, query, short)


def test_a_copy_of_an_implementation_makes_launches_of_its_own() -> None:
    layer = DiffusionAttention(2, 64, backend="TORCH_SDPA")
    tensors = [torch.randn(1, 8, 2, 64) for _ in range(3)]
    want = [layer(*tensors) for _ in range(3)][0]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer.impl)), copy.copy(layer.impl)):
        impl = getattr(twin, "impl", twin)
        assert not impl._launches and torch.equal(impl.forward(*tensors), want)


def test_nan_behind_a_mask_of_keys_reaches_nothing() -> None:
    impl = SDPABackend.get_impl_cls()(2, 64)
    q, k, v = (torch.randn(2, 8, 2, 64) for _ in range(3))
    k[0, 5:] = v[0, 5:] = torch.nan
    assert torch.isfinite(impl.forward(q, k, v, DiffusionAttentionMetadata(kv_lens=[5, 8]))).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"key": torch.zeros(2, 8, 3, 64)}, ShapeError, r"key has shape \[2, 8, 3, 64\]: must be \[B, S, 2, 64\]"),
        ({"value": torch.zeros(2, 7, 2, 64)}, ShapeError, "key has 8 rows, value 7"),
        ({"value": torch.zeros(2, 8, 2, 64, dtype=torch.float16)}, DTypeError, "value has dtype torch.float16"),
        ({"key": torch.zeros(3, 8, 2, 64)}, ShapeError, "key has batch 3, query 2"),
        ({"query": [1.0]}, TypeError, "query is a list: must be an array of torch"),
        ({"value": np.zeros((2, 8, 2, 64))}, TypeError, "value is an array of numpy: must be of torch"),
        ({"attn_metadata": torch.ones(2, 8)}, TypeError, r"pass a mask as DiffusionAttentionMetadata\(attn_mask"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arrays = {name: torch.zeros(2, 8, 2, 64) for name in ("query", "key", "value")} | change
    with pytest.raises(error, match=words):
        SDPABackend.get_impl_cls()(2, 64).forward(**arrays)


@pytest.mark.parametrize(
    ("meta", "error", "words"),
    [
        ({"kv_lens": [8, 9]}, ValueError, r"kv_lens=\[8, 9\] must be 2 ints of 0..8"),
        ({"kv_lens": [8]}, ValueError, "must be 2 ints"),
        ({"kv_lens": [8, 7.5]}, ValueError, r"kv_lens=\[8, 7.5\] must be 2 ints"),
        ({"kv_lens": [8, 7], "attn_mask": np.ones((2, 8), bool)}, ValueError, "pass one of them"),
        ({"attn_mask": np.ones((2, 7), bool)}, ShapeError, r"must be \[2, 8\]"),
        ({"attn_mask": np.ones((2, 8), np.float32)}, DTypeError, "must be bool, True = attend"),
        ({"attn_mask": np.ones((2, 3, 8, 8), bool)}, ShapeError, r"must broadcast to \[2, 2, 8, 8\]"),
        ({"joint_key": torch.zeros(2, 3, 2, 64)}, ValueError, "needs joint_key and joint_value"),
        ({"joint_value": torch.zeros(2, 3, 2, 64)}, ValueError, "needs joint_key and joint_value"),
        ({"joint_attn_mask": np.ones((2, 3), bool)}, ValueError, "needs joint_key and joint_value"),
        (
            {"joint_key": torch.zeros(2, 3, 2, 64), "joint_value": torch.zeros(2, 3, 2, 64), "joint_strategy": "middle"},
            ValueError,
            "'middle' is unknown; known: front, rear",
        ),
    ],
)
def test_metadata_that_contradicts_itself(meta: dict[str, Any], error: type[Exception], words: str) -> None:
    x = torch.zeros(2, 8, 2, 64)
    with pytest.raises(error, match=words):
        SDPABackend.get_impl_cls()(2, 64).forward(x, x, x, DiffusionAttentionMetadata(**meta))


def test_a_layer_selects_gives_reasons_and_is_differentiable() -> None:
    layer = DiffusionAttention(4, 64, num_kv_heads=2, role="cross", features=["backward"], dtype=torch.float32)
    assert layer.selection.name == "TORCH_SDPA" and "TORCH_SDPA" in repr(layer)
    q, k, v = torch.randn(1, 5, 4, 64, requires_grad=True), torch.randn(1, 7, 2, 64), torch.randn(1, 7, 2, 64)
    layer(q, k, v).sum().backward()
    assert q.grad is not None and torch.isfinite(q.grad).all()


def test_one_key_is_refused_by_cudnn_in_words() -> None:
    from attn.torch.diffusion.backends.cudnn_attn import CuDNNAttentionBackend

    x = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="CUDNN_ATTN: keys=1 \\(supports 2 and more\\)"):
        CuDNNAttentionBackend.get_impl_cls()(2, 64).forward(x, x, x)


def test_causality_over_padding_is_refused() -> None:
    x = torch.zeros(1, 4, 2, 64)
    with pytest.raises(UnsupportedError, match="causal layer over padded keys"):
        SDPABackend.get_impl_cls()(2, 64, causal=True).forward(x, x, x, DiffusionAttentionMetadata(kv_lens=[3]))


def test_cudnn_by_name_is_obeyed_or_refused_on_this_device() -> None:
    told = "; ".join(
        DiffusionAttentionBackendEnum.CUDNN_ATTN.get_class().why_not(  # type: ignore[attr-defined]
            DiffusionAttention(2, 64, dtype=torch.bfloat16).selection.request, Device("torch", "cpu")
        )
    )
    assert "platform=cpu (supports cuda)" in told


def _small(case: DenseCase) -> DenseCase:
    """A vast case at a size that the host can afford."""
    lens = {"lens": (200, 300, 250), "batch": 3, "keys": 300} if case.lens else {}
    joint = (7, 20) if case.joint[0] else (0, 0)
    rows, keys, batch = min(case.rows, 200), min(case.keys, 300), min(case.batch, 3)
    return replace(
        case, **{"rows": rows, "keys": keys, "batch": batch, "num_heads": 2, "num_kv_heads": 1, "joint": joint, **lens}
    )


def vast_cases() -> list[DenseCase]:
    return [case for case in dense_cases(SDPABackend, Device("torch", "cuda"), "full") if case.vast]


def test_the_full_suite_has_fluxs_length_and_on_a_gpu_arrays_beyond_32_bits() -> None:
    names = {case.name for case in dense_cases(SDPABackend, Device("torch", "cpu"), "full")}
    assert {"4608 rows", "4608 rows with the joint stream's", "one row, one key", "77 rows"} <= names
    assert not any("2**31" in name for name in names) and len(vast_cases()) == 4
    for case in vast_cases():
        sizes = [case.batch * n * case.num_heads * case.head_size for n in (case.rows, case.keys)]
        assert max(sizes) > 2**31 and 4 * case.num_heads * case.batch * case.rows * case.keys * case.head_size < 1e15


@pytest.mark.parametrize("case", [_small(case) for case in vast_cases()], ids=str)
def test_a_vast_case_is_compared_at_its_places(case: DenseCase, monkeypatch: pytest.MonkeyPatch) -> None:
    check_dense(SDPABackend, case)
    attend = SDPAImpl._attend

    def last_key_missed(self: Any, call: Any) -> Any:
        last = -1 if not case.lens else case.lens[-1] - 1
        key, value = call.key.clone(), call.value.clone()
        key[-1, last], value[-1, last] = key[-1, 0], value[-1, 0]
        return attend(self, call._replace(key=key, value=value))

    monkeypatch.setattr(SDPAImpl, "_attend", last_key_missed)
    with pytest.raises(AssertionError, match="relative row error"):
        check_dense(SDPABackend, case)


def test_a_call_beyond_a_limit_must_be_refused_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(SDPABackend):
        key_multiple = 64
        key_masks = False

    class OddImpl(SDPAImpl, backend=Odd):
        pass

    cases = {case.name: case for case in dense_cases(Odd)}
    more = cases["77 rows, and 51 keys more"]
    assert more.keys == more.rows == 128 and cases["joint, front, and 24 keys more"].keys == 57
    assert cases["refused: 77 rows"].refused == ("keys=77 without causality (supports multiples of 64)",)
    assert "padded keys" not in cases and "mask of keys" in cases["refused: padded keys"].refused[-1]
    check_dense(Odd, cases["refused: 77 rows"])
    monkeypatch.setattr(OddImpl, "backend", SDPABackend)
    with pytest.raises(AssertionError, match="computed instead of rejected: keys=77"):
        check_dense(Odd, cases["refused: 77 rows"])


def test_what_a_kernel_raises_is_its_cases_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(SDPAImpl, "_attend", broken)
    report = run_dense(["TORCH_SDPA"], only="joint, rear", level="full")
    (row,) = report.backends
    assert (row.level, len(row.failures)) == ("dense, full", 1) and "illegal memory access" in str(row.failures[0])
    with pytest.raises(ValueError, match=r"level='huge' \(supports smoke, quick, full\)"):
        run_dense(["TORCH_SDPA"], level="huge")


def test_a_layer_follows_the_dtype_of_its_model() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), DiffusionAttention(4, 64, num_kv_heads=2, role="cross", dtype=torch.float32)
    )
    layer = model[1]
    before = layer.impl
    assert model.to("cpu")[1].impl is before, "nothing changed"
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float64, "float64")):
        assert model.to(dtype)[1].selection.request.dtype == name and name in repr(model)
        query, key = torch.randn(1, 3, 4, 64, dtype=dtype), torch.randn(1, 5, 2, 64, dtype=dtype)
        assert layer(query, key, key).dtype == dtype
    with pytest.raises(UnsupportedError, match="dtype=float8_e4m3fn"):
        layer.to(torch.float8_e4m3fn)
    assert layer.selection.request.dtype == "float64"
