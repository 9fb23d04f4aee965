"""How fast a backend is: batches in vLLM's grammar, each timed configuration checked in the same run (`attn bench`).

A row tells the time of a call (of a replayed graph or a compiled program where there is one, caches flushed before each),
what it costs the host, and two rates, as shares of what a copy and a matrix product reach on the same device in the same
run. The bytes counted are those that must move: the keys and values that are seen, queries and outputs, once. The operations
are 4 H D for each pair of a query and a key that it sees. A latent (MLA) layer's call is the layer's own, write and
up-projection included; counted are its attention's bytes and operations alone (`nbytes`, `flops`).

With peers, every backend that serves a case and every other kernel at hand attends it in one run, what the selector takes
is marked, and a verdict says whether something else would have been faster. `attn tune` keeps such verdicts for the selector.
"""

from attn.bench.case import CPU_SUITE, LIMITS, MLA_CPU_SUITE, MLA_SUITE, SUITE, Case, Timing, flops, grammar, nbytes, parse
from attn.bench.judge import Change, Verdict, compare, judge, ranking, verdicts
from attn.bench.roofline import chart
from attn.bench.rows import Bench, Entry, Refusal, Report, Row, entrants, measured, open_bench, plan
from attn.preferences import MARGIN

__all__ = [
    "CPU_SUITE",
    "LIMITS",
    "MARGIN",
    "MLA_CPU_SUITE",
    "MLA_SUITE",
    "SUITE",
    "Bench",
    "Case",
    "Change",
    "Entry",
    "Refusal",
    "Report",
    "Row",
    "Timing",
    "Verdict",
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
