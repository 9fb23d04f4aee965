"""Every notebook runs from top to bottom and shows what is stored in it; it says first what the reader will be able to do.

With nbclient (extra `notebooks`) they run in a kernel of their own, as Jupyter would, and what they show is compared: one
notebook a day in `make test`, all under `--full`. Their code cells also run in this process, except where eight devices are
needed.
"""

import ast
import contextlib
import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from attn.imports import installed
from tests.levels import LEVEL, sampled

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
DISTRIBUTED = [path for path in NOTEBOOKS if "device_count=8" in path.read_text(encoding="utf-8")]  #: they set up XLA anew
ALONE = [path for path in NOTEBOOKS if path not in DISTRIBUTED]
KERNEL = installed("nbclient") and installed("ipykernel")
DRAWN = sampled(NOTEBOOKS, 1, "notebooks")


def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = runner()


def code_cells(notebook: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in run.read(notebook)["cells"] if cell["cell_type"] == "code"]


def execute_here(notebook: Path) -> None:
    """Run the cells in one namespace; the value of a cell's last line is rendered as a notebook would."""
    namespace = {"__name__": "__main__"}
    for number, source in enumerate(code_cells(notebook)):
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        name = f"{notebook.name}, code cell {number + 1}"
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(tree, name, "exec"), namespace)
            if last is not None:
                shown = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
                getattr(shown, "_repr_html_", shown.__repr__)()


def execute_in_a_kernel(notebook: Path) -> None:
    assert run.same(run.read(notebook), run.executed(notebook)), (
        f"the outputs differ from the stored ones: run `python notebooks/run.py --write {notebook.stem}`"
    )


def test_there_are_notebooks_for_each_use():
    numbers = [path.stem[:2] for path in NOTEBOOKS]
    assert len(numbers) >= 7 and numbers == [f"{n:02}" for n in range(1, len(numbers) + 1)]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_opens_with_what_it_does(notebook):
    first = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]
    title, _, rest = "".join(first["source"]).partition("\n")
    assert first["cell_type"] == "markdown" and title.startswith(f"# {notebook.stem[:2]} ")
    assert rest.strip().startswith("This notebook ")


@pytest.mark.skipif(not KERNEL, reason="nbclient or ipykernel is not installed (extra notebooks)")
@pytest.mark.parametrize("notebook", DRAWN, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # what a kernel's own packages warn of is not ours
def test_shows_in_a_kernel_what_is_stored(notebook, monkeypatch):
    if os.environ[LEVEL] != "full":  # XLA compiles fast, as the programs of a notebook run once
        quick = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
        monkeypatch.setenv("XLA_FLAGS", quick)
    execute_in_a_kernel(notebook)


@pytest.mark.parametrize("notebook", ALONE, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")
def test_runs(notebook, monkeypatch):
    monkeypatch.chdir(FOLDER)
    execute_here(notebook)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_with_small_outputs(notebook):
    stored = run.read(notebook)
    cells = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)) and any(run.compared(stored))
    assert notebook.read_text(encoding="utf-8") == run.written(stored) and notebook.stat().st_size < 400_000
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert "/tmp" not in outputs and "/home" not in outputs and str(FOLDER.parent) not in outputs and "stderr" not in outputs


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_of_the_versions_that_are_tested_together(notebook):
    pinned = dict(line.split("==") for line in (FOLDER.parent / "constraints.txt").read_text().split() if "==" in line)
    used = run.read(notebook)["metadata"]["executed_with"]
    for name in ("torch", "jax", "numpy", "transformers"):
        if name in pinned:
            assert used[name].partition("+")[0] == pinned[name], "run `python notebooks/run.py --write`"
    assert used["machine"] and "attn" not in used


def notebook_of(tmp_path: Path, source: str, *tags: str) -> Path:
    cell = {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {"tags": list(tags)}, "outputs": []}
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = {"cells": [{**cell, "source": [source]}], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "08_mine.ipynb").write_text(run.written(notebook), encoding="utf-8")
    return tmp_path / "08_mine.ipynb"


@pytest.mark.skipif(not KERNEL, reason="nbclient or ipykernel is not installed (extra notebooks)")
@pytest.mark.filterwarnings("default")
def test_outputs_are_written_and_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    source = "import sys, time\nprint(len('abc'), 'cases', time.perf_counter(), '/tmp/tmpab12/x.json')\n"
    source += "print(1, file=sys.stderr)\n'end'"
    path = notebook_of(tmp_path, source)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert run.main() == 1 and "08_mine.ipynb: DIFFERENT: run with --write" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["run.py", "--write", "08"])
    assert run.main() == 0
    [cell] = run.read(path)["cells"]
    stream, value = cell["outputs"]
    assert (
        cell["execution_count"] == 1
        and stream["text"][0].startswith("3 cases ")
        and stream["text"][0].endswith(" .../x.json\n")
    )
    assert value["data"] == {"text/plain": ["'end'"]}, "nothing of stderr"
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert run.main() == 0, "a time differs, and is not compared"
    path.write_text(path.read_text().replace("3 cases", "4 cases"))
    assert run.main() == 1
    path.write_text(path.read_text().replace('"numpy": "', '"numpy": "0.'))
    assert run.main() == 0, "texts of other versions may differ"
    path.write_text(path.read_text().replace("text/plain", "text/html"))
    assert run.main() == 1, "kinds may not"
    monkeypatch.setattr(sys, "argv", ["run.py", "09"])
    with pytest.raises(ValueError, match="09: must begin the name of a notebook: 08_mine"):
        run.main()


def test_what_is_compared_of_a_cell():
    def cell(text, *tags, form="text/plain"):
        output = {"output_type": "display_data", "metadata": {}, "data": {form: [text]}}
        return {"cells": [{"cell_type": "code", "metadata": {"tags": list(tags)}, "outputs": [output]}]}

    assert run.compared(cell("5 of 7 in 3 ms: 0.25")) == run.compared(cell("5 of 7 in 12 ms: 1.5e-07"))
    assert run.compared(cell("5 of 7")) != run.compared(cell("6 of 7"))
    assert run.compared(cell("A wins", "measured")) == run.compared(cell("B wins", "measured"))
    assert run.compared(cell("abc", form="image/png")) == run.compared(cell("abd", form="image/png"))
    assert run.compared(cell("abc", "measured", form="image/png")) != run.compared(cell("abc", "measured"))
