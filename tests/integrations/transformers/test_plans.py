"""Calls that repeat are decided once: which calls have a plan, and that a plan is not kept past what it depends on."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import attn  # noqa: E402
from attn.integrations import transformers as attn_transformers  # noqa: E402
from attn.integrations.transformers import plans  # noqa: E402
from attn.integrations.transformers.call import Call  # noqa: E402
from attn.integrations.transformers.plans import needed  # noqa: E402
from attn.integrations.transformers.ways import Way, classify  # noqa: E402
from attn.torch.diffusion.backends._sdpa import SDPABase  # noqa: E402


class Layer(torch.nn.Module):
    is_causal = True
    layer_idx = 0


def arrays(rows=1, keys=9, width=16, **options):
    torch.manual_seed(0)
    shapes = ((2, 4, rows, 16), (2, 2, keys, 16), (2, 2, keys, width))
    return [torch.randn(shape, **options) for shape in shapes]


def attended(module, given, mask=None, name="attn", **options):
    from transformers import AttentionInterface

    attn_transformers.register()
    return AttentionInterface()[name](module, *given, mask, **{"scaling": 0.25, **options})[0]


@pytest.fixture
def decisions(monkeypatch):
    """The calls that were decided, one entry each."""
    made, choose = [], plans._planned
    monkeypatch.setattr(plans, "_planned", lambda call, padded: made.append(call) or choose(call, padded))
    return made


def call_of(query=1, keys=9, value=16, **changes):
    fields = {
        "module": Layer(), "query": torch.zeros(1, query, 4, 16), "key": torch.zeros(1, keys, 2, 16),
        "value": torch.zeros(1, keys, 2, value), "causal": False, "scale": 1.0, "window": None, "soft_cap": None,
        "sinks": None, "backend": None,
    }  # fmt: skip
    return Call(**{**fields, **changes})


DENSE, PACKED, FORMULA = Way
NAMED, CAP, WINDOW, SINKS = {"backend": "CPU_ATTN"}, {"soft_cap": 9.0}, {"window": 4}, {"sinks": torch.zeros(4)}


@pytest.mark.parametrize(
    ("changes", "square", "masked", "gaps", "way"),
    [
        ({}, False, False, False, DENSE),
        ({}, False, True, False, DENSE),
        ({"causal": True}, True, False, False, DENSE),
        ({"causal": True}, False, False, False, PACKED),  # rows after cached keys
        ({"causal": True}, True, True, False, PACKED),
        (NAMED, False, False, False, PACKED),
        (CAP, False, False, False, PACKED),
        (WINDOW, True, False, False, PACKED),
        (SINKS, False, False, False, PACKED),
        (SINKS, False, True, True, PACKED),  # keys between gaps are packed
        (WINDOW, True, True, True, FORMULA),  # a window counts the keys in gaps, packed rows do not have them
        ({"value": 32}, False, False, False, FORMULA),
        ({"value": 32, **CAP}, False, False, False, FORMULA),
    ],
)
def test_the_way_of_a_call(changes, square, masked, gaps, way):
    assert classify(call_of(**changes), square, masked, gaps) is way


def test_gradients_take_the_formula_where_no_kernel_has_them():
    query = torch.zeros(1, 1, 4, 16, requires_grad=True)
    assert classify(call_of(), False, False) is DENSE
    for changes in (CAP, WINDOW, SINKS, NAMED):
        assert classify(Call(**{**vars(call_of(**changes)), "query": query}), False, False) is FORMULA


@pytest.mark.parametrize(
    ("rows", "keys", "causal", "window", "found"),
    [
        (1, 9, True, None, (0, 9, False, None)),
        (1, 9, True, 9, (0, 9, False, None)),
        (1, 9, True, 4, (5, 9, False, None)),
        (3, 9, True, 4, (0, 9, True, 4)),
        (3, 9, True, 9, (0, 9, True, None)),
        (3, 9, False, None, (0, 9, False, None)),
        (3, 9, False, 4, (0, 9, False, 4)),
    ],
)
def test_the_keys_that_a_call_needs(rows, keys, causal, window, found):
    assert needed(rows, keys, causal, window) == found


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"sliding_window": 4}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}]
)
@pytest.mark.parametrize("name", ["attn", "attn:TORCH_SDPA"])
def test_tokens_after_the_first_are_not_decided(name, options, decisions):
    """A backend may need numbers of keys that are multiples of some number: such lengths are decided once more."""
    module = Layer()
    for keys in range(9, 41):
        given = arrays(1, keys)
        mask = attn_transformers.mask(
            2, 1, keys, keys - 1, mask_function=None if "sliding_window" not in options else _windowed(4)
        )
        want = attn.attention(
            *(x.transpose(1, 2) for x in given), scale=0.25, causal=True, layout="BSHD", sinks=options.get("s_aux"),
            window=(3, 0) if "sliding_window" in options else None, logits_soft_cap=options.get("softcap"),
        )  # fmt: skip
        torch.testing.assert_close(attended(module, given, mask, name, **options), want, rtol=1e-4, atol=1e-5)
    assert (first := len(decisions)) < 8
    attended(Layer(), given, mask, name, **options)
    assert len(decisions) == first + 1


def _windowed(size):
    from transformers.masking_utils import sliding_window_causal_mask_function

    return sliding_window_causal_mask_function(size)


@torch.no_grad()
@pytest.mark.parametrize(("name", "dense"), [("attn:TORCH_SDPA", True), ("attn:CPU_ATTN", False)])
def test_plain_calls_by_name_are_the_dense_backends_of_that_name(name, dense, monkeypatch):
    launched = []
    attend = SDPABase._attend_heads_first
    monkeypatch.setattr(SDPABase, "_attend_heads_first", lambda *given: launched.append(1) or attend(*given))
    for rows, options, plain in ((1, {}, True), (9, {}, True), (1, {"softcap": 5.0}, False), (9, {"is_causal": False}, True)):
        launched.clear()
        given = arrays(rows)
        want = attn.attention(
            *(x.transpose(1, 2) for x in given), scale=0.25, causal=options.get("is_causal", True), layout="BSHD",
            logits_soft_cap=options.get("softcap"),
        )  # fmt: skip
        torch.testing.assert_close(attended(Layer(), given, name=name, **options), want, rtol=1e-4, atol=1e-5)
        assert bool(launched) == (dense and plain)


@torch.no_grad()
def test_another_fact_is_decided_again(decisions):
    module = Layer()
    changes = (
        lambda: attended(module, arrays()),
        lambda: attended(module, arrays(2, 2)),
        lambda: attended(module, arrays(2, 2), is_causal=False),
        lambda: attended(module, arrays(dtype=torch.bfloat16)),
        lambda: attended(module, arrays(width=8)),
        lambda: attended(module, arrays(), softcap=5.0),
        lambda: attended(module, arrays(), name="attn:CPU_ATTN"),
    )
    for number, (_, change) in enumerate(itertools.product(range(2), changes)):
        change()
        assert len(decisions) == min(number + 1, len(changes))


@torch.no_grad()
def test_a_choice_by_the_environment_counts_at_once(decisions, monkeypatch):
    module, given = Layer(), arrays()
    attended(module, given)
    with attn.backend_per_kind_context_manager({"full": "CPU_ATTN"}):
        attended(module, given)
        assert decisions[-1].backend == "CPU_ATTN"
    monkeypatch.setenv("ATTN_BACKEND_PER_KIND", "full=TORCH_SDPA")
    attended(module, given)
    assert [call.backend for call in decisions] == [None, "CPU_ATTN", "TORCH_SDPA"]


@torch.no_grad()
def test_sinks_that_change_in_place_or_are_replaced_are_used(decisions):
    module, given, sinks = Layer(), arrays(), torch.zeros(4, dtype=torch.bfloat16)

    def check(sinks):
        want = attn.attention(*(x.transpose(1, 2) for x in given), scale=0.25, layout="BSHD", sinks=sinks)
        torch.testing.assert_close(attended(module, given, s_aux=sinks), want, rtol=1e-4, atol=1e-5)

    check(sinks)
    check(sinks.fill_(3.0))
    check(torch.full((4,), -2.0))
    with torch.inference_mode():
        check(made := torch.full((4,), 1.0))
        check(made.fill_(5.0))
    assert len(decisions) == 1


def test_calls_that_need_more_than_a_launch_have_no_plan(decisions):
    module, given = Layer(), arrays()
    bias = torch.zeros(1, 4, 1, 9)
    attended(module, given, output_attentions=True)
    attended(module, given, position_bias=bias)
    attended(module, given, dropout=0.5)
    attended(module, [x.requires_grad_() for x in given])
    attended(module, arrays(), torch.ones(2, 9, dtype=torch.bool))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attended(module, arrays()).dtype == torch.bfloat16
    with pytest.raises(attn.UnsupportedError, match="head_mask"):
        attended(module, arrays(), head_mask=torch.ones(4))
    with pytest.raises(attn.UnsupportedError, match="2 causal rows over 9 keys without a mask"):
        attended(module, arrays(2))
    assert not decisions
    attended(module, arrays(), output_attentions=False, head_mask=None)
    assert len(decisions) == 1


def test_a_window_without_causality_is_refused_for_one_row_too():
    with pytest.raises(attn.UnsupportedError, match="a non-causal window without a mask"):
        attended(Layer(), arrays(), is_causal=False, sliding_window=4)


@torch.no_grad()
def test_a_device_without_autocast_is_none_that_has_it_on():
    given = arrays(device="meta")
    assert not torch.amp.is_autocast_available("meta")
    plans.repeated(
        None, Layer(), *given, None, scaling=None, is_causal=None, window=None, soft_cap=None, sinks=None, kwargs={}
    )  # fmt: skip


def test_sinks_alone_may_want_gradients():
    """As when only they are trained, after steps without gradients."""
    module, given, sinks = Layer(), arrays(), torch.zeros(4, requires_grad=True)
    with torch.no_grad():
        attended(module, given, s_aux=sinks)
    attended(module, given, s_aux=sinks).sum().backward()
    assert sinks.grad is not None and sinks.grad.abs().max() > 0


def test_wrong_shapes_are_refused_before_and_after_a_plan():
    module = Layer()
    attended(module, arrays())
    query, key, value = arrays()
    for wrong in ((query, key[..., :8], value), (query, key, value[:, :, :3]), (query, key[:1], value[:1])):
        with pytest.raises(attn.AttnError):
            attended(module, wrong)


def test_a_plan_is_of_its_layer_and_bounded(monkeypatch):
    monkeypatch.setattr(plans, "_MOST", 3)
    module = Layer()
    for scale in range(1, 9):
        attended(module, arrays(), scaling=float(scale))
        assert len(plans._plans[module]) <= 3
    held = len(plans._plans)
    del module
    assert len(plans._plans) == held - 1


class RunsImpl:
    """As an implementation of the Triton family: each request has a run of the keys."""

    attends_keys = attends_valid_keys = True

    def __init__(self, call):
        self.call, self.sinks, self.runs = call, call.sinks, []

    def row_launcher(self, device, dtype):
        return None

    def attend_keys(self, query, key, value, causal, valid):
        self.runs.append(torch.stack((valid.first, valid.number)).T.tolist())
        out = torch.zeros_like(query)
        for b, (first, number) in enumerate(self.runs[-1]):
            one, own = slice(b, b + 1), slice(first, first + number)
            rows = own if query.shape[1] == key.shape[1] else slice(None)
            out[one, rows] = attn.attention(
                query[one, rows], key[one, own], value[one, own], scale=self.call.scale, causal=causal, window=self.call.window,
                logits_soft_cap=self.call.soft_cap, sinks=self.sinks, layout="BSHD",
            )  # fmt: skip
        return out


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"sliding_window": 4}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}]
)
@pytest.mark.parametrize("padding", [([0, 3], [9, 9]), ([0, 9], [7, 9]), ([2, 0], [8, 5])])
@pytest.mark.parametrize("rows", [1, 9])
def test_calls_with_padding_are_launched_where_a_backend_attends_runs(options, padding, rows, monkeypatch):
    given = arrays(rows)
    there = torch.zeros(2, 9, dtype=torch.bool)
    for entry, first, end in zip(there, *padding, strict=True):
        entry[first:end] = True
    window = options.get("sliding_window")
    mask_of = lambda: attn_transformers.mask(  # noqa: E731
        2, rows, 9, 9 - rows, mask_function=None if window is None else _windowed(window), attention_mask=there
    )
    want = attended(Layer(), given, mask_of(), **options)
    made = []
    monkeypatch.setattr(
        plans, "layer_of", lambda call, kind: made.append(RunsImpl(call)) or type("Made", (), {"impl": made[-1]})
    )
    module = Layer()
    for _ in range(2):
        torch.testing.assert_close(attended(module, given, mask_of(), **options), want, rtol=1e-4, atol=1e-5)
    if rows == 1 and window and padding != ([0, 3], [9, 9]):
        assert not made  # a window counts from the row's own key, which is not there
        return
    runs = [[first if end > first else 9, end - first] for first, end in zip(*padding, strict=True)]
    assert len(made) == 1 and made[0].runs == [runs, runs]
    there[0] = torch.tensor([1, 0, 0, 1, 1, 1, 1, 1, 1])  # a gap
    attended(module, given, mask_of(), **options)
    assert len(made[0].runs) == 2
