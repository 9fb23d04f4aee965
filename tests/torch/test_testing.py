"""The torch driver of the conformance suite detects errors outside the output (a few seconds)."""

from typing import Any

import numpy as np
import pytest
import torch

from attn.testing import Case, bits, draw, run_case
from attn.testing.expected import specified_cache
from attn.torch.backends.cpu_attn import CPUAttentionBackend
from attn.torch.backends.sdpa import TorchSDPABackend, TorchSDPAImpl
from attn.torch.testing import TorchRunner

CASE = Case("mixed", (1, 6, 18), (33, 9, 18), padding=2, lse=True)


def backend_with(forward: Any) -> type[TorchSDPABackend]:
    """TORCH_SDPA whose `_attend` is followed by `forward(output, kv_cache)`."""

    class Backend(TorchSDPABackend):
        pass

    class Impl(TorchSDPAImpl, backend=Backend):
        def _attend(self, call: Any) -> None:
            super()._attend(call)
            forward(call.output, call.kv_cache)

    return Backend


def beyond(output: torch.Tensor, kv_cache: torch.Tensor) -> None:
    torch.as_strided(output, (1,), (1,), output.storage_offset() + output.numel()).fill_(0)


def before(output: torch.Tensor, kv_cache: torch.Tensor) -> None:
    torch.as_strided(output, (1,), (1,), output.storage_offset() - 1).fill_(0)


def padding(output: torch.Tensor, kv_cache: torch.Tensor) -> None:
    output[-1, 0, 0] = 0


def other_slot(output: torch.Tensor, kv_cache: torch.Tensor) -> None:
    kv_cache.view(torch.int32).flatten()[-1] += 1


@pytest.mark.parametrize(
    ("harm", "rule", "words"),
    [
        (beyond, "A", "beside the output"),
        (before, "A", "beside the output"),
        (padding, "A", "padding row"),
        (other_slot, "W", "not in slot_mapping"),
    ],
)
def test_harm_beside_the_answer_is_seen(harm: Any, rule: str, words: str) -> None:
    (violation,) = run_case(backend_with(harm), CASE)
    assert violation.rule == rule and words in str(violation)


def test_a_backend_without_an_output_buffer_makes_its_own() -> None:
    backend = type("Own", (TorchSDPABackend,), {"accept_output_buffer": False})
    assert run_case(backend, CASE.replace(padding=0)) == []


@pytest.mark.parametrize("backend", [TorchSDPABackend, CPUAttentionBackend])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e5m2", "int8"])
def test_the_cache_goes_in_and_out_byte_for_byte(backend: Any, kv_cache_dtype: str) -> None:
    call = draw(CASE.replace(kv_cache_dtype=kv_cache_dtype, num_blocks=16))
    result = TorchRunner(backend)(call)
    assert call.key_cache is not None and result.key_cache is not None and result.value_cache is not None
    for stored, want in zip((result.key_cache, result.value_cache), specified_cache(call), strict=True):
        assert np.array_equal(bits.as_bytes(stored), bits.as_bytes(want))
    assert not call.key_cache.flags.writeable  # what was drawn is not what the backend wrote to
