"""The merge kernel joins states as the formula in torch does, empty and NaN states included. About 3 s on one core."""

import pytest
import torch
from torch import library

from attn.torch.merge import merge_attn_states

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [pytest.mark.triton_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]

T, H, D = 6, 3, 40


def states(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random states, rows of T among which one is empty in one state, one in all, and one far above the others."""
    torch.manual_seed(count)
    outputs, lses = torch.randn(count, T, H, D), 20 * torch.randn(count, H, T)
    lses[:, :, 1] = -torch.inf
    outputs[:, 1] = torch.nan
    if count:
        lses[0, :, 2], outputs[0, 2] = -torch.inf, torch.inf
        lses[0, 0, 3], outputs[0, 3, 0] = torch.inf, torch.nan
        lses[-1, 1, 4], outputs[-1, 4, 1] = torch.nan, torch.nan
        lses[-1, :, 5] = 3e4
    return outputs.to(dtype), lses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("nan_is_empty", [True, False])
def test_as_the_formula(count: int, dtype: torch.dtype, nan_is_empty: bool) -> None:
    from attn.torch.kernels.merge_states import merge_states, merge_two_states

    outputs, lses = states(count, dtype)
    want = merge_attn_states(list(outputs), list(lses), nan_is_empty=nan_is_empty)
    found = [merge_states(outputs.to(DEVICE), lses.to(DEVICE), nan_is_empty)]
    if count == 2:
        apart = [x.to(DEVICE) for x in (outputs[0], lses[0], outputs[1], lses[1])]
        found.append(merge_two_states(*apart, nan_is_empty))
    for out, lse in found:
        torch.testing.assert_close(out.cpu(), want[0], equal_nan=True, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-6)
        torch.testing.assert_close(lse.cpu(), want[1], equal_nan=True)
        assert bool((out[1] == 0).all()) and bool((lse[:, 1] == -torch.inf).all())


def test_no_state_and_strided_ones() -> None:
    from attn.torch.kernels.merge_states import merge_states

    out, lse = merge_states(torch.empty(0, 4, 2, 16, device=DEVICE), torch.empty(0, 2, 4, device=DEVICE))
    assert not out.any() and bool((lse == -torch.inf).all())
    outputs, lses = torch.randn(2, 4, 3, 32, device=DEVICE), torch.randn(2, 3, 4, device=DEVICE)
    wide = torch.zeros(2, 4, 5, 64, device=DEVICE)
    wide[:, :, 1:4, :32] = outputs
    for got, want in zip(merge_states(wide[:, :, 1:4, :32], lses), merge_states(outputs, lses), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("heads", [3, 40])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.float16)])
def test_in_place(heads: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Into some of the rows of a wider state, of the same or a wider dtype; the other rows keep what they hold."""
    from attn.torch.kernels.merge_states import merge_into

    (output, other), lses = states(2, torch.float32)[0].repeat(1, 1, -(-heads // H), 1)[:, :, :heads], states(2, dtypes[0])[1]
    lse, other_lse = lses.repeat(1, -(-heads // H), 1)[:, :heads].unbind(0)
    output, other = output.to(dtypes[0]), other.to(dtypes[1])
    want = merge_attn_states([output, other.to(dtypes[0])], [lse, other_lse], nan_is_empty=False)
    whole, logs = torch.full((T + 5, heads, D), 7.0, dtype=dtypes[0]), torch.full((heads, T + 5), 7.0)
    whole[2 : T + 2], logs[:, 2 : T + 2] = output, lse
    whole, logs = whole.to(DEVICE), logs.to(DEVICE)
    merge_into(whole[2 : T + 2], logs[:, 2 : T + 2], other.to(DEVICE), other_lse.to(DEVICE))
    rounding = 1e-5 if dtypes[0] == torch.float32 else 1e-3
    torch.testing.assert_close(whole[2 : T + 2].cpu(), want[0], equal_nan=True, rtol=rounding, atol=1e-6)
    torch.testing.assert_close(logs[:, 2 : T + 2].cpu(), want[1], equal_nan=True)
    for rows in (slice(2), slice(T + 2, None)):
        assert bool((whole[rows] == 7).all()) and bool((logs[:, rows] == 7).all())


def test_registered_as_an_operator() -> None:
    from attn.torch.kernels.merge_states import merge_states, merge_two_states

    outputs, lses = (x.to(DEVICE) for x in states(2, torch.float32))
    checks = ("test_schema", "test_faketensor")
    library.opcheck(merge_states, (outputs, lses), test_utils=checks)
    apart = outputs[0], lses[0], outputs[1], lses[1]
    library.opcheck(merge_two_states, apart, test_utils=checks)
    library.opcheck(torch.ops.attn.triton_merge_into.default, apart, test_utils=checks)
