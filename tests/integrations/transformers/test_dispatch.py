"""The route of each call; calls that repeat are decided once, and a launch is not kept past what it depends on."""

import itertools
import sys
import weakref
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import attn  # noqa: E402
from attn.errors import UnsupportedError  # noqa: E402
from attn.integrations import transformers as attn_transformers  # noqa: E402
from attn.integrations.transformers import dispatch, masks  # noqa: E402
from attn.integrations.transformers.call import CAUSAL, EVERYTHING, ModuleCall, Requested, visible  # noqa: E402
from attn.integrations.transformers.dispatch import Route, classify  # noqa: E402
from attn.integrations.transformers.masks import Described, read  # noqa: E402
from attn.torch.diffusion.backends._sdpa import SDPABase  # noqa: E402
from attn.visibility import BatchMask, Visibility  # noqa: E402


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
    made, choose = [], dispatch._decided
    monkeypatch.setattr(dispatch, "_decided", lambda call: made.append(call) or choose(call))
    return made


def call_of(rows=1, keys=9, width=16, causal=False, window=None, chunk=None, spans=None, padded=False, **changes):
    seen = Visibility(visible(causal, window).layer._replace(chunk_size=chunk), BatchMask(spans=spans))
    valid = Described(seen, torch.ones(1, keys, dtype=torch.bool), rows) if padded else None
    arrays = torch.zeros(1, 4, rows, 16), torch.zeros(1, 2, keys, 16), torch.zeros(1, 2, keys, width)
    given = {"mask": None, "seen": seen, "scale": 1.0, "valid": valid, **changes}
    return ModuleCall(**{"module": Layer(), **dict(zip(("query", "key", "value"), arrays, strict=True)), **given})


DENSE, PACKED, FORMULA, SDPA, OPERATOR = Route
NAMED, CAP, WINDOW, SINKS = (
    {"requested": Requested("CPU_ATTN")},
    {"soft_cap": 9.0},
    {"causal": True, "window": 4},
    {"sinks": torch.zeros(4)},
)
DRAWN, GRAD = {"mask": torch.ones(1, 1, 1, 9, dtype=torch.bool)}, {"query": torch.zeros(1, 4, 1, 16, requires_grad=True)}
CHUNK, SPANS = {"causal": True, "chunk": 4}, {"causal": True, "spans": object()}
SQUARE, PADDED, WIDE = {"rows": 9}, {"padded": True}, {"width": 32}
BIAS, DROPOUT, GRAPH, GAPS = (
    {"bias": torch.zeros(1, 4, 1, 9)},
    {"dropout": 0.5},
    {"graph": True},
    {"gaps": True, "padded": True},
)


@pytest.mark.parametrize(
    ("changes", "route"),
    [
        ([], DENSE),
        ([PADDED], DENSE),
        ([DRAWN], DENSE),
        ([GRAD], DENSE),
        ([GRAPH], DENSE),
        ([SQUARE, {"causal": True}], DENSE),
        ([{"causal": True}], PACKED),  # rows after cached keys
        ([SQUARE, {"causal": True}, PADDED], PACKED),
        ([NAMED], PACKED),
        ([CAP], PACKED),
        ([SINKS], PACKED),
        ([SINKS, GAPS], PACKED),  # keys between gaps are packed
        ([SQUARE, WINDOW], PACKED),
        ([SQUARE, WINDOW, PADDED], PACKED),
        ([SQUARE, WINDOW, GAPS], FORMULA),  # a window counts the keys in gaps, packed rows do not have them
        ([SQUARE, CHUNK], PACKED),
        ([SQUARE, SPANS, PADDED], PACKED),
        ([SQUARE, SPANS, CAP], PACKED),
        ([WIDE], FORMULA),
        ([WIDE, CAP], FORMULA),
        ([WIDE, DRAWN], FORMULA),
        ([DRAWN, CAP], FORMULA),
        ([DRAWN, SINKS], FORMULA),
        ([DRAWN, NAMED], FORMULA),  # refused there
        ([GRAD, CAP], FORMULA),
        ([GRAD, SINKS], FORMULA),
        ([GRAD, NAMED], FORMULA),  # refused there
        ([GRAD, WINDOW], FORMULA),
        ([GRAPH, CAP], OPERATOR),
        ([GRAPH, SINKS], OPERATOR),
        ([GRAPH, NAMED], OPERATOR),
        ([GRAPH, WINDOW], OPERATOR),
        ([BIAS], SDPA),
        ([BIAS, GRAPH], SDPA),
        ([DROPOUT], SDPA),
        ([DROPOUT, CAP], SDPA),  # refused there
    ],
)
def test_the_route_of_a_call(changes, route):
    changes = {name: value for change in changes for name, value in change.items()}
    graph, gaps = (changes.pop(name, False) for name in ("graph", "gaps"))
    assert classify(call_of(**changes), graph, gaps) is route


@pytest.mark.parametrize(
    ("rows", "causal", "window", "mask", "found"),
    [
        (1, True, None, None, (0, EVERYTHING)),
        (1, True, 9, None, (0, EVERYTHING)),
        (1, True, 4, None, (5, EVERYTHING)),
        (9, True, 4, None, (0, visible(True, 4))),
        (9, True, 9, None, (0, CAUSAL)),
        (3, False, None, None, (0, EVERYTHING)),
        (3, False, 9, None, (0, EVERYTHING)),
        (1, True, 4, [0, 0, 0, 0, 0, 0, 1, 1, 1], (5, EVERYTHING)),
        (3, True, 4, [0, 0, 0, 0, 0, 0, 1, 1, 1], (0, visible(True, 4))),
    ],
)
def test_what_is_left_of_causality_and_a_window(rows, causal, window, mask, found):
    """A single row sees its last keys, and no later ones."""
    mask = None if mask is None else torch.tensor([mask])
    key = torch.arange(9.0)[None, None, :, None].expand(1, 2, 9, 16)
    call = call_of(rows, causal=causal, window=window, key=key, value=key, mask=mask)
    read(call)
    assert (int(call.key[0, 0, 0, 0]), call.seen) == found
    assert call.mask is None and call.key.shape[2] == call.value.shape[2] == 9 - found[0]
    if mask is not None:
        assert torch.equal(call.valid.present, mask[:, found[0] :].bool())


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
            *(x.transpose(1, 2) for x in given),
            scale=0.25,
            causal=True,
            layout="BSHD",
            sinks=options.get("s_aux"),
            window=(3, 0) if "sliding_window" in options else None,
            logits_soft_cap=options.get("softcap"),
        )
        torch.testing.assert_close(attended(module, given, mask, name, **options), want, rtol=1e-4, atol=1e-5)
    assert (first := len(decisions)) < 8
    attended(Layer(), given, mask, name, **options)
    assert len(decisions) == first, "another layer of the step"
    if "s_aux" in options:
        attended(Layer(), given, mask, name, s_aux=options["s_aux"].clone())
        assert len(decisions) == first + 1, "each with sinks has its own launch"


class Bound:
    """A decoder whose calls are counted, and its calls that were prepared."""

    def __init__(self):
        self.calls, self.prepared = [], []

    def __call__(self, query, key, value, sinks=None, runs=None):
        self.calls.append(key.shape[2])
        return attn.attention(*(x.transpose(1, 2) for x in (query, key, value)), scale=0.25, sinks=sinks, layout="BSHD")

    def bound(self, query, key, value, sinks=None):
        facts = lambda sinks, *arrays: [sinks is None or sinks.dtype, *((x.shape, x.stride()) for x in arrays)]  # noqa: E731
        like = facts(sinks, query, key, value)

        def again(query, key, value, sinks=None, runs=None):
            assert like == facts(sinks, query, key, value)
            self.prepared.append(key.shape[2])
            return self(query, key, value, sinks)

        return again


@torch.no_grad()
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_layers_of_a_step_repeat_a_prepared_call(dtype, monkeypatch):
    """Each step prepares one for all of its layers, from the second on; strides count, and the dtype of sinks, of which each
    layer has its own."""
    decoder = Bound()
    monkeypatch.setattr(dispatch, "_decided", lambda call: dispatch.DenseLaunch(decoder, decoder))
    layers = [(Layer(), {} if dtype is None else {"s_aux": torch.randn(4).to(dtype)}) for _ in range(3)]
    if dtype is not None:
        layers.append((Layer(), {"s_aux": torch.randn(4).half()}))
    for keys in (11, 13, 17):
        for layer, options in layers:
            given = arrays(1, keys)
            sinks = None if dtype is None else options["s_aux"].float()
            want = attn.attention(*(x.transpose(1, 2) for x in given), scale=0.25, sinks=sinks, layout="BSHD")
            torch.testing.assert_close(attended(layer, given, None, **options), want)
    each = len(layers)
    assert decoder.calls == [11] * each + [13] * each + [17] * each
    assert decoder.prepared == [11] * 2 + [13] * each + [17] * each
    query, key, value = arrays(1, 17)
    attended(layers[0][0], (query, key.transpose(1, 2).contiguous().transpose(1, 2), value), None, **layers[0][1])


@torch.no_grad()
def test_a_launch_that_prepares_nothing_computes_every_layer(monkeypatch):
    """As that of Hopper's prompts does where no launch of their kind was compiled yet: a second length in one process."""

    def plain(query, key, value):
        return attn.attention(*(x.transpose(1, 2) for x in (query, key, value)), scale=0.25, layout="BSHD")

    plain.bound = lambda query, key, value: plain
    monkeypatch.setattr(dispatch, "_dense", lambda call, route: plain)
    layers = [Layer() for _ in range(3)]
    for rows in (9, 10):
        for layer in layers:
            given = arrays(rows, rows)
            torch.testing.assert_close(attended(layer, given, None), plain(*given))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_tokens_of_plain_layers_need_no_record_of_the_call(options, monkeypatch):
    """From the second turn of key numbers that a backend may distinguish on; a mask or a window does need one."""
    module, made = Layer(), []
    monkeypatch.setattr(
        attn_transformers, "ModuleCall", lambda *given, **more: made.append(given) or ModuleCall(*given, **more)
    )
    for keys in range(1024, 1088):
        attended(module, arrays(1, keys), **options)
    made.clear()
    for keys in range(1088, 1152):
        attended(module, arrays(1, keys), **options)
    assert not made
    attended(module, arrays(1, 1153), sliding_window=8, **options)
    assert len(made) == 1


@torch.no_grad()
@pytest.mark.parametrize("context", [512, 2048])
def test_every_layer_but_a_steps_first_finds_its_launch_at_any_context(context, monkeypatch):
    """Over 64 tokens, after 64 in which each class of numbers that a backend distinguishes is decided, once for all layers."""
    decided, decoder = [], Bound()
    monkeypatch.setattr(dispatch, "_decided", lambda call: decided.append(call) or dispatch.DenseLaunch(decoder, decoder))
    monkeypatch.setattr(Bound, "__call__", lambda self, query, *given: self.calls.append(1) or query.transpose(1, 2))
    layers, found, attention = [Layer() for _ in range(3)], [], attn_transformers._function(None)
    for keys in range(context, context + 128):
        before, given = len(decoder.prepared), [torch.empty(1, 4 - 2 * (n > 1), n, 16) for n in (1, keys, keys)]
        for layer in layers:
            attention(layer, *given, None, scaling=0.25)
        found.append(len(decoder.prepared) - before)
    assert found[64:] == [3] * 64 and all(number in (2, 3) for number in found)
    assert len(decided) == found.count(2) <= 8


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
            *(x.transpose(1, 2) for x in given),
            scale=0.25,
            causal=options.get("is_causal", True),
            layout="BSHD",
            logits_soft_cap=options.get("softcap"),
        )
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
    attended(module, given)
    assert len(decisions) == 3
    monkeypatch.setenv("ATTN_DISABLE", "CPU_ATTN")
    attended(module, given)
    assert len(decisions) == 4


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
    attended(module, given, position_bias=bias)
    attended(module, given, dropout=0.5)
    attended(module, [x.requires_grad_() for x in given])
    attended(module, arrays(), torch.ones(2, 9, dtype=torch.bool))
    with pytest.raises(attn.UnsupportedError, match="head_mask"):
        attended(module, arrays(), head_mask=torch.ones(4))
    with pytest.raises(attn.UnsupportedError, match="2 causal rows over 9 keys without a mask"):
        attended(module, arrays(2))
    assert not decisions
    attended(module, arrays(), output_attentions=False, head_mask=None)
    attended(module, arrays(), output_attentions=True)
    assert len(decisions) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attended(module, arrays()).dtype == torch.bfloat16
    assert len(decisions) == 2


@pytest.mark.parametrize("rows", [1, 9])
def test_no_requests_are_no_launch(rows, decisions):
    module, given = Layer(), [x[:0] for x in arrays(rows=rows)]
    for _ in range(2):
        assert attended(module, given).shape == (0, rows, *given[0].shape[1::2])
    assert not dispatch._launches.get(module)


def test_a_window_without_causality_is_refused_for_one_row_too():
    with pytest.raises(attn.UnsupportedError, match="a non-causal window without a mask"):
        attended(Layer(), arrays(), is_causal=False, sliding_window=4)


@torch.no_grad()
def test_a_device_without_autocast_is_none_that_has_it_on():
    given = arrays(device="meta")
    assert not torch.amp.is_autocast_available("meta")
    call = ModuleCall(Layer(), *given, None, CAUSAL, 0.25)
    read(call)
    assert dispatch.launch_of(call) is not None


def test_sinks_alone_may_want_gradients():
    """As when only they are trained, after steps without gradients."""
    module, given, sinks = Layer(), arrays(), torch.zeros(4, requires_grad=True)
    with torch.no_grad():
        attended(module, given, s_aux=sinks)
    attended(module, given, s_aux=sinks).sum().backward()
    assert sinks.grad is not None and sinks.grad.abs().max() > 0


def test_gradients_by_a_backend_by_name_are_refused_without_recommending_it():
    given = arrays(9, 9, requires_grad=True)
    with pytest.raises(attn.UnsupportedError, match="gradients by a backend requested by name") as caught:
        attended(Layer(), given, name="attn:TORCH_SDPA")
    assert 'attn_implementation="attn" computes them' in str(caught.value) and "uses TORCH_SDPA" not in str(caught.value)
    attended(Layer(), given).sum().backward()
    assert given[0].grad is not None


def test_a_backend_by_name_in_lower_case():
    lower, upper = (attended(Layer(), arrays(), name=f"attn:{name}") for name in ("torch_sdpa", "TORCH_SDPA"))
    torch.testing.assert_close(lower, upper, rtol=0, atol=0)
    assert "attn:torch_sdpa" not in attn_transformers.register()


def test_wrong_shapes_are_refused_before_and_after_a_plan():
    module = Layer()
    attended(module, arrays())
    query, key, value = arrays()
    for wrong in ((query, key[..., :8], value), (query, key, value[:, :, :3]), (query, key[:1], value[:1])):
        with pytest.raises(attn.AttnError):
            attended(module, wrong)


def test_a_plan_is_of_its_layer_and_bounded(monkeypatch):
    monkeypatch.setattr("attn.torch.metadata._MOST", 3)
    module = Layer()
    for scale in range(1, 9):
        attended(module, arrays(), scaling=float(scale))
        assert len(dispatch._launches[module]) <= 3
    held = len(dispatch._launches)
    del module
    assert len(dispatch._launches) == held - 1


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
                query[one, rows],
                key[one, own],
                value[one, own],
                scale=self.call.scale,
                causal=causal,
                window=self.call.seen.window,
                logits_soft_cap=self.call.soft_cap,
                sinks=self.sinks,
                layout="BSHD",
            )
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
        dispatch, "layer_of", lambda call, kind: made.append(RunsImpl(call)) or type("Made", (), {"impl": made[-1]})
    )
    module = Layer()
    for _ in range(2):
        torch.testing.assert_close(attended(module, given, mask_of(), **options), want, rtol=1e-4, atol=1e-5)
    cut = 9 - window if rows == 1 and window else 0  # a window counts from the row's own key, which may not be valid
    runs = [[max(first - cut, 0), end - max(first, cut)] for first, end in zip(*padding, strict=True)]
    runs = [[first, number] if number > 0 else [9 - cut, 0] for first, number in runs]
    assert len(made) == 1 and made[0].runs == [runs, runs]
    there[0] = torch.tensor([1, 0, 0, 1, 1, 1, 1, 1, 1])  # a gap
    attended(module, given, mask_of(), **options)
    assert len(made[0].runs) == (3 if cut else 2)  # the last keys have no gap


class HostReads(TorchDispatchMode):
    """Counts the elements that are read on the host, for which a GPU is waited for."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("at_once", [1 << 26, 1])
@pytest.mark.parametrize("padding", [([0, 3], [9, 9]), ([0, 9], [7, 9]), ([2, 0], [8, 5])])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (9, 16), (1, 8), (9, 8)])
def test_layers_with_padding_by_name_wait_for_nothing(rows, width, padding, at_once, monkeypatch):
    monkeypatch.setattr(dispatch, "_MASK_AT_ONCE", at_once)
    monkeypatch.setattr(dispatch, "_waits", lambda device: True)
    given, module = arrays(rows, width=width), Layer()
    there = torch.zeros(2, 9, dtype=torch.bool)
    for entry, first, end in zip(there, *padding, strict=True):
        entry[first:end] = True
    made = attn_transformers.mask(2, rows, 9, 9 - rows, attention_mask=there)
    want = torch.zeros(2, rows, 4, width)
    for b, (first, end) in enumerate(zip(*padding, strict=True)):
        query, key, value = (x[b : b + 1, :, first:end] for x in given)
        real = slice(first, end) if rows > 1 else slice(0, int(end > first))
        options = {"scale": 0.25, "causal": rows > 1, "layout": "BHSD"}
        if end > first:
            query = query if rows > 1 else given[0][b : b + 1]
            want[b, real] = attn.attention(query, key, F.pad(value, (0, 16 - width)), **options)[0].transpose(0, 1)[..., :width]
    for x in given[1:]:
        x.transpose(1, 2)[~there] = torch.nan  # may hold anything
    for layer in range(2):
        with HostReads() as reads:
            out = attended(module, given, made, "attn:TORCH_SDPA")
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        assert layer == 0 or not reads.number


@pytest.mark.parametrize("slots", [0, 5])
def test_tokens_under_a_window_are_decided_once(slots, monkeypatch):
    """Each sees its last keys only; `slots` of a static cache after them are unused."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    made, module, window = [], Layer(), 4
    monkeypatch.setattr(
        attn_transformers, "ModuleCall", lambda *args, **options: made.append(args) or ModuleCall(*args, **options)
    )
    for number in (9, 10, 12, 4, 30):
        given = arrays(keys=number + slots)
        function = sliding_window_causal_mask_function(window)
        mask = attn_transformers.mask(2, 1, number + slots, number - 1, mask_function=function)
        with torch.no_grad():
            out = attended(module, given, mask, sliding_window=window)
            query, key, value = given[0], *(x[:, :, max(number - window, 0) : number] for x in given[1:])
            expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2))
    assert len(made) == 1


@torch.no_grad()
@pytest.mark.parametrize("slots", [0, 5])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}], ids=str)
def test_prompts_need_no_record_of_the_call(options, slots, monkeypatch):
    """Nor do those under a window, each kept with its own; `slots` of a static cache after their tokens are unused."""
    made, modules = [], [Layer() for _ in range(2)]
    monkeypatch.setattr(attn_transformers, "ModuleCall", lambda *args, **more: made.append(args) or ModuleCall(*args, **more))
    for rows, window, calls in (
        (9, None, 1),
        (11, None, 0),
        (13, 4, 1),
        (9, 4, 0),
        (9, 1, 1),
        (9, 9, 0 if slots else 1),
        (3, None, 0),
    ):
        given = arrays(rows, rows + slots)
        function = None if window is None else _windowed(window)
        mask = attn_transformers.mask(2, rows, rows + slots, 0, mask_function=function)
        assert (mask is None) == (not slots and (window or 99) >= rows)
        cut = [given[0], *(x[:, :, :rows] for x in given[1:])]
        sees = {} if window is None else {"window": (window - 1, 0)}
        rules = {"sinks": options.get("s_aux"), "logits_soft_cap": options.get("softcap"), **sees}
        want = attn.attention(*(x.transpose(1, 2) for x in cut), scale=0.25, causal=True, layout="BSHD", **rules)
        made.clear()
        for module in modules:
            out = attended(module, given, mask, sliding_window=window, **options)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        assert len(made) <= (2 if mask is None and window else calls), (rows, window)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}], ids=str)
def test_tokens_over_a_static_cache_find_the_keys_once_a_step(options, monkeypatch):
    """The layers share what the first found, until the mask changes. The kernel's operator has a stand-in."""
    asked, searched = [], []

    def row(query, key, value, scale, cap, sinks, mask, run):
        assert run == [len(searched)]
        rules = {"logits_soft_cap": cap or None, "sinks": sinks, "mask": mask[:, None, None]}
        return attn.attention(*(x.transpose(1, 2) for x in (query, key, value)), scale=scale, layout="BSHD", **rules)

    stand_in = ModuleType("attn.torch.kernels.dense_decode")
    stand_in.row, stand_in.run_of = row, lambda mask: searched.append(mask.shape) or [len(searched)]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(dispatch, "_has_row_operator", lambda *facts: asked.append(facts) or True)
    given, mask = arrays(1, 14), torch.zeros(2, 1, 1, 14, dtype=torch.bool)
    mask[0, ..., :9], mask[1, ..., 3:9] = True, True
    for _ in range(3):
        mask[..., int(mask.any(0).sum())] = True
        for layer in (Layer(), Layer()):
            out = attended(layer, given, mask, **options)
            rules = {"logits_soft_cap": options.get("softcap"), "sinks": options.get("s_aux"), "mask": mask}
            want = attn.attention(*(x.transpose(1, 2) for x in given), scale=0.25, layout="BSHD", **rules)
            torch.testing.assert_close(out, want)
    assert searched == [(2, 14)] * 3 and len(asked) == 6
    of_any = torch.ones(1, 1, 1, 14, dtype=torch.bool)
    for entries in (2, 1):
        assert len(attended(Layer(), [x[:entries] for x in given], of_any, **options)) == entries
    assert searched[3:] == [(2, 14), (1, 14)]
    with torch.inference_mode():
        attended(Layer(), given, mask.clone(), **options)  # a tensor without versions: nothing is kept with it
    assert len(searched) == 6
    gone = weakref.ref(mask)
    del mask, rules
    assert gone() is None, "what was found of a mask keeps it: each step would leave one"


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 4])
def test_a_drawn_mask_is_recognised_once_a_step(rows, monkeypatch):
    """All layers of a kind share what it is, where a kernel needs that, until it changes."""
    found, recognised = [], masks.recognised
    monkeypatch.setattr(masks, "recognised", lambda call, mask: found.append(1) or recognised(call, mask))
    given, key = arrays(rows, 14), torch.arange(14)
    mask = torch.zeros(2, 1, rows, 14, dtype=torch.bool)
    for end in (9, 10, 12):
        mask.copy_(key <= torch.arange(end - rows, end)[:, None])
        mask[1, ..., :3] = False
        for layer in (Layer(), Layer()):
            out = attended(layer, given, mask, softcap=5.0)
            rules = {"logits_soft_cap": 5.0, "mask": mask}
            want = attn.attention(*(x.transpose(1, 2) for x in given), scale=0.25, layout="BSHD", **rules)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    assert len(found) == 3
    attended(Layer(), given, mask, softcap=5.0, sliding_window=20)  # of another kind
    assert len(found) == 4
    unknown = torch.rand(2, 1, rows, 14) < 0.5
    attended(Layer(), given, unknown, softcap=5.0)
    gone = [weakref.ref(x) for x in (mask, unknown)]
    del mask, unknown, rules
    assert [x() for x in gone] == [None, None]


@torch.no_grad()
def test_a_prompt_over_a_static_cache_waits_for_its_padding_once(monkeypatch):
    """`generate` makes the mask, and the model makes one of it again."""
    read, all_of = [], torch.Tensor.all
    monkeypatch.setattr(torch.Tensor, "all", lambda x, *given: read.append(x.shape) or all_of(x, *given))
    first = attn_transformers.mask(2, 9, 14, 0, attention_mask=torch.ones(2, 9, dtype=torch.bool))
    again = attn_transformers.mask(2, 9, 14, 0, attention_mask=first)
    under = attn_transformers.mask(2, 9, 14, 0, mask_function=_windowed(4), attention_mask=first)
    assert len(read) == 1 and again.attn_described.whole and again.shape == (2, 9)
    windows = [made.attn_described.seen.layer.window[0] for made in (first, again, under)]
    assert windows == [None, None, 3]  # each its own


def test_a_token_that_sees_no_later_key_needs_a_causal_layer():
    with pytest.raises(UnsupportedError, match="non-causal window"), torch.no_grad():
        attended(Layer(), arrays(), is_causal=False, sliding_window=4)
