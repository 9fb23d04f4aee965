"""The command line: what it prints and returns, and the errors for common mistakes."""

import io
import itertools
import json
import os
import re
import subprocess
import sys

import pytest

import attn
from attn import cli
from attn.errors import BackendLoadError, MetadataError, UnsupportedError
from attn.selection import plugins
from tests.levels import sampled


def call(capsys, line, *more):
    """(exit code, stdout, stderr) of a command line, run in this process; `more` are words that may hold spaces."""
    try:
        code = cli.main([*line.split(), *more])
    except SystemExit as stop:  # argparse's own way out
        code = stop.code
    said = capsys.readouterr()
    return code, said.out, said.err


def fresh(*arguments, stdout=subprocess.PIPE):
    """A Python of its own, from the checkout's root."""
    root = str(cli.Path(attn.__file__).parents[1])
    return subprocess.run(
        [sys.executable, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
    )


@pytest.fixture
def command(monkeypatch):
    """Put a command `try` into the table that runs any function."""

    def install(run):
        monkeypatch.setitem(cli.COMMANDS, "try", cli.Command("x", "attn try", lambda parser: run))

    return install


def test_text_that_the_encoding_lacks_is_escaped(command, monkeypatch):
    """As in a path, or a model's text; the command's other output is not lost for it."""
    command(lambda args: print("before \u65e5 after") or 0)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["try"]) == 0
    assert written.getvalue().split() == [b"before", rb"\u65e5", b"after"]


# what each command says


def test_backends(capsys):
    code, out, err = call(capsys, "backends")
    assert (code, err) == (0, "")
    for words in ("attention backends", "mla_prefill backends", "diffusion backends", "TORCH_SDPA", "XLA_ATTN"):
        assert words in out


def test_backends_with_every_column(capsys):
    wide = call(capsys, "backends --registry diffusion --wide")[1]
    narrow = call(capsys, "backends --registry diffusion")[1]
    assert "evidence" in wide and "head_size any" in wide and "evidence" not in narrow and "head_size any" not in narrow
    assert len(wide.splitlines()) < len(narrow.splitlines())


def test_backends_of_one_registry(capsys):
    code, out, _ = call(capsys, "backends --registry diffusion --json")
    assert code == 0 and {row["registry"] for row in json.loads(out)["backends"]} == {"diffusion"}


def test_explain(capsys):
    code, out, _ = call(capsys, "explain --head-size 96 --dtype float32 --feature sinks --framework torch")
    assert code == 0 and "-> " in out and "features={sinks}" in out
    assert "candidates: the priority list of torch on cpu" in out


def test_explain_a_device_that_is_not_here(capsys):
    h100 = "explain --head-size 128 --dtype bfloat16 --platform cuda --arch sm_90 --json --device-name"
    code, out, _ = call(capsys, h100, "NVIDIA H100")
    data = json.loads(out)
    assert data["device"] == {"framework": "torch", "platform": "cuda", "name": "NVIDIA H100", "arch": "sm_90"}
    assert code == (0 if data["backend"] else 1)
    code, out, _ = call(capsys, "explain --head-size 128 --platform tpu --arch v6e")
    assert "priority list of jax on tpu" in out
    code, out, _ = call(capsys, "explain --head-size 128 --dtype bfloat16 --device H100 --assume flashinfer,xformers")
    assert code == 0 and out.startswith("TRITON_ATTN for") and "installed: torch, triton, flashinfer, xformers" in out
    repeated = "explain --head-size 128 --dtype bfloat16 --device H100 --assume flashinfer --assume xformers"
    assert call(capsys, repeated)[:2] == (code, out)


def test_the_dtype_is_that_of_the_device_unless_it_is_passed(capsys):
    assert "dtype=bfloat16" in call(capsys, "explain --head-size 128 --device H100")[1]
    assert "dtype=bfloat16" in call(capsys, "explain --head-size 128 --platform tpu --arch v6e")[1]
    assert "dtype=float32" in call(capsys, "explain --head-size 128 --device x86_64")[1]
    assert "dtype=float32" in call(capsys, "explain --head-size 128")[1]
    assert "dtype=float16" in call(capsys, "explain --head-size 128 --device H100 --dtype float16")[1]


@pytest.mark.parametrize(
    "argv",
    ["backends", "backends --wide", "explain --head-size 96 --feature sinks", "explain --device H100 --model", "env"],
)
def test_columns_is_obeyed(argv, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "60")
    model = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(model))
    code, out, _ = call(capsys, argv, *([str(tmp_path)] if argv.endswith("--model") else []))
    assert code == 0 and max(map(len, out.splitlines())) <= 60
    json.loads(call(capsys, "backends --json")[1])


def test_names_of_backends_are_accepted_in_any_case(capsys):
    assert "-> TORCH_SDPA" in call(capsys, "explain --head-size 64 --backend torch_sdpa")[1]
    assert "disabled by the caller" in call(capsys, "explain --head-size 64 --disable cpu_attn --framework torch")[1]
    assert call(capsys, "conform torch_sdpa --only nothing")[2] == "attn: not tested: TORCH_SDPA: no case was selected\n"


def test_a_misspelt_variable_is_told_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("ATTN_BAKEND", "CPU_ATTN")
    code, _, err = call(capsys, "explain --head-size 64")
    assert (code, err) == (0, "attn: environment variable ATTN_BAKEND is not read by attn: did you mean ATTN_BACKEND?\n")


def test_no_backend_for_the_demo_model_is_a_request_that_failed(capsys):
    pytest.importorskip("tokenizers")
    code, out, err = call(capsys, "generate hello --framework torch --backend FLASH_ATTN")
    assert (code, out) == (1, "") and "no attention backend serves this model" in err and err.count("\n") == 1


def test_explain_all_the_arguments(capsys):
    words = "explain --head-size 64 --dtype bfloat16 --kv-cache-dtype fp8 --block-size 32 --attn-type decoder"
    words += " --feature sliding_window --feature soft_cap --num-heads 8 --num-kv-heads 2 --backend TORCH_SDPA --json"
    code, out, _ = call(capsys, words)
    data = json.loads(out)
    assert code == 0 and data["backend"] == "TORCH_SDPA" and data["source"] == "argument"
    assert data["request"]["features"] == ["sliding_window", "soft_cap"] and data["request"]["block_size"] == 32
    code, out, _ = call(capsys, "explain --head-size 576 --mla --framework torch --disable TRITON_MLA --json")
    assert "mla" in json.loads(out)["request"]["features"]


def test_explain_a_model(capsys, tmp_path):
    config = {  # meta-llama/Llama-3.1-8B
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = call(capsys, "explain --device H200 --context 1024 --requests 8 --model", str(tmp_path))
    assert (code, err) == (0, "") and "TRITON_ATTN" in out and "8 requests of 1024 tokens" in " ".join(out.split())
    code, out, _ = call(capsys, "explain --device H100 --json --dtype float16 --model", str(tmp_path / "config.json"))
    data = json.loads(out)
    assert code == 0 and data["dtype"] == "float16" and data["context"] == 4096 and data["ceilings"]["measured"] is False
    code, out, _ = call(capsys, "explain --device H100 --backend FLASHINFER --model", str(tmp_path))
    assert code == 1 and "flashinfer is not installed" in out
    code, out, err = call(capsys, "explain --mla --model", str(tmp_path))
    assert (code, out) == (2, "") and "--mla describes one layer: it cannot be combined with --model" in err
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": "many"}))
    code, out, err = call(capsys, "explain --model", str(tmp_path))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f'attn: {tmp_path / "config.json"}: num_hidden_layers = "many": must be an integer')


def test_no_backend_is_exit_code_1(capsys):
    code, out, err = call(capsys, "explain --head-size 64 --feature sparse_mla --backend TORCH_SDPA")
    assert code == 1 and err == "" and out.startswith("no backend for head_size=64")
    assert "sparse_mla not supported" in out


def test_env(capsys, monkeypatch):
    monkeypatch.setenv("ATTN_DISABLE", "FLASH_ATTN")
    code, out, _ = call(capsys, "env")
    assert code == 0 and f"attn: {attn.__version__}" in out and "ATTN_DISABLE: FLASH_ATTN" in out
    assert "plugins: none" in out


@pytest.mark.parametrize("command", ["backends", "env", "explain --head-size 64"])
def test_json_is_valid(capsys, command):
    code, out, err = call(capsys, f"{command} --json")
    assert code == 0 and err == "" and isinstance(json.loads(out), dict)


def test_tables(capsys, tmp_path, monkeypatch):
    code, out, _ = call(capsys, "tables")
    assert code == 0 and out.startswith("**Attention backends**")
    package = tmp_path / "attn"
    package.mkdir()
    monkeypatch.setattr(attn, "__file__", str(package / "__init__.py"))
    page = tmp_path / "docs" / "reference" / "backends.md"
    code, _, err = call(capsys, "tables --write")
    assert code == 2 and err == f"attn: {page}: No such file or directory\n"
    page.parent.mkdir(parents=True)
    page.write_text("<!-- backends:begin --><!-- backends:end -->")
    assert call(capsys, "tables --write")[:2] == (0, "backends.md: tables rewritten\n")
    assert call(capsys, "tables --write")[:2] == (0, "backends.md: unchanged\n")
    assert out in page.read_text()
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = call(capsys, "tables --write")
    assert code == 2 and err.startswith("attn: --write needs the records of every backend: pip install 'torch")
    assert out in page.read_text()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_an_example(capsys, name):
    code, out, _ = call(capsys, f"{name} --help")
    assert code == 0 and "example: " in out and cli.COMMANDS[name].example.split()[0] in out


def test_examples_parse():
    import shlex

    for name, command in cli.COMMANDS.items():
        words = shlex.split(command.example)
        argv = words[1:] if words[0] == "attn" else words[3:]
        assert argv[0] == name
        cli.parser(argv).parse_args(argv)


def test_version(capsys):
    assert call(capsys, "--version") == (0, f"attn {attn.__version__}\n", "")


# conformance


def test_conform(capsys):
    code, out, _ = call(capsys, "conform TORCH_SDPA --json --only", "refuses block_sparse")
    data = json.loads(out)
    assert code == 0 and data["ok"] and [(row["backend"], row["cases"]) for row in data["backends"]] == [("TORCH_SDPA", 1)]


@pytest.mark.parametrize("registry", ["attention", "diffusion", "mla_prefill"])
def test_conform_shows_the_progress_and_the_time_left_on_stderr(capsys, registry):
    only = {"attention": "causal", "diffusion": "padded", "mla_prefill": "context"}[registry]
    code, out, err = call(capsys, f"conform TORCH_SDPA --registry {registry} --only {only} --json")
    cases = json.loads(out)["backends"][0]["cases"]
    lines = err.splitlines()
    assert code == 0 and 1 <= len(lines) <= 5 and all(re.search(r" left: \d+:\d\d", line) for line in lines)
    assert f"{cases}/{cases}" in lines[-1] and "left: 0:00" in lines[-1] and "TORCH_SDPA" in lines[-1]


UNTESTED = [
    ("conform XFORMERS", "XFORMERS: xformers is not installed (pip install xformers)"),
    ("conform TORCH_SDPA CUSTOM --only block_sparse", "CUSTOM: Backend CUSTOM must be registered before use"),
    ("conform TORCH_SDPA --only no_such_case", "TORCH_SDPA: no case was selected"),
    ("conform TORCH_SDPA --only oracle --dtype float8_e4m3fn", "TORCH_SDPA: no case was selected"),
]


@pytest.mark.parametrize(("argv", "words"), UNTESTED)
def test_conform_without_cases_is_exit_code_1(capsys, argv, words):
    code, _, err = call(capsys, argv)
    *progress, last = err.splitlines()
    assert code == 1 and last.startswith("attn: not tested: ") and words in last and all(" left: " in line for line in progress)


@pytest.mark.parametrize(
    ("argv", "words"),
    sampled([pytest.param(*case) for case in UNTESTED], 1, "untested", lambda case: case.values == UNTESTED[0]),
)
def test_conform_without_cases_is_not_ok(capsys, argv, words):
    code, out, err = call(capsys, f"{argv} --json")
    assert code == 1 and not json.loads(out)["ok"] and words in err


CASE = '{"name":"x","query_lens":[1],"seq_lens":[3]}'


def test_repro(capsys):
    assert call(capsys, "conform TORCH_SDPA --repro", CASE)[:2] == (0, "no violation\n")
    code, out, _ = call(capsys, "conform TORCH_SDPA --json --repro", CASE)
    data = json.loads(out)
    assert code == 0 and data == {"ok": True, "case": json.loads(CASE), "violations": []}
    code, _, err = call(capsys, "conform XFORMERS --repro", CASE)
    assert code == 1 and err.startswith("attn: XFORMERS: xformers is not installed") and err.count("\n") == 1


def test_a_case_that_fails_is_exit_code_1(capsys):
    from attn.backends.registry import register_backend
    from attn.torch.backends.sdpa import TorchSDPABackend, TorchSDPAImpl

    class Forgetful(TorchSDPABackend):
        pass

    class ForgetfulImpl(TorchSDPAImpl, backend=Forgetful):
        def _attend(self, call):
            call.output.zero_()

    register_backend("FORGETFUL", Forgetful)
    code, out, _ = call(capsys, "conform FORGETFUL --only", "float32, constant V")
    assert code == 1 and "FAILED float32, constant V" in out and "--repro" in out


# the model


TINY = "--max-new-tokens 2 --json"


def test_generate(capsys):
    code, out, _ = call(capsys, f"generate --framework torch {TINY}", "def main(")
    assert code == 0 and json.loads(out)["results"][0]["prompt"] == "def main("


def test_demo(capsys):
    code, out, _ = call(capsys, f"demo --frameworks torch --num-requests 2 {TINY}")
    assert code == 0 and isinstance(json.loads(out), dict)


# newcomers' first mistakes: exit code 2, one line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("explain --head-size 64 --backend FLASH", "backend: 'FLASH'. Did you mean FLASH_ATTN? Valid options are: FLASH_ATTN"),
        ("explain --head-size 64 --feature sink", "feature 'sink' is unknown; known: non_causal"),
        ("explain --head-size 64 --dtype fp23", "dtype 'fp23' is unknown; known: float64"),
        ("explain --head-size -1", "head_size=-1 must be a positive int"),
        ("explain --head-size 64 --num-heads 6 --num-kv-heads 4", "num_heads=6 is not a multiple of num_kv_heads=4"),
        ("explain --head-size 64 --disable NOPE", "Unknown attention backend: 'NOPE'"),
        ("explain --head-size 64 --backend torch_sdp", "Did you mean TORCH_SDPA?"),
        ("conform TORCH_SDPA --dtype fp23", "dtype 'fp23' is unknown; known: float64"),
        ("conform TORCH_SDPA --repro {", "'{' is not a case: Expecting property name"),
        ("conform TORCH_SDPA --repro {}", "'{}' is not a case: missing fields: name, query_lens, seq_lens"),
        ("generate hello --model /no/such/model", "'/no/such/model' does not exist"),
        ("explain --model /no/such/model", "/no/such/model does not exist: pass a config.json, or a folder with one"),
        ("explain --head-size 64 --device H1000", "Unknown device: 'H1000'. Did you mean H100? Valid options are: V100"),
        ("explain --head-size 64 --platform xpu --arch pvc", "arch='pvc': the devices of xpu have no architectures here"),
        ("explain --head-size 64 --platform cuda --arch sm_999", "Unknown arch of cuda: 'sm_999'. Did you mean sm_90?"),
        ("explain --head-size 64 --assume flashinfre", "Unknown package: 'flashinfre'. Did you mean flashinfer-python?"),
        ("bench q1s16 --plot /no/such/folder/x.svg", "/no/such/folder/x.svg: No such file or directory"),
        ("bench q1s16 --json /no/such/folder/x.json", "/no/such/folder/x.json: No such file or directory"),
        ("bench 2x64x2x64 --registry diffusion --plot /", "/: the extension must be one of"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, words):
    code, out, err = call(capsys, argv)
    assert (code, out) == (2, "") and err.startswith("attn: ") and words in err and err.count("\n") == 1


def test_an_unknown_backend_in_the_environment_is_named(capsys, monkeypatch):
    monkeypatch.setenv("ATTN_BACKEND", "FLASHATTN")
    code, _, err = call(capsys, "explain --head-size 64")
    assert code == 2 and "ATTN_BACKEND=FLASHATTN: Unknown attention backend" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--json", "the following arguments are required: COMMAND"),
        ("explian", "invalid choice: 'explian'"),
        ("explain", "the following arguments are required: --head-size, or --model"),
        ("explain --model . --head-size 64", "--head-size describes one layer: it cannot be combined with --model"),
        ("explain --model . --num-heads 0", "--num-heads describes one layer: it cannot be combined with --model"),
        ("explain --head-size 64 --context 0", "--context requires --model"),
        ("explain --head-size many", "invalid int value: 'many'"),
        ("explain --head-size 64 --arch sm_90", "--arch and --device-name require --platform"),
        ("backends --registry video", "invalid choice: 'video'"),
        (
            "explain --head-size 64 --device H100 --arch sm_90",
            "--device cannot be combined with --platform, --arch",
        ),
        ("bench --limit many", "invalid float value: 'many'"),
        ("env --jsn", "attn env: unrecognized arguments: --jsn (attn env --help)"),
    ],
)
def test_wrong_usage(capsys, argv, words):
    code, out, err = call(capsys, argv)
    assert (code, out) == (2, "") and words in err
    assert err.startswith("attn") and err.endswith(" --help)\n") and err.count("\n") == 1


def test_attn_alone_is_help(capsys):
    code, out, err = call(capsys, "")
    assert (code, err) == (0, "") and out.startswith("usage: attn") and "explain" in out


def raising(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (MetadataError("seq_lens", 1, -3, "at least 0"), 2, "seq_lens[1] = -3: must be at least 0"),
        (UnsupportedError("no backend"), 1, "no backend"),
        (BackendLoadError("torch is not installed: pip install 'torch>=2.8'"), 2, "torch is not installed: pip"),
        (ImportError("neither torch nor jax is installed: pip install ..."), 2, "neither torch nor jax"),
        (ModuleNotFoundError("x", name="rich.table"), 2, "rich is not installed: pip install 'safetensors>=0.8' 'tok"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 2, "x.json: No such file or directory"),
    ],
)
def test_mistakes_by_kind(capsys, command, error, code, line):
    command(raising(error))
    got, out, err = call(capsys, "try")
    assert (got, out) == (code, "") and err.startswith(f"attn: {line}")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("of some library"),
        RuntimeError("x"),
        KeyError("x"),
        ModuleNotFoundError("No module named 'attn.lost'", name="attn.lost"),
        ImportError("cannot import name 'x' from 'attn'", name="attn"),
    ],
)
def test_what_is_our_own_fault_keeps_its_traceback(command, error):
    command(raising(error))
    with pytest.raises(type(error)):
        cli.main(["try"])


def test_interrupted(command):
    command(raising(KeyboardInterrupt()))
    assert cli.main(["try"]) == 130


def test_a_failed_plugin_is_shown_and_harms_nothing(capsys, monkeypatch):
    class Point:
        name, value = "BROKEN", "some_package:nothing"

        def load(self):
            raise ImportError("libfoo.so is missing")

    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [Point()])
    plugins.forget()
    code, out, _ = call(capsys, "backends")
    assert code == 0 and "plugin not loaded: ImportError: libfoo.so is missing" in out
    assert "BROKEN: ImportError: libfoo.so is missing" in call(capsys, "env")[1]


# processes of their own


def test_python_m_attn():
    done = fresh("-m", "attn", "explain", "--head-size", "64", "--backend", "NOPE")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("attn: Unknown attention backend")


def test_help_loads_nothing():
    script = (
        "import sys; from attn import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'numpy', 'torch', 'jax', 'rich', 'attn.reports.report', 'attn.selector'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = fresh("-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argv", ["--help", "try"])
def test_a_reader_that_goes_away_is_no_error(argv):
    script = (
        "import sys; from attn import cli\n"
        "cli.COMMANDS['try'] = cli.Command('x', 'x', lambda parser: lambda args: print('x' * 100_000) or 0)\n"
        f"sys.exit(cli.main([{argv!r}]))"
    )
    read, write = os.pipe()
    os.close(read)
    try:
        done = fresh("-c", script, stdout=write)
    finally:
        os.close(write)
    assert done.stderr == "" and done.returncode in (0, 141)  # 0: argparse itself keeps quiet about it


needs_a_full_device = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
COMMANDS = ["explain --head-size 64", "backends --json", "env"]
CANNOT = (1, "attn: the output could not be written: No space left on device\n")


@needs_a_full_device
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_a_command_prints_that_cannot_be_written_is_no_traceback(unbuffered, monkeypatch):
    script = (
        "import sys; from attn import cli\n"
        "cli.COMMANDS['try'] = cli.Command('x', 'x', lambda parser: lambda args: print('x') or 0)\n"
        "sys.exit(cli.main(['try']))"
    )
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        done = fresh("-c", script, stdout=full)
    assert (done.returncode, done.stderr) == CANNOT


@needs_a_full_device
@pytest.mark.parametrize(
    ("words", "unbuffered"), sampled([pytest.param(*case) for case in itertools.product(COMMANDS, ["", "1"])], 1, "unwritten")
)
def test_output_that_cannot_be_written_is_no_traceback(words, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        done = fresh("-m", "attn", *words.split(), stdout=full)
    assert (done.returncode, done.stderr) == CANNOT


@needs_a_full_device
def test_a_file_that_cannot_be_written_is_no_traceback(capsys, command):
    command(lambda args: cli.Path("/dev/full").write_text("x") and 0)
    assert call(capsys, "try") == (1, "", "attn: the output could not be written: No space left on device\n")


@needs_a_full_device
def test_a_message_that_cannot_be_written_changes_no_exit_code():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "attn", "explain", "--head-size", "64", "--backend", "NOPE"]
        assert subprocess.run(words, stdout=full, stderr=full, timeout=120).returncode == 2


CLOSED = [
    pytest.param(*case, closed) for case in [("env", 0), ("explain --head-size 0", 2)] for closed in (">&-", "2>&-", ">&- 2>&-")
]


@pytest.mark.parametrize(("words", "code", "closed"), sampled(CLOSED, 1, "closed streams", lambda case: case.values[1] == 2))
def test_closed_streams_are_no_traceback(words, code, closed):
    line = f'"$0" -m attn {words} {closed}'
    done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Traceback" not in done.stdout + done.stderr


# conform: what is not tested, and arguments that have no effect


def test_fuzzing_that_tests_nothing_is_no_success(capsys):
    code, out, err = call(capsys, "conform TORCH_SDPA --fuzz 1e-9")
    assert code == 1 and "0 cases of 0 programs, NOTHING TESTED" in out
    assert err == "attn: not tested: TORCH_SDPA: no case was finished in its share of 1e-09 s: pass more to --fuzz\n"
    code, out, err = call(capsys, "conform --registry diffusion --fuzz 1e-9 --json")
    assert code == 1 and json.loads(out)["ok"] is False and "not tested: " in err


def test_comparing_and_judging_nothing_is_no_success(capsys, tmp_path):
    file = str(tmp_path / "empty.json")
    cli.Path(file).write_text('{"rows": []}')
    code, out, _ = call(capsys, "bench compare", file, file)
    assert code == 1 and "0 times in both" in out
    code, _, err = call(capsys, "bench --judge", file)
    assert (code, err) == (2, f"attn: {file}: no rows to judge\n")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize(
    "words", ["conform TORCH_SDPA --fuzz", "evidence --out x --seconds", "bench q1s9 --limit", "tune --limit"]
)
def test_times_are_finite(capsys, words, seconds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, f"{words} {seconds}")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"seconds={float(seconds)} must be a finite number above 0" in err.replace("limit", "seconds")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fuzz 5 --level full", "--level has no effect with --fuzz, which uses --jobs, --seed"),
        ("--fuzz 5 --level quick", "--level has no effect with --fuzz, which uses --jobs, --seed"),
        ("--fuzz 5 --only mixed", "--only has no effect with --fuzz, which uses --jobs, --seed"),
        ("--fuzz 5 --dtype float32", "--dtype has no effect with --fuzz, which uses --jobs, --seed"),
        ("--fuzz 5 --kind ran", "--kind has no effect with --fuzz, which uses --jobs, --seed"),
        ("--fuzz 5 --part 1/2", "--part has no effect with --fuzz, which uses --jobs, --seed"),
        ("--fuzz 5 --record", "--record has no effect with --fuzz, which uses --jobs, --seed"),
        ("--fuzz 5 --repro {}", "pass --fuzz or --repro, not both"),
        ("--repro {} --jobs 2", "--jobs has no effect with --repro, which uses the backends and --registry only"),
        ("--seed 3", "--seed requires --fuzz"),
        (
            "--registry diffusion --part 1/2",
            "--part has no effect with --registry diffusion, which uses --level, --only, --kind, --jobs, --record",
        ),
        (
            "--registry mla_prefill --level full",
            "--level has no effect with --registry mla_prefill, which uses --only, --kind, --jobs, --record",
        ),
    ],
)
def test_conform_ignores_no_argument(capsys, words, message):
    assert call(capsys, f"conform TORCH_SDPA {words}") == (2, "", f"attn: {message}\n")


def test_python_m_attn_testing_is_attn_conform():
    done = fresh("-m", "attn.testing", "NOPE")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("attn: Unknown attention backend: 'NOPE'")


def test_conform_of_the_diffusion_registry(capsys):
    code, out, _ = call(capsys, "conform --registry diffusion TORCH_SDPA --json --only", "padded")
    told = json.loads(out)
    assert code == 0 and told["ok"] and told["backends"][0]["cases"] == 3 and told["backends"][0]["level"] == "dense"
    code, _, err = call(capsys, "conform --registry diffusion SAGE_ATTN")
    assert code == 1 and "SAGE_ATTN: sageattention is not installed" in err
    code, _, err = call(capsys, "conform --registry diffusion NOBODY")
    assert code == 2 and "Unknown diffusion attention backend: 'NOBODY'" in err
