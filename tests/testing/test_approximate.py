"""Declared errors of approximate dense backends against the models of their arithmetic."""

import numpy as np
import pytest

from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from tests.testing.approximate import KINDS, MODELS, e2m1, inputs, int8, int8_scores, measured, nvfp4

pytest.importorskip("torch")


@pytest.mark.parametrize("name", MODELS)
def test_a_backend_declares_the_worst_that_its_model_finds_and_little_more(name):
    found = {(kind, size): error for size in (64, 128) for kind, error in measured(MODELS[name], 256, size).items()}
    declared = DiffusionAttentionBackendEnum[name].get_class().error
    assert max(found.values()) <= declared <= 1.6 * max(found.values()), found


def test_every_approximate_backend_has_a_model():
    torch_names = [n for n in DiffusionAttentionBackendEnum.names() if n != "CUSTOM"]
    classes = {name: DiffusionAttentionBackendEnum[name].candidate().backend for name in torch_names}
    assert {name for name, cls in classes.items() if cls is not None and cls.error} == set(MODELS)


def test_smoothing_keys_takes_their_channels_offsets_out_and_nothing_else():
    plain, smooth = (measured(int8_scores(1, 128, "bfloat16", flag), 256) for flag in (False, True))
    assert plain["key channels"] > 2.5 * smooth["key channels"]
    assert smooth["key channels"] == pytest.approx(smooth["normal"], rel=0.05)
    assert plain["normal"] == pytest.approx(smooth["normal"], rel=0.1)


def test_four_bit_floats_and_their_scales():
    assert e2m1(np.array([0.2, 0.25, 0.3, 0.75, 2.5, 3.5, 4.9, 5.1, 9, -2.6])).tolist() == [0, 0, 0.5, 1, 2, 4, 4, 6, 6, -3]
    x = np.array([[6.0, 3, 1.5, 0.5] * 4, [0.0] * 16, [612.0] + [1.0] * 15])
    assert (nvfp4(x)[:2] == x[:2]).all()
    assert nvfp4(x)[2].tolist() == [pytest.approx(6 * 104)] + [0] * 15  # 102 is nearest to e4m3's 104


def test_eight_bits_hold_every_step_and_zeros():
    steps = np.arange(-127, 128.0)[:, None] * 0.25
    assert np.allclose(int8(steps, 255), steps) and not int8(np.zeros((4, 2)), 2).any()


def test_kinds_of_input_differ():
    drawn = [inputs(kind, 128, 64) for kind in KINDS]
    assert len({float(q.sum() + k.sum()) for q, k, _ in drawn}) == len(KINDS)
    with pytest.raises(ValueError, match="kind='odd' is unknown; known: normal"):
        inputs("odd", 128, 64)
