"""benchmarks/host.py runs: launches are repeated without a GPU, batches and adapters are timed, operators are counted."""

from pathlib import Path

from tests.torch.kernels.test_direct import assert_equal, needs_compiler

SCRIPT = """
import contextlib, io
from unittest import mock
import torch
from attn.kernels import hopper
from benchmarks import host

host.REPEATS, host.NUMBER, host.BUILT = 1, 1, ((3, 300, False), (3, 300, True))
said = io.StringIO()
with host.without_kernels() as seen, torch.no_grad():
    for lens, launches in (
        ([1, 1], "attention merge"), ([1, 300], "write attention merge"), ([1, 3000], "write prefill attention merge"),
        ([300, 40], "write prefill"),
    ):
        calls = host.calls_of("TRITON_ATTN", "auto", lens)
        calls.first()
        calls.again()
        seen.clear()
        calls.again()
        assert seen == launches.split(), seen
    for call in ((64, 64), (64, 32), (20, 300), (64, 64, [64, 50]), (20, 300, [0, 50])):
        calls = host.dense_calls(*call)
        for one in calls:
            seen.clear()
            one()
            assert seen == ["prefill"], (call, seen)
    assert host.dense_calls(1, 300, [300, 50]).again().shape == (2, 1, 2, 64) and seen[-1] == "_decode"
    with mock.patch.object(hopper, "is_on", lambda kernel: False):  # no launch of decodes either, which would find none
        for call in ((64, 32), (20, 300), (64, 64, [64, 50])):
            calls = host.dense_calls(*call)
            seen.clear()
            calls.again()
            assert seen == ["attention"], (call, seen)
    impl = host.AttentionBackendEnum["TRITON_ATTN"].get_class().get_impl_cls()(2, 64, 0.1, 2)
    query, key = (torch.ones(2, n, 2, 64, dtype=torch.bfloat16) for n in (20, 300))
    seen.clear()
    impl.attend_keys(query, key, key, True)
    assert seen == ["attention"], seen
    host.BATCHES = {"3 decodes": [1, 1, 1]}
    with contextlib.redirect_stdout(counted := io.StringIO()):
        host.counts(seen)
queries = "1 attention, 1 merge, 1 _cuda_getDevice, 1 _cuda_getCurrentRawStream, 1 is_current_stream_capturing"
row = next(row.split() for row in counted.getvalue().splitlines() if row.startswith("TRITON_ATTN, auto, 3"))
assert row[4:6] == ["1", "1"] and " ".join(row[8:]) == queries, row
with contextlib.redirect_stdout(said):
    host.builds(torch.device("meta"))
    host.adapters()
rows = said.getvalue().splitlines()
assert len(rows) == 3 + 5 and all(float(row.split()[-1]) > 0 for row in rows[3:]), rows
print("equal")
"""


@needs_compiler
def test_the_benchmark_of_the_host_runs(tmp_path: Path) -> None:
    assert_equal(SCRIPT, tmp_path)
