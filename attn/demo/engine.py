"""Serving with a checkpoint: a model under the framework asked for, batches in, tokens out, text as it arrives.

Which token comes next is decided here, on the host, in the same way for both frameworks; a request draws from its own
random numbers, so what it says does not depend on whom it shares a batch with.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from attn.demo.batcher import Batcher, GenerationRequest, Plan
from attn.demo.checkpoint import ModelConfig
from attn.errors import AttnError, BackendLoadError, UnsupportedError
from attn.imports import installed, pip_install, resolve_obj_by_qualname
from attn.verdicts import Selection

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHIPPED_MODEL = Path(__file__).parent / "model"
FRAMEWORKS: Mapping[str, tuple[str, ...]] = {"torch": ("torch",), "jax": ("jax", "flax")}  #: and what each needs
DTYPES = ("float32", "bfloat16", "float16")

Choose = Callable[[npt.NDArray[np.float32], GenerationRequest], int]
Event = tuple[GenerationRequest, int]


class Runner(Protocol):
    """A model with its caches: `attn.demo.torch_llama.Runner` or `attn.demo.jax_llama.Runner`."""

    framework: str
    selection: Selection

    def run(self, plan: Plan) -> npt.NDArray[np.float32]: ...


def missing(framework: str) -> tuple[str, ...]:
    """The packages that `framework` needs and that are not installed."""
    return tuple(package for package in FRAMEWORKS[framework] if not installed(package))


def load_runner(
    framework: str,
    config: ModelConfig,
    weights: Mapping[str, npt.NDArray[np.float32]],
    batcher: Batcher,
    *,
    dtype: str = "float32",
    backend: str | None = None,
) -> Runner:
    """The model under `framework`, ready for the batches of `batcher`.

    Raises `BackendLoadError` when the framework is not installed, `AttnError` with all reasons when no attention
    backend, or not the one asked for, serves the model, and ValueError for an unknown backend: one line each.
    """
    if absent := missing(framework):
        raise BackendLoadError(f"{' and '.join(absent)} not installed: {pip_install(framework)}")
    make = resolve_obj_by_qualname(f"attn.demo.{framework}_llama.Runner")
    try:
        return make(config, weights, batcher, dtype=dtype, backend=backend)
    except UnsupportedError as error:
        what = f"no attention backend serves this model under {framework}"
        raise AttnError(f"{what}: {'; '.join(error.reasons)}") from error


def greedy(logits: npt.NDArray[np.float32], request: GenerationRequest) -> int:
    """The likeliest token."""
    return int(logits.argmax())


def sampler(temperature: float, seed: int) -> Choose:
    """Draws from softmax(logits / temperature); 0 is greedy. The n-th token of the i-th request depends on
    (seed, i, n) and its logits alone. Raises ValueError for a negative temperature."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be at least 0 and finite")
    if temperature == 0:
        return greedy

    def draw(logits: npt.NDArray[np.float32], request: GenerationRequest) -> int:
        scaled = logits.astype(np.float64) / temperature
        weights = np.exp(scaled - scaled.max())
        bounds = np.cumsum(weights / weights.sum())
        random = np.random.default_rng((seed, request.request_id, len(request.output)))
        return min(int(np.searchsorted(bounds, random.random(), side="right")), len(bounds) - 1)

    return draw


def serve(runner: Runner, batcher: Batcher, choose: Choose = greedy) -> Iterator[list[Event]]:
    """Run until every request is finished, giving each step's new tokens; more may be submitted in between."""
    while (plan := batcher.step()) is not None:
        logits = runner.run(plan)
        tokens = [choose(row, request) for row, request in zip(logits, plan.sampled, strict=True)]
        yield batcher.commit(tokens)


class TextStream:
    """The text that a request's tokens make, in pieces, as they arrive.

    What follows depends on what went before (a word's first token brings its space), so the prompt is decoded too; the
    bytes of a character that is not whole yet are held back.
    """

    def __init__(self, tokenizer: "Tokenizer", request: GenerationRequest) -> None:
        self._tokenizer, self._request = tokenizer, request
        self._prompt = tokenizer.decode(request.prompt)
        self.text = ""

    @property
    def finished(self) -> bool:
        return self._request.finish_reason is not None

    def read(self) -> str:
        """The text that is new since the last call."""
        whole = self._tokenizer.decode(self._request.tokens).removeprefix(self._prompt)
        if whole.endswith("\ufffd") and not self.finished:
            whole = whole.rstrip("\ufffd")
        new = whole[len(self.text) :]
        self.text += new
        return new
