"""Draw the speed of the selected backend beside other packages' kernels, as `attn bench --plot` draws random batches.

python docs/speed_picture.py          writes docs/assets/speed.svg
"""

import json
from pathlib import Path
from typing import Any

from attn.pictures import Picture
from attn.tools.bench.roofline import ratios

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TARGET = Path(__file__).parent / "assets" / "speed.svg"
#: Backends in plain torch, which are no rivals: a batch that only they serve too has no dot.
PLAIN = ("TORCH_SDPA", "FLEX_ATTENTION")


def report() -> dict[str, Any]:
    """Return the newest report of random batches, else that of the fixed ones, without `PLAIN` backends."""
    found = sorted(RESULTS.glob("random_*.json"), key=lambda path: path.stem[-10:]) or [*RESULTS.glob("every_peer_*.json")]
    data: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8"))
    return {**data, "rows": [row for row in data["rows"] if row["backend"] not in PLAIN]}


def picture() -> Picture:
    return ratios(report())


if __name__ == "__main__":
    picture().save(TARGET)
    print(TARGET)
