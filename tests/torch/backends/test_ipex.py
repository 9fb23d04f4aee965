"""IPEX on a stand-in: the suite, what each kernel would get wrong and is never asked, and what is refused with its reason."""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attn.capabilities import AttentionType, Device, Feature, Request
from attn.errors import UnsupportedError
from attn.testing import check_conformance
from attn.testing.conformance import runner_for
from attn.testing.draw import draw
from attn.testing.expected import expect
from attn.testing.subject import base_case, subject_of
from attn.testing.suite import cases_of
from attn.torch.backends import ipex as adapter
from attn.torch.backends.ipex import IpexAttentionBackend, IpexAttentionImpl
from tests.levels import some
from tests.testing import covering

XEON = Device("torch", "cpu", "x86_64 CPU", "x86_64")
PLAIN = Request(head_size=128, dtype="bfloat16", block_size=16)
WINDOW = frozenset({Feature.SLIDING_WINDOW})


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    adapter._lacking.cache_clear()


@pytest.fixture
def here(standins: Callable[..., None]) -> None:
    standins("ipex_pkg")


def test_the_suite_on_a_stand_in(here: None) -> None:
    cases = cases_of(subject_of(IpexAttentionBackend), "quick")
    assert sum(not case.check.startswith("refusal") for case in cases) > 60
    for case in some(cases, 20, "IPEX", functools.partial(covering.is_kept, "TRITON_ATTN")):
        check_conformance(IpexAttentionBackend, case)


@pytest.mark.parametrize(
    ("changes", "decodes", "prefills"),
    [
        ({}, [(2, None)], [(12, -1, -1.0)]),
        ({"sliding_window": 4}, [(2, None)], [(12, 3, -1.0)]),
        ({"sliding_window": 1}, [(14, 1)], []),  # every row by itself: the prefill kernel takes 0 for no window
        ({"logits_soft_cap": 2.0}, [], [(14, -1, 2.0)]),  # the decode kernel takes no cap beside a window
        ({"logits_soft_cap": 2.0, "sliding_window": 4}, [], [(14, 3, 2.0)]),
    ],
)
def test_which_rows_take_which_kernel(
    here: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], decodes: list[Any], prefills: list[Any]
) -> None:
    import intel_extension_for_pytorch as ipex

    kernels = ipex.llm.modules.PagedAttention
    seen: tuple[list[Any], list[Any]] = ([], [])
    decode, prefill = kernels.single_query_cached_kv_attention, kernels.flash_attn_varlen_func

    @functools.wraps(decode)
    def spy_on_decode(**given: Any) -> Any:
        longest = given["max_context_len"]
        seen[0].append((len(given["query"]), longest if longest == 1 else None))
        return decode(**given)

    @functools.wraps(prefill)
    def spy_on_prefill(**given: Any) -> Any:
        seen[1].append((len(given["query"]), given["window_size_left"], given["softcap"]))
        return prefill(**given)

    monkeypatch.setattr(kernels, "single_query_cached_kv_attention", spy_on_decode)
    monkeypatch.setattr(kernels, "flash_attn_varlen_func", spy_on_prefill)
    case = base_case(subject_of(IpexAttentionBackend), "routes", (1, 1, 9, 3), (20, 33, 9, 40), **changes)
    check_conformance(IpexAttentionBackend, case)
    assert seen == (decodes, prefills)


def test_decodes_that_share_their_first_page_are_not_taken_for_beams(here: None) -> None:
    case = base_case(
        subject_of(IpexAttentionBackend), "shared", (1,) * 5, (34, 22, 34, 17, 25), shared_prefix=16, kv_sharing=True
    )
    check_conformance(IpexAttentionBackend, case)


def test_a_windows_keys_become_pages_of_their_own() -> None:
    pages = torch.arange(6 * 2 * 16 * 1, dtype=torch.float32).view(6, 2, 16, 1)
    table = torch.tensor([[4, 1, 5], [2, 0, 3]], dtype=torch.int32)
    begin, end = np.array([20, 0]), np.array([41, 3])
    keys, values, own = adapter._copied(pages, -pages, table, begin, end)
    assert keys.shape == (3, 2, 16, 1) and own.tolist() == [[0, 1], [2, 2]] and torch.equal(values, -keys)
    rows = [torch.cat([pages[p] for p in row], 1)[:, low:high] for row, low, high in zip(table, begin, end, strict=True)]
    assert torch.equal(torch.cat([keys[0], keys[1]], 1)[:, :21], rows[0]) and torch.equal(keys[2][:, :3], rows[1])


def _why(request: Request) -> str:
    return "; ".join(IpexAttentionBackend.why_not(request, XEON))


def test_what_it_does_not_serve_is_a_reason() -> None:
    assert _why(PLAIN) == ""
    for asked in (
        replace(PLAIN, features=WINDOW | {Feature.NON_CAUSAL}),
        replace(PLAIN, features=WINDOW, attn_type=AttentionType.ENCODER),
    ):
        assert _why(asked) == "sliding_window without causality not supported"
    capped = replace(PLAIN, features=frozenset({Feature.SOFT_CAP}), attn_type=AttentionType.ENCODER_ONLY)
    assert _why(capped) == "soft_cap with attn_type=encoder_only not supported"
    told = _why(replace(PLAIN, features=frozenset({Feature.ALIBI, Feature.LSE, Feature.SINKS}), block_size=256))
    assert told == "alibi not supported; lse not supported; sinks not supported; block_size=256 (supports 16, 32, 64, 128)"
    xpu = IpexAttentionBackend.why_not(PLAIN, Device("torch", "xpu", "Intel Data Center GPU Max"))
    assert xpu == ["platform=xpu (supports cpu)"]


def test_a_window_without_causality_is_refused_when_it_is_asked_for_in_a_call(here: None) -> None:
    case = base_case(subject_of(IpexAttentionBackend), "", (1, 4), (20, 4), sliding_window=4, causal=False)
    with pytest.raises(UnsupportedError, match="sliding_window without causality not supported"):
        runner_for(IpexAttentionBackend)(draw(case))


def test_another_torch_is_a_reason_and_ends_no_process(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package calls exit() when it is imported beside a torch of another number."""
    monkeypatch.setattr(adapter, "version_of", lambda name: "1.13.0+cpu")
    assert (
        _why(PLAIN) == f"intel-extension-for-pytorch 1.13.0+cpu needs PyTorch of the same version (found {torch.__version__})"
    )
    monkeypatch.setattr(adapter, "version_of", lambda name: torch.__version__)
    assert _why(PLAIN) == "" and "intel_extension_for_pytorch" not in sys.modules


def test_a_version_without_a_kernel_is_a_reason_and_no_crash(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import intel_extension_for_pytorch as ipex

    kernels = ipex.llm.modules.PagedAttention
    monkeypatch.delattr(kernels, "flash_attn_varlen_func")
    monkeypatch.setattr(kernels, "single_query_cached_kv_attention", lambda output, query, head_mapping, window_size=-1: None)
    with pytest.raises(UnsupportedError) as refused:
        IpexAttentionImpl(4, 64, 0.125)
    assert refused.value.reasons == (
        "intel-extension-for-pytorch.modules.PagedAttention.single_query_cached_kv_attention has no softcap",
        "intel-extension-for-pytorch has no modules.PagedAttention.flash_attn_varlen_func",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_encoders_scale_rounds_no_query(here: None, dtype: str) -> None:
    """Its kernel ignores the scale, so that queries carry it: in float32 where their dtype would round the product."""
    plain = base_case(
        subject_of(IpexAttentionBackend),
        "scale",
        (40, 77),
        (40, 77),
        attn_type=AttentionType.ENCODER_ONLY,
        causal=False,
        dtype=dtype,
        head_size=64,
        lse=False,
    )
    call = draw(plain.replace(scale=0.31))
    call = call.but(query=call.query * np.float32(4))  # scores of about 10, where a rounded query shows
    out, want = runner_for(IpexAttentionBackend)(call).output, expect(call).out
    once = torch.from_numpy(want).to(getattr(torch, dtype)).double().numpy()
    assert np.sqrt(np.mean((out - want) ** 2)) < 1.6 * np.sqrt(np.mean((once - want) ** 2))
