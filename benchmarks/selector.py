"""The cost of a selection: importing the library, repeating a selection, and checking a batch.

A layer selects once, but an engine may select at every step. Figures are medians of processor time in one process, without
device work.
"""

import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

from attn.backends.metadata import CommonAttentionMetadata
from attn.selector import get_attn_backend

REPEATS = 9


def import_milliseconds() -> float:
    """Return the time of `import attn` beyond a bare interpreter's start, measured in new processes."""
    code = "import time; t = time.process_time(); import attn; print((time.process_time() - t) * 1e3)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(REPEATS)]
    return statistics.median(float(run.stdout) for run in runs)


def microseconds(call: Callable[[], Any], number: int) -> float:
    """Return the time of one warm call."""
    call()
    return statistics.median(timeit.repeat(call, timer=time.process_time, number=number, repeat=REPEATS)) / number * 1e6


def main() -> None:
    print(f"{'import attn':<44} {import_milliseconds():8.2f} ms")
    dtypes: dict[str, Any] = {"string dtype": "bfloat16"}
    try:
        import torch
    except ImportError:
        print("torch is not installed: string dtype only")
    else:
        dtypes = {"torch dtype": torch.bfloat16, **dtypes}
    rows: dict[str, tuple[Callable[[], Any], int]] = {
        f"get_attn_backend, warm, {name}": (lambda d=dtype: get_attn_backend(128, d, "auto", 16, False), 20_000)
        for name, dtype in dtypes.items()
    }
    for requests in (1, 256):
        batch = CommonAttentionMetadata.from_lens([1] * requests, [9] * requests, [[r] for r in range(requests)], 16)
        rows[f"validate {requests} requests"] = (lambda b=batch: b.validate(16), 2_000)
        rows[f"validate {requests} requests, ids and slots too"] = (
            lambda b=batch, n=requests: b.validate(16, n),
            2_000,
        )
    for name, (call, number) in rows.items():
        print(f"{name:<44} {microseconds(call, number):8.2f} us")


if __name__ == "__main__":
    main()
