"""The kernel with 8-bit scores against the model of its arithmetic, in Triton's interpreter or on the GPU at hand."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from attn import reference
from attn.kernels import launch
from attn.torch.interpreter import correct_bfloat16
from attn.torch.kernels import direct
from attn.torch.kernels.int8_attention import DenseKeys, int8_attention
from tests.testing.approximate import inputs, int8_scores, relative

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.triton_kernels,
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning", "ignore::DeprecationWarning"
    ),  # the interpreter computes what is selected away
]


@pytest.fixture(autouse=True)
def products_of_bfloat16() -> None:
    if direct.arch() == "interpreter":
        correct_bfloat16()


def run(q, k, v, *, smooth=True, causal=False, lens=None, lse=False):
    """[S, H, D], [M, K, D] in NumPy, one batch entry: (output, lse or None)."""
    query, key, value = [torch.from_numpy(np.asarray(x, np.float32))[None].to(DEVICE, torch.bfloat16) for x in (q, k, v)]
    length = k.shape[0] if lens is None else lens
    out = torch.full_like(query, torch.nan)
    logs = torch.full((1, q.shape[1], q.shape[0]), torch.nan, device=DEVICE) if lse else None
    mean = key[:, :length].float().mean(1) if smooth else None
    counts = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    int8_attention(out, logs, query, DenseKeys(key, value, counts, mean), q.shape[2] ** -0.5, causal)
    return out[0].double().cpu().numpy(), None if logs is None else logs[0].double().cpu().numpy()


@pytest.mark.parametrize(
    ("kind", "smooth"), [("normal", True), ("key channels", True), ("key channels", False), ("sharp", True)]
)
def test_the_kernel_rounds_as_its_model_does(kind, smooth):
    q, k, v = inputs(kind, 128, 64)
    got, _ = run(q[:, None], k[:, None], v[:, None], smooth=smooth)
    tile = launch.int8_launch(direct.arch(), 64).block_n
    want = int8_scores(1, tile, "bfloat16", smooth)(q, k, v)
    exact = reference.attention(q[:, None], k[:, None], v[:, None])[0]
    assert relative(got[:, 0], want) < 4e-3  # the output's own rounding; means are rounded otherwise
    assert relative(got, exact) == pytest.approx(relative(want[:, None], exact), rel=0.15)


def test_what_lies_behind_the_last_key_reaches_nothing_and_the_mean_comes_back_into_the_log():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((20, 4, 64)), rng.standard_normal((70, 2, 64)) + 3, rng.standard_normal((70, 2, 64))
    q, k, v = (np.asarray(torch.from_numpy(x).bfloat16().double()) for x in (q, k, v))
    want, logs = reference.attention(q, k[:41], v[:41])
    k[41:] = v[41:] = np.nan
    got, found = run(q, k, v, lens=41, lse=True)
    assert relative(got, want) < 0.02 and np.abs(found - logs).max() < 0.05
    rough, unshifted = run(q, k, v, lens=41, lse=True, smooth=False)
    assert relative(rough, want) > relative(got, want) and np.abs(unshifted - logs).max() < 0.2


def test_rows_without_keys_are_zero_and_keys_of_zeros_are_no_nan():
    ones = np.ones((6, 2, 64))
    got, logs = run(ones, ones, ones, lens=0, lse=True)
    assert (got == 0).all() and np.isneginf(logs).all()
    got, logs = run(ones, 0 * ones, ones, lse=True)  # scores 0: the mean of the values, log 6
    assert np.allclose(got, 1) and np.allclose(logs, np.log(6))
    got, logs = run(ones, ones[:2], ones[:2], causal=True, lse=True)  # four rows before the first key
    assert (got[:4] == 0).all() and np.isneginf(logs[:, :4]).all() and np.allclose(logs[:, 4:], 8 + np.log([1, 2]))


@pytest.mark.parametrize("wild", [np.nan, np.inf])
def test_a_number_that_is_none_is_seen(wild):
    q, k, v = np.random.default_rng(1).standard_normal((3, 40, 2, 64))
    q[3, 1, 5] = wild
    got, _ = run(q, k, v)
    bad = ~np.isfinite(got).all(-1)
    assert bad[3, 1] and bad.sum() == 1
    q[3, 1, 5], k[7, 0, 9] = 0, wild
    got, _ = run(q, k, v)
    bad = ~np.isfinite(got).all(-1)
    assert bad[:, 0].all() and not bad[:, 1].any()
