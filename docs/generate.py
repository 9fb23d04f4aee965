"""Generate the site's reference pages from the code, and its pages of notebooks, when the site is built.

python docs/generate.py FOLDER      write them to FOLDER, without building the site
"""

import argparse
import base64
import enum
import functools
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn import cli, envs
from attn.reports import evidence

#: Modules whose public names are listed, in this order.
MODULES = (
    "attn",
    "attn.torch",
    "attn.jax",
    "attn.serving",
    "attn.reports.report",
    "attn.testing",
    "attn.reference",
    "attn.pictures",
    "attn.visibility",
    "attn.backends.paged",
    "attn.tools.bench",
    "attn.integrations.transformers",
    "attn.integrations.diffusers",
    "attn.integrations.vllm",
    "attn.integrations.flax",
)

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
NOTES = ROOT / "benchmarks" / "notes"


def pages() -> dict[str, str | bytes]:
    """Return {path within the site: Markdown, or an image of a notebook}."""
    made: dict[str, Callable[[], str]] = {"evidence": evidence_page, "commands": commands, "variables": variables}
    found: dict[str, str | bytes] = {f"reference/{name}.md": make() for name, make in made.items()}
    found |= {f"reference/api/{name}.md": page for name, page in names().items()}
    for path in sorted(NOTES.glob("*.md")):
        found[f"benchmarks/{path.stem.replace('README', 'index')}.md"] = figures(path)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        found |= notebook(path)
    return found


def figures(path: Path) -> str:
    """Return a page of figures. The first has README.md's sections on speed and devices too; files outside of the site are
    named, not linked."""
    text = path.read_text(encoding="utf-8")
    if path.stem == "README":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        shown = readme[readme.index("## How fast") : readme.index("## When to use it")]
        shown = re.sub(r"\]\(docs/", "](../", shown).replace("](benchmarks/notes/README.md)", "](#by-kernel)")
        head, _, rest = text.partition("\n\n")
        text = f"{head}\n\n{shown}\n## By kernel\n\n{rest}"
    return re.sub(r"\[([^]]+)\]\(\.\./results/([^)]+)\)", r"\1 (`benchmarks/results/\2`)", text)


def notebook(path: Path) -> dict[str, str | bytes]:
    """Return a notebook's page with its stored outputs, and its images."""
    parts, images = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = source.replace(".ipynb)", ".md)")  # another notebook is a page of the site too
            # a formula is shown as its text: to draw it, the page would need a script from elsewhere
            parts.append(re.sub(r"\$\$(.*?)\$\$", r"```text\n\1\n```", source, flags=re.DOTALL))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(images) + 1}.png"
                images[f"notebooks/{name}"] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![what the cell shows]({name})")
            elif "text/html" in data:
                parts.append(f"<div>{' '.join(''.join(data['text/html']).split())}</div>")
            else:
                parts.append(f"```text\n{''.join(data.get('text/plain', output.get('text', ''))).rstrip()}\n```")
    return {f"notebooks/{path.stem}.md": "\n\n".join(parts) + "\n", **images}


def evidence_page() -> str:
    """Return the page of recorded conformance runs."""
    kinds = _table(
        ("kind", "meaning"),
        [
            ("ran", "executed on the given device"),
            ("interpreted", "a kernel's program executed by an interpreter on the host"),
            ("compiled", "lowered and compiled for the given platform, not executed"),
            ("stand-in", "executed with a substitute for the vendor's package: tests the adapter, not the kernel"),
        ],
    )
    head = ("registry", "backend", "kind", "device", "level", "cases", "failures", "date", "versions", "reported by")
    rows = sorted(evidence.load(), key=lambda row: (row.registry, row.backend, evidence.KINDS.index(row.kind), row.device))
    body = [
        (
            row.registry, f"`{row.backend}`", row.kind, row.device, row.level, str(row.cases), str(row.failures),
            row.date[:10], ", ".join(f"{name} {version}" for name, version in sorted(row.versions.items())),
            row.reporter,
        )
        for row in rows
    ]  # fmt: skip
    intro = "A row is one run of the conformance suite. A run of one kind never replaces or hides one of another kind.\n\n"
    return f"# Evidence\n\n{intro}{kinds}\n\n{_table(head, body)}\n"


def commands() -> str:
    """Return the page of commands: the help of each."""
    parts = ["# Command line\n"]
    for name, command in cli.COMMANDS.items():
        parser = argparse.ArgumentParser(f"attn {name}", formatter_class=_Wide)
        command.configure(parser)
        summary = f"{command.summary[0].upper()}{command.summary[1:]}."
        parts.append(f"## attn {name}\n\n{summary}\n\n```sh\n{command.example}\n```\n\n```text\n{parser.format_help()}```\n")
    return "\n".join(parts)


class _Wide(argparse.HelpFormatter):
    """Formats help for a wide terminal, independently of the current one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=100, max_help_position=28)


def variables() -> str:
    """Return the page of environment variables."""
    rows = [line for line in (envs.__doc__ or "").splitlines() if line.startswith("|")]
    return "# Variables\n\nRead when they are needed, never at import.\n\n" + "\n".join(rows) + "\n"


def names() -> dict[str, str]:
    """Return {module: the page of its public names and their methods}: signatures, and docstrings by mkdocstrings."""
    pages = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        parts = [f"# {module_name}\n\n{_first_paragraph(module)}\n"]
        for name in public(module):
            parts += _entries(f"{module_name}.{name}", getattr(module, name))
        pages[module_name] = "\n".join(parts)
    return pages


def public(module: Any) -> list[str]:
    """Return a module's public names: `__all__`, or the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("_")]
    own = {name: thing for name, thing in vars(module).items() if getattr(thing, "__module__", None) == module.__name__}
    return [name for name, thing in own.items() if not name.startswith("_") and (inspect.isclass(thing) or callable(thing))]


def methods(cls: type) -> dict[str, Any]:
    """Return {name: method or property} of a class: the public ones, inherited from classes of this package too."""
    found = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] == "attn":
            found |= {name: value for name, value in vars(base).items() if not name.startswith("_") and _is_method(value)}
    return dict(sorted(found.items()))


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | staticmethod | classmethod | functools.cached_property)


def _entries(path: str, thing: Any) -> list[str]:
    """Return the entries of a public name and, for a class, of its methods."""
    name = path.rpartition(".")[2]
    parts = [_entry(f"## {name}", path, _signature(name, thing), thing)]
    if inspect.isclass(thing):
        for method, value in methods(thing).items():
            kind = " (property)" if isinstance(value, property | functools.cached_property) else ""
            signature = "" if kind else _signature(method, _function(value))
            inherited = (vars(base).get(method) for base in thing.__mro__)
            described = next((each for each in map(_function, inherited) if getattr(each, "__doc__", None)), None)
            parts.append(_entry(f"### {name}.{method}{kind}", f"{path}.{method}", signature, described))
    return parts


def _function(value: Any) -> Any:
    """Return the function of a method, a property or a static method."""
    return next((getattr(value, name) for name in ("__func__", "fget", "func") if hasattr(value, name)), value)


def _entry(heading: str, anchor: str, signature: str, thing: Any) -> str:
    shown = f"\n\n```python\n{signature}\n```" if signature else ""
    where = _documented(thing)
    text = f"\n\n::: {where}\n" if where else "\n"
    return f"{heading} {{ #{anchor} }}{shown}{text}"


def _documented(thing: Any) -> str:
    """Return the dotted path of the object whose source has the docstring of `thing`; "" without one."""
    doc = getattr(thing, "__doc__", None)
    if not doc or not getattr(thing, "__module__", "").startswith("attn"):
        return ""
    if inspect.isclass(thing):  # a layer has its base's docstring
        thing = next(base for base in reversed(thing.__mro__) if base.__doc__ == doc)
        source = inspect.getsource(thing)
        if doc.strip().splitlines()[0] not in source:  # made by dataclass, enum or NamedTuple
            return ""
    return f"{thing.__module__}.{thing.__qualname__}" if "<locals>" not in thing.__qualname__ else ""


def _signature(name: str, thing: Any) -> str:
    """Return how a name is called: without `self`, a line for each parameter if it is long."""
    is_class = inspect.isclass(thing)
    head = f"class {name}" if is_class else name
    if is_class and issubclass(thing, enum.Enum):
        return head
    if not callable(thing):
        return f"{name}: {type(thing).__name__}"
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # written in C
        return head
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in ("self", "cls")]
    returned = signature.empty if is_class else signature.return_annotation
    text = _short(str(signature.replace(parameters=parameters, return_annotation=returned)))
    if len(head + text) <= 100 or not parameters:
        return head + text
    keyword = next((p.name for p in parameters if p.kind is p.KEYWORD_ONLY), "")
    starred = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    lines = [_short(f"    *,\n    {p}," if p.name == keyword and not starred else f"    {p},") for p in parameters]
    return f"{head}(\n" + "\n".join(lines) + "\n)" + text[text.rindex(")") + 1 :]


def _short(signature: str) -> str:
    """Return a signature whose types of the standard library have no module before them."""
    return re.sub(r"\b(collections\.abc|typing|pathlib)\.(?=[A-Z])", "", signature)


def _first_paragraph(module: Any) -> str:
    return " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def main(folder: str) -> None:
    for path, text in pages().items():
        file = Path(folder) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        print(file)


if __name__ == "__main__":
    main(sys.argv[1])
