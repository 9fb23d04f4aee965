"""The TPU kernels under the real TPU compiler, without a TPU, and the tools for it: a case of each kernel and chip a day, under
`--full` every value of every axis.

libtpu comes from PYTHONPATH or from the environment's folder `compilers` (`make compilers`); without it these are skipped.
"""

import functools
import json
import os
import random
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn.errors import BackendLoadError
from attn.jax.kernels.tpu import _chips
from attn.jax.kernels.tpu._refs import PagedConfig, block_shape, rows_at
from attn.tools.aot import command as aot
from attn.tools.aot import libtpu as _libtpu
from attn.tools.aot import tpu as jax_aot
from attn.visibility import LayerMask
from tests.levels import seed

TARGETS = [name for name in aot.TARGETS if name.startswith("tpu-")]


@functools.cache
def libtpu() -> str:
    """The folder to put on the path; skips the test when there is none."""
    try:
        return aot.compiler_path("tpu-v5e")
    except BackendLoadError as error:
        pytest.skip(str(error))


def subset(target, kernel):
    """Cases with every value of every axis once; the whole grid is for `attn aot`."""
    return [case for case in aot.cases(target) if case.subset and case.kernel == kernel]


#: 16 rows of one byte are half a tile of a v5e, which a copy into the middle of one may not address (E2003).
NARROW = "batch=decode", "block_size=16,", "kv=fp8_e4m3"


def drawn(target, kernel):
    """On a v5e a case with pages narrower than a tile; else one of those that compile fast: decodes and small matrices."""
    of_kernel = [case for case in aot.cases(target) if case.kernel == kernel]
    if target == "tpu-v5e" and (narrow := [case for case in of_kernel if all(word in case.name for word in NARROW)]):
        return narrow[0]
    few = [case for case in of_kernel if case.subset]
    light = [case for case in few if case.choice.get("batch", "decode") == "decode" and "512/640" not in case.name]
    return random.Random(f"{seed()} {target} {kernel}").choice(light)


@pytest.mark.parametrize("target", TARGETS)
def test_a_case_of_each_kernel_compiles(target):
    check(target, [drawn(target, kernel) for kernel in jax_aot.KERNELS])


def test_both_paged_kernels_are_compiled_with_narrow_pages():
    names = [drawn("tpu-v5e", kernel).name for kernel in ("ragged_paged_attention", "mla_attention")]
    assert all(word in name for name in names for word in NARROW)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_the_subset_of_the_grid_compiles(target):
    check(target, [case for kernel in jax_aot.KERNELS for case in subset(target, kernel)])


def check(target, cases):
    libtpu()
    rows = aot.compile_cases(target, cases, compile_only=True)
    assert [f"{row.label}: {row.reason}" for row in rows if row.status != "compiled"] == []
    chip = _chips.CHIPS[target.removeprefix("tpu-")]
    for row in rows:
        assert row.parts and row.figures["hbm_us"] > 0 and row.figures["mxu_us"] > 0
        for part in row.parts:
            assert 0 < part["vmem"] <= chip.vmem and 0 <= part["smem"] <= chip.smem and part["bundles"] > 0


@pytest.mark.full
@pytest.mark.parametrize("kernel", list(jax_aot.KERNELS))
def test_a_program_that_compiles_has_an_estimate(kernel):
    """The simulator takes longer than the compiler. Some programs lie beyond it, and say so (v7x the most)."""
    libtpu()
    cases = subset("tpu-v6e", kernel)
    rows = aot.compile_cases("tpu-v6e", [next((case for case in cases if "decode" in case.name), cases[0])])
    for row in rows:
        assert row.status == "compiled" and not row.notes and row.figures["ratio"] > 0, row.label
        assert all(part["us"] > 0 for part in row.parts), row.label


SCRIPT = """
import json, os, sys
dump = sys.argv[1]
from attn.tools.aot import libtpu as _libtpu
os.environ.update(_libtpu.environment("v6e", dump, estimate=True))
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

def program(times, rows, limit=64 << 20):
    def body(count, x, out, kept):
        kept[...] = x[...]
        def step(i, _):
            kept[...] = kept[...] * 2 + 1
        lax.fori_loop(0, count[0], step, None)
        out[...] = kept[...]
    def call(x, count):
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=(1,), in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
                out_specs=pl.BlockSpec(memory_space=pltpu.VMEM), scratch_shapes=[pltpu.VMEM(x.shape, x.dtype)]),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="doubling",
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
        )(count + 1, x)
    shape = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    return _libtpu.PallasProgram(call, [shape], [np.array([times], np.int32)], (), 0.0, 0.0, "float32")

told = {}
for times in (3, 103):
    (part,) = _libtpu.estimate_program(program(times, 64), "v6e", dump)
    told[times] = part["cycles"]
(told["whole"],) = _libtpu.compile_program(program(3, 64), "v6e", dump)
try:
    _libtpu.compile_program(program(3, 4096, 1 << 20), "v6e", dump)
except _libtpu.CompileError as error:
    told["refused"] = str(error)
print(json.dumps(told))
"""


def test_estimates_follow_the_batch_and_refusals_are_the_compilers_own(tmp_path):
    path = os.pathsep.join(x for x in (libtpu(), os.environ.get("PYTHONPATH", ""), os.getcwd()) if x)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    per_step = (told["103"] - told["3"]) / 100
    assert 8 <= per_step <= 100  # eight registers are read, changed and written
    assert told["whole"]["name"] == "doubling" and told["whole"]["vmem"] >= 64 * 128 * 4
    assert told["whole"]["slots"]["VALU"] > 0
    assert "vmem" in told["refused"].lower() and "\n" not in told["refused"]


# what needs no compiler


def test_launches_know_the_scalars_that_the_batch_decides():
    def body(count, x, out):
        out[...] = x[...] * count[1]

    def scaled(x, lens, steps):
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(steps,)),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            input_output_aliases={1: 0},
            name="scaled",
            interpret=True,
        )(jnp.cumsum(lens, dtype=jnp.int32), x * 2)

    def call(x, lens):
        made = scaled(x, lens, lens.sum() // lens.sum())
        return scaled(made, lens, lens[0] // lens.sum()) + 1  # no step: nothing is launched

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    (launch,) = _libtpu.launches(call, [x], [np.array([3, 4], np.int32)])
    assert launch.name == "scaled" and launch.donated == (1,)
    assert [(s.shape, s.dtype) for s in launch.operands] == [((2,), jnp.int32), ((8, 128), jnp.float32)]
    assert pl.pallas_call.__module__.startswith("jax")  # put back


def test_operations_of_a_kernel_are_found_by_its_name():
    assert all(_libtpu._is(op, "flash") for op in ("flash", "flash.1", "jvp_flash_.12", "transpose_jvp_flash__.1"))
    assert not any(_libtpu._is(op, "flash") for op in ("flash_backward.1", "flash_fusion", "my_flash.1"))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e5m2])
def test_rows_of_narrow_pages_make_whole_tiles_in_order(dtype):
    cfg = PagedConfig(1, 1, 1, 1, 1, 1, 16, 128, 1, 2, 1, kv_block=64, large=1, key_tile=16, slots=1)
    codes = jax.random.randint(jax.random.key(0), (64, 128), -128, 128, jnp.int32).astype(jnp.int8)
    codes = jax.lax.bitcast_convert_type(codes, dtype)

    def body(x, first, rest):
        kv = types.SimpleNamespace(kv=x)
        first[...] = rows_at(cfg, kv, 0, 0, 0, pl.ds(0, 32))
        rest[...] = rows_at(cfg, kv, 0, 0, 0, pl.ds(jnp.int32(32), 32))

    shape = jax.ShapeDtypeStruct((32, 128), dtype)
    apart = codes.reshape(1, 1, 1, *block_shape(cfg))
    parts = pl.pallas_call(body, out_shape=[shape, shape], interpret=pltpu.InterpretParams())(apart)
    got = np.concatenate([np.asarray(jax.lax.bitcast_convert_type(x, jnp.int8)) for x in parts])
    np.testing.assert_array_equal(got, np.asarray(jax.lax.bitcast_convert_type(codes, jnp.int8)))


def test_static_figures_of_a_dump():
    allocations = """
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'constant']
  #allocation2 [shape = 'u32[144,128]{1,0:T(1,128)}', space=vmem, size = 0x12000, scoped, tag = 'internal scratch']
  #allocation16 [shape = 'u8[512]{0}', space=smem, size = 0x200, scoped, tag = 'prefetched SMEM operand 0']
  #allocation65_spill [shape = 'u8[4096]{0}', space=vmem, size = 0x1000, scoped, tag = 'register spill']
"""
    utilisation = "== CAPACITY:\nMATMUL, VALU\n2 4\n== UTILIZATION:\n0 3\n1 4\n0 0\n"
    figures = _libtpu.static_figures({"post-ra": allocations, _libtpu._UTILISATION: utilisation})
    assert figures == {
        "vmem": 0x13000,
        "smem": 0x200,
        "spills": 1,
        "scalar_spills": 0,
        "bundles": 3,
        "slots": {"MATMUL": 1, "VALU": 7},
    }


def test_floors_are_those_of_the_peers_table():
    """The figures of v6e at 32/8 heads of 128: decode of 64 requests of 4k, and 2k new tokens at 8k."""
    decode = jax_aot.ragged("v6e", jax_aot.Ragged([1] * 64, [4096] * 64, (32, 8), 128, 128, columns=32))
    assert decode.floors("v6e")["hbm_us"] == pytest.approx(655, abs=1)
    windowed = LayerMask(window=(1023, None))
    window = jax_aot.ragged("v6e", jax_aot.Ragged([1] * 64, [4096] * 64, (32, 8), 128, 128, columns=32, mask=windowed))
    assert window.floors("v6e")["hbm_us"] == pytest.approx(164, abs=1)
    prefill = jax_aot.ragged("v6e", jax_aot.Ragged([2048], [8192], (32, 8), 128, 128, columns=64))
    assert prefill.floors("v6e")["mxu_us"] == pytest.approx(262, abs=1)


@pytest.mark.parametrize(("simulated", "at_hbm"), [(0.5, True), (2.0, False)])
def test_no_estimate_is_below_the_time_of_its_bytes(monkeypatch, simulated, at_hbm):
    case = next(case for case in subset("tpu-v6e", "ragged_paged_attention") if case.choice["batch"] == "decode")
    floor = jax_aot.KERNELS[case.kernel].make(dict(case.choice), "v6e").floors("v6e")["hbm_us"]
    part = {"name": "it", "cycles": 7, "us": simulated * floor}
    monkeypatch.setattr(_libtpu, "estimate_program", lambda *args: [part])
    made = jax_aot.measure(case, "tpu-v6e", "estimate", "")
    assert made["parts"][0]["us"] == pytest.approx(max(simulated, 1) * floor, rel=1e-2)
    assert (made["notes"], made["ratio"]) == ([jax_aot.AT_HBM] * at_hbm, pytest.approx(max(simulated, 1), abs=0.05))


@pytest.mark.parametrize(
    ("arguments", "scores", "rows"),
    [
        ({"query_lens": [2], "seq_lens": [5]}, 4 + 5, 5),
        ({"query_lens": [2], "seq_lens": [5], "mask": LayerMask(causal=False)}, 10, 5),
        ({"query_lens": [2], "seq_lens": [5], "mask": LayerMask(window=(1, None))}, 4, 3),
        ({"query_lens": [2, 1], "seq_lens": [5, 9], "mask": LayerMask(False, (1, 1))}, 3 + 2 + 2, 3 + 2),
        ({"query_lens": [3], "seq_lens": [5], "mask": LayerMask(chunk_size=4)}, 3 + 4 + 1, 5),
    ],
)
def test_cost_counts_what_is_visible(arguments, scores, rows):
    assert jax_aot.cost(**arguments, num_heads=3, head_size=8) == (2 * 3 * 16 * scores, rows)


@pytest.mark.parametrize("target", TARGETS)
def test_the_grid_covers_every_head_size_block_size_and_dtype(target):
    for kernel in jax_aot.KERNELS.values():
        assert all(len(values) > 1 for values in kernel.axes.values())
    axes = jax_aot.KERNELS["ragged_paged_attention"].axes
    choices = [case.choice for case in aot.cases(target) if case.kernel == "ragged_paged_attention"]
    for axis in ("block_size", "dtype", "kv", "mask", "soft_cap", "alibi", "sinks", "lse", "kv_sharing"):
        met = {(choice["head_size"], choice[axis]) for choice in choices}
        pairs = {(size, value) for size in axes["head_size"] for value in axes[axis]}
        assert met == {(size, value) for size, value in pairs if value != "int4_per_token_head" or size in (128, 256)}
