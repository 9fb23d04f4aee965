"""Continuous batching from arrays on the device, and in CUDA graphs, on stand-ins that forbid reads of tensors on the host.

No GPU is used. A stand-in for a graph records the operations of a capture, and replays them on the same memory: it shows that
a capture reads nothing on the host, and that a replay computes the step that is in transformers' arrays then. A stand-in for a
kernel computes from the metadata on the device only; `test_interpreted_kernels` runs Triton's. What a GPU's kernels do in a
graph is not covered.
"""

import contextlib
import dataclasses
import inspect
import os
import re
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import attn.torch  # noqa: E402
from attn.backends.registry import AttentionBackendEnum  # noqa: E402
from attn.errors import UnsupportedError  # noqa: E402
from attn.integrations import transformers as attn_transformers  # noqa: E402
from attn.integrations.transformers import batching as module  # noqa: E402
from attn.integrations.transformers import steps  # noqa: E402
from attn.integrations.transformers.steps import LayerCache  # noqa: E402
from tests.integrations import tiny_transformers  # noqa: E402
from tests.integrations.tiny_transformers import batching, decoder  # noqa: E402
from tests.levels import sampled  # noqa: E402
from tests.torch import test_interpreted  # noqa: E402

PROMPTS = [[3, 4, 5, 6, 7], [9] * 19]
#: More than fit in one step of 16 tokens, two of them with the same first page of 16.
MIXED = [[5 + i % 7 for i in range(20)] + [3, 4], [5 + i % 7 for i in range(20)] + [9], *PROMPTS, [11, 2, 7] * 11]


class NoHostReads(TorchFunctionMode):
    """What CUDA does while it captures: an operation that waits for the device is an error."""

    WAITS = frozenset(
        {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero"}
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.WAITS:
            raise RuntimeError(f"{func.__name__}: operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """Keep the operations that run within the block, with the tensors that they were given and returned."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor is read on the host"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class Graph:
    """A stand-in for a CUDA graph: the operations of a capture, run again on the same memory."""

    def __init__(self):
        self.calls, self.replays = [], 0

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            if func.is_view:
                continue
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for before, after in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    before.copy_(after)

    def reset(self):
        pass


def generate(model, prompts=PROMPTS, persistent_manager=False, warmup=True, **changes):
    config, more = batching(), {"persistent_manager": True} if persistent_manager else {}
    if not warmup and "warmup" in inspect.signature(model.generate_batch).parameters:
        more["warmup"] = False
    for name, value in changes.items():
        setattr(config, name, value)
    greedy = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=config, **more)
    return {tuple(answer.prompt_ids): answer for answer in answers.values()}


def check_texts(model, answers, prompts=PROMPTS):
    """Each answer is what eager attention generates for its prompt alone."""
    model.set_attn_implementation("eager")
    for prompt in prompts:
        assert answers[tuple(prompt)].error is None
        ids = torch.tensor([prompt], device=model.device)
        want = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert answers[tuple(prompt)].generated_tokens == want[0, len(prompt) :].tolist()


@pytest.fixture
def captures(monkeypatch):
    """transformers finds a GPU with graphs; returns those that it makes. A capture forbids reads on the host."""
    runner = pytest.importorskip("transformers.generation.continuous_batching.model_runner")
    initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization")
    found, capturing = [], []

    @contextlib.contextmanager
    def capture(graph, **_):
        found.append(graph)
        capturing.append(graph)
        with monkeypatch.context() as during, NoHostReads(), Recording(graph.calls):
            # transformers itself reads no tensors then
            during.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True, raising=False)
            yield
        capturing.clear()

    def patch(target, **changes):
        for name, value in changes.items():
            monkeypatch.setattr(target, name, value)

    pools = {"get_memory_pools": lambda: (None, 0), "memory_pool_context": lambda pool: contextlib.nullcontext()}
    if hasattr(initialization, "get_accelerator_graph_name"):
        patch(initialization, get_accelerator_graph_name=lambda: "CUDAGraph")
        patch(runner, **pools, create_accelerator_graph=Graph, accelerator_graph_capture_context=capture)
    else:  # before 5.19 transformers asks torch.cuda itself
        cuda = types.SimpleNamespace(
            is_available=lambda: True, CUDAGraph=Graph, graph=capture, stream=lambda _: contextlib.nullcontext()
        )
        patch(initialization, torch=types.SimpleNamespace(**{**vars(torch), "cuda": cuda}))
        patch(runner, torch=types.SimpleNamespace(**{**vars(torch), "cuda": cuda}))
        patch(runner, **dict(zip(("get_cuda_pools", "mem_pool_ctx"), pools.values(), strict=True)))
    monkeypatch.setattr(module, "_capturing", lambda x: bool(capturing))
    return found


@contextlib.contextmanager
def lengths_on_device():
    """TORCH_SDPA computes from metadata on the device only; its rows of no request are NaN."""
    backend = AttentionBackendEnum.TORCH_SDPA.get_class()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.get_impl_cls(), "traceable", True)
        patch.setattr(backend.get_impl_cls(), "_attend", _attend)
        build = lambda self, batch: self.build(0, batch)  # noqa: E731
        patch.setattr(backend.get_builder_cls(), "build_for_cudagraph_capture", build, raising=False)
        yield


@contextlib.contextmanager
def outputs():
    """Collect what layers return in continuous batching."""
    attend, found = attn_transformers.attend_paged, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attn_transformers, "attend_paged", lambda *given: found.append(attend(*given)) or found[-1])
        yield found


def _attend(impl, call):
    meta, (keys, values, _) = call.meta, impl._caches(call.kv_cache)
    starts, lens, size = meta.query_start_loc, meta.seq_lens, keys.shape[1]
    row, j = torch.arange(len(call.query)), torch.arange(meta.max_seq_len)
    request = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp(max=meta.num_reqs - 1)
    position = (lens[request] - starts[1:][request] + row)[:, None]
    left, right = (meta.max_seq_len if side is None else side for side in call.window)
    seen = (j < lens[request, None]) & (j >= position - left) & (j <= position + right)
    page = meta.block_table[request][:, j // size].clamp(0, len(keys) - 1)
    group = impl.num_heads // impl.num_kv_heads
    k, v = (x[page, j % size].repeat_interleave(group, 2) for x in (keys, values))
    scores = torch.einsum("thd,tjhd->thj", call.query, k) * impl.scale
    if impl.logits_soft_cap:
        scores = impl.logits_soft_cap * torch.tanh(scores / impl.logits_soft_cap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if impl.sinks is not None:
        scores = torch.cat((scores, impl.sinks[None, :, None].expand(len(row), -1, 1)), 2)
    weights = scores.softmax(2)[..., : len(j)].nan_to_num()
    call.output.copy_(torch.einsum("thj,tjhd->thd", weights, v.masked_fill(~seen[..., None, None], 0)))
    call.output.masked_fill_((row >= starts[-1])[:, None, None], float("nan"))


def test_the_stand_in_refuses_reads():
    with NoHostReads(), pytest.raises(RuntimeError, match="tolist: operation not permitted"):
        torch.ones(2).tolist()


KINDS = sampled(["llama", "gemma2", "gpt_oss"], 2, "batching on the device")


def of_kind(kind):
    if kind != "llama" and module.installed() < module.WINDOWS_IN_PAGES:
        pytest.skip("this transformers hands out wrong keys of windows: refused")
    return decoder(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_are_eager_ones(kind, captures):
    """Prompts in parts, shared prefixes, decodes, padding; graphs of a step are replayed for others."""
    model = of_kind(kind)
    with lengths_on_device(), outputs() as outs, attn_transformers.paged(model, "torch_sdpa"):
        # warming up, transformers before 5.18 reads keys that nothing has written
        answers = generate(model, MIXED, use_async_batching=False, warmup=False)
    assert captures and sum(graph.replays for graph in captures) > len(captures)
    assert all(out.isfinite().all() for out in outs), "rows of padding must be 0"
    check_texts(model, answers, MIXED)


@pytest.mark.parametrize(
    "version, asked, share",
    [((5, 17), {}, 0.5), ((5, 17), {"max_memory_percent": 0.7}, 0.7), ((5, 17), {"num_blocks": 9}, None), ((5, 18), {}, None)],
)
def test_gathered_keys_find_memory(version, asked, share, monkeypatch):
    """A share of memory, or a number of blocks, that the caller asks for is kept."""
    config = pytest.importorskip("transformers.generation").ContinuousBatchingConfig(**asked)
    if version >= module.JOINED > module.installed():
        pytest.skip("this transformers has another configuration")
    if "max_memory_percent" not in asked and config.max_memory_percent is not None:
        pytest.skip("this transformers has a default share, which a caller may have asked for")
    model, given = decoder("llama"), []
    monkeypatch.setattr(module, "installed", lambda: version)

    class Manager:
        def __init__(self, generation_config, batching):
            given.append(batching)

    model.init_continuous_batching = Manager
    with lengths_on_device(), module.graphs_where_possible(model, "TORCH_SDPA"):
        model.init_continuous_batching(None, config)
    assert given[0].max_memory_percent == share
    assert config.max_memory_percent == asked.get("max_memory_percent")


def test_the_request_of_a_warm_up_is_limited_within_the_block(monkeypatch):
    runner, asked = pytest.importorskip("transformers.generation.continuous_batching.model_runner"), []
    recorded = lambda *given: asked.append(given)  # noqa: E731
    monkeypatch.setattr(runner, "create_warmup_future_states", recorded)
    with attn_transformers.paged(decoder("llama"), "TORCH_SDPA"):
        for older in (10_000, 3):
            runner.create_warmup_future_states(1, "prefilling", 16, older, "cache")
    assert asked == [(1, "prefilling", 16, older, "cache") for older in (16, 3)]
    assert runner.create_warmup_future_states is recorded


def test_the_warm_up_fills_no_cache(captures, monkeypatch):
    """Its attention would take seconds. Arrays have the sizes of the largest step, so later graphs fit in its memory."""
    model, made, make = decoder("llama"), [], steps._made_on_device

    def counted(pages, *given):
        if not made:  # the first one is not captured
            made.append((int(pages.row_starts[-1]), int(pages.key_starts[-1]), len(pages.read)))
        return make(pages, *given)

    monkeypatch.setattr(steps, "_made_on_device", counted)
    monkeypatch.setattr(module, "_capturing", lambda x: False)
    with lengths_on_device(), attn_transformers.paged(model, "TORCH_SDPA"):
        generate(model, use_async_batching=False)
    config = batching()
    rows, keys, read = made[0]
    assert rows == config.max_batch_tokens and keys <= 2 * rows
    assert read > 2 * rows


@pytest.mark.parametrize("kind", KINDS)
def test_steps_from_the_device_are_those_from_the_host(kind, monkeypatch):
    """Layer by layer and step by step. The metadata of a step is made once for each kind of layer, without reads."""
    model, made, make = of_kind(kind), [], steps._made_on_device

    def without_reads(*given):
        made.append(given)
        with NoHostReads(), Recording([]):
            return make(*given)

    monkeypatch.setattr(steps, "_made_on_device", without_reads)
    results = []
    for place in (lengths_on_device(), contextlib.nullcontext()):
        with place, outputs() as outs, attn_transformers.paged(model, "TORCH_SDPA"):
            generate(model, MIXED, use_cuda_graph=False, use_async_batching=False)
        results.append(outs)
    assert len(results[0]) == len(results[1]) > 20
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    kinds = 1 if kind == "llama" else 2
    assert len(made) == kinds * len(outs) // model.config.num_hidden_layers


@pytest.mark.parametrize("kind", ["gemma3n", "gemma4", "phimoe"])
def test_layers_without_keys_or_a_window_of_their_own(kind):
    """Layers that share the keys of others (Gemma 3n, Gemma 4), and that leave their window to masks (Phi-3.5-MoE)."""
    if not hasattr(transformers, tiny_transformers.DECODERS[kind][0]):
        pytest.skip("no such model in this transformers")
    model = of_kind(kind)
    with attn_transformers.paged(model):
        answers = generate(model, MIXED)
    check_texts(model, answers, MIXED)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nemotron", "NemotronForCausalLM: .* its layers do not pass a step's arguments on"),
        ("diffllama", "DiffLlamaAttention.*(twice in a step not supported|not the ones that it stores)"),
    ],
)
def test_models_whose_steps_do_not_reach_attention_are_refused(kind, said):
    """Their requests would see each other, or values that were stored for another call, without a word."""
    model = decoder(kind)
    with attn_transformers.paged(model):
        answers = generate(model)
    for answer in answers.values():
        assert answer.error is not None and re.search(said, str(answer.error)), answer.error


def pages_with(q_lens, past, padding, page=16):
    """A step's state as transformers prepares it, for requests of `q_lens` rows and `past` older keys; and the slots of each
    request's keys. padding: rows, requests and keys beyond them."""
    generator = torch.Generator().manual_seed(len(q_lens) + sum(past))
    lens = [q + p for q, p in zip(q_lens, past, strict=True)]
    free, slots = torch.randperm(200, generator=generator) + 2, []
    for n in lens:
        blocks, free = free[: -(-n // page)], free[-(-n // page) :]
        slots.append((blocks[:, None] * page + torch.arange(page)).flatten()[:n])
    rows, requests, keys = padding
    begins = [torch.tensor([0, *each]).cumsum(0) for each in (q_lens, lens)]
    row_starts, key_starts = (torch.cat((x, x[-1:].expand(requests))).to(torch.int32) for x in begins)
    older = any(past)
    read = torch.cat((*slots, torch.zeros(keys, dtype=torch.int64))) if older else torch.zeros(0, dtype=torch.int64)
    new = [own[len(own) - q :] for own, q in zip(slots, q_lens, strict=True)]
    written = torch.cat((*new, torch.full((rows,), page)))
    pages = LayerCache(0, row_starts, key_starts, max(q_lens) + rows, max(lens) + keys, read, written, None, None, None)
    return pages, slots


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("padding", [(0, 0, 0), (7, 5, 40)])
@pytest.mark.parametrize(
    ("q_lens", "past"),
    [
        ([5], [0]),
        ([16, 1, 33], [0, 0, 0]),
        ([1, 1, 1, 1], [31, 32, 33, 0]),
        ([20, 1, 7], [16, 100, 9]),
        ([3, 0, 2], [4, 9, 15]),
    ],
)
def test_metadata_from_arrays_on_the_device(q_lens, past, padding, gathered):
    """Every key of a request is in its place, requests without rows have no keys, and padding has no request."""
    pages, slots = pages_with(q_lens, past, padding)
    size = 64 if gathered else 16
    layer = attn.torch.Attention(2, 16, dtype=torch.float32, backend="TORCH_SDPA", block_size=size)
    with lengths_on_device(), NoHostReads(), Recording([]):
        found = steps._made_on_device(pages, layer, len(pages.written), gathered)
    meta = found.metadata
    assert found.padding.tolist() == [False] * sum(q_lens) + [True] * padding[0]
    lens = [len(own) if q else 0 for own, q in zip(slots, q_lens, strict=True)]
    assert meta.seq_lens.tolist() == lens + [0] * padding[1]
    assert meta.query_start_loc.tolist() == pages.row_starts.tolist()
    for r, own in enumerate(slots):
        at = torch.arange(lens[r])
        place = meta.block_table[r].long()[at // size] * size + at % size
        where = pages.read if len(pages.read) else pages.written
        if gathered:
            assert torch.equal(where[found.taken[place]], own[: lens[r]])
            assert torch.equal(found.slots[place], own[: lens[r]])
        else:
            assert torch.equal(place, own[: lens[r]])
    if gathered:  # each key once
        assert int((found.slots > 0).sum()) == sum(lens)


def test_padding_of_graphs_without_keys():
    """Before transformers 5.6 requests of padding have rows, and may begin before the last key."""
    pages, _ = pages_with([3, 2], [0, 4], (0, 0, 0))
    starts = {"row_starts": torch.tensor([0, 3, 5, 9]), "key_starts": torch.tensor([0, 3, 9, 0])}
    pages = dataclasses.replace(pages, **starts, written=torch.zeros(9, dtype=torch.int64))
    layer = attn.torch.Attention(2, 16, dtype=torch.float32, backend="TORCH_SDPA", block_size=16)
    with lengths_on_device():
        assert steps._made_on_device(pages, layer, 9, True).metadata.seq_lens.tolist() == [3, 6, 0]


def test_no_graph_is_captured_by_default(captures):
    """transformers' default is to capture for an implementation without masks; a backend that reads lengths on the host then
    failed every request."""
    model = decoder("llama")
    attn_transformers.register()
    with attn_transformers.paged(model):
        answers = generate(model, use_async_batching=False)
    assert not captures
    check_texts(model, answers)


@pytest.mark.triton_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="no GPU for Triton's kernels (test_interpreted_kernels interprets them)",
)
@pytest.mark.parametrize("kind", sampled(["llama", "gpt_oss"], 2 if torch.cuda.is_available() else 1, "continuous batching"))
def test_kernels(kind, monkeypatch):
    """Triton's kernels over transformers' pages and over gathered keys, in steps padded as for graphs; on a GPU in graphs."""
    runner = pytest.importorskip("transformers.generation.continuous_batching.model_runner").ModelRunner
    begin = runner.__init__

    def padding(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(runner, "__init__", padding)
    name, extra = tiny_transformers.DECODERS[kind]
    monkeypatch.setitem(tiny_transformers.DECODERS, kind, (name, {**extra, "head_dim": 32}))
    model = of_kind(kind).to("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "gpt_oss" and torch.cuda.is_available():  # in float32 grouped_mm, the default, reads offsets on the host
        model.set_experts_implementation("batched_mm")
    replays, replay = [], torch.cuda.CUDAGraph.replay if torch.cuda.is_available() else None
    if replay is not None:
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph))
    with attn_transformers.paged(model, "TRITON_ATTN"):
        answers = generate(model, MIXED[1:4])
    check_texts(model, answers, MIXED[1:4])
    assert replays or replay is None


@test_interpreted.pytestmark[0]
@test_interpreted.pytestmark[1]
def test_interpreted_kernels():
    test_interpreted.interpreted("pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"{__file__}::test_kernels")


def test_lengths_are_read_once_a_step(monkeypatch):
    """The layers of a step share its lengths and its metadata, and the next step has its own."""
    made, step, forwards = [], steps.BatchingStep, []
    build = steps.CommonAttentionMetadata.from_lens
    monkeypatch.setattr(steps, "BatchingStep", lambda *given: made.append("step") or step(*given))
    monkeypatch.setattr(
        steps.CommonAttentionMetadata,
        "from_lens",
        lambda *given, **more: made.append("batch") or build(*given, **more),
    )
    model = decoder("llama")
    assert model.config.num_hidden_layers > 1
    model.model.register_forward_pre_hook(lambda *_: forwards.append("forward"))
    with attn_transformers.paged(model):
        answers = generate(model, use_async_batching=False)
    assert all(answer.error is None for answer in answers.values())
    in_pages = module.installed() >= module.JOINED  # before, keys are gathered
    assert made.count("step") == len(forwards) and in_pages <= made.count("batch") <= len(forwards)


def test_a_step_that_reuses_the_tensor_of_lengths_is_another():
    cache, starts = type("Cache", (), {})(), torch.tensor([0, 1], dtype=torch.int32)
    step_of = steps.step_of
    first = step_of(cache, 0, starts)
    assert step_of(cache, 3, starts) is first
    starts[1] = 2
    again = step_of(cache, 0, starts)
    assert again is not first and again.starts.tolist() == [0, 2]
    assert step_of(cache, 1, starts.clone()) is not again
    captured = step_of(cache, 2, starts, True)
    assert step_of(cache, 3, starts) is not captured


def test_a_capture_by_hand_is_an_error_of_ours(captures):
    """Without `paged`, transformers captures: the call says so instead of failing within CUDA."""
    model = decoder("llama")
    attn_transformers.register()
    model.config._attn_implementation = attn_transformers.paged_name()
    answers = generate(model, use_async_batching=False)
    assert captures
    for answer in answers.values():
        assert "LlamaAttention of layer 0" in answer.error and "use paged(model), or ContinuousBatchingConfig" in answer.error


def test_graphs_that_are_asked_for_are_refused():
    model = decoder("llama")
    with attn_transformers.paged(model):
        for asked in (True, (False, True)):
            with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM: use_cuda_graph=.* leave use_cuda_graph at None"):
                generate(model, use_cuda_graph=asked)
        model._cached_continuous_batching_manager = type("Kept", (), {"continuous_batching_config": batching()})()
        model._cached_continuous_batching_manager.continuous_batching_config.use_cuda_graph = (True, False)
        with pytest.raises(UnsupportedError, match=r"graphs of another implementation: call model\.destroy_cached"):
            generate(model)
        del model._cached_continuous_batching_manager
        config = batching()
        with attn_transformers.paged(model, "TORCH_SDPA"):
            assert generate(model)[tuple(PROMPTS[0])].error is None
        assert config.use_cuda_graph is None
    assert "init_continuous_batching" not in vars(model)


class Manager:
    """A stand-in for a manager of continuous batching."""


@contextlib.contextmanager
def captured(monkeypatch):
    """A model whose layers can be captured, and the configurations with which its continuous batching starts."""
    model, found = decoder("llama"), []
    version = max(module.installed(), module.GRAPHS)
    monkeypatch.setattr(module, "installed", lambda: version)
    monkeypatch.setattr(model, "init_continuous_batching", lambda general, config, *_: found.append(config) or Manager())
    with lengths_on_device(), attn_transformers.paged(model, "TORCH_SDPA"):
        yield model, found


def test_graphs_follow_the_configuration_where_they_can_be_captured(monkeypatch):
    for asked in (None, True, False, (True, False)):
        config = batching()
        config.use_cuda_graph = asked
        with captured(monkeypatch) as (model, found):
            model.init_continuous_batching(None, config)
        assert found == [config]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda patch, backend: patch.setattr(module, "installed", lambda: (5, 5)),
            "transformers 5.5 replays graphs of shorter",
        ),
        (
            lambda patch, backend: patch.setattr(backend.get_impl_cls(), "traceable", False),
            "TORCH_SDPA reads lengths on the host",
        ),
        (
            lambda patch, backend: patch.delattr(backend.get_builder_cls(), "build_for_cudagraph_capture"),
            "TORCH_SDPA reads lengths on the host",
        ),
    ],
    ids=["version", "impl", "builder"],
)
def test_why_graphs_are_off(change, why, monkeypatch):
    config = batching()
    with captured(monkeypatch) as (model, found), pytest.MonkeyPatch.context() as patch:
        change(patch, AttentionBackendEnum.TORCH_SDPA.get_class())
        model.init_continuous_batching(None, config)
        assert [each.use_cuda_graph for each in found] == [False] and config.use_cuda_graph is None
        config.use_cuda_graph = True
        with pytest.raises(UnsupportedError, match=why):
            model.init_continuous_batching(None, config)


def test_graphs_depend_on_every_kind_of_layer(monkeypatch):
    """Full layers have pages of transformers' size from 5.18 on; keys of windows are gathered into pages of another."""
    asked, make = [], module._layer_of_model
    monkeypatch.setattr(module, "_layer_of_model", lambda *given: asked.append(given[1:]) or make(*given))
    monkeypatch.setattr(module, "installed", lambda: module.JOINED)
    model, config = decoder("gemma2"), types.SimpleNamespace(page_size=16)
    with lengths_on_device():
        assert module.why_no_graphs(model, "TORCH_SDPA", config) == ""
        assert set(asked) == {(None, "TORCH_SDPA", 16), (6, "TORCH_SDPA", 64)}
        monkeypatch.setattr(module, "_is_captured", lambda layer: layer.impl.window == (None, None))
        assert module.why_no_graphs(model, "TORCH_SDPA", config) == "TORCH_SDPA reads lengths on the host"
    monkeypatch.setattr(module, "installed", lambda: (5, 17))
    asked.clear()
    module.why_no_graphs(decoder("llama"), "TORCH_SDPA", config)
    assert asked == [(None, "TORCH_SDPA", 64)]
    assert module._size_of_gathered("FLASH_ATTN") == 256


def test_sinks_decide_whether_a_backend_can_serve():
    if module.installed() < module.WINDOWS_IN_PAGES:
        pytest.skip("windows are refused first")
    with pytest.raises(UnsupportedError, match=r"GptOssForCausalLM: (?s:.*)features=\{sinks\}"):
        attn_transformers.paged(decoder("gpt_oss"), "XFORMERS").__enter__()


def test_a_kept_manager_replays_its_own_graphs(captures):
    """A manager that is kept with its graphs serves the implementation that it was started with, and no other."""
    model = decoder("llama")
    options = {"persistent_manager": True, "use_async_batching": False}
    with lengths_on_device():
        with attn_transformers.paged(model, "TORCH_SDPA"):
            check = [generate(model, **options) for _ in range(2)]
        made = len(captures)
        assert made and all(answer.error is None for answers in check for answer in answers.values())
        with attn_transformers.paged(model), pytest.raises(UnsupportedError, match="graphs of another implementation"):
            generate(model, **options)
    model.destroy_cached_continuous_batching_manager()
    check_texts(model, check[1])
