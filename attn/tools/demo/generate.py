"""`attn generate`: continue prompts with a checkpoint, in one continuous batch, printing text as it is generated.

Texts are printed in the order of the prompts: the first unfinished one token by token, later ones when their turn comes. Text
goes to stdout, information about it to stderr.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from attn.selection.platforms import default_framework
from attn.tools.demo.checkpoint import load_config, load_tokenizer, load_weights
from attn.tools.demo.engine import DTYPES, FRAMEWORKS, SHIPPED_MODEL, TextStream, load_runner, sampler, scheduler_of, serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to continue")
    parser.add_argument(
        "--model", type=Path, default=SHIPPED_MODEL, metavar="DIR", help="checkpoint (default: the built-in one)"
    )
    parser.add_argument("--framework", choices=list(FRAMEWORKS), help="(default: the installed one)")
    parser.add_argument("--backend", metavar="NAME", help="attention backend: used or rejected (default: selected)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights and the cache (default: float32)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="new tokens per prompt (default: 64)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per cache block (default: 16)")
    parser.add_argument("--num-blocks", type=int, metavar="N", help="blocks in the cache (default: as many as needed)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument("--json", action="store_true", help="print only one JSON object, at the end")
    parser.add_argument("--verbose", action="store_true", help="also print why the attention backend was chosen")


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises ValueError, with a one-line message, for invalid input."""
    # First of all, since a wrong temperature needs no model.
    choose = sampler(args.temperature, args.seed)
    framework = args.framework or default_framework()
    config, tokenizer = load_config(args.model), load_tokenizer(args.model)
    prompts = [tokenizer.encode(text).ids for text in args.prompts]
    if args.num_blocks is None:
        # As many blocks as all requests need at once, so that none waits.
        longest = (min(len(prompt) + args.max_new_tokens, config.max_position_embeddings) for prompt in prompts)
        args.num_blocks = sum(-(-max(length, 1) // max(args.block_size, 1)) for length in longest)
    scheduler = scheduler_of(config, args.num_blocks, args.block_size, max_num_reqs=min(64, len(prompts)))
    requests = [scheduler.submit(prompt, args.max_new_tokens) for prompt in prompts]
    # After the requests, so that a prompt that is too long is refused before weights are read.
    runner = load_runner(framework, config, load_weights(args.model, config), scheduler, dtype=args.dtype, backend=args.backend)
    if args.verbose and not args.json:
        print(runner.selection, file=sys.stderr)

    streams = [TextStream(tokenizer, request) for request in requests]
    pages = _Pages(args.prompts, streams)
    began = time.perf_counter()
    for _ in serve(runner, scheduler, choose):
        if not args.json:
            pages.print_new()
    seconds = time.perf_counter() - began
    stats, selection = scheduler.stats, runner.selection
    speed = stats.generated_tokens / seconds
    if args.json:
        figures = {
            "framework": framework,
            "selection": selection.to_dict(),
            "seconds": seconds,
            "tokens_per_second": speed,
            "stats": dataclasses.asdict(stats),
            "results": [
                {"prompt": text, "text": stream.read(), "tokens": request.output, "finish_reason": request.finish_reason}
                for text, stream, request in zip(args.prompts, streams, requests, strict=True)
            ],
        }
        print(json.dumps(figures))
    else:
        figure = f"{stats.generated_tokens} tokens in {seconds:.2f} s, {speed:.1f} tokens/s"
        print(f"{figure} ({selection.name} on {selection.device})", file=sys.stderr)
    return 0


class _Pages:
    """Prints prompts and their texts to stdout, one after another."""

    def __init__(self, prompts: Sequence[str], streams: Sequence[TextStream]) -> None:
        self._left = deque(zip(prompts, streams, strict=True))
        self._opened = False

    def print_new(self) -> None:
        """Print the new part of the first unfinished text, and all texts that finished before it."""
        while self._left:
            prompt, stream = self._left[0]
            sys.stdout.write(("" if self._opened else prompt) + stream.read())
            # The prompt is printed once, before the first part of its text.
            self._opened = not stream.finished
            if self._opened:
                break
            self._left.popleft()
            sys.stdout.write("\n\n" if self._left else "\n")
        sys.stdout.flush()
