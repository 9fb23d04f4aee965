"""Execute the notebooks, each in a kernel of its own, and store what their cells show.

python notebooks/run.py                       execute all, and compare with the stored outputs
python notebooks/run.py --write 05 08_mine    execute these, and store their outputs

Warnings (stderr) and temporary paths are not stored. Numbers with a decimal point and times are not compared, nor the bytes
of images. Only the kinds of the outputs are compared of a cell with the tag `measured` (in its metadata), and of all cells
if the stored outputs are of another processor or other versions of packages.
"""

import argparse
import json
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn.imports import version_of
from attn.reports.report import DISTRIBUTIONS

FOLDER = Path(__file__).resolve().parent
SECONDS = 300  #: limit of a cell
MOST_BYTES = 150_000  #: limit of an output
#: What is kept of a result that has several forms, the first first.
FORMS = ("image/png", "image/svg+xml", "text/html", "text/markdown", "text/plain")


def notebooks(names: Sequence[str] = ()) -> list[Path]:
    """Return the notebooks whose names begin with one of `names` (default: all). Raises ValueError if one begins none."""
    found = sorted(FOLDER.glob("*.ipynb"))
    for name in names:
        if not any(path.name.startswith(name) for path in found):
            raise ValueError(f"{name}: must begin the name of a notebook: {', '.join(path.stem for path in found)}")
    return [path for path in found if not names or path.name.startswith(tuple(names))]


def read(path: Path) -> dict[str, Any]:
    """Return a notebook as its JSON."""
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def executed(path: Path) -> dict[str, Any]:
    """Execute a notebook; return its JSON with the outputs of this run. Raises nbclient's errors."""
    import nbformat
    from nbclient import NotebookClient

    notebook, run = read(path), nbformat.read(path, as_version=4)
    NotebookClient(run, timeout=SECONDS, resources={"metadata": {"path": str(FOLDER)}}).execute()
    notebook["metadata"]["executed_with"] = environment()
    count = 0
    for cell, ran in zip(notebook["cells"], run["cells"], strict=True):
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"] = count
            cell["outputs"] = _merged([_stored(output, count) for output in ran["outputs"] if output.get("name") != "stderr"])
    return notebook


def environment() -> dict[str, str]:
    """Return what outputs may depend on: the processor, and the versions of the packages that decide what runs."""
    found = {name: version for name in DISTRIBUTIONS if (version := version_of(name)) and name != "attn"}
    return {"machine": platform.machine(), **found}


def _stored(output: dict[str, Any], count: int) -> dict[str, Any]:
    """Return what is stored of an output: its first form of `FORMS`, without temporary paths."""
    if output["output_type"] == "stream":
        return {"name": "stdout", "output_type": "stream", "text": _lines(output["text"])}
    form = next(form for form in FORMS if form in output["data"])
    data = output["data"][form]
    if len(data) > MOST_BYTES:
        raise ValueError(f"an output of cell {count} has {len(data)} bytes: must be at most {MOST_BYTES}")
    found = {"data": {form: _lines(data)}, "metadata": {}, "output_type": output["output_type"]}
    return {**found, "execution_count": count} if output["output_type"] == "execute_result" else found


def _merged(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join successive streams, which a kernel cuts at any place."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        if found and output["output_type"] == found[-1]["output_type"] == "stream":
            found[-1]["text"] = _lines("".join(found[-1]["text"]) + "".join(output["text"]))
        else:
            found.append(output)
    return found


def _lines(text: str) -> list[str]:
    return re.sub(r"/\S*?/tmp\w+(?=/)", "...", text).splitlines(keepends=True)


def same(stored: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a notebook's stored outputs are those of a run, as far as they can be equal."""
    texts = stored["metadata"].get("executed_with") == now["metadata"]["executed_with"]
    return compared(stored, texts) == compared(now, texts)


def compared(notebook: dict[str, Any], texts: bool = True) -> list[Any]:
    """Return what must be equal in two runs: for each code cell, the kinds of its outputs and, with `texts`, their texts."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            measured = "measured" in cell.get("metadata", {}).get("tags", ())
            found.append([_essence(output, texts and not measured) for output in cell["outputs"]])
    return found


#: Numbers of a measurement or a rounding error; addresses.
VARIES = re.compile(r"\b\d+\.\d+(e[+-]?\d+)?|\b\d+e[+-]?\d+|\b\d+(?= ?(s|ms|us|ns)\b)|0x[0-9a-f]+")


def _essence(output: dict[str, Any], texts: bool) -> tuple[str, str]:
    form, text = next(iter(output["data"].items())) if "data" in output else ("stream", output["text"])
    if not texts or form.startswith("image/"):
        return form, ""
    return form, " ".join(VARIES.sub("#", "".join(text)).split())


def written(notebook: dict[str, Any]) -> str:
    """Return the text of a notebook's file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute the notebooks, and compare or store their outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of the notebooks' names (default: all)")
    parser.add_argument("--write", action="store_true", help="store the outputs")
    args = parser.parse_args()
    different = []
    for path in notebooks(args.names):
        now = executed(path)
        if args.write:
            path.write_text(written(now), encoding="utf-8")
        equal = same(read(path), now)
        different += [] if equal else [path.name]
        print(
            f"{path.name}: {'written' if args.write else 'as stored' if equal else 'DIFFERENT: run with --write'}", flush=True
        )
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
