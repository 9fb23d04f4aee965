"""Benchmarks (`attn bench`): batches in the grammar of vLLM's benchmarks, each timed configuration checked in the same run.

A row holds the time of a call (of a replayed graph or a compiled program if there is one, with caches flushed before each
call), its host time, and two rates, as fractions of the rates that a copy and a matrix product reach on the same device in the
same run. The bytes counted are those that must move: visible keys and values, queries and outputs, once each. The operations
are 4 H D per visible pair of query and key. The call of a latent (MLA) layer includes the cache write and the up-projection;
counted are the bytes and operations of its attention only (`nbytes`, `flops`).

With peers, every backend that serves a case and every other available kernel is timed in one run, the selector's choice is
marked, and a verdict says whether another kernel would have been faster. `attn tune` saves such times for the selector.
"""

from attn.selection.preferences import MARGIN
from attn.tools.bench.case import (
    CPU_SUITE,
    LIMITS,
    MLA_CPU_SUITE,
    MLA_SUITE,
    SUITE,
    BenchCase,
    Timing,
    flops,
    grammar,
    nbytes,
    parse,
)
from attn.tools.bench.judge import BenchVerdict, Change, compare, judge, ranking, verdicts
from attn.tools.bench.roofline import chart
from attn.tools.bench.rows import Bench, BenchReport, BenchRow, Entry, Refusal, entrants, measured, open_bench, plan

__all__ = [
    "CPU_SUITE",
    "LIMITS",
    "MARGIN",
    "MLA_CPU_SUITE",
    "MLA_SUITE",
    "SUITE",
    "Bench",
    "BenchCase",
    "Change",
    "Entry",
    "Refusal",
    "BenchReport",
    "BenchRow",
    "Timing",
    "BenchVerdict",
    "chart",
    "compare",
    "entrants",
    "flops",
    "grammar",
    "judge",
    "measured",
    "nbytes",
    "open_bench",
    "parse",
    "plan",
    "ranking",
    "verdicts",
]
