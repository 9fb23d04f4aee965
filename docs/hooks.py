"""Hooks that mkdocs calls during the build: they add the generated pages to the written ones, and two sections to the menu."""

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # mkdocs puts the path back after this file
generate = importlib.import_module("generate")


#: Pages whose tables need the width of the table of contents.
WIDE = ("reference/backends.md", "reference/evidence.md", "reference/variables.md", "benchmarks/index.md")


def on_config(config: Any) -> Any:
    pages = [f"notebooks/{path.stem}.md" for path in sorted(generate.NOTEBOOKS.glob("*.ipynb"))]
    config.nav.insert(-1, {"Notebooks": pages})
    config.nav[-1]["Reference"].append({"Public names": [f"reference/api/{name}.md" for name in generate.MODULES]})
    notes = [f"benchmarks/{path.stem}.md" for path in sorted(generate.NOTES.glob("*.md")) if path.stem != "README"]
    config.nav.insert(-1, {"Figures": ["benchmarks/index.md", *notes]})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> None:
    if page.file.src_path in WIDE:
        page.meta["hide"] = ["toc"]


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in generate.pages().items():
        files.append(File.generated(config, path, content=text))
    return files
