"""`attn demo`: serve many requests with a small model under torch and JAX, and compare with a dense run.

The cache has fewer blocks than the requests need at once, so some wait, and some are preempted and resumed. Under both
frameworks every request must generate the same tokens as dense decoding, without paging, batching or a cache; otherwise the
first different token is printed, and the exit code is 1.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attn.errors import AttnError
from attn.imports import pip_install, resolve_obj_by_qualname
from attn.progress import Display, Lines, Quiet, coloured, display
from attn.serving import GenerationRequest, Scheduler
from attn.tables import Column, cells, folded, header, line
from attn.tools.demo.checkpoint import load_config, load_tokenizer, load_weights
from attn.tools.demo.dense import Dense, dense_forward
from attn.tools.demo.engine import FRAMEWORKS, SHIPPED_MODEL, ModelRunner, TextStream, load_runner, missing, scheduler_of, serve
from attn.tools.demo.prompts import PROMPTS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEXTS = 3  # requests whose text is shown during generation
_WIDTH = 100  # characters shown of each text
_COLUMNS = (
    Column("", 7, text=True, key="framework"),
    Column("backend", 17, text=True, key="backend"),
    Column("tokens", 7, key="generated_tokens"),
    Column("seconds", 8, key="seconds", form=".2f"),
    Column("tokens/s", 9, key="tokens_per_second", form=".0f"),
    Column("start-up s", 11, key="startup_seconds", form=".2f"),
    Column("steps", 6, key="steps"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    known = ", ".join(FRAMEWORKS)
    parser.add_argument(
        "--model", type=Path, default=SHIPPED_MODEL, metavar="DIR", help="checkpoint (default: the built-in one)"
    )
    parser.add_argument("--frameworks", metavar="A,B", help=f"comma-separated, of {known} (default: those installed)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt per line (default: built-in ones)")
    parser.add_argument("--num-requests", type=int, metavar="N", help="number of requests; prompts repeat if there are fewer")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="new tokens per request (default: 48)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per cache block (default: 16)")
    parser.add_argument("--num-blocks", type=int, metavar="N", help="default: a seventh of what all requests need")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch's CPU threads (default: 1)")
    parser.add_argument("--json", action="store_true", help="print only one JSON object, at the end")


@dataclasses.dataclass(frozen=True)
class Served:
    """The result of one framework: its requests, all finished, and figures."""

    runner: ModelRunner
    requests: list[GenerationRequest]
    scheduler: Scheduler
    most_waiting: int
    startup_seconds: float
    seconds: float

    @property
    def figures(self) -> dict[str, Any]:
        selection = self.runner.selection
        return {
            "framework": self.runner.framework,
            "backend": selection.name,
            "device": selection.device.name,
            "tokens_per_second": self.scheduler.stats.generated_tokens / self.seconds,
            "seconds": self.seconds,
            "startup_seconds": self.startup_seconds,
            "most_waiting": self.most_waiting,
            **dataclasses.asdict(self.scheduler.stats),
        }


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A token that dense decoding would not have chosen; `gap`: by how much the logit of its choice is higher."""

    request: int
    framework: str
    position: int
    token: int
    dense_token: int
    gap: float


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns 1 if any token differs, else 0. Raises ValueError, with a one-line message, for invalid input."""
    for name in ("num_requests", "threads"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise AttnError(f"{name}={value} must be at least 1")
    frameworks, texts = _frameworks(args.frameworks), _prompts(args.prompts, args.num_requests)
    config, tokenizer = load_config(args.model), load_tokenizer(args.model)
    prompts = [tokenizer.encode(text).ids for text in texts]
    # A block size of 0 is refused below, by the scheduler, and not by a division here.
    needs = [-(-(len(prompt) + args.max_new_tokens) // max(args.block_size, 1)) for prompt in prompts]
    # A seventh of what all need, so that requests wait and are preempted, but never less than one request needs alone.
    num_blocks = max(*needs, sum(needs) // 7) if args.num_blocks is None else args.num_blocks
    weights = load_weights(args.model, config)
    if not missing("torch"):  # such a small model runs faster on one thread than on several that synchronise
        resolve_obj_by_qualname("torch.set_num_threads")(args.threads)
    with display(Quiet()) if args.json else display(Lines(), sys.stdout, transient=False) as shown:
        shown.say(
            f"{len(prompts)} requests of {min(map(len, prompts))} to {max(map(len, prompts))} tokens need {sum(needs)} "
            f"blocks of {args.block_size} tokens if all run at once; the cache has {num_blocks}."
        )
        served = []
        for framework in frameworks:
            schedulers = [
                # Two: the second serves the warm-up, so that the first one's counts and cached prefixes are those of the timed
                # run.
                scheduler_of(config, num_blocks, args.block_size, token_budget=128, max_num_reqs=16)
                for _ in range(2)
            ]
            # Before the runner: a prompt that cannot be served is refused before a model is loaded.
            requests = [schedulers[0].submit(prompt, args.max_new_tokens) for prompt in prompts]
            began = time.perf_counter()
            runner = load_runner(framework, config, weights, schedulers[0])
            shown.say(f"\n{runner.selection}")
            _warm_up(runner, schedulers[1], prompts[0])
            startup_seconds = time.perf_counter() - began
            served.append(_served(runner, schedulers[0], requests, tokenizer, shown, startup_seconds))
        began = time.perf_counter()
        judge, forward = dense_forward(args.model, config, weights)
        shown.begin(judge, len(prompts))
        divergences = []
        for i in range(len(prompts)):
            divergences += _judged(forward, i, served)
            shown.step(i + 1, "texts compared")
        dense_seconds = time.perf_counter() - began
    # A request that differs under both frameworks is one.
    agreeing = len(prompts) - len({divergence.request for divergence in divergences})
    if args.json:
        figures = {
            "agreeing": agreeing,
            "requests": len(prompts),
            "num_blocks": num_blocks,
            "blocks_needed_at_once": sum(needs),
            "served": [one.figures for one in served],
            "dense": {"by": judge, "seconds": dense_seconds},
            "divergences": [dataclasses.asdict(divergence) for divergence in divergences],
        }
        print(json.dumps(figures))
    else:
        _report(served, judge, dense_seconds, agreeing, tokenizer)
        for divergence in divergences[:1]:
            print(_explained(divergence, judge, tokenizer))
    return int(bool(divergences))


def _frameworks(requested: str | None) -> list[str]:
    if requested is not None:
        names = [name.strip() for name in requested.split(",")]
        # Twice the same framework would be counted as two that agree.
        if not set(names) <= FRAMEWORKS.keys() or len(set(names)) != len(names):
            raise AttnError(f"frameworks={requested!r}: must be some of {', '.join(FRAMEWORKS)}, each once")
        return names
    names = [name for name in FRAMEWORKS if not missing(name)]
    if not names:
        raise AttnError(f"no framework is installed: {pip_install('torch')}, or {pip_install('jax')}")
    return names


def _prompts(path: Path | None, count: int | None) -> list[str]:
    """Return `count` texts to continue, from the lines of a file or the built-in ones."""
    try:
        texts = list(PROMPTS) if path is None else [line for line in path.read_text("utf-8").splitlines() if line]
    except UnicodeDecodeError as error:
        raise AttnError(f"{path}: not a text: {error}") from error
    if not texts:
        raise AttnError(f"{path}: contains no prompts: must have one per line")
    return list(islice(cycle(texts), count or len(texts)))


def _warm_up(runner: ModelRunner, scheduler: Scheduler, prompt: Sequence[int]) -> None:
    """Run a prompt and a decode step and discard the results, so that compilation is not timed."""
    # Two tokens of prompt, even if the shortest prompt has one, then a decode: the two shapes of a step.
    scheduler.submit([*prompt, *prompt][:2], 2)
    for _ in serve(runner, scheduler):
        pass


def _served(
    runner: ModelRunner,
    scheduler: Scheduler,
    requests: list[GenerationRequest],
    tokenizer: "Tokenizer",
    shown: Display,
    startup_seconds: float,
) -> Served:
    streams = [TextStream(tokenizer, request) for request in requests]

    def texts() -> list[str]:
        running = [request.request_id for request in scheduler.running[:_TEXTS]]
        # Only the texts that are shown are decoded, and only when they are drawn (`texts` is called by the display).
        for i in running:
            streams[i].read()
        return [f"{i:>4}: {_one_line(streams[i].text)}" for i in running]

    most_waiting = 0
    shown.begin(runner.framework, sum(request.max_new_tokens for request in requests))
    began = time.perf_counter()
    for _ in serve(runner, scheduler):
        stats, seconds = scheduler.stats, time.perf_counter() - began
        most_waiting = max(most_waiting, len(scheduler.waiting))
        shown.step(
            stats.generated_tokens,
            f"{stats.generated_tokens / seconds:6.0f} tokens/s {len(scheduler.running):>3} running "
            f"{len(scheduler.waiting):>3} waiting {stats.preemptions:>3} preempted",
            # A finished request may have ended before its limit: the total shrinks as such requests end.
            sum(len(r.output) if r.finish_reason else r.max_new_tokens for r in requests),
            texts,
        )
    return Served(runner, requests, scheduler, most_waiting, startup_seconds, time.perf_counter() - began)


def _one_line(text: str) -> str:
    """Return the end of `text`, with white space collapsed."""
    return " ".join(text.split())[-_WIDTH:]


def _judged(forward: Dense, index: int, served: Sequence[Served]) -> list[Divergence]:
    """Return where the texts of one request differ from dense decoding, at most one position per framework."""
    divergences = []
    verdicts: dict[tuple[int, ...], tuple[int, int, float] | None] = {}
    for one in served:
        request = one.requests[index]
        output = tuple(request.output)
        # Frameworks usually agree: the dense pass, which takes longest, is then made once for both.
        if output not in verdicts:
            # The last token was chosen from the logits after the one before it; nothing follows from its own.
            logits = forward(request.tokens[:-1], len(output))
            best = logits.argmax(-1)
            # The first difference only: after it the texts have other contexts.
            wrong = np.flatnonzero(best != output)
            verdicts[output] = None
            if wrong.size:
                step = int(wrong[0])
                verdicts[output] = step, int(best[step]), float(logits[step, best[step]] - logits[step, output[step]])
        if (verdict := verdicts[output]) is not None:
            step, dense_token, gap = verdict
            divergences.append(Divergence(index, one.runner.framework, step, output[step], dense_token, gap))
    return divergences


def _report(served: Sequence[Served], judge: str, dense_seconds: float, agreeing: int, tokenizer: "Tokenizer") -> None:
    """Print the results in words and as a table."""
    requests = served[0].requests
    print(folded("\n".join(["", header(_COLUMNS), *(line(cells(one.figures, _COLUMNS), _COLUMNS) for one in served), ""])))
    events: dict[str, list[str]] = {}
    for one in served:
        f = one.figures
        text = (
            f"at most {f['most_waiting']} requests waited at once; {f['preemptions']} preemptions; "
            f"at most {f['peak_blocks']} of {one.scheduler.pool.num_blocks} blocks in use\n"
            f"  tokens found in shared blocks: {f['prefix_hit_tokens']} of prompts, {f['recovered_tokens']} after preemptions"
        )
        events.setdefault(text, []).append(f["framework"])
    for text, frameworks in events.items():
        print(folded(f"{' and '.join(frameworks)}: {text}"))
    tokens = sum(len(request.output) for request in requests)
    print(folded(f"{judge}: {tokens} tokens compared with {len(requests)} dense passes without a cache, {dense_seconds:.1f} s"))
    print("\nsome of the texts (prompt -> generated):")
    varied = sorted(requests, key=lambda request: -len(set(request.output)))[:_TEXTS]  # a small model repeats itself
    for request in varied:
        prompt, text = (_one_line(tokenizer.decode(part)) for part in (request.prompt[-40:], request.output))
        print(folded(f"{request.request_id:>4}: ...{prompt[-_WIDTH // 2 :]} -> {text[: _WIDTH // 2]}"))
    names = " = ".join([*(one.runner.framework for one in served), judge])
    equal = f"{names}: {agreeing} of {len(requests)} texts are equal, token by token"
    print()
    print(coloured(equal, agreeing == len(requests), sys.stdout))


def _explained(divergence: Divergence, judge: str, tokenizer: "Tokenizer") -> str:
    d = divergence
    token, dense_token = (f"{i} {tokenizer.decode([i])!r}" for i in (d.token, d.dense_token))
    return (
        f"request {d.request}, generated token {d.position}: {d.framework} chose {token}, {judge} {dense_token}, "
        f"whose logit is higher by {d.gap:.3g}"
    )
