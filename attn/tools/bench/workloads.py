"""Benchmark cases from workloads recorded on servers: files in the FlashInfer Trace format.

A file holds one JSON object per line: the name of a `definition` and a `workload` with its axes and inputs. The definition's
constants (heads, head size, page size, dtypes) are in `definitions/<kind>/<name>.json` of the same data set; lengths are in a
`.safetensors` file or, an extension of this module, in `{"type": "values", "values": [...]}`. Supported are grouped-query
definitions, paged (`gqa_paged`) and ragged (`gqa_ragged`, whose keys are then stored in pages). Only lengths and shapes are
used, which determine a batch's time. Pages are placed at random without sharing, values are
random, and the scale is 1 / sqrt(head size).

Schema: https://github.com/flashinfer-ai/flashinfer-bench (flashinfer_trace).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attn.tools.bench.case import BenchCase, grammar

KINDS = ("gqa_paged", "gqa_ragged")
_CODES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "int8": "int8"}  #: dtype of keys -> of the cache
_BLOCK_SIZE = 16  #: of the pages that ragged keys are put into


def load(file: str | Path, block_size: int | None = None) -> list[BenchCase]:
    """Return the distinct cases of a file, in its order; `block_size` overrides the page size.

    Raises ValueError with file, line and problem for a line that is not a supported case, and OSError.
    """
    path = Path(file)
    cases: dict[BenchCase, None] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            cases[_case(json.loads(line), path, block_size)] = None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: {problem}") from None
    if not cases:
        raise ValueError(f"{path}: no workloads")
    return list(cases)


def _case(entry: dict[str, Any], path: Path, block_size: int | None) -> BenchCase:
    root, definition = _definition(str(entry["definition"]), path)
    op_type = definition["op_type"]
    if op_type not in KINDS:
        raise ValueError(f"{entry['definition']} is of kind {op_type} (supports {', '.join(KINDS)})")
    const = {name: axis["value"] for name, axis in definition["axes"].items() if axis["type"] == "const"}
    inputs, dtypes = entry["workload"]["inputs"], {name: spec["dtype"] for name, spec in definition["inputs"].items()}
    # Paged definitions call it k_cache, ragged ones k.
    stored = dtypes.get("k_cache", dtypes.get("k", dtypes["q"]))
    if stored not in (dtypes["q"], *_CODES):
        raise ValueError(f"keys of dtype {stored} with queries of another dtype (supports {', '.join(_CODES)})")
    batch = grammar(_lens(inputs, const.get("page_size", 1), root))
    layer = (f"{const['num_qo_heads']}/{const['num_kv_heads']}", const["head_dim"])
    page = const.get("page_size", _BLOCK_SIZE) if block_size is None else block_size
    return BenchCase(batch, *layer, page, dtypes["q"], "auto" if stored == dtypes["q"] else _CODES[stored])


def _definition(name: str, path: Path) -> tuple[Path, dict[str, Any]]:
    """Return (the data set's root, the definition called `name`), searched for in the parent directories of the file."""
    # A file of workloads may be in any folder of the data set, whose root has `definitions`.
    for root in path.resolve().parents:
        for file in sorted((root / "definitions").glob(f"*/{name}.json")):
            return root, json.loads(file.read_text(encoding="utf-8"))
    raise ValueError(f"definition {name!r}: no definitions/*/{name}.json in the parent directories")


def _lens(inputs: dict[str, Any], page: int, root: Path) -> Iterator[tuple[int, int]]:
    """Yield (new tokens, tokens in the cache) of each request."""
    pages = _steps(_values("kv_indptr", inputs, root))
    # A decode's definition has no starts of rows: one per request.
    new = _steps(_values("qo_indptr", inputs, root)) if "qo_indptr" in inputs else [1] * len(pages)
    if len(new) != len(pages):
        raise ValueError(f"qo_indptr has {len(new)} requests, kv_indptr {len(pages)}: need the same number")
    if page == 1:
        keys = pages
    elif "kv_last_page_len" in inputs:
        last = _values("kv_last_page_len", inputs, root)
        keys = [(count - 1) * page + tail for count, tail in zip(pages, last, strict=True)]
    else:
        raise ValueError(f"pages of {page} tokens need kv_last_page_len, the number of tokens in each last page")
    for request, (n, m) in enumerate(zip(new, keys, strict=True)):
        if n < 1 or m < n:
            raise ValueError(f"request {request} has {n} new tokens and {m} in the cache: need 1 <= new <= cached")
        yield n, m


def _steps(starts: list[int]) -> list[int]:
    return [after - before for before, after in zip(starts, starts[1:], strict=False)]


def _values(name: str, inputs: dict[str, Any], root: Path) -> list[int]:
    """Read an input's values."""
    entry = inputs[name]
    if entry["type"] == "values":
        return [int(value) for value in entry["values"]]
    if entry["type"] != "safetensors":
        raise ValueError(f"{name} has type {entry['type']!r} (supports values, safetensors)")
    from safetensors.numpy import load_file

    file = root / entry["path"]
    if not file.is_file():
        raise ValueError(f"{name}: {file} does not exist")
    return [int(value) for value in load_file(file)[entry["tensor_key"]]]
