"""The training text of the demo model: the documentation that ships with Python.

Two sources, both under the PSF licence: the language reference in `pydoc_data.topics`, and the docstrings of
the standard library, written as stubs (`def name(arguments):` and the docstring). Files are parsed, never
imported. The order is the sorted order of names, so one Python version gives one corpus; a repeated docstring
is kept once.
"""

import ast
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-not-found]
from typing import NamedTuple

_SKIPPED = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"})
_HELD_OUT_ONE_IN = 20

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Document(NamedTuple):
    """A text and the name by which it is sorted."""

    name: str
    text: str

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.text.encode())

    @property
    def held_out(self) -> bool:
        """Whether the document is used for validation: depends only on its name, so the split never changes."""
        return zlib.crc32(self.name.encode()) % _HELD_OUT_ONE_IN == 0


def documents() -> list[Document]:
    """Return every document, sorted by the source's name."""
    found = [Document(f"topics.{name}", text.strip() + "\n") for name, text in sorted(topics.items())]
    seen: set[str] = set()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if not _SKIPPED.intersection(parts):
            found.extend(_module_documents(".".join(parts), path.read_bytes(), seen))
    return found


def _module_documents(module: str, source: bytes, seen: set[str]) -> Iterator[Document]:
    """Yield a module's docstring, then one document per documented top-level class and function."""
    tree = ast.parse(source)
    if text := _fresh_docstring(tree, seen):
        yield Document(module, f"# {module}\n{text}")
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and (text := _stub(node, seen)):
            yield Document(f"{module}.{node.name}", text)


def _stub(node: ast.AST, seen: set[str]) -> str:
    """Return `node` as a stub with its docstring and, for a class, its members; empty if nothing is documented."""
    if isinstance(node, _FUNCTIONS):
        keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        head, members = f"{keyword} {node.name}({ast.unparse(node.args)}):\n", []
    elif isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        head, members = f"class {node.name}({bases}):\n" if bases else f"class {node.name}:\n", node.body
    else:
        return ""
    pieces = [_fresh_docstring(node, seen), *(_stub(member, seen) for member in members)]
    body = "\n".join(piece for piece in pieces if piece)
    return head + textwrap.indent(body, "    ") if body else ""


def _fresh_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, seen: set[str]) -> str:
    """Return the docstring in quotes with a newline, or "" if there is none or it was seen before."""
    text = (ast.get_docstring(node) or "").strip()
    if not text or text in seen:
        return ""
    seen.add(text)
    return f'"""{text}"""\n' if "\n" not in text else f'"""{text}\n"""\n'
