"""Continuous batching where transformers captures CUDA graphs, on a stand-in that forbids reads of tensors on the host.

No GPU is used: the stand-in covers transformers' choice to capture, and that no read happens while it captures. That kernels
can be captured and replayed is not covered.
"""

import contextlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.overrides import TorchFunctionMode  # noqa: E402

from attn.errors import UnsupportedError  # noqa: E402
from attn.integrations import transformers as attn_transformers  # noqa: E402
from tests.integrations.tiny_transformers import batching, decoder  # noqa: E402

PROMPTS = [[3, 4, 5, 6, 7], [9] * 19]


class NoHostReads(TorchFunctionMode):
    """What CUDA does while it captures: an operation that waits for the device is an error."""

    WAITS = frozenset(
        {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero"}
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.WAITS:
            raise RuntimeError(f"{func.__name__}: operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


def generate(model, **changes):
    config = batching()
    for name, value in changes.items():
        setattr(config, name, value)
    greedy = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = model.generate_batch(PROMPTS, generation_config=greedy, continuous_batching_config=config)
    return {tuple(answer.prompt_ids): answer for answer in answers.values()}


@pytest.fixture
def captures(monkeypatch):
    """transformers finds a GPU with graphs; each capture is recorded, and forbids reads on the host."""
    runner = pytest.importorskip("transformers.generation.continuous_batching.model_runner")
    initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization")
    if not hasattr(initialization, "get_accelerator_graph_name"):
        pytest.skip("this transformers asks torch.cuda itself")
    found = []

    @contextlib.contextmanager
    def capture(graph, **_):
        found.append(graph)
        with monkeypatch.context() as during, NoHostReads():
            # transformers itself reads no tensors then
            during.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True, raising=False)
            yield

    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    monkeypatch.setattr(runner, "get_memory_pools", lambda: (None, 0))
    monkeypatch.setattr(runner, "memory_pool_context", lambda pool: contextlib.nullcontext())
    monkeypatch.setattr(runner, "create_accelerator_graph", object)
    monkeypatch.setattr(runner, "accelerator_graph_capture_context", capture)
    return found


def test_the_stand_in_refuses_reads():
    with NoHostReads(), pytest.raises(RuntimeError, match="tolist: operation not permitted"):
        torch.ones(2).tolist()


def test_no_graph_is_captured_by_default(captures):
    """transformers' default is to capture for an implementation without masks; then every request failed."""
    model = decoder("llama")
    attn_transformers.register()
    with attn_transformers.paged(model):
        answers = generate(model, use_async_batching=False)
    assert not captures
    model.set_attn_implementation("eager")
    for prompt in PROMPTS:
        assert answers[tuple(prompt)].error is None
        want = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert answers[tuple(prompt)].generated_tokens == want[0, len(prompt) :].tolist()


def test_lengths_are_read_once_a_step(monkeypatch):
    """The layers of a step share its lengths and its metadata, and the next step has its own."""
    made, steps, forwards = [], attn_transformers.batching._Step, []
    build = attn_transformers.batching.CommonAttentionMetadata.from_lens
    monkeypatch.setattr(attn_transformers.batching, "_Step", lambda *given: made.append("step") or steps(*given))
    monkeypatch.setattr(
        attn_transformers.batching.CommonAttentionMetadata,
        "from_lens",
        lambda *given, **more: made.append("batch") or build(*given, **more),
    )
    model = decoder("llama")
    assert model.config.num_hidden_layers > 1
    model.model.register_forward_pre_hook(lambda *_: forwards.append("forward"))
    with attn_transformers.paged(model):
        answers = generate(model, use_async_batching=False)
    assert all(answer.error is None for answer in answers.values())
    in_pages = attn_transformers.versions.installed() >= (5, 18)  # before, keys are gathered
    assert made.count("step") == len(forwards) and in_pages <= made.count("batch") <= len(forwards)


def test_a_step_that_reuses_the_tensor_of_lengths_is_another():
    cache, starts = type("Cache", (), {})(), torch.tensor([0, 1], dtype=torch.int32)
    step_of = attn_transformers.batching._step_of
    first = step_of(cache, 0, starts)
    assert step_of(cache, 3, starts) is first
    starts[1] = 2
    again = step_of(cache, 0, starts)
    assert again is not first and again.starts.tolist() == [0, 2]
    assert step_of(cache, 1, starts.clone()) is not again


def test_a_capture_by_hand_is_an_error_of_ours(captures, monkeypatch):
    """Without `paged`, transformers captures: the call says so instead of failing within CUDA."""
    model = decoder("llama")
    attn_transformers.register()
    model.config._attn_implementation = attn_transformers.paged_name()
    monkeypatch.setattr(attn_transformers.batching, "_capturing", lambda x: bool(captures))
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
