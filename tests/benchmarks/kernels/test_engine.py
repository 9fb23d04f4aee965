"""The benchmark of the bulk tensor engine's copies compiles for sm_90, with and without heads as one dimension. 10 s."""

from pathlib import Path

from tests.compilers import needs_triton, output

SCRIPT = """
from benchmarks.kernels import engine
engine.CASES = [engine.Case(40, 8, 16, "heads"), engine.Case(40, 8, 16, "flat"), engine.Case(72, 4, 64, "aligned")]
engine.compile_for_sm_90()
"""


@needs_triton
def test_it_compiles(tmp_path: Path) -> None:
    lines = output(SCRIPT, tmp_path).splitlines()
    assert len(lines) == 3 and all(" bytes, " in line for line in lines), lines
