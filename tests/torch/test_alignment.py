"""Tensors for kernels that read vectors of 16 bytes: what is copied, and that `F.scaled_dot_product_attention` gets no other.

A CPU cannot show what a misaligned read returns; the conformance cases "views at odd addresses" show it on a GPU.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn.torch
from attn.testing import check_conformance
from attn.testing.dense import check_dense, dense_cases
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch import alignment
from attn.torch.alignment import aligned
from attn.torch.backends.sdpa import TorchSDPABackend
from attn.torch.diffusion.backends import cudnn_attn
from attn.torch.diffusion.backends.cudnn_attn import CuDNNAttentionBackend
from attn.torch.diffusion.backends.sdpa import SDPABackend


@pytest.fixture
def vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device whose kernels read vectors."""
    monkeypatch.setattr(alignment, "VECTOR_DEVICES", ("cuda", "cpu"))


def _is_aligned(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 and not any(n % 16 for n in (x.data_ptr(), *(s * x.element_size() for s in x.stride()[:-1])))


_FLAT = torch.arange(4096.0)

#: A view, and whether it has to be copied.
VIEWS = {
    "dense": (lambda: _FLAT[:960].view(5, 4, 48), False),
    "part of wider rows": (lambda: _FLAT[:1280].view(5, 256)[:, :192].view(5, 4, 48), False),
    "transposed": (lambda: _FLAT[:960].view(4, 5, 48).transpose(0, 1), False),
    "expanded": (lambda: _FLAT[:240].view(5, 1, 48).expand(5, 4, 48), False),
    "an aligned offset": (lambda: _FLAT[16:976].view(5, 4, 48), False),
    "an offset of one element": (lambda: _FLAT[1:961].view(5, 4, 48), True),
    "an offset of 8 bytes": (lambda: _FLAT[2:962].view(5, 4, 48), True),
    "odd rows": (lambda: _FLAT[:975].view(5, 195)[:, :192].view(5, 4, 48), True),
    "odd rows, one of them": (lambda: _FLAT[195:390].view(1, 195)[:, :192].view(1, 4, 48), True),
    "a stride that is not used": (lambda: _FLAT.as_strided((1, 4, 48), (195, 48, 1)), True),
    "rows that are not dense": (lambda: _FLAT[:960].view(5, 48, 4).transpose(1, 2), True),
    "every other element": (lambda: _FLAT[:1920].view(5, 4, 96)[..., ::2], True),
    "no row": (lambda: _FLAT[:0].view(0, 4, 48), False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_copied(name: str, vectors: None) -> None:
    make, copied = VIEWS[name]
    x = make()
    got = aligned(x)
    assert (got is not x) is copied and _is_aligned(got) and torch.equal(got, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_bytes_count_not_elements(dtype: torch.dtype, vectors: None) -> None:
    x = torch.zeros(5, 64 + 16 // dtype.itemsize, dtype=dtype)
    assert aligned(x[:, :64]).data_ptr() == x.data_ptr()
    for odd in (x[:, 1:65], torch.zeros(5, 65, dtype=dtype)[:, :64]):
        assert aligned(odd) is not odd and _is_aligned(aligned(odd))


def test_a_mask_is_copied_for_its_address_only(vectors: None) -> None:
    rows = _FLAT[:35].view(5, 7)
    assert aligned(rows, strides=False) is rows
    assert aligned(rows[:, 1:], strides=False).data_ptr() % 16 == 0
    assert aligned(_FLAT[1], strides=False).data_ptr() % 16 == 0


def test_a_cpu_needs_no_copy() -> None:
    x = _FLAT[1:961].view(5, 4, 48)
    assert aligned(x) is x


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, vectors: None) -> list[int]:
    """Make `F.scaled_dot_product_attention` require aligned arguments; the result counts its calls."""
    calls: list[int] = []
    attend = F.scaled_dot_product_attention

    def strict(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        for name, x in (("query", query), ("key", key), ("value", value)):
            assert _is_aligned(x), f"{name} has address {x.data_ptr()} and strides {x.stride()}"
        assert attn_mask is None or attn_mask.dtype == torch.bool or attn_mask.data_ptr() % 16 == 0
        return attend(query, key, value, attn_mask, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", strict)
    return calls


def _odd(case: Any) -> bool:
    return case.layout == "fused"


def test_paged_calls_are_aligned(guarded: list[int]) -> None:
    cases = [case for case in cases_of(subject_of(TorchSDPABackend), "smoke") if _odd(case)]
    assert {case.dtype for case in cases} == set(TorchSDPABackend.capabilities.dtypes)
    for case in cases:
        check_conformance(TorchSDPABackend, case)
    few = [case.replace(num_heads=8, num_kv_heads=1, head_size=16) for case in cases]
    for case in few:
        check_conformance(TorchSDPABackend, case)
    assert len(guarded) > len(cases)


@pytest.mark.parametrize("backend", [SDPABackend, CuDNNAttentionBackend])
def test_dense_calls_are_aligned(backend: Any, guarded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # a CPU has no cuDNN
    monkeypatch.setattr(cudnn_attn, "sdpa_kernel", lambda kernels: contextlib.nullcontext())
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", _as_cudnn)
    cases = [case for case in dense_cases(backend) if _odd(case)]
    assert cases
    for case in cases:
        check_dense(backend, case)
    assert len(guarded) == 3 * len(cases)  # twice more, so that the launch of a repeated call is reached


def _as_cudnn(*arrays: torch.Tensor, is_causal: bool, scale: float, **_: Any) -> tuple[torch.Tensor]:
    return (F.scaled_dot_product_attention(*arrays, is_causal=is_causal, scale=scale, enable_gqa=True),)


def _projected(width: int = 3 * 4 * 16, rows: int = 9) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, rows, 3 + width)


def _attended(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Self-attention with and without a mask of floats, of views of one array."""
    parts = packed[..., 3:].unflatten(-1, (3, 4, 16)).unbind(-3)
    query, key, value = (x.transpose(1, 2) for x in parts)
    rows = query.shape[2]
    mask = packed.new_zeros(rows, 16 + rows)[:, 1 : 1 + rows]
    return (
        attn.torch.scaled_dot_product_attention(query, key, value),
        attn.torch.scaled_dot_product_attention(query, key, value, mask),
    )


def test_drop_in_calls_are_aligned(guarded: list[int]) -> None:
    for out in _attended(_projected()):
        assert out.isfinite().all()
    assert len(guarded) == 2


def test_gradients_pass_a_copy(vectors: None) -> None:
    packed = _projected().requires_grad_()
    sum(out.square().sum() for out in _attended(packed)).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "VECTOR_DEVICES", ())
        plain = _projected().requires_grad_()
        sum(out.square().sum() for out in _attended(plain)).backward()
    torch.testing.assert_close(packed.grad, plain.grad)


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda *x: f(*x).sum())])
def test_a_transform_has_no_addresses(transform: Callable[..., Any], vectors: None) -> None:
    x = torch.randn(2, 1, 4, 8, 16)
    with sdpa_kernel([SDPBackend.MATH]):
        got = transform(attn.torch.scaled_dot_product_attention)(x, x, x)
    assert got.isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_copies_where_its_trace_did(dynamic: bool, vectors: None) -> None:
    torch.compiler.reset()
    copies: list[int] = []

    def counted(graph: Any, _: Any) -> Any:
        copies.append(sum(node.target is torch.ops.aten.clone.default for node in graph.graph.nodes))
        return graph

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(_attended, fullgraph=True, dynamic=dynamic, backend=aot_autograd(fw_compiler=counted))
    for rows in (9, 12):
        packed = _projected(rows=rows)
        torch.testing.assert_close(compiled(packed), _attended(packed))
    assert copies == [7] * (1 if dynamic else 2)
    torch.compiler.reset()
    copies.clear()
    wide = torch.cat([packed.new_zeros(2, 12, 1), packed], -1)  # 4 + 192 columns
    aligned_compiled = torch.compile(
        lambda x: attn.torch.scaled_dot_product_attention(*x[..., 4:].unflatten(-1, (3, 4, 16)).movedim(-3, 0).transpose(2, 3)),
        fullgraph=True,
        dynamic=dynamic,
        backend=aot_autograd(fw_compiler=counted),
    )
    torch.testing.assert_close(aligned_compiled(wide), _attended(packed)[0])
    assert copies == [0]


def test_an_exported_program_of_any_length(vectors: None) -> None:
    class Model(torch.nn.Module):
        def forward(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return _attended(packed)

    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Model(), (_projected(),), dynamic_shapes=({1: rows},))
    other = _projected(rows=14)
    torch.testing.assert_close(program.module()(other), _attended(other))
