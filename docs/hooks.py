"""Hooks that mkdocs calls during the build: add the generated pages to the written ones."""

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # mkdocs puts the path back after this file
generate = importlib.import_module("generate")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in generate.pages().items():
        files.append(File.generated(config, path, content=text))
    return files
