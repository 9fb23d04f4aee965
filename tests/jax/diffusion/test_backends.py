"""The diffusion backends under jax: the dense suite on the device at hand."""

import pytest

from attn.jax.diffusion.backends.xla_attn import XLAAttentionBackend
from attn.testing.dense import DenseCase, check_dense, dense_cases


@pytest.mark.parametrize("case", dense_cases(XLAAttentionBackend), ids=str)
def test_xla_attn_conforms(case: DenseCase) -> None:
    check_dense(XLAAttentionBackend, case)
