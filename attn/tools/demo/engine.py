"""Serve a checkpoint: load a model in a framework, run batches, choose tokens, and stream text.

The next token is chosen by this module, on the host, in the same way for both frameworks; each request has its own random
numbers, so its text does not depend on the rest of the batch.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from attn.arguments import natural_int
from attn.errors import BackendLoadError, UnsupportedError
from attn.imports import installed, pip_install, resolve_obj_by_qualname
from attn.selection.verdicts import Selection
from attn.serving import GenerationRequest, Scheduler, Step
from attn.tools.demo.checkpoint import ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHIPPED_MODEL = Path(__file__).parent / "model"
FRAMEWORKS: Mapping[str, tuple[str, ...]] = {"torch": ("torch",), "jax": ("jax", "flax")}  #: the packages that each needs
DTYPES = ("float32", "bfloat16", "float16")

Choose = Callable[[npt.NDArray[np.float32], GenerationRequest], int]
Event = tuple[GenerationRequest, int]


class ModelRunner(Protocol):
    """A model with its caches: `attn.tools.demo.torch_llama.LlamaRunner` or `attn.tools.demo.jax_llama.LlamaRunner`."""

    framework: str
    selection: Selection

    def run(self, step: Step) -> npt.NDArray[np.float32]: ...


def missing(framework: str) -> tuple[str, ...]:
    """Return the packages that `framework` needs and that are not installed."""
    return tuple(package for package in FRAMEWORKS[framework] if not installed(package))


def load_runner(
    framework: str,
    config: ModelConfig,
    weights: Mapping[str, npt.NDArray[np.float32]],
    scheduler: Scheduler,
    *,
    dtype: str = "float32",
    backend: str | None = None,
) -> ModelRunner:
    """Load the model in `framework`, ready for the batches of `scheduler`.

    Raises `BackendLoadError` if the framework is not installed, `UnsupportedError` with all reasons if no attention backend,
    or not the requested one, serves the model, and ValueError for an unknown backend.
    """
    if absent := missing(framework):
        raise BackendLoadError(f"{' and '.join(absent)} not installed: {pip_install(framework)}")
    # By name, so that one framework is not imported for the other's sake.
    make = resolve_obj_by_qualname(f"attn.tools.demo.{framework}_llama.LlamaRunner")
    try:
        return make(config, weights, scheduler, dtype=dtype, backend=backend)
    except UnsupportedError as error:
        message = f"no attention backend serves this model under {framework}"
        raise UnsupportedError(f"{message}: {'; '.join(error.reasons)}", error.reasons) from error


def scheduler_of(config: ModelConfig, num_blocks: int, block_size: int, **limits: int) -> Scheduler:
    """Return a scheduler of the model's vocabulary, length and end of text; `limits`: its other arguments."""
    sizes = {"vocab_size": config.vocab_size, "max_model_len": config.max_position_embeddings, **limits}
    return Scheduler(num_blocks, block_size, eos_token_ids=config.eos_token_ids, **sizes)


def greedy(logits: npt.NDArray[np.float32], request: GenerationRequest) -> int:
    """Return the likeliest token."""
    return int(logits.argmax())


def sampler(temperature: float, seed: int) -> Choose:
    """Return a function that draws from softmax(logits / temperature); 0 is greedy. The n-th token of the i-th request
    depends only on (seed, i, n) and its logits. Raises ValueError for a negative temperature or seed."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be at least 0 and finite")
    natural_int("seed", seed)
    if temperature == 0:
        return greedy

    def draw(logits: npt.NDArray[np.float32], request: GenerationRequest) -> int:
        # Subtracted before it is divided: a quotient beyond float64 is then -inf, of weight 0, and never inf - inf.
        with np.errstate(over="ignore"):
            weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
        bounds = np.cumsum(weights / weights.sum())
        # A generator for each token, so that a text does not depend on when, and beside which others, its request runs.
        random = np.random.default_rng((seed, request.request_id, len(request.output)))
        # The last bound may be rounded to just below 1.
        return min(int(np.searchsorted(bounds, random.random(), side="right")), len(bounds) - 1)

    return draw


def serve(runner: ModelRunner, scheduler: Scheduler, choose: Choose = greedy) -> Iterator[list[Event]]:
    """Run until every request is finished, yielding each step's new tokens; more may be submitted in between."""
    # One step at a time: the next batch needs this one's tokens.
    while (step := scheduler.schedule()) is not None:
        logits = runner.run(step)
        tokens = [choose(row, request) for row, request in zip(logits, step.sampled, strict=True)]
        yield scheduler.commit(tokens)


class TextStream:
    """The text of a request's tokens, in pieces, as they arrive.

    Decoding depends on the preceding tokens (a word's first token adds its space), so the prompt is decoded too; the bytes of
    an incomplete character are held back.
    """

    def __init__(self, tokenizer: "Tokenizer", request: GenerationRequest) -> None:
        self._tokenizer, self._request = tokenizer, request
        self._prompt = tokenizer.decode(request.prompt)
        self.text = ""

    @property
    def finished(self) -> bool:
        return self._request.finish_reason is not None

    def read(self) -> str:
        """Return the text added since the last call."""
        whole = self._tokenizer.decode(self._request.tokens).removeprefix(self._prompt)
        # U+FFFD at the end is a character of which bytes are missing; at the end of the request none will follow.
        if whole.endswith("\ufffd") and not self.finished:
            whole = whole.rstrip("\ufffd")
        new = whole[len(self.text) :]
        self.text += new
        return new
