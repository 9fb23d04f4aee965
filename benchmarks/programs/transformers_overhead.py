"""What a layer's call costs the host beside its kernel in transformers: sdpa's function and "attn", with empty kernels.

    python -m benchmarks.programs.transformers_overhead                 # microseconds per call and layer, on this host
    python -m benchmarks.programs.transformers_overhead --rounds 100    # smaller variation
    python -m benchmarks.programs.transformers_overhead --json FILE     # also write the rows
    python -m benchmarks.programs.transformers_overhead --in-model llama --shapes 1x512 16x2048

Each kernel is replaced by a function that returns an output made before, so a difference is the interface's own work: the
decision, checks, views. The functions are called as a model calls them, in turns; the figure is the fastest of the rounds.
"dispatched" is PyTorch's smallest operation on the query, which shows how fast the host is.

`--in-model` times the functions within `generate` instead, with kernels, on a CUDA device if there is one, where nothing waits
for it: the calls of a prompt, of a token's first layer and of its others (microseconds a layer), and a token's masks. The
model's own code evicts them from the caches, so they take a multiple of what they take in a loop. A figure is the first
quartile of the tokens, of a prompt the median of its layers; the least of the rounds, in turns.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import AttentionInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attn.integrations import transformers as integration
from attn.torch.backends._ragged import RaggedAttentionImpl
from benchmarks.programs.transformers_models import DEVICE, MODELS, model_of

HEADS, KV_HEADS, SIZE, KEYS, WINDOW = 32, 8, 64, 512, 256
CALLS = 100  #: in one round
#: Name, rows, options of a layer's call, and whether sdpa's function can compute it.
KINDS: tuple[tuple[str, int, dict[str, Any], bool], ...] = (
    ("decode", 1, {}, True),
    ("prompt", KEYS, {}, True),
    ("decode, window", 1, {"sliding_window": WINDOW}, True),
    ("decode, window of all keys", 1, {"sliding_window": KEYS}, True),
    ("decode, cap", 1, {"softcap": 50.0}, False),
    ("decode, sinks", 1, {"s_aux": torch.zeros(HEADS)}, False),
)
NAMES = ("sdpa", "attn", "attn:TORCH_SDPA")
IN_MODEL = ("sdpa", "attn")


@contextlib.contextmanager
def without_kernels(rows: int) -> Iterator[None]:
    """Replace every kernel by one that returns an output made before."""
    turned = torch.zeros(1, rows, HEADS, SIZE)  # as kernels lay it out
    out = turned.transpose(1, 2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", lambda *a, **k: out))
        for cls in {RaggedAttentionImpl, *_below(RaggedAttentionImpl)}:
            if "attend_keys" in vars(cls):
                stack.enter_context(mock.patch.object(cls, "attend_keys", lambda *a, **k: turned))
        yield


def _below(cls: type) -> Iterator[type]:
    for below in cls.__subclasses__():
        yield below
        yield from _below(below)


def called(name: str, rows: int, options: dict[str, Any]) -> Callable[[], Any]:
    """Return a call of a layer as a model makes it, with the mask that its step has."""
    module = SimpleNamespace(is_causal=True, layer_idx=0, num_key_value_groups=HEADS // KV_HEADS, training=False)
    layer = _Module(module)
    query = torch.zeros(1, rows, HEADS, SIZE).transpose(1, 2)
    key, value = torch.zeros(1, KV_HEADS, KEYS, SIZE), torch.zeros(1, KV_HEADS, KEYS, SIZE)
    window = options.get("sliding_window")
    made = None
    if name != "sdpa":
        function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        made = integration.mask(1, rows, KEYS, KEYS - rows, mask_function=function)
    elif window is not None:
        made = torch.ones(1, 1, rows, KEYS, dtype=torch.bool)
    function = AttentionInterface()[name]

    def call() -> Any:
        return function(layer, query, key, value, made, dropout=0.0, scaling=SIZE**-0.5, **options)

    return call


class _Module(torch.nn.Module):
    def __init__(self, attributes: SimpleNamespace) -> None:
        super().__init__()
        vars(self).update(vars(attributes))


def measured(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each kind of call: microseconds of each function."""
    rows_out = []
    for kind, rows, options, sdpa_can in KINDS:
        names = [name for name in NAMES if name != "sdpa" or sdpa_can]
        calls = {name: called(name, rows, options) for name in names}
        query = torch.zeros(1, HEADS, rows, SIZE)
        calls["dispatched"] = lambda query=query: query.detach()
        best = dict.fromkeys(calls, float("inf"))
        with torch.no_grad(), without_kernels(rows):
            for _ in range(rounds):
                for name, call in calls.items():
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        call()
                    best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
        rows_out.append({"kind": kind, **{name: round(best[name], 1) for name in best}})
    return rows_out


@contextlib.contextmanager
def timed(interface: Any, name: str, took: list[float]) -> Iterator[None]:
    """Add the microseconds of each call of an interface's function to `took`."""
    function = interface[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        before = time.perf_counter_ns()
        out = function(*args, **kwargs)
        took.append((time.perf_counter_ns() - before) / 1e3)
        return out

    interface[name] = call
    try:
        yield
    finally:
        del interface[name]


def in_model(kind: str, shape: str, rounds: int, tokens: int = 24) -> list[dict[str, Any]]:
    """Return a row for each kind of call in `generate` of a model of `transformers_models`."""
    model = model_of(kind, torch.bfloat16 if DEVICE == "cuda" else torch.float32)[0]
    batch, prompt = map(int, shape.split("x"))
    ids = torch.randint(2, model.config.vocab_size, (batch, prompt), device=DEVICE)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    given |= {"min_new_tokens": tokens + 1, "max_new_tokens": tokens + 1}
    layers, best = model.config.num_hidden_layers, dict[str, dict[str, float]]()
    for turn in range(rounds + 1):
        for name in IN_MODEL:
            calls, masks = list[float](), list[float]()
            model.set_attn_implementation(name)
            with timed(ALL_ATTENTION_FUNCTIONS, name, calls), timed(ALL_MASK_ATTENTION_FUNCTIONS, name, masks):
                model.generate(**given)
            steps = [calls[at : at + layers] for at in range(layers, len(calls), layers)]
            a_step = len(masks) // (len(steps) + 1)
            found = {
                "prompt, a layer": statistics.median(calls[:layers]),
                "token, first layer": quartile([step[0] for step in steps]),
                "token, other layers": quartile([sum(step[1:]) / (layers - 1) for step in steps]),
                "token, masks": quartile([sum(masks[at : at + a_step]) for at in range(a_step, len(masks), a_step)]),
            }
            for what, us in found.items() if turn else ():  # the first round compiles, and meets the lengths
                of = best.setdefault(what, {})
                of[name] = min(us, of.get(name, us))
    return [{"kind": f"{kind} {shape}: {what}", **{name: round(us, 1) for name, us in of.items()}} for what, of in best.items()]


def quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="rounds; the fastest counts (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE too")
    parser.add_argument("--in-model", nargs="+", choices=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--shapes", nargs="+", default=["1x512"], help="BATCHxPROMPT in a model (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.rounds < 1:
        parser.error(f"--rounds is {chosen.rounds}: must be at least 1")
    integration.register()
    if chosen.in_model:
        shapes = [(kind, shape) for kind in chosen.in_model for shape in chosen.shapes]
        names, rows = IN_MODEL, [row for kind, shape in shapes for row in in_model(kind, shape, chosen.rounds)]
    else:
        names, rows = (*NAMES, "dispatched"), measured(chosen.rounds)
    print("| call | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for row in rows:
        print(f"| {row['kind']} | " + " | ".join(str(row.get(name, "")) for name in names) + " |")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
