"""Rule D for 16-bit latent attention: as wide as rounding requires and no wider, so that planted bugs are detected (10 s)."""

from typing import Any

import numpy as np
import pytest

from attn.testing import Case, draw, expect, run_case
from attn.testing.bits import decode, rounded
from attn.testing.expected import specified_cache
from attn.testing.rules import Score
from attn.testing.subject import base_case, subject_of
from attn.torch.backends.mla.torch_mla import TorchMLABackend

HALVES = ("bfloat16", "float16")
LENS = (1, 6, 18, 1, 21), (33, 9, 18, 20, 70)


def case_of(dtype: str, **changes: Any) -> Case:
    return base_case(subject_of(TorchMLABackend), dtype, *LENS, dtype=dtype, **changes)


def planted(**changes: Any) -> Any:
    """TORCH_MLA with an implementation that differs in these attributes or methods."""

    class Backend(TorchMLABackend):
        pass

    class Impl(TorchMLABackend.get_impl_cls(), backend=Backend):  # type: ignore[misc]
        pass

    for name, value in changes.items():
        setattr(Impl, name, value)
    return Backend


def _lse(change: Any) -> Any:
    def forward(self: Any, *arguments: Any) -> Any:
        out, lse = TorchMLABackend.get_impl_cls().forward(self, *arguments)
        return out, change(lse)

    return planted(forward=forward)


def _scaled(factor: float) -> Any:
    def __init__(self: Any, *arguments: Any, **more: Any) -> None:
        TorchMLABackend.get_impl_cls().__init__(self, *arguments, **{**more, "scale": more["scale"] * factor})

    return planted(__init__=__init__)


def _without_k_scale() -> Any:
    def _decode(self: Any, call: Any) -> Any:
        layer = type(call.layer)(**{**vars(call.layer), "_k_scale": call.layer._k_scale * 0 + 1})
        return TorchMLABackend.get_impl_cls()._decode(self, call._replace(layer=layer))

    return planted(_decode=_decode)


BUGS = {
    "log2": (lambda: _lse(lambda lse: lse / np.log(2)), {}),
    "no scale": (lambda: _scaled(192**0.5), {}),
    "the absorbed head's scale": (lambda: _scaled((192 / 576) ** 0.5), {}),
    "a scale of 1 % more": (lambda: _scaled(1.01), {"inputs": "needle"}),
    "no k_scale": (_without_k_scale, {"kv_cache_dtype": "fp8", "k_scale": 0.037, "v_scale": 0.037}),
    "an lse that is off by 0.01": (lambda: _lse(lambda lse: lse + 0.01), {}),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_planted_bug_is_seen_in_16_bits(dtype: str, bug: str) -> None:
    broken, changes = BUGS[bug]
    case = case_of(dtype, **changes)
    assert run_case(TorchMLABackend, case) == []
    assert "D" in {violation.rule for violation in run_case(broken(), case)}


@pytest.mark.parametrize("inputs", ["randn", "needle"])
@pytest.mark.parametrize("stored", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_right_backend_stays_well_within(dtype: str, stored: str, inputs: str) -> None:
    scale = 0.037 if stored == "fp8" else 1.0
    case, score = case_of(dtype, kv_cache_dtype=stored, k_scale=scale, v_scale=scale, inputs=inputs), Score()
    assert run_case(TorchMLABackend, case, score=score) == []
    assert 0.05 < score.lse < 0.8


@pytest.mark.parametrize("dtype", HALVES)
def test_the_noise_is_that_of_rounding_the_absorbed_query(dtype: str) -> None:
    """Measured: queries rounded as a program rounds them, everything else exact."""
    call = draw(case_of(dtype))
    rank, nope, _, _ = call.case.mla
    want = expect(call)
    absorbed = np.einsum("nhd,lhd->nhl", call.query[..., :nope].astype(np.float64), call.weights[..., :nope].astype(np.float64))
    rows, j = call.rows(4), np.arange(70)
    stored = specified_cache(call)[0][call.batch.block_table[4, j // 16], j % 16, 0]
    latent = decode(stored, call.case.element).astype(np.float64)
    rope = np.einsum("nhr,mr->hnm", call.query[rows, :, nope:], latent[:, rank:])
    scores = [
        call.scale * (np.einsum("nhl,ml->hnm", q, latent[:, :rank]) + rope)
        for q in (absorbed[rows], rounded(absorbed[rows], dtype).astype(np.float64))
    ]
    seen = j <= np.arange(21)[:, None] + 70 - 21
    lses = [np.log(np.where(seen, np.exp(s), 0).sum(-1)) for s in scores]
    np.testing.assert_allclose(lses[0], want.lse[:, rows], atol=1e-9)
    error = np.abs(lses[1] - lses[0])
    assert error.max() < want.noise[:, rows].max() < 12 * error.max()  # never exceeded, and of the error's own size
    assert (error < want.noise[:, rows]).all()
    roundoff = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    products = np.einsum("nhl,ml->hnm", np.abs(absorbed[rows]), np.abs(latent[:, :rank]))
    certain = call.scale * roundoff * np.where(seen, products, 0).max(-1)
    assert np.median(certain / want.noise[:, rows]) > 5  # what would need no independence


def test_there_is_none_where_nothing_is_rounded() -> None:
    assert expect(draw(case_of("float32"))).noise is None
    assert expect(draw(Case("plain", (3,), (9,), dtype="bfloat16", lse=True))).noise is None
