"""Time generation with transformers' models: its own implementations of attention beside `attn`, in one table.

    python -m benchmarks.programs.transformers_generate                                    # every row; for a large GPU
    python -m benchmarks.programs.transformers_generate --models llama --batches 1 2 --prompts 512 --caches dynamic
    python -m benchmarks.programs.transformers_generate --rows gemma2:16x2048:dynamic llama:64x1024:paged
    python -m benchmarks.programs.transformers_generate --rows llama:1x512:compiled --implementations sdpa attn --profile 12

A row is a model, a batch of prompts of one length, and a cache: dynamic; static; compiled, a static cache with `generate`'s
`torch.compile`; paged, `generate_batch` with prompts of mixed lengths up to the given one. Models have random weights: about a
billion on a CUDA device, few on a CPU. A row's lines:

* prefill ms: `generate` of one token, greedy, the device synchronised before and after;
* ms per token: (`generate` of N + 1 tokens less that of one) / N; with a compiled cache, whose first step in each `generate` is
  recorded as a CUDA graph again, less that of 4, / (N - 3);
* tokens per s: new tokens of `generate_batch`, which also makes its cache, and CUDA graphs where transformers uses them;
* kept tokens per s: the same with `persistent_manager=True`, which keeps both from a call before, as a server does;
* first call ms: lengths that nothing has met before, slightly longer than the row's, so that plans and compilations count: a
  prompt and 4 tokens; with a compiled cache, the row's lengths and N + 1 tokens; the whole `generate_batch`.

Each repetition runs every implementation, and begins with another one than the last; the fastest counts. The ratio is the best
peer's time by that of `attn` (of rates the inverse): from 1.00 on `attn` is not slower.

`--profile N` adds, for each implementation, the kernels of a prompt and of a token under torch's profiler (on a CPU operators),
their time and the N that take most. Profiled calls take longer, and are not those that are timed.

Outputs are compared with those of transformers' default, or of the first peer that can: logits of each step while the tokens so
far are the same, relative to their deviation; of `generate_batch`, how far the default's logit of each token is below its
largest. A time whose difference is above `LIMITS` has a footnote, is no best peer and has no ratio.

An implementation that refuses, fails or finds the budget used up is a footnote, below the first row that has it; the exit code
is 1 if `attn` has one. Set HF_HUB_OFFLINE=1 where transformers would look for kernels online. Lines are printed, and `--json`
is written, after each row.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import math
import operator
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._inductor.utils import fresh_inductor_cache as fresh_cache

from attn.integrations import transformers as attn_transformers
from benchmarks.programs.transformers_models import DEVICE, MODELS, clock, config_of, model_of, using
from benchmarks.programs.transformers_table import OURS, PAGED, SHORTEST, Cell, Row, header, lines, profile, shown

#: The largest difference of logits, relative to their deviation: layers and experts amplify roundings.
LIMITS = {"float32": 1e-2, "bfloat16": 0.2}
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "compiled": {"cache_implementation": "static"},
}
NAMES = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention", OURS)
FIRST = 4  #: tokens of a first call
NEW, JUDGED = 64, 16  #: tokens of each request of `generate_batch`, and the number of requests whose tokens are judged


class Generation:
    """`generate` with prompts of one length."""

    def __init__(self, model: Any, row: Row, tokens: int, num_names: int) -> None:
        self.model, self.row, self.tokens, self.num_names = model, row, tokens, num_names
        self.options = dict(CACHES[row.cache])
        if row.cache == "compiled":
            torch._dynamo.reset()
            torch.compile(lambda x: x + 1)(torch.ones(8, device=DEVICE))  # loads the compiler, before the first call is timed
            if DEVICE == "cpu":  # where it compiles on request only
                self.options["compile_config"] = transformers.CompileConfig()
                self.options["compile_config"]._compile_all_devices = True

    def generate(self, prompt: int, tokens: int, **more: Any) -> tuple[float, Any]:
        torch.manual_seed(prompt)
        ids = torch.randint(2, self.model.config.vocab_size, (self.row.batch, prompt), device=DEVICE)
        # a static cache is as long as the longest one before: of compiled steps each, so that all are the same program
        self.model._previous_max_cache_length = prompt + self.tokens + 1 if self.row.cache == "compiled" else -1
        options: dict[str, Any] = self.options | {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens} | more
        mask, before = torch.ones_like(ids), clock()
        out = self.model.generate(input_ids=ids, attention_mask=mask, **options)
        return clock() - before, out

    def first(self, place: int) -> float:
        if self.row.cache == "compiled":
            with fresh_cache(delete=False):  # which implementations would share
                return self.generate(self.row.prompt, self.tokens + 1)[0]
        place += list(CACHES).index(self.row.cache) * self.num_names
        return self.generate(self.row.prompt + self.tokens + 2 + place * (FIRST + 1), FIRST)[0]

    def outcome(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new tokens [B, N + 1] and their logits [B, N + 1, V]."""
        out = self.generate(self.row.prompt, self.tokens + 1, return_dict_in_generate=True, output_logits=True)[1]
        return out.sequences[:, self.row.prompt :], torch.stack(out.logits, 1).float()

    def compare(self, outcome: Any, reference: Any) -> tuple[float | None, float | None]:
        """Return the largest difference, and the share of tokens before the first that differs in each request."""
        if reference is None:
            return None, None
        (tokens, logits), (wanted, expected) = outcome, reference
        same = (tokens == wanted).cumprod(1)
        known = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1).bool()
        error = (logits - expected).abs().amax(-1)[known].max() / expected.std()
        return float(error), float(same.float().mean())

    def times(self) -> dict[str, float]:
        return {str(tokens): self.generate(self.row.prompt, tokens)[0] for tokens in dict.fromkeys((1, *self.between()))}

    def figures(self, best: dict[str, float]) -> dict[str, float]:
        few, more = self.between()
        return {"prefill ms": best["1"], "ms per token": (best[str(more)] - best[str(few)]) / (more - few)}

    def kernels(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Return number and microseconds of each kernel of a prompt and of a token."""
        few, more = self.between()
        found = {tokens: self._profiled(tokens) for tokens in {1, few, more}}
        steps = more - few
        token = {}
        for name, (number, us) in found[more].items():
            number_before, us_before = found[few].get(name, (0, 0.0))
            if number > number_before:
                token[name] = (number - number_before) / steps, (us - us_before) / steps
        return {"prompt": found[1], "token": token}

    def _profiled(self, tokens: int) -> dict[str, tuple[float, float]]:
        activity = getattr(torch.profiler.ProfilerActivity, DEVICE.upper())
        with torch.profiler.profile(activities=[activity]) as profile:
            self.generate(self.row.prompt, tokens)
        time_of = operator.attrgetter("self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total")
        return {event.key: (event.count, time_of(event)) for event in profile.key_averages() if time_of(event)}

    def between(self) -> tuple[int, int]:
        """Return numbers of new tokens whose times differ by steps alone."""
        return min(FIRST, self.tokens) if self.row.cache == "compiled" else 1, self.tokens + 1


class Batching:
    """`generate_batch` with prompts of mixed lengths."""

    def __init__(self, model: Any, row: Row, default: str, memory: float | None) -> None:
        self.model, self.row, self.default = model, row, default
        self.config = transformers.ContinuousBatchingConfig(max_memory_percent=memory)
        if DEVICE == "cpu":  # where it would take most of the memory
            self.config.num_blocks, self.config.max_batch_tokens = row.batch * ((row.prompt + NEW) // 256 + 2), 2048
        if hasattr(self.config, "auto_switch_to_flash"):
            self.config.auto_switch_to_flash = False

    def prompts(self, seed: int) -> list[list[int]]:
        chosen = random.Random(seed)
        lengths = [int(math.exp(chosen.uniform(math.log(SHORTEST), math.log(self.row.prompt)))) for _ in range(self.row.batch)]
        return [[chosen.randrange(2, self.model.config.vocab_size) for _ in range(length)] for length in lengths]

    def generate(self, seed: int, **manager: bool) -> tuple[float, list[list[int]]]:
        greedy = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
        prompts, before = self.prompts(seed), clock()
        options = {"generation_config": greedy, "continuous_batching_config": self.config, **manager}
        answers = self.model.generate_batch(prompts, **options)
        took = clock() - before
        errors = [answer.error for answer in answers.values() if answer.error is not None]
        by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in answers.values()}
        found = [by_prompt.get(tuple(prompt), []) for prompt in prompts]
        if errors or any(len(tokens) != NEW for tokens in found):
            raise RuntimeError(errors[0] if errors else f"{sum(map(len, found))} tokens instead of {NEW * len(prompts)}")
        return took, found

    def first(self, place: int) -> float:
        return self.generate(place + 1)[0]

    def outcome(self) -> list[list[int]]:
        return self.generate(0)[1]

    @torch.no_grad()
    def compare(self, outcome: Any, reference: Any) -> tuple[float, float]:
        """Return how far the default's logits of the tokens are below the largest ones, and the share that are the largest."""
        below, largest = [], []
        with using(self.model, self.default, "dynamic"):
            for prompt, tokens in list(zip(self.prompts(0), outcome, strict=True))[:JUDGED]:
                ids = torch.tensor([prompt + tokens], device=DEVICE)
                logits = self.model(input_ids=ids, logits_to_keep=NEW + 1).logits[0, :-1].float()
                gap = logits.amax(1) - logits.gather(1, ids[0, -NEW:, None])[:, 0]
                below.append(float(gap.max() / logits.std()))
                largest.append(float((gap == 0).float().mean()))
        return max(below), sum(largest) / len(largest)

    def times(self) -> dict[str, float]:
        whole = self.generate(0)[0]
        try:
            self.generate(0, persistent_manager=True)
            return {"all": whole, "kept": self.generate(0, persistent_manager=True)[0]}
        finally:  # the next implementation makes its own
            self.model.destroy_cached_continuous_batching_manager()
            release()

    def figures(self, best: dict[str, float]) -> dict[str, float]:
        tokens = 1e3 * self.row.batch * NEW
        return {"tokens per s": tokens / best["all"], "kept tokens per s": tokens / best["kept"]}


def measure(row: Row, names: list[str], options: argparse.Namespace, until: float) -> dict[str, Cell]:
    """Return a row's cells by name. Nothing starts after `until`; an implementation without figures by then has a note."""
    model, default = model_of(row.model, getattr(torch, options.dtype))
    order = sorted(names, key=lambda name: (name.startswith(OURS), name != default))  # the reference comes first
    paged, lengths = row.cache == PAGED, (options.tokens, len(order))
    work = Batching(model, row, default, options.memory_percent) if paged else Generation(model, row, *lengths)
    cells, first, reference = {name: Cell() for name in names}, {}, None
    best: dict[str, dict[str, float]] = {name: {} for name in names}

    def tried(name: str, call: Callable[[], Any]) -> Any:
        """Return what a call returns, or None once this implementation has failed."""
        if not cells[name].note:
            with cells[name].noting(), using(model, name, row.cache):
                if time.monotonic() >= until and not best[name]:
                    raise TimeoutError(spent(options))
                return call()
            release()

    for place, name in enumerate(order):
        first[name] = tried(name, functools.partial(work.first, place))
    for name in order:
        outcome = tried(name, work.outcome)
        reference = outcome if reference is None and not name.startswith(OURS) else reference
        with cells[name].noting():
            if outcome is not None:
                cells[name].difference, cells[name].equal = work.compare(outcome, reference)
    del outcome, reference
    for turn in range(options.repeats):
        for name in order:
            if turn == 0 or time.monotonic() < until:
                for what, ms in (tried(name, work.times) or {}).items():
                    best[name][what] = min(ms, best[name].get(what, ms))
        order.append(order.pop(0))
    for name in (name for name in names if not cells[name].note):
        cells[name].figures = work.figures(best[name]) | {"first call ms": first[name]}
        cells[name].judge(LIMITS[options.dtype])
        if options.profile and isinstance(work, Generation):
            cells[name].kernels = tried(name, work.kernels) or {}
    release()
    return cells


def release() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def spent(options: argparse.Namespace) -> str:
    return f"the budget of {options.budget:g} s is used up"


def why_not(row: Row, options: argparse.Namespace, memory: int, until: float) -> str:
    """Return why a row is left out, or nothing: the budget, or what its keys, values, logits and activations need at least."""
    if time.monotonic() >= until:
        return spent(options)
    config, size = config_of(row.model), getattr(torch, options.dtype).itemsize
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    cache = keys * (row.prompt + options.tokens + 1)
    activations = row.prompt * (3 * config.intermediate_size + 4 * config.hidden_size) * size
    needed = row.batch * (cache + activations + config.vocab_size * (options.tokens + 1) * 4)
    if row.cache != PAGED and needed > memory:
        return f"needs {needed / 2**30:.0f} GiB of {memory / 2**30:.0f}"
    return ""


def warm_up() -> int:
    """Let a GPU reach its clocks. Returns the bytes of memory that the device has."""
    if DEVICE == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    x, end = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16), time.monotonic() + 2
    while time.monotonic() < end:
        x @ x
        torch.cuda.synchronize()
    return torch.cuda.get_device_properties(0).total_memory


def rows_of(options: argparse.Namespace) -> list[Row]:
    if options.rows:
        return list(options.rows)
    shapes = list(itertools.product(options.batches, options.prompts, options.caches))
    paged = [(options.batching, 1024, PAGED)] if options.batching else []
    return [Row(model, *shape) for model in options.models for shape in (*shapes, *paged)]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 2048, 16384], help="tokens of the prompts")
    parser.add_argument("--caches", nargs="*", choices=CACHES, default=list(CACHES))
    parser.add_argument("--batching", type=int, default=64, help="prompts of generate_batch; 0 leaves it out")
    parser.add_argument("--rows", nargs="+", type=Row.parse, help="these rows instead, as MODEL:BATCHxPROMPT:CACHE")
    parser.add_argument("--implementations", nargs="+", default=list(NAMES), help="of transformers, attn, attn:<BACKEND>")
    parser.add_argument("--tokens", type=int, default=32, help="N, the tokens whose times are averaged")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=LIMITS, default="bfloat16" if DEVICE == "cuda" else "float32")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which nothing is started")
    parser.add_argument("--memory-percent", type=float, help="share of free memory for the cache of generate_batch, 0 to 1")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="list the N kernels that take most time")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    for row in options.rows or ():
        if row.model not in MODELS or row.cache not in (*CACHES, PAGED):
            parser.error(f"--rows {row}: models are {', '.join(MODELS)}; caches are {', '.join((*CACHES, PAGED))}")
    known = {*NAMES, *attn_transformers.register()}
    if unknown := [name for name in options.implementations if name not in known]:
        parser.error(f"--implementations {' '.join(unknown)}: known are {', '.join(sorted(known))}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    until = time.monotonic() + options.budget
    transformers.logging.set_verbosity_error()
    memory, names = warm_up(), options.implementations
    footnotes: list[str] = []
    on = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    run_of: dict[str, Any] = {"device": on, "torch": torch.__version__, "transformers": transformers.__version__}
    run_of |= {"dtype": options.dtype, "tokens": options.tokens, "repeats": options.repeats}
    print(", ".join(f"{name} {value}" for name, value in run_of.items()) + f"\n\n{header(names)}", flush=True)
    run_of |= {"command": " ".join(sys.argv), "rows": [], "left_out": {}, "kernels": []}
    for row in rows_of(options):
        if reason := why_not(row, options, memory, until):
            run_of["left_out"][str(row)] = reason
            print(f"| {row} | left out: {reason} |", flush=True)
        else:
            whole, cells = Cell(), {}
            # implementations and lengths have a compilation each
            with whole.noting(), contextlib.redirect_stdout(sys.stderr), torch._dynamo.config.patch(recompile_limit=64):
                cells = measure(row, names, options, until)
            cells = cells or {name: whole for name in names}
            for line in lines(row, cells):
                run_of["rows"].append(line)
                known = len(footnotes)
                print(shown(line, names, footnotes), flush=True)
                for number, note in list(enumerate(footnotes, 1))[known:]:
                    print(f"| [{number}] {note} |", flush=True)
            for name, cell in cells.items():
                for what, kernels in cell.kernels.items():
                    run_of["kernels"].append({"row": str(row), "name": name, "what": what, "kernels": kernels})
                    print(profile(f"{row} {name}, {what}", kernels, options.profile), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(run_of, indent=1) + "\n", encoding="utf-8")
    return int(any(OURS in line["notes"] for line in run_of["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
