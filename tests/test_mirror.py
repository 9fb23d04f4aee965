"""A test file has the path of the module or package of `attn` that it tests (`attn/selector.py`: `tests/test_selector.py`)."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent

#: Files that test no single module, and what they test.
ACROSS = {
    "tools/demo/test_models.py": "the same model in both frameworks",
    "integrations/test_arguments.py": "docs/reference/arguments.md",
    "integrations/test_entry_points.py": "pyproject.toml",
    "integrations/transformers/test_ways.py": "the ways to generate",
    "jax/test_conformance.py": "the conformance suite on an interpreted kernel",
    "reference/test_errors.py": "the oracle, whose functions are one package's",
    "reference/test_fixtures.py": "the oracle",
    "reference/test_peers.py": "the oracle",
    "reference/test_properties.py": "the oracle",
    "reference/test_reference.py": "the oracle",
    "test_conformance.py": "the conformance suite on a CPU",
    "test_citations.py": "all text",
    "test_docs.py": "docs",
    "test_field_incidents.py": "bugs of other libraries",
    "test_floors.py": "which module may import which",
    "test_mirror.py": "this rule",
    "test_notebooks.py": "notebooks",
    "test_prose.py": "all text",
    "test_readme.py": "README.md",
    "test_records.py": "every backend's capabilities",
    "test_same_refusals.py": "every backend's errors",
    "test_vllm_interface.py": "vLLM's names and signatures",
    "test_torch_with_jax.py": "a layer between frameworks",
    "torch/test_devices.py": "layers, batches and caches on devices",
    "torch/test_dtensor.py": "a layer under torch's DTensor",
    "torch/interpreted/test_conformance.py": "the conformance suite on interpreted kernels",
    "torch/interpreted/test_under_jax.py": "the same under jax",
    "torch/test_interpreted.py": "processes that interpret Triton's kernels",
}


def files() -> set[str]:
    return {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}


def subjects(file: str) -> list[Path]:
    """The modules that a test file may belong to: of the package, of the folders of scripts, or a helper next to it."""
    folder, _, name = file.rpartition("/")
    stem = name.removeprefix("test_").removesuffix(".py")
    places = [ROOT / "attn" / folder, TESTS / folder]
    if folder.partition("/")[0] in ("benchmarks", "examples"):
        places.append(ROOT / folder)
    found = [place / name for place in places for name in (f"{stem}.py", f"_{stem}.py", stem)]
    return [path for path in found if path.is_file() or (path / "__init__.py").is_file()]


def test_every_test_file_has_the_path_of_its_module() -> None:
    strays = sorted(file for file in files() - ACROSS.keys() if not subjects(file))
    assert strays == [], "move them to the path of their module, or add them to ACROSS"


def test_exceptions_are_needed() -> None:
    assert sorted(ACROSS.keys() - files()) == []
    assert sorted(file for file in ACROSS if subjects(file)) == [], "these have a module"
