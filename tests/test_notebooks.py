"""Every notebook runs from top to bottom, says first what the reader will be able to do, and is stored without outputs.

Some 70 seconds in all on an idle machine; the longest is 03, where libtpu compiles a kernel.

With nbclient (extra `notebooks`) in a kernel of its own, as Jupyter would; without it the code cells are run in this
process, which the test's id says.
"""

import ast
import contextlib
import io
import json
from pathlib import Path

import pytest

from attn.imports import installed

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
KERNEL = installed("nbclient") and installed("ipykernel")


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


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
    import nbformat
    from nbclient import NotebookClient

    NotebookClient(nbformat.read(notebook, as_version=4), timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()


def test_there_are_notebooks_for_each_use():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{n:02}" for n in range(1, 8)]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_opens_with_what_it_does(notebook):
    first = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]
    title, _, rest = "".join(first["source"]).partition("\n")
    assert first["cell_type"] == "markdown" and title.startswith(f"# {notebook.stem[:2]} ")
    assert rest.strip().startswith("This notebook ")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: f"{path.stem}-{'kernel' if KERNEL else 'exec'}")
@pytest.mark.filterwarnings("default")  # what a kernel's own packages warn of is not ours
def test_runs(notebook):
    (execute_in_a_kernel if KERNEL else execute_here)(notebook)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_without_outputs(notebook):
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
