"""The `attn` command: list backends, explain a choice, check and time backends, and run a demo model.

Each command is a function that adds its arguments and returns the function to run. A command's modules are imported only
when it is called, so `attn --help` imports none of them. Exit codes: 0 success; 1 the request failed (no backend serves
it, a conformance case failed); 2 the command line is wrong, reported in one line; 130 interrupted, 143 by SIGTERM. Any other
exception is a bug in this package and keeps its traceback.
"""

import argparse
import contextlib
import errno
import importlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import attn
from attn import envs, imports
from attn.capabilities import FRAMEWORKS
from attn.errors import AttnError, UnsupportedError
from attn.imports import installed, pip_install
from attn.tables import folded

Run = Callable[[argparse.Namespace], int]

#: Third-party module -> the extra of this package that installs it.
# The command line is what turns a missing module into the command that installs it, so it maps modules back to the extras.
EXTRAS = {requirement.partition(">")[0]: extra for extra, packages in imports.EXTRAS.items() for requirement in packages}
EXTRAS |= {"hypothesis": "dev", "pytest": "dev"}
#: Platform -> its framework; None: both have it.
PLATFORMS = {"cuda": "torch", "rocm": "torch", "xpu": "torch", "tpu": "jax", "gpu": "jax", "cpu": None}


def _backends(parser: argparse.ArgumentParser) -> Run:
    from attn.reports import report

    parser.add_argument("--registry", choices=report.REGISTRIES, help="list one registry (default: all three)")
    parser.add_argument("--wide", action="store_true", help="also print what each backend serves and its evidence")
    _json_argument(parser)

    def run(args: argparse.Namespace) -> int:
        table = report.backends(args.registry)
        return _show(table if args.json else table.text(args.wide), args.json)

    return run


#: Options of `attn explain` that describe one layer, and those that describe a model's load.
_OF_LAYER = ("head_size", "num_heads", "num_kv_heads", "feature", "attn_type", "mla")
_OF_MODEL = ("context", "requests")


def _explain(parser: argparse.ArgumentParser) -> Run:
    from attn import dtypes
    from attn.capabilities import ATTN_TYPES, FRAMEWORKS, Feature
    from attn.reports import machines

    add = parser.add_argument
    add("--model", metavar="CONFIG", help="explain every layer of a model: a transformers config.json, or a folder with one")
    add("--context", type=int, help="with --model: tokens per request (default: 4096)")
    add("--requests", type=int, help="with --model: requests in the batch (default: 1)")
    add("--head-size", type=int, help="explain one layer; required without --model")
    add("--dtype", help="dtype of the activations (default: float32 on a CPU, else bfloat16; with --model that of the file)")
    add("--kv-cache-dtype", default="auto", help=f"one of {', '.join(dtypes.KV_CACHE_DTYPES)} (default: %(default)s)")
    add("--block-size", type=int, default=16, help="tokens per cache block (default: %(default)s)")
    add("--feature", action="append", default=[], help=f"required feature; may be repeated: {', '.join(Feature)}")
    add("--attn-type", help=f"one of {', '.join(ATTN_TYPES)} (default: {ATTN_TYPES[0]})")
    add("--mla", action="store_true", help="multi-head latent attention")
    add("--num-heads", type=int, help="query heads, which some backends limit (default: not judged)")
    add("--num-kv-heads", type=int, help="kv heads (default: not judged)")
    add("--backend", help="require this backend: used or rejected with reasons, never replaced")
    add("--framework", choices=FRAMEWORKS, help="(default: that of --backend or the device, else the installed one)")
    add("--disable", action="append", default=[], metavar="NAME", help="exclude a backend; may be repeated")
    add("--device", "--gpu", metavar="NAME", help="explain for this device, present or not: H100, MI300X, v6e, sm_120")
    add("--platform", choices=PLATFORMS, help="describe the device by its platform instead")
    add("--arch", default="", help="architecture, with --platform: sm_90, gfx942, v6e")
    add("--device-name", default="", help="name to show, with --platform")
    assumed = "with --device or --platform what the framework's wheel installs, else what is installed on this machine"
    packages = f"packages assumed to be installed, comma-separated: {', '.join(machines.PACKAGES)} (default: {assumed})"
    add("--assume", action="append", metavar="NAMES", help=f"{packages}; may be repeated")
    _json_argument(parser)

    def run(args: argparse.Namespace) -> int:
        # An option of the other form would have no effect: it is an error, not a silent default. Compared with the
        # parser's defaults, because argparse does not say which options were passed.
        of_other_form = _OF_LAYER if args.model else _OF_MODEL
        passed = [name for name in of_other_form if getattr(args, name) != parser.get_default(name)]
        if passed:
            option = f"--{passed[0].replace('_', '-')}"
            one_layer = f"{option} describes one layer: it cannot be combined with --model"
            parser.error(one_layer if args.model else f"{option} requires --model")
        if not args.model and args.head_size is None:
            parser.error("the following arguments are required: --head-size, or --model")
        # `--assume ""` is an empty list, a machine with nothing but the framework; without the option the default of
        # `explain` applies.
        assume = None if args.assume is None else [name.strip() for name in ",".join(args.assume).split(",") if name.strip()]
        common = {name: getattr(args, name) for name in ("backend", "framework", "disable")}
        common |= {"device": _described_device(parser, args), "assume": assume}
        return (_explain_model if args.model else _explain_layer)(args, common)

    return run


def _described_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    """Return the device that the options of `attn explain` describe; None: the current one."""
    from attn.capabilities import Device
    from attn.reports import machines
    from attn.selection.platforms import default_framework

    if args.device:
        if args.platform or args.arch or args.device_name:
            parser.error("--device cannot be combined with --platform, --arch or --device-name: pass one form or the other")
        return machines.device_named(args.device, args.framework)
    if args.platform:
        framework = args.framework or PLATFORMS[args.platform] or default_framework()
        # A misspelled architecture would satisfy no rule, and every backend would be rejected for a device that does
        # not exist.
        arch = machines.check_arch(args.platform, args.arch) if args.arch else ""
        return Device(framework, args.platform, args.device_name, arch)
    if args.arch or args.device_name:
        parser.error("--arch and --device-name require --platform")
    return None


def _explain_model(args: argparse.Namespace, common: dict[str, Any]) -> int:
    from attn.reports.model_report import explain_model

    cache = {"dtype": args.dtype, "kv_cache_dtype": args.kv_cache_dtype, "block_size": args.block_size}
    load = {name: getattr(args, name) for name in _OF_MODEL if getattr(args, name) is not None}
    report = explain_model(args.model, **cache, **load, **common)
    _show(report, args.json)
    return 0 if report.served else 1


def _explain_layer(args: argparse.Namespace, common: dict[str, Any]) -> int:
    from attn.capabilities import AttentionType
    from attn.reports.report import explain
    from attn.selection.platforms import default_framework, platform_for

    layer = {"features": args.feature, "use_mla": args.mla, "attn_type": args.attn_type or AttentionType.DECODER}
    heads = {"num_heads": args.num_heads, "num_kv_heads": args.num_kv_heads}
    device = common["device"] or platform_for(args.framework or default_framework()).device()
    dtype = args.dtype or ("float32" if device.platform == "cpu" else "bfloat16")
    selection = explain(args.head_size, dtype, args.kv_cache_dtype, args.block_size, **layer, **heads, **common)
    _show(selection, args.json)
    # Only then there was a list: a backend requested by name was judged alone.
    if selection.source == "priority" and not args.json:
        print(folded(f"candidates: the priority list of {selection.device.framework} on {selection.device.platform}"))
    return 0 if selection.winner else 1


def _env(parser: argparse.ArgumentParser) -> Run:
    from attn.reports.report import environment

    _json_argument(parser)

    def run(args: argparse.Namespace) -> int:
        facts = environment()
        if args.json:
            return _show(facts, True)
        for name, value in facts.items():
            if isinstance(value, dict):
                print(f"{name}:" if value else f"{name}: none")
                for key, entry in value.items():
                    print(folded(f"  {key}: {entry}"))
            else:
                print(folded(f"{name}: {value}"))
        return 0

    return run


def _tables(parser: argparse.ArgumentParser) -> Run:
    from attn.reports.report import backend_tables, replace_tables

    parser.add_argument("--write", action="store_true", help="write them into docs/reference/backends.md of this checkout")

    def run(args: argparse.Namespace) -> int:
        if not args.write:
            print(backend_tables(), end="")
            return 0
        # Records are read from the classes, which import their framework: without one, its rows would be written as empty.
        missing = [framework for framework in FRAMEWORKS if not installed(framework)]
        if missing:
            raise ValueError(f"--write needs the records of every backend: {pip_install(*missing)}")
        page = Path(attn.__file__).parents[1] / "docs" / "reference" / "backends.md"
        before = page.read_text(encoding="utf-8")
        after = replace_tables(before)
        page.write_text(after, encoding="utf-8")
        print(f"{page.name}: {'unchanged' if after == before else 'tables rewritten'}")
        return 0

    return run


def _delegate(module: str) -> Callable[[argparse.ArgumentParser], Run]:
    """A command whose module defines `add_arguments(parser)` and `run(args) -> int`."""

    def configure(parser: argparse.ArgumentParser) -> Run:
        command = importlib.import_module(module)
        command.add_arguments(parser)
        return command.run

    return configure


class Command(NamedTuple):
    """A subcommand: a one-line summary, an example, and the function that adds its arguments."""

    summary: str
    example: str
    configure: Callable[[argparse.ArgumentParser], Run]


COMMANDS = {
    "backends": Command(
        "list every backend: whether it runs on this machine, and what it serves",
        "attn backends --registry attention --wide",
        _backends,
    ),
    "explain": Command(
        "show which backend a layer, or each layer of a model, would get, and why the others were rejected",
        "attn explain --head-size 128 --dtype bfloat16 --device H100",
        _explain,
    ),
    "conform": Command(
        "run the conformance suite on this machine's backends",
        "attn conform TORCH_SDPA --level quick",
        _delegate("attn.tools.conform"),
    ),
    "aot": Command(
        "compile kernels for TPUs and GPUs without having them: memory, spills, estimated time",
        "attn aot --target tpu-v6e --subset",
        _delegate("attn.tools.aot.command"),
    ),
    "bench": Command(
        "time backends on this machine, checking every output",
        "attn bench 64q1s4k --peers all --plot times.svg",
        _delegate("attn.tools.bench.command"),
    ),
    "tune": Command(
        "time backends on this machine and save the results for the selector",
        "attn tune 64q1s4k 4q4k --heads 32/8 --head-size 128",
        _delegate("attn.tools.bench.tuning"),
    ),
    "generate": Command(
        "generate text with a demo model", 'attn generate "Once upon a time"', _delegate("attn.tools.demo.generate")
    ),
    "demo": Command("show the demo model serving requests step by step", "attn demo", _delegate("attn.tools.demo.show")),
    "replay": Command(
        "run a recorded call on backends of both frameworks, checking every output",
        "attn replay records/000001-77-TRITON_ATTN-non-finite.safetensors --shrink small.safetensors",
        _delegate("attn.tools.replay"),
    ),
    "evidence": Command(
        "check and time backends on this machine's device in bounded time, and write one file to send",
        "attn evidence --out evidence.json --seconds 600",
        _delegate("attn.tools.collect"),
    ),
    "env": Command("print versions, devices and variables for a bug report", "attn env --json", _env),
    "tables": Command("generate the documentation's tables of backends", "python -m attn tables --write", _tables),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return the exit code."""
    with _sigterm_interrupts() as received:
        code = _main(sys.argv[1:] if argv is None else argv)
    return 143 if received and code == 130 else code


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[list[int]]:
    """Let SIGTERM, as `timeout` sends it, interrupt as Ctrl-C does: a command shows what it has and ends its processes.

    Yields a list that has the signal once it was received. Only in a main thread, and where the signal has no other handler.
    """
    received = list[int]()

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    alone = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if alone:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        if alone:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _main(argv: Sequence[str]) -> int:
    # `print` to None does nothing, but argparse and `flush` below would raise AttributeError.
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller (`>&-`)
            setattr(sys, stream, io.StringIO())
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A path or a text of a model that the terminal's encoding lacks is written as \u65e5, and the rest is not lost.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            if not argv:
                parser(argv).print_help()
                return 0
            # Variables are checked after the arguments, so that a wrong command line is one line.
            args, unknown = parser(argv).parse_known_args(argv)
            if unknown:  # refused by the command, whose help has its arguments; argparse would say `attn --help`
                args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
            envs.warn_of_unknown(lambda text: print(f"attn: {text}", file=sys.stderr))
            return args.run(args)
        finally:
            sys.stdout.flush()  # before the handlers below, which include a broken pipe
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `attn backends | head`
        # 141 is what a shell reports for a program that SIGPIPE ended (128 + 13).
        _discard_output()
        return 141
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        try:
            # What a full disk did not take at the flush above is still buffered, and would fail again at exit, in a traceback.
            sys.stdout.flush()
        except OSError:
            _discard_output()
        with contextlib.suppress(OSError):  # stderr may be full too
            print(f"attn: {message}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, UnsupportedError) or _no_room(error) else 2


def _discard_output() -> None:
    """Discard what could not be written to stdout, which Python would report at exit."""
    # The interpreter flushes stdout once more at exit; with the descriptor at the null device, that flush succeeds.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _no_room(error: Exception) -> str:
    """Return why a stream or an open file, which the error does not name, takes no more output; "" for another error."""
    # An error of opening a file has the file's name; one of writing to an open stream has none.
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return str(error.strerror) if isinstance(error, OSError) and error.filename is None and error.errno in full else ""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports errors in one line on stderr, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")


def parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with arguments for the command that `argv` names only."""
    top = Parser("attn", description="Select, check and time attention backends for torch and jax.")
    top.add_argument("--version", action="version", version=f"attn {attn.__version__}")
    # Only this command's arguments are added, because adding them imports its modules: `attn env` loads no benchmark.
    chosen = next((word for word in argv if not word.startswith("-")), None)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=f"example: {command.example}",
        )
        if name == chosen:
            sub.set_defaults(run=command.configure(sub), refuse=sub.error)
    return top


def user_message(error: Exception) -> str | None:
    """The message to show for an error the user can fix; None for a bug, which keeps its traceback.

    Fixable are: errors that this package raises deliberately (including a ValueError raised by its own code), missing
    files, a full disk, and missing packages of an extra.
    """
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in EXTRAS:
        package = (error.name or "").partition(".")[0]
        extra = EXTRAS[package]
        return f"{package} is not installed: {f'pip install {package}' if extra == 'dev' else pip_install(extra)}"
    # The import system names the module in an ImportError; those that this package raises have advice, and no name.
    if isinstance(error, AttnError) or (isinstance(error, ImportError) and error.name is None):
        return str(error)
    # A ValueError from a library below is a bug of ours: its message would mean nothing to the user.
    if isinstance(error, ValueError) and _raised_in(error).partition(".")[0] == "attn":
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if why := _no_room(error):
        return f"the output could not be written: {why}"
    return None


def _raised_in(error: Exception) -> str:
    """The module that raised `error`."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", ""))


def _json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _show(result: Any, as_json: bool) -> int:
    """Print a report object as text, or its `to_dict()` (or `result` itself, if a dict) as JSON."""
    data = result if isinstance(result, dict) else None
    print(json.dumps(data or result.to_dict(), indent=2) if as_json else folded(result))
    return 0
