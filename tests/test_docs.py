"""The documentation: examples run, generated pages are complete, links exist, the site builds."""

import contextlib
import doctest
import functools
import html
import importlib
import importlib.util
import io
import json
import pkgutil
import posixpath
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import attn
from attn import cli, envs
from attn.imports import installed
from attn.reports import evidence, report
from attn.tools.fuzz import campaign as fuzz

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = {f"reference/{name}.md" for name in ("evidence", "commands", "variables")}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for tag, text in FENCE.findall(page.read_text(encoding="utf-8")) if tag == language]


def named(page: Path) -> str:
    return str(page.relative_to(DOCS))


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return script("generate")


@pytest.fixture(scope="module")
def made(generate: ModuleType) -> dict[str, str]:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    return {path: page for path, page in generate.pages().items() if isinstance(page, str)}


# examples


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=named)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for number, source in enumerate(blocks(page, "python"), 1):
            exec(compile(source, f"{named(page)}, example {number}", "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "pycon")], ids=named)
def test_a_pages_sessions_say_what_they_show(page: Path) -> None:
    session = "\n".join(blocks(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(session, {}, named(page), str(page), 0)
    said = io.StringIO()
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.write)
    assert tried and not failed, said.getvalue()


SESSION = re.compile(r"^ {4,}>>> ", re.MULTILINE)
WITH_DOCTESTS = [path for path in sorted((ROOT / "attn").rglob("*.py")) if SESSION.search(path.read_text(encoding="utf-8"))]


def test_there_are_docstrings_with_sessions() -> None:
    assert len(WITH_DOCTESTS) >= 3


@pytest.mark.parametrize("path", WITH_DOCTESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_say_what_they_show(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed


MISTAKES = DOCS / "how-to" / "mistakes.md"
#: Every command of the README and the pages; those of the mistakes are run by their own test.
COMMANDS = list(
    dict.fromkeys(
        shlex.join(words)
        for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES)
        if page != MISTAKES
        for line in "\n".join(blocks(page, "sh")).splitlines()
        if (words := shlex.split(line, comments=True))
    )
)
#: Commands that are not run: how they begin -> why.
NOT_RUN = {
    "pip install": "installs packages; the extras are compared with pyproject.toml",
    "make": "builds environments or runs these tests; the targets are compared with the Makefile",
    "vllm serve": "needs vLLM and a model; benchmarks/vllm_cpu.py runs the engine with these options",
    "attn conform MY_ATTN": "MY_ATTN is the reader's backend; the page's Python runs the suite on it",
    "ATTN_BATCH_INVARIANT=1 python serve.py": "serve.py is the reader's program",
    "attn bench --workloads": "the file is part of a data set; tests/tools/bench/test_workloads.py runs one of its format",
    "attn bench 64q1s4k --backend TRITON_ATTN": "needs a GPU",
    "attn bench --registry diffusion": "its shapes are too large for a CPU; tests/tools/bench/test_dense.py runs a small one",
    "attn replay": "the file is the reader's recording; tests/test_recording.py replays one",
    "attn tables --write": "writes into this checkout; a test below compares its tables",
    "attn evidence": "runs for minutes; tests/tools/test_collect.py runs one backend",
    "attn aot": "compiles for minutes; tests/tools/aot/test_command.py and tests/tools/aot/test_tpu.py compile some cases",
}
#: What is made smaller, for a CPU: sizes of batches, numbers of them, seconds, and kernels that compile for seconds.
SMALLER = (
    (r"\b(64q1s4k|8q1s1k)\b", "2q1s20"),
    (r"\bq1s32k\b", "q1s40"),
    (r"\b4q4k\b", "2q8"),
    (r"--random 40", "--random 1"),
    (r"--max-new-tokens 32", "--max-new-tokens 2"),
    (r"--peers all", "--peers TORCH_SDPA,sdpa"),
    (r"(attn tune .*)", r"\1 --framework torch --without FLEX_ATTENTION --heads 2/1 --head-size 32"),
    (r"(attn bench .*--mla)", r"\1 --heads 2"),
    (r"(attn bench (?!.*(--mla|compare)).*)", r"\1 --heads 2/1 --head-size 32"),
    (r"conform TORCH_SDPA$", "conform TORCH_SDPA --only float64"),
    (r"^attn demo$", "attn demo --num-requests 2 --max-new-tokens 2"),
)


def not_run(command: str) -> str | None:
    return next((why for begin, why in NOT_RUN.items() if command.startswith(begin)), None)


def test_there_are_commands_and_every_exception_is_one() -> None:
    assert len(COMMANDS) > 30
    assert [begin for begin in NOT_RUN if not any(command.startswith(begin) for command in COMMANDS)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command: str) -> None:
    words = shlex.split(command)
    while "=" in words[0]:
        assert words.pop(0).partition("=")[0] in envs.VARIABLES
    if words[0] == "vllm":
        assert not_run(command) and words[-2:] in (["--attention-backend", "CUSTOM"], ["--attention-backend", "attn"])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif words[0] == "attn":
        assert words[1] in cli.COMMANDS
        cli.parser(words[1:]).parse_args(words[1:])
    else:
        assert not_run(command), "neither attn nor make"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that commands of the pages name."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "dtype": "bfloat16",
    }
    for folder in ("path/to", "gemma-2-9b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    for name in ("before.json", "after.json"):
        shutil.copy(ROOT / "benchmarks/results/every_peer_h200_2026-11-22.json", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("command", [command for command in COMMANDS if not not_run(command)])
def test_commands_run(command: str, files: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for large, small in SMALLER:
        command = re.sub(large, small, command)
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if "torch" in sys.modules:
        monkeypatch.setattr(
            "attn.tools.bench.on_torch._CPU_GEMM", 64
        )  # a large product in bfloat16 takes seconds on some processors
    monkeypatch.setattr(fuzz, "run_fuzz", functools.partial(fuzz.run_fuzz, most=1))  # one program, however long that takes
    assert cli.main(words[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_the_mistakes_give_the_messages_that_the_page_shows() -> None:
    for module in ("torch", "jax", "transformers", "matplotlib", "tokenizers", "safetensors"):
        pytest.importorskip(module)
    mistakes, page = script("mistakes"), MISTAKES.read_text(encoding="utf-8")
    assert mistakes.current(page) == page, "run `python docs/mistakes.py --write`"
    assert page.count("```text") >= 35


def test_the_picture_of_a_terminal_has_what_it_shows_in_the_end() -> None:
    pytest.importorskip("rich")
    demo = script("demo_picture")
    written = demo.run([sys.executable, "-c", "print('one\\ntwo\\x1b[1A\\r\\x1b[2K\\x1b[32mONE\\x1b[0m')"])
    assert demo.screen(written)[:2] == ["\x1b[32mONE\x1b[0m", "two"], "the first line is written again"
    drawn = demo.picture(["\x1b[1;32m40 of 40", "plain"], "attn demo")
    assert (
        "40&#160;of&#160;40" in drawn
        and "@font-face" not in drawn
        and "http" not in re.sub(r'xmlns="[^"]*"|<!--.*?-->', "", drawn)
    )
    columns = demo.picture(["torch   CPU_ATTN      10", "jax     XLA_ATTN  1 < 2"], "attn demo")
    of = {text: float(place) for place, text in re.findall(r'x="([\d.]+)" y="[\d.]+" textLength[^>]*>([^<]*)<', columns)}
    assert of["torch"] == of["jax"] == 0 and of["CPU_ATTN"] == of["XLA_ATTN"] > 90, "a column is where its text begins"
    assert of["10"] > of["1&#160;&lt;&#160;2"]
    with pytest.raises(subprocess.CalledProcessError):
        demo.run([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_picture_of_what_backends_serve_is_current() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    stored = (DOCS / "assets" / "capabilities.svg").read_text(encoding="utf-8")
    now = script("capabilities_picture").picture()
    assert all(f">{html.escape(text)}</text>" in stored for text in now.texts), "run `python docs/capabilities_picture.py`"
    if f"Matplotlib v{matplotlib.__version__}," in stored:
        assert now._repr_svg_() == stored, "run `python docs/capabilities_picture.py`"


def test_the_picture_of_speed_is_current() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    stored = (DOCS / "assets" / "speed.svg").read_text(encoding="utf-8")
    now = script("speed_picture").picture()
    drawn = [html.escape(text, quote=False) for text in now.texts]
    assert [text for text in drawn if f">{text}</text>" not in stored] == [], "run `python docs/speed_picture.py`"
    if f"Matplotlib v{matplotlib.__version__}," in stored:
        assert now._repr_svg_() == stored, "run `python docs/speed_picture.py`"


def test_what_succeeds_is_no_mistake() -> None:
    mistakes = script("mistakes")
    with pytest.raises(ValueError, match="exit code 0, must be 1 or 2"):
        mistakes.command("attn --version")
    with pytest.raises(ValueError, match="raises nothing"):
        mistakes.exception("1 + 1", {})
    page = "```sh\nattn explain\n```\n\n```text\nan old message\n```\n"
    assert "--head-size, or --model" in mistakes.current(page) and "an old message" not in mistakes.current(page)


# links and the site's plan


def site_files() -> dict[str, str]:
    """The site's files by their path in it, with the text of written pages: what mkdocs finds, without mkdocs."""
    files = {named(path): "" for path in DOCS.rglob("*") if path.is_file() and path.suffix != ".py"}
    files |= {f"reference/api/{module}.md": "" for module in script("generate").MODULES}
    files |= dict.fromkeys(GENERATED, "") | {named(page): page.read_text(encoding="utf-8") for page in PAGES}
    notes = {f"benchmarks/{path.stem.replace('README', 'index')}.md": "" for path in (ROOT / "benchmarks/notes").glob("*.md")}
    return files | notes | {f"notebooks/{path.stem}.md": "" for path in (ROOT / "notebooks").glob("*.ipynb")}


def broken_links(page: str, text: str, files: dict[str, str]) -> list[str]:
    """The links of a page that do not lead to a file of the site, or to a heading of a written page."""
    prose, broken = FENCE.sub("", text), []
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)", prose) + re.findall(r"^\[[^]]+\]: *(\S+)", prose, re.MULTILINE)
    for link in links:
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        headings = {
            re.sub(r"[^\w\s-]", "", line).strip().lower() for line in re.findall(r"^#+ (.*)", files.get(target, ""), re.M)
        }
        slugs = {re.sub(r"[-\s]+", "-", heading) for heading in headings}
        if target not in files or (anchor and files[target] and anchor not in slugs):
            broken.append(f"{page}: {link}")
    return broken


def test_links_lead_to_pages_of_the_site() -> None:
    """`mkdocs build --strict` accepts no other: a file of the repository outside of docs/ is not in the site."""
    files = site_files()
    assert [link for page in PAGES for link in broken_links(named(page), files[named(page)], files)] == []


@pytest.mark.parametrize(
    ("link", "fine"),
    [
        ("choose.md", True), ("../semantics.md", True), ("../reference/api/attn.torch.md#attn.x", True), ("#here-a", True),
        ("tpu-serving.md#a-server", True), ("../notebooks/06_mla.md", True), ("https://example.org/x", True),
        ("../../benchmarks/notes/engines.md", False), ("../../README.md", False), ("../hooks.py", False), ("missing", False),
        ("../how-to", False), ("tpu-serving.md#no-such-heading", False), ("#there", False), ("/semantics.md", False),
    ],
)  # fmt: skip
def test_a_broken_link_is_found(link: str, fine: bool) -> None:
    files = site_files()
    for text in (
        f"# Here, `a`\n\n[x]({link})\n",
        f"# Here, `a`\n\n[x\ny]({link} 'title')\n",
        f"# Here, `a`\n\n[x]\n\n[x]: {link}\n",
    ):
        found = broken_links("how-to/vendor.md", text, {**files, "how-to/vendor.md": text})
        assert found == ([] if fine else [f"how-to/vendor.md: {link}"])


def test_links_of_generated_pages_lead_to_pages_of_the_site(made: dict[str, str], generate: ModuleType) -> None:
    files = {**site_files(), **dict.fromkeys(generate.pages(), "")}
    assert [link for page, text in made.items() for link in broken_links(page, text, files)] == []


def test_figures_are_pages_that_begin_with_the_tables_of_the_readme(made: dict[str, str]) -> None:
    index = made["benchmarks/index.md"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"<!-- table: speed -->.*?<!-- end -->", readme, re.DOTALL)[0] in index  # type: ignore[index]
    assert re.search(r"<!-- table: places -->.*?<!-- end -->", readme, re.DOTALL)[0] in index  # type: ignore[index]
    assert "assets/speed.svg" in index and "](triton.md)" in index and "results/every_peer" in made["benchmarks/triton.md"]


def test_every_page_is_in_the_menu_and_every_entry_is_a_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))
    assert listed == {named(page) for page in PAGES} | GENERATED


def test_there_is_a_how_to_for_each_user() -> None:
    assert {"tpu-serving", "pytorch-gpu", "notebook", "backend-author", "vendor"} <= {page.stem for page in PAGES}


# what is made from the code


def test_tables_hold_every_backend_and_every_run(made: dict[str, str]) -> None:
    page = made["reference/evidence.md"]
    rows = evidence.load()
    assert rows and page.count("\n| attention |") == sum(row.registry == "attention" for row in rows)
    for row in rows:
        assert f"| {row.registry} | `{row.backend}` | {row.kind} | {row.device} | {row.level} | {row.cases} |" in page


def test_commands_and_variables(made: dict[str, str]) -> None:
    for name, command in cli.COMMANDS.items():
        assert f"## attn {name}\n" in made["reference/commands.md"] and command.example in made["reference/commands.md"]
    assert "--workloads FILE" in made["reference/commands.md"]
    for name in envs.VARIABLES:
        assert name in made["reference/variables.md"] or name == "VLLM_USE_V1"


def test_every_public_name_and_method_is_there_with_its_docstring(made: dict[str, str], generate: ModuleType) -> None:
    """Of names that a page shows, mkdocstrings finds the docstring by the path that follows `:::`: it must lead to the same."""
    without = []
    for module_name in generate.MODULES:
        module, page = importlib.import_module(module_name), made[f"reference/api/{module_name}.md"]
        shown = dict(re.findall(r"\{ #(\S+) \}\n(?:\n```python\n.*?\n```\n)?(?:\n::: (\S+)\n)?", page, re.DOTALL))
        for name in generate.public(module):
            thing = getattr(module, name)
            methods = generate.methods(thing) if isinstance(thing, type) else {}
            for path, value in {name: thing, **{f"{name}.{method}": value for method, value in methods.items()}}.items():
                described = shown[f"{module_name}.{path}"]
                if described:
                    assert pkgutil.resolve_name(described).__doc__, described
                elif callable(value) and not isinstance(value, type):
                    without.append(f"{module_name}.{path}")
    assert set(attn._FACE) <= set(generate.public(attn))
    assert len(without) < 20, without
    for module, paths in {
        "attn": ("CommonAttentionMetadata.from_lens",),
        "attn.torch": ("Attention.new_kv_cache", "MLAAttention.load_pages"),
        "attn.jax": ("Attention.build",),
        "attn.serving": (
            "Scheduler.submit",
            "Scheduler.schedule",
            "Scheduler.commit",
            "Scheduler.cancel",
            "BlockPool.allocate",
        ),
    }.items():
        for path in paths:
            assert f"{{ #{module}.{path} }}" in made[f"reference/api/{module}.md"]


def test_parameters_that_a_docstring_describes_become_a_section() -> None:
    sections = script("docstrings").sections
    text = "Do it.\n\na: first,\n    as said; b, c: [T] ints. Raises ValueError for others\nthan these.\n\nMore: of __b__."
    made = ["Do it.", "Args:", "    a: first, as said", "    b, c: [T] ints.", "Raises ValueError for others than these."]
    assert [line for line in sections(text, {"a", "b", "c"}).splitlines() if line] == [*made, "More: of `__b__`."]
    assert sections(text, set()) == text.replace("__b__", "`__b__`"), "no parameter, no section"
    session = "Show.\n\n    >>> f(1)\n    2\n\nAfter."
    assert sections(session, set()) == "Show.\n\n```python\n>>> f(1)\n2\n\n```\n\nAfter."
    assert sections("A.\n\nArgs:\n    a: b", {"a"}) == "A.\n\nArgs:\n    a: b", "it has its sections"


def test_every_public_function_has_a_docstring(generate: ModuleType) -> None:
    without = [
        f"{module}.{name}"
        for module in generate.MODULES
        for name in generate.public(importlib.import_module(module))
        if callable(thing := getattr(importlib.import_module(module), name)) and not (thing.__doc__ or "").strip()
    ]
    assert without == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        if not installed(package):
            pytest.skip(f"{package} is not installed (extra docs)")
    folder = tmp_path_factory.mktemp("site")
    # as `make docs`: with --quiet, warnings are not counted
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_site_builds_without_a_warning(site: Path) -> None:
    page = (site / "reference/backends/index.html").read_text(encoding="utf-8")
    assert "<table>" in page and "TRITON_ATTN" in page
    assert not (site / "generate.py").exists()
    assert "Switch to dark colours" in page and "Switch to light colours" in page
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert (site / "notebooks" / path.stem / "index.html").exists() and f"notebooks/{path.stem}/" in page, "in the menu"
    assert (site / "benchmarks/triton/index.html").exists() and "benchmarks/triton/" in page, "in the menu"
    drawn = (site / "notebooks/05_masks_sinks_windows/index.html").read_text(encoding="utf-8")
    assert drawn.count('alt="what the cell shows"') == 8 and len(list((site / "notebooks").glob("05*.png"))) == 8
    assert "decoder (3, 0)" in drawn and "$$" not in (site / "notebooks/06_mla/index.html").read_text(encoding="utf-8")
    layer = (site / "reference/api/attn.torch/index.html").read_text(encoding="utf-8")
    assert '<h2 id="attn.torch.Attention">Attention' in layer, "its anchor, and no markup that is left over"
    assert '<h3 id="attn.torch.Attention.new_kv_cache">' in layer and "a zeroed cache of" in layer and ":::" not in layer
    assert "<b>sinks</b>" in layer or "<code>sinks</code>" in layer, "a section of parameters"


# in a browser


UNPACKED = str(Path(sys.prefix) / "browser" / "chromium")  # by `make browser`
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", UNPACKED))), "")
in_a_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium on the path (Debian's package: chromium; `make browser`)")
#: What the page measures of itself: every table's rows with their heights, and whether text overflows its cell.
PROBE = """
<script>addEventListener("load", () => {
  const told = [...document.querySelectorAll("table")].map(t => ({
    rows: t.rows.length, width: t.getBoundingClientRect().width,
    hidden: [...t.rows].filter(r => r.getBoundingClientRect().height < 8).length,
    text: t.innerText.length, beyond: t.getBoundingClientRect().right - document.documentElement.clientWidth,
  }));
  const svg = [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect().width);
  const out = document.createElement("pre"); out.id = "probe"; out.textContent = JSON.stringify({tables: told, svg});
  document.body.append(out);
})</script>
"""


def opened(page: Path, tmp_path: Path) -> tuple[dict[str, Any], Any]:
    """What a page measured of itself, and its screenshot [height, width, 3]."""
    from matplotlib.image import imread

    shot = tmp_path / "shot.png"
    call = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1600", "--hide-scrollbars"]
    call += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=120, check=True)
    told = run([*call, "--dump-dom"]).stdout
    run([*call, f"--screenshot={shot}"])
    found = re.search(r'<pre id="probe">(.*?)</pre>', told, re.DOTALL)
    assert found, "the page's own script did not run"
    return json.loads(html.unescape(found[1])), imread(shot)[..., :3]


@in_a_browser
def test_what_a_notebook_shows_is_a_table_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    from attn import pictures

    table = report.backends("attention")
    selection = attn.explain(96, "float32", features=["sinks"], framework="torch")
    page = tmp_path / "page.html"
    body = selection._repr_html_() + pictures.mask(8, causal=True)._repr_svg_().partition("?>")[2] + table._repr_html_()
    page.write_text(f"<!doctype html><meta charset=utf-8><body>{body}{PROBE}", encoding="utf-8")
    told, image = opened(page, tmp_path)
    chosen, listed = told["tables"]
    assert chosen["rows"] == 1 + len(selection.trace) and listed["rows"] == 1 + len(table)
    assert chosen["hidden"] == listed["hidden"] == 0 and chosen["width"] > 200 and listed["width"] > 600
    assert told["svg"][0] > 100
    green = (image[..., 1] > image[..., 0] + 0.01) & (image[..., 1] > image[..., 2] + 0.01)
    assert green.sum() > 1000, "the winner's row is tinted"
    blue = (image[..., 2] > image[..., 0] + 0.5) & (image[..., 2] > 0.6)
    assert blue.sum() > 1000, "the mask is drawn"


@in_a_browser
@pytest.mark.parametrize("name", ["backends", "evidence"])
def test_the_sites_tables_render(name: str, site: Path, tmp_path: Path) -> None:
    page = site / "reference" / name / "index.html"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    told, image = opened(page, tmp_path)
    assert max(table["beyond"] for table in told["tables"]) <= 0, "the page has room for its tables"
    rows = sum(table["rows"] for table in told["tables"])
    registered = sum(len(registry.names()) for registry in report.REGISTRIES.values())
    want = len(evidence.load()) if name == "evidence" else registered
    assert rows >= want and not any(table["hidden"] for table in told["tables"])
    assert image.std() > 0.02, "something is drawn"
