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
