"""Use libtpu as a compiler only: compile TPU programs on any host, and read libtpu's dumps.

A *program* is a function whose small integer arguments (lengths, tables) have known values. It is compiled whole, as a user
would compile it, and each `pallas_call` in it is estimated alone. libtpu's static simulator follows scalar code, branches
and loop counts only if it can evaluate them, so the kernel's first instructions (about a bundle each) store the values of
the scalars that a call prefetches into its SMEM. Kernels are estimated alone because the simulator aborts on copies from
HBM to HBM.

The values come from tracing: under `jax.ensure_compile_time_eval` everything that depends only on known arrays is computed,
and reaches the call as an array, not as a tracer.

libtpu and jax read their environment once: `environment` is for the process that calls the other functions.
"""

import contextlib
import copy
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn.reports.machines import CEILINGS
from attn.tools.aot.command import numbered


class Generation(NamedTuple):
    """A generation: its names in libtpu, the TensorCores' clock and number, and the peaks of one TensorCore."""

    topology: str
    accelerator: str
    ghz: float
    cores: int
    tflops: float  #: bf16 products
    hbm: float  #: GB/s


def _chip(name: str, topology: str, accelerator: str, ghz: float, cores: int) -> Generation:
    peaks = CEILINGS[f"TPU {name}"]
    # A program is compiled for one TensorCore; a v7x chip has two, and `CEILINGS` states the chip.
    return Generation(topology, accelerator, ghz, cores, peaks.gemm_tflop_per_s / cores, peaks.copy_gb_per_s / cores)


CHIPS = {
    "v5e": _chip("v5e", "v5e:2x2", "v5litepod-4", 1.5, 1),
    "v6e": _chip("v6e", "v6e:2x2", "v6e-4", 1.75, 1),
    "v7x": _chip("v7x", "tpu7x:2x2x1", "tpu7x-8", 2.2, 2),
}

#: Products of float32 at full precision are six bfloat16 products.
_PASSES = {"float32": 6}


class CompileError(RuntimeError):
    """libtpu rejected a program."""


class PallasProgram(NamedTuple):
    """`call(*arrays, *batch)`: arrays are shapes, the batch consists of small integer arrays with values.

    Its minimal work is `flops` of products in `dtype`, and `bytes` to and from HBM.
    """

    call: Callable[..., Any]
    arrays: Sequence[Any]
    batch: Sequence[np.ndarray]
    donated: tuple[int, ...]
    flops: float
    bytes: float
    dtype: str

    def floors(self, chip: str) -> dict[str, float]:
        """Microseconds that the products and bytes take at the chip's peaks."""
        peak = CHIPS[chip]
        return {"hbm_us": self.bytes / peak.hbm / 1e3, "mxu_us": self.flops * _PASSES.get(self.dtype, 1) / peak.tflops / 1e6}


def environment(chip: str, dump: str, estimate: bool) -> dict[str, str]:
    """Environment variables of a process that compiles for `chip` and dumps under `dump`; `estimate`: also simulates.

    Estimates keep operands out of VMEM, where XLA would place some: the figures are those of a kernel with all of VMEM.
    """
    for folder in ("llo", "profile"):
        # `_dumped` and `_profiled` read both, whether or not libtpu has written into them.
        (Path(dump) / folder).mkdir(exist_ok=True)
    flags = [
        f"--xla_jf_dump_to={dump}/llo",
        "--xla_jf_dump_llo_text=true",
        # The two that `static_figures` reads: allocations, and the bundles of the final program.
        "--xla_jf_dump_llo_pass_label_regex=^(post-ra|final_hlo-static-per-bundle-utilization)$",
    ]
    if estimate:
        flags += [
            f"--xla_jf_dump_static_llo_profile_to={dump}/profile",
            "--xla_tpu_check_llo_types=false",  # otherwise packed 16-bit immediates abort the simulator from v6e on
            "--xla_vf_vmem_memory_space_assignment=false",
            "--xla_gf_vmem_memory_space_assignment=false",
        ]
    return {
        "LIBTPU_INIT_ARGS": " ".join(flags),
        # jax itself runs on the host: the topology is asked for by name and needs no device.
        "JAX_PLATFORMS": "cpu",
        "TPU_ACCELERATOR_TYPE": CHIPS[chip].accelerator,
        # With the three that follow, libtpu describes a machine without asking a cloud's metadata server, which is not there.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_LOG_DIR": "disabled",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several such processes at a time
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


@functools.cache
def _mesh(chip: str) -> Any:
    """One device of a machine of that generation."""
    from jax.experimental import topologies
    from jax.sharding import Mesh

    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology)
    # One of the four or eight: a kernel runs on one TensorCore.
    return Mesh(np.array(topology.devices[:1]), ("x",))


def _compile(chip: str, call: Callable[..., Any], arrays: Sequence[Any], donated: tuple[int, ...]) -> tuple[str, Any]:
    """(StableHLO, compiled program). Raises CompileError with the compiler's message."""
    sharding = jax.sharding.NamedSharding(_mesh(chip), jax.sharding.PartitionSpec())
    # The sharding names the described device, for which the program is then compiled, not for this host's.
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]
    with jax.sharding.use_abstract_mesh(_mesh(chip).abstract_mesh):
        lowered = jax.jit(call, donate_argnums=donated).lower(*shapes)
        try:
            return lowered.as_text(), lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            # The compiler's error with its number; around it are the program's text and links.
            message = re.search(r"E\d{4}: .*?(?= See https|\n|$)", str(error))
            raise CompileError(message[0] if message else str(error).partition("\n")[0]) from error


def compile_program(program: PallasProgram, chip: str, dump: str) -> list[dict[str, Any]]:
    """Compile the whole program. Returns the static figures of each of its kernels."""
    text, _ = _compile(chip, program.call, [*program.arrays, *program.batch], program.donated)
    names = list(dict.fromkeys(re.findall(r'kernel_name = "([^"]+)"', text)))
    dumped = _dumped(dump)
    # XLA's own fusions are dumped beside the kernels, and are left out by name.
    return numbered([{"name": name, **static_figures(files)} for op, files in dumped for name in names if _is(op, name)])


def estimate_program(program: PallasProgram, chip: str, dump: str, copies: bool = True) -> list[dict[str, Any]]:
    """Compile and simulate each kernel alone, for the program's batch: `cycles` and `us`, beside the static figures.

    Without `copies` no data is moved or waited for: the time to compute, for simulators that do not support copies.
    """
    # For the estimate only: what `compile_program` compiles is the program that a user gets.
    with _unsigned_division(), contextlib.nullcontext() if copies else _without_copies():
        return _estimates(program, chip, dump)


def _estimates(program: PallasProgram, chip: str, dump: str) -> list[dict[str, Any]]:
    parts = []
    for launch in launches(program.call, program.arrays, program.batch):
        _compile(chip, launch.call, launch.operands, launch.donated)
        figures = [static_figures(files) for op, files in _dumped(dump) if _is(op, launch.name)]
        cycles = [n for op, n in _profiled(dump) if _is(op, launch.name)]
        # Another number would mean that figures of two programs are mixed up.
        if len(figures) != 1 or len(cycles) != 1:
            raise RuntimeError(f"libtpu wrote {len(figures)} dumps and {len(cycles)} profiles of {launch.name}")
        parts.append({"name": launch.name, **figures[0], "cycles": cycles[0], "us": cycles[0] / CHIPS[chip].ghz / 1e3})
    return numbered(parts)


def _is(op: str, name: str) -> bool:
    """Whether an operation of the compiled program is the kernel of that name, transformed (jvp_name_) or not."""
    return re.fullmatch(r"((jvp|transpose|vmap)_)*" + re.escape(name) + r"_*(\.\d+)?", op) is not None


# --- tracing --------------------------------------------------------------------------------------------------------


class PallasCall(NamedTuple):
    """One `pallas_call` as a function of its array operands, with the values of its scalars built in."""

    name: str
    call: Callable[..., Any]
    operands: list[jax.ShapeDtypeStruct]
    donated: tuple[int, ...]


def launches(call: Callable[..., Any], arrays: Sequence[Any], batch: Sequence[np.ndarray]) -> list[PallasCall]:
    """Every `pallas_call` of `call(*arrays, *batch)`, in order, except those with an empty grid.

    It must call pallas as `pl.pallas_call`.
    """
    recorded: list[PallasCall] = []

    def traced(*shapes: Any) -> Any:
        # Only arrays that depend on traced shapes stay tracers (the module's docstring).
        with jax.ensure_compile_time_eval():
            return call(*shapes, *map(jnp.asarray, batch))

    with _recorded(recorded):
        jax.eval_shape(traced, *arrays)
    return recorded


@contextlib.contextmanager
def _recorded(launches: list[PallasCall]) -> Iterator[None]:
    """Within the context, `pl.pallas_call` records its arguments and returns arrays of the right shapes."""
    from jax.experimental import pallas as pl

    real = pl.pallas_call
    signature = inspect.signature(real)

    def record(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        # By name, since callers pass the grid and the specifications by position and by keyword.
        bound = signature.bind(kernel, *args, **kwargs).arguments
        return lambda *operands: _record(real, bound, operands, launches)

    pl.pallas_call = record
    try:
        yield
    finally:
        pl.pallas_call = real


@contextlib.contextmanager
def _unsigned_division() -> Iterator[None]:
    """Within the context, divisions of int32 scalars are unsigned, or shifts and masks where possible.

    Signed divisions hide loop bounds from the simulator, which then silently counts a loop once. Kernels divide nothing
    negative.
    """
    from jax import lax
    from jax._src import core

    def scalar(x: Any) -> bool:
        return getattr(x, "shape", None) == () and getattr(x, "dtype", None) == jnp.int32

    def as_unsigned(operation: Any, x: Any, y: Any) -> Any:
        return operation(jnp.asarray(x).astype(jnp.uint32), jnp.asarray(y).astype(jnp.uint32)).astype(jnp.int32)

    def replacement(name: str, operation: Any) -> tuple[Any, Any]:
        # From `vars`, as the staticmethod that it is: an attribute would be the bare function, and putting that back would make
        # it a method.
        original = vars(core.ShapedArray)[name]

        def divide(x: Any, y: Any) -> Any:
            # By a power of two: a shift or a mask.
            if scalar(x) and isinstance(y, int) and y.bit_count() == 1:
                return lax.shift_right_arithmetic(x, y.bit_length() - 1) if name == "_floordiv" else lax.bitwise_and(x, y - 1)
            if scalar(x) and (isinstance(y, int) or scalar(y)):
                return as_unsigned(operation, x, y)
            return original.__func__(x, y)

        return original, staticmethod(divide)

    def unsigned(operation: Any) -> Any:
        def divide(x: Any, y: Any) -> Any:
            return as_unsigned(operation, x, y) if scalar(x) or scalar(y) else operation(x, y)

        return divide

    div, rem = lax.div, lax.rem
    methods = {name: replacement(name, operation) for name, operation in (("_floordiv", div), ("_mod", rem))}
    for name, (_, new) in methods.items():
        setattr(core.ShapedArray, name, new)
    lax.div, lax.rem = unsigned(div), unsigned(rem)
    try:
        yield
    finally:
        lax.div, lax.rem = div, rem
        for name, (old, _) in methods.items():
            setattr(core.ShapedArray, name, old)


@contextlib.contextmanager
def _without_copies() -> Iterator[None]:
    """Within the context, copies made by `pltpu.make_async_copy` do nothing."""
    from jax.experimental.pallas import tpu as pltpu

    real = pltpu.make_async_copy

    class NoCopy:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def start(self) -> None: ...

        def wait(self) -> None: ...

    pltpu.make_async_copy = NoCopy  # type: ignore[assignment]
    try:
        yield
    finally:
        pltpu.make_async_copy = real


def _record(real: Callable[..., Any], bound: dict[str, Any], operands: Sequence[Any], launches: list[PallasCall]) -> Any:
    flat, tree = jax.tree.flatten(operands)
    kernel, grid_spec = bound["kernel"], bound.get("grid_spec")
    scalars = getattr(grid_spec, "num_scalar_prefetch", 0)
    passed = {i: x for i, x in enumerate(operands[:scalars]) if x is not None}  # an operand of None has no ref
    known = {i: np.asarray(x) for i, x in passed.items() if not isinstance(x, jax.core.Tracer)}
    options = {name: value for name, value in bound.items() if name != "kernel"}
    grid = grid_spec.grid if grid_spec is not None else bound.get("grid", ())
    grid = (grid,) if isinstance(grid, int) else tuple(int(n) for n in grid)  # a bound that is an array has a known value
    if grid_spec is not None:
        # A copy: the caller's object stays as it is.
        options["grid_spec"] = copy.copy(grid_spec)
        object.__setattr__(options["grid_spec"], "grid", grid)

    def with_scalars(*refs: Any) -> Any:
        # Element by element: scalar memory has no vector stores. The simulator sees constants and can count the loops that
        # follow.
        def store() -> None:
            for i, values in known.items():
                for index, value in np.ndenumerate(values):
                    refs[i][index] = jnp.asarray(value, values.dtype)

        # With one step there is nothing to guard, and the simulator need not follow a branch.
        if math.prod(grid) == 1:
            store()
        else:
            from jax.experimental import pallas as pl

            # In the first step only, since SMEM keeps its contents through the grid.
            first = functools.reduce(jnp.logical_and, [pl.program_id(axis) == 0 for axis in range(len(grid))])
            pl.when(first)(store)
        return kernel(*refs)

    name = str(bound.get("name") or getattr(kernel, "__name__", "kernel"))
    options["name"] = name

    def alone(*leaves: Any) -> Any:
        return real(with_scalars if known else kernel, **options)(*jax.tree.unflatten(tree, leaves))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
    donated = tuple(sorted(bound.get("input_output_aliases") or {}))
    # A grid of no steps launches nothing.
    if math.prod(grid):
        launches.append(PallasCall(name, alone, shapes, donated))
    tracer = next(x for x in flat if isinstance(x, jax.core.Tracer)).ravel()[0]  # so that results are tracers as well
    return jax.tree.map(lambda out: jnp.broadcast_to(tracer.astype(out.dtype), out.shape), bound["out_shape"])


# --- dumps ----------------------------------------------------------------------------------------------------------

_UTILISATION = "final_hlo-static-per-bundle-utilization"
_ALLOCATION = re.compile(r"#(allocation\w+) \[shape = '[^']*', space=(\w+), size = (0x[0-9a-f]+)([^\n]*)")


def _dumped(dump: str) -> list[tuple[str, dict[str, str]]]:
    """(operation, {pass: text}) of every dumped operation, oldest first. Each is returned once, and its files are removed."""
    dumps: dict[tuple[str, str], dict[str, str]] = {}
    for path in sorted((Path(dump) / "llo").iterdir()):
        if match := re.fullmatch(r"(\d+)-(.+)-\d+-(post-ra|" + _UTILISATION + r")\.txt", path.name):
            # The stamp tells two compilations of one name apart.
            stamp, op, label = match.groups()
            dumps.setdefault((stamp, op), {})[label] = path.read_text()
        path.unlink()
    # `static_figures` needs both.
    return [(op, files) for (_, op), files in dumps.items() if len(files) == 2]


def _profiled(dump: str) -> list[tuple[str, int]]:
    """(operation, estimated cycles) of every profile written since the last call."""
    profiles = []
    for path in sorted((Path(dump) / "profile").iterdir()):
        if path.name.endswith("profile.textproto"):
            text = path.read_text()
            op, cycles = re.search(r'hlo_op_name: "([^"]+)"', text), re.search(r"estimated_cycles: (\d+)", text)
            if op and cycles:
                profiles.append((op[1], int(cycles[1])))
        path.unlink()
    return profiles


def static_figures(files: dict[str, str]) -> dict[str, Any]:
    """VMEM and SMEM bytes, vector and scalar registers spilled, bundles, and instructions by slot, of one operation."""
    spaces: dict[str, tuple[str, int, bool]] = {}
    for name, space, size, attributes in _ALLOCATION.findall(files["post-ra"]):
        spaces[name] = (space, int(size, 16), "fixed_abs" in attributes)
    # The second line has the slots' names; a row has the instructions of one bundle in each slot.
    _, heads, _, _, *rows = files[_UTILISATION].splitlines()
    slots = [head.strip() for head in heads.split(",")]
    counts = np.array([row.split() for row in rows if len(row.split()) == len(slots)], np.int64).reshape(-1, len(slots))

    def allocated(space: str) -> int:
        return sum(size for where, size, fixed in spaces.values() if where == space and not fixed)

    def spilled(space: str) -> int:
        return sum(where == space and name.endswith("spill") for name, (where, _, _) in spaces.items())

    return {
        "vmem": allocated("vmem"),
        "smem": allocated("smem"),
        "spills": spilled("vmem"),
        "scalar_spills": spilled("smem"),
        "bundles": len(counts),
        "slots": dict(zip(slots, counts.sum(axis=0).tolist(), strict=True)),
    }
