"""Direct launches pass to the compiled kernel exactly what Triton's own launches pass. Compiles for sm_90: 30 s on one core."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
COMPILERS = Path(sys.prefix) / "compilers"

#: Compiles for sm_90; `launched` lists what launches pass to the kernels' parameters.
DRIVER = """
import ctypes, os, struct
import torch, triton
from attn.tools.aot import triton as aot
from attn.torch.kernels import direct, driver
from attn.kernels.memory import SHARED_MEMORY

launched, compiled, used = [], [], set()
placeholder = aot._placeholder("sm_90", SHARED_MEMORY["sm_90"])

def launcher(source, metadata):
    kinds = list(source.signature.values())
    def launch(*args):
        assert len(kinds) == len(args[9:])
        values = [passed(x, kind) for x, kind in zip(args[9:], kinds) if kind != "constexpr"]
        launched.append((metadata.name, metadata.hash, args[:4], values))
    return launch

def parameters(cubin, name):
    # the bytes of a kernel's parameters: EIATTR_KPARAM_INFO in the kernel's own section of information
    sections, = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    table = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    text, sizes = table[names][4], {}
    for at, _, _, _, start, length in table:
        if cubin[text + at : cubin.index(0, text + at)].decode() == f".nv.info.{name}":
            place = start
            while place < start + length:
                form, kind, rest = struct.unpack_from("<BBH", cubin, place)
                if (form, kind) == (4, 0x17):
                    _, index, _, flags = struct.unpack_from("<IHHI", cubin, place + 4)
                    sizes[index] = flags >> 18
                place += 4 + rest * (form == 4)
    return [sizes[i] for i in range(len(sizes))]

class Driver:
    # the functions of the CUDA driver that launches need; they read memory as it does
    def __init__(self):
        self.sizes, self.compiled, self.maps = {}, {}, []

    def load(self, name, cubin, *_):
        self.sizes[len(self.sizes) + 1] = parameters(cubin, name)
        return self, len(self.sizes), 0, 0, 1024

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index < len(self.sizes[function]):
            ctypes.c_size_t.from_address(size).value = self.sizes[function][index]
        return int(index >= len(self.sizes[function]))

    def cuTensorMapEncodeTiled(self, place, kind, dims, address, shape, strides, box, ones, interleave, swizzle, fetch, fill):
        assert (kind, interleave, swizzle, fetch, fill, place % 64) == (9, 0, 3, 2, 0, 0)
        shape, strides = ((ctypes.c_uint64 * dims).from_address(x)[::-1] for x in (shape, strides))
        box, ones = ((ctypes.c_uint32 * dims).from_address(x)[::-1] for x in (box, ones))
        assert ones == [1] * dims and strides[0] == 0  # the last of the engine's strides is not read
        self.maps.append((address, shape, [x // 2 for x in strides[1:]] + [1], box))
        ctypes.c_uint64.from_address(place).value = len(self.maps)
        return 0

    def cuTensorMapReplaceAddress(self, place, address):
        assert place % 64 == 0 and address % 16 == 0
        _, *rest = self.maps[ctypes.c_uint64.from_address(place).value - 1]
        self.maps.append((address, *rest))
        ctypes.c_uint64.from_address(place).value = len(self.maps)
        return 0

    def cuLaunchKernelEx(self, config, function, params, extra):
        compiled = self.compiled[function]
        *grid, threads, y, z, shared, stream, attributes, count = struct.unpack("7I4xQQI4x", ctypes.string_at(config, 56))
        metadata, early = compiled.metadata, getattr(compiled.metadata, "launch_pdl", False)
        assert (threads, y, z, shared, extra) == (32 * metadata.num_warps, 1, 1, metadata.shared, None)
        assert count == early and (not early or struct.unpack("3i", ctypes.string_at(attributes, 12)) == (6, 0, 1))
        read = iter(self.sizes[function])
        places = iter((ctypes.c_uint64 * len(self.sizes[function])).from_address(params))
        values = []
        for kind in compiled.src.signature.values():
            if kind.startswith("tensordesc"):
                at, size = next(places), next(read)
                assert size == 128 and at % 64 == 0
                address, shape, strides, box = self.maps[ctypes.c_uint64.from_address(at).value - 1]
                numbers = [int.from_bytes(ctypes.string_at(next(places), n := next(read)), "little") for _ in shape + strides]
                assert numbers == shape + strides
                values.append((address, shape, strides, box))
            elif kind != "constexpr":
                code = "Q" if kind[0] == "*" else {"i32": "i", "i64": "q", "fp32": "f"}[kind]
                assert next(read) == struct.calcsize(code)
                value, = struct.unpack(code, ctypes.string_at(next(places), struct.calcsize(code)))
                values.append(passed(value, kind))
        assert [*read] == [8, 8]  # memory that Triton's launcher gives to kernels that ask for it
        launched.append((metadata.name, metadata.hash, (*grid, stream), values))
        return 0

cuda = Driver()
placeholder.launcher_cls = launcher
placeholder.utils.load_binary = cuda.load
triton.runtime.driver.set_active(placeholder)
driver._library = lambda: cuda
prepare = direct.launcher

def prepared(compiled):
    cuda.compiled[compiled.function] = compiled
    assert (found := prepare(compiled)) is not None
    return found

direct.launcher = prepared
run, call = triton.runtime.jit.JITFunction.run, direct.Prepared.__call__

def by_triton(self, programs, arrays, *numbers, columns=1):
    self._kernel[programs, columns](*arrays, *numbers, **self._constants)

def counted(self, *args, **kwargs):
    compiled.append(self)
    return run(self, *args, **kwargs)

triton.runtime.jit.JITFunction.run = counted

def passed(value, kind):
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    if isinstance(value, triton.experimental.gluon.nvidia.hopper.TensorDescriptor):
        return value.base.data_ptr(), value.shape, value.strides, value.block_shape
    if kind == "fp32":
        value, = struct.unpack("f", struct.pack("f", value))
    # absent arrays are 0; memory of the call's own is at another address each time
    return None if value in (None, 0) else "new" if kind.startswith("*") and value not in given else value

def taken():
    found = list(launched)
    launched.clear()
    return found

"""

#: Every call is made twice: by Triton, and by what was kept of the calls before.
SCRIPT = (
    DRIVER
    + """
from attn.torch.diffusion.backends.triton_attn import TritonAttentionImpl
from attn.torch.kernels.runs import Runs
from attn.torch.kernels import dense_decode, kv_write, latent_write, merge_states, mla_decode, mla_prefill
from attn.torch.kernels import paged_attention as kernels

def twice(function, arguments):
    # what two calls pass to compiled kernels: with what was kept before, and by Triton
    global given, given_tensors
    given_tensors = list(arguments.values())  # their memory is no other tensor's
    given = {x.data_ptr() for x in arguments.values() if isinstance(x, torch.Tensor)}
    compiled.clear()
    function(**arguments)
    if not compiled:
        used.update((of.__name__, name) for name, *_ in launched)
    directly = taken()
    direct.Prepared.__call__ = by_triton
    function(**arguments)
    direct.Prepared.__call__ = call
    return directly, taken()

def attend(lens, heads, dtype, stored, odd, window, cap, extras, whole):
    R, cols, page = len(lens), -(-max(lens) // 16), 16
    query = torch.zeros(R * heads[0] * 64 + 8, dtype=dtype)[odd : odd + R * heads[0] * 64].view(R, heads[0], 64)
    cache = torch.zeros(2, 8, page, heads[1], 64, dtype=dtype if stored is None else stored)
    arguments = dict(
        output=torch.empty_like(query), lse=torch.empty(heads[0], R) if extras else None, query=query, key_cache=cache[0],
        value_cache=cache[1], query_start_loc=torch.arange(R + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32), block_table=torch.zeros(R, cols, dtype=torch.int32), max_query_len=1,
        max_seq_len=max(lens), scale=-0.1 if extras else 0.3, left=window, right=0, soft_cap=cap,
        sinks=torch.zeros(heads[0]) if extras else None, k_scale=torch.ones(()) if stored and extras else None,
        v_scale=torch.ones(heads[1]) if stored and extras else None, whole=whole,
    )
    return twice(kernels.paged_attention, arguments)

def attend_prompts(lens, tokens, stored, apart, paged):
    R, T, page = len(lens), sum(tokens), 16
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    query = torch.zeros(T, 8, 64 + apart, dtype=torch.bfloat16)[..., :64]
    cache = torch.zeros(2, 8, page, 2, 64, dtype=stored) if paged else torch.zeros(2, T, 2, 64, dtype=stored)
    return twice(kernels.paged_attention, dict(
        output=torch.empty_like(query), lse=torch.empty(8, T), query=query, key_cache=cache[0], value_cache=cache[1],
        query_start_loc=starts, seq_lens=torch.tensor(lens, dtype=torch.int32) if paged else None,
        block_table=torch.zeros(R, -(-max(lens) // page), dtype=torch.int32) if paged else None, max_query_len=max(tokens),
        max_seq_len=max(lens), scale=0.3, right=0))

def merge(states, tokens, odd):
    outputs = torch.zeros(states * tokens * 128 + 8)[odd : odd + states * tokens * 128].view(states, tokens, 2, 64)
    return twice(merge_states.merge_states, dict(outputs=outputs, lses=torch.zeros(states, 2, tokens)))

def prefill(tokens, odd):
    key = torch.zeros(tokens * 96 + 8, dtype=torch.bfloat16)[odd : odd + tokens * 96].view(tokens, 2, 48)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    return twice(mla_prefill.mla_prefill, dict(
        out=torch.zeros(tokens, 2, 32, dtype=torch.bfloat16), lse=torch.zeros(2, tokens), query=key.clone(), key=key,
        value=key[..., :32].clone(), query_start_loc=starts, key_start_loc=starts, scale=0.3, causal=True))

def attend_row(reqs, keys, dtype, odd, order, window, extras):
    shape = (reqs, 2, keys, 64) if order == "heads" else (reqs, keys, 2, 64)
    key = torch.zeros(reqs * keys * 128 + 8, dtype=dtype)[odd : odd + reqs * keys * 128].view(shape)
    key = key if order == "heads" else key.transpose(1, 2)
    numbers = torch.zeros(reqs, dtype=torch.int32)
    shape = key.device, dtype, (8, 2, 64), -0.1 if extras else 0.3, 5.0 if extras else 0.0, window
    return twice(lambda **given: dense_decode.decoder(*shape)(**given), dict(
        query=torch.zeros(reqs, 8, 1, 64, dtype=dtype), key=key, value=key, sinks=torch.zeros(8) if extras else None,
        mask=torch.ones(reqs, keys, dtype=torch.bool) if extras else None,
        runs=Runs(numbers, numbers) if extras else None))

def others(general, bound, like, arrays, aligned=True, sinks=()):
    # a call that was prepared for arrays of the same shapes, of others; without `general`'s own launch if they are aligned
    global given, given_tensors
    for _ in range(2):
        general(*like, *sinks[:1])
    again, given_tensors = bound(*like, *sinks[:1]), (*arrays, *sinks[1:])
    assert again is not general
    given = {x.data_ptr() for x in given_tensors}
    taken()
    direct.Prepared.__call__ = None if aligned else call
    assert again(*given_tensors).shape == arrays[0].transpose(1, 2).shape
    directly, direct.Prepared.__call__ = taken(), by_triton
    general(*given_tensors)
    direct.Prepared.__call__ = call
    return directly, taken()

def attend_bound(reqs, keys, dtype, odd, order, window, sinks):
    def arrays(odd):
        key = torch.zeros(reqs * keys * 128 + 8, dtype=dtype)[odd : odd + reqs * keys * 128]
        key = key.view(reqs, 2, keys, 64) if order == "heads" else key.view(reqs, keys, 2, 64).transpose(1, 2)
        return torch.zeros(reqs, 8, 1, 64, dtype=dtype), key, key.clone()
    decoder = dense_decode.decoder(torch.device("cpu"), dtype, (8, 2, 64), 0.3, 0.0, window)
    found = others(decoder, decoder.bound, arrays(0), arrays(odd), not odd, [torch.zeros(8) for _ in range(2 * sinks)])
    used.add(("attend_bound", found[0][0][0]))
    return found

def prompts_bound(reqs, rows, dtype, causal, lens):
    def arrays():
        x = [torch.zeros(reqs, rows, heads, 64, dtype=dtype) for heads in (8, 2, 2)]
        return x[0].transpose(1, 2), *(y.transpose(1, 2).contiguous() for y in x[1:])
    like, impl = arrays(), TritonAttentionImpl(8, 64, 0.3, causal, 2)
    of = [x.transpose(1, 2) for x in like]
    launch = impl.launcher(*of) if lens is None else impl.padded_launcher(*of, lens)
    found = others(launch, launch.bound, like, arrays())
    used.add(("prompts_bound", found[0][0][0]))
    ends = [plan.kernel._constants["ENDS"] for plan, _ in launch.bound.func.__self__._plans.values()]
    assert ends == [lens is None], "padding is overwritten, which may be NaN"
    return found

def write(tokens, dtype, stored, odd, scales):
    key = torch.zeros(tokens * 128 + 8, dtype=dtype)[odd : odd + tokens * 128].view(tokens, 2, 64)
    cache = torch.zeros(2, 8, 16, 2, 64, dtype=stored)
    k_scale, v_scale = (torch.ones(()), torch.ones(2)) if scales else (None, None)
    slots = torch.arange(tokens)
    return twice(kv_write.write_kv, dict(
        key=key, value=key.clone(), key_cache=cache[0], value_cache=cache[1], slot_mapping=slots, k_scale=k_scale,
        v_scale=v_scale))

def write_latents(tokens, dtype, stored, odd, copied):
    rows = torch.zeros(tokens, 80, dtype=dtype)
    query = torch.zeros(tokens, 4, 32, dtype=dtype) if copied else None
    return twice(latent_write.write_latents, dict(
        kv_c=rows[:, odd : 64 + odd], k_pe=torch.zeros(tokens, 16, dtype=dtype), cache=torch.zeros(8, 16, 80, dtype=stored),
        slot_mapping=torch.arange(tokens), k_factor=0.5 * tokens, query=query,
        absorbed=None if query is None else torch.zeros(tokens, 4, 80, dtype=dtype)))

def decode(lens, dtype, stored, uneven, extras, topk, heads=16, rank=128):
    R, cols = len(lens), -(-max(lens) // 16)
    return twice(mla_decode.mla_decode, dict(
        out=torch.zeros(R, heads, rank, dtype=dtype), lse=torch.empty(heads, R) if extras else None,
        query=torch.zeros(R, heads, rank + 64, dtype=dtype), cache=torch.zeros(8, 16, rank + 64, dtype=stored),
        query_start_loc=torch.arange(R + 1, dtype=torch.int32), seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.zeros(R, cols, dtype=torch.int32), max_query_len=1, max_seq_len=max(lens), scale=0.1,
        k_scale=torch.ones(()) if extras and stored != dtype else None, uneven=uneven,
        indices=torch.zeros(R, topk, dtype=torch.int32) if topk else None))

plain, fp8 = ((8, 2), torch.bfloat16, None, 0, None, 0.0, False), torch.float8_e4m3fn
shapes = [plain, ((8, 2), torch.float16, fp8, 0, None, 0.0, True)]
shapes += [(*plain[:i], other, *plain[i + 1 :]) for i, other in ((0, (4, 4)), (3, 1), (4, 500), (6, True))]
batches = ((4096, 70, 3000), (16, 1600), (900,) * 40, (4000, 71, 3001))
if os.environ["SUITE_LEVEL"] != "full":  # each shape compiles for seconds
    shapes, batches = shapes[:2] + shapes[3:4], batches[::3]
calls = [(attend, lens, *shape, whole) for lens in batches for whole in (False, True) for shape in shapes]
half, full = torch.bfloat16, torch.float32
calls += [
    (attend_row, reqs, keys, *shape) for reqs, keys in ((3, 700), (1, 701), (3, 30))
    for shape in (
        (half, 0, "heads", None, False), (half, 0, "tokens", 100, False), (half, 1, "heads", None, False),
        (torch.float16, 0, "heads", 100, True)
    )
]
calls += [
    (attend_bound, reqs, keys, half, *how) for reqs, keys in ((3, 700), (1, 701))
    for how in ((0, "heads", None, False), (0, "tokens", 100, True), (1, "heads", None, False))
]
calls += [
    (prompts_bound, *how) for how in ((2, 300, half, True, None), (1, 129, half, False, None), (2, 129, half, False, (70, 0)))
]
calls += [
    (write, tokens, *shape) for tokens in (3, 17, 5)
    for shape in ((half, half, 0, False), (half, half, 1, False), (half, fp8, 0, True), (full, half, 0, False))
]
calls += [
    (write_latents, tokens, *shape) for tokens in (3, 16, 5)
    for shape in ((half, half, 0, False), (half, half, 1, True), (half, fp8, 0, True))
]
calls += [
    (decode, lens, *shape) for lens in batches
    for shape in (
        (half, half, True, False, 0), (half, half, False, True, 0), (half, fp8, True, True, 0), (half, half, False, False, 64)
    )
]
calls += [
    (attend_prompts, lens, tokens, *shape) for lens, tokens in (((70, 30), (20, 1)), ((71, 33), (33, 1)), ((900, 7), (17, 7)))
    for shape in ((half, 0, True), (half, 0, False), (half, 4, True), (fp8, 0, True))
]
if os.environ["SUITE_LEVEL"] == "full":  # hopper_mla
    calls += [(decode, lens, half, half, *how, 64, 512) for lens in batches for how in ((True, False, 0), (False, True, 128))]
calls += [(merge, states, tokens, odd) for odd in (0, 1) for states, tokens in ((2, 3), (3, 16), (2, 5))]
calls += [(prefill, tokens, odd) for odd in (0, 1) for tokens in (30, 32, 70)]
for of, *arguments in calls:
    directly, expected = of(*arguments)
    assert directly == expected, (of, arguments, directly, expected)
    assert directly
    if of is attend:
        assert len(directly) == (1 if arguments[-1] else 2)
wanted = {
    attend: "attention merge", attend_prompts: "attention prefill", attend_row: "_decode", attend_bound: "_decode",
    prompts_bound: "prefill",
    merge: "merge", write: "write", write_latents: "write", decode: "attend stream_k merge", prefill: "attend prefill",
}
assert used == {(of.__name__, name) for of, names in wanted.items() for name in names.split()}, used
print("equal", len(calls))
"""
)


needs_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1"
    or (importlib.util.find_spec("triton") is None and not (COMPILERS / "triton").is_dir()),
    reason="needs Triton's compiler: not the interpreter, and installed, or in the folder compilers (make compilers)",
)


def assert_equal(script: str, cache: Path) -> None:
    """Run a script in a process that compiles with Triton, and keeps programs in a folder; it prints "equal" at its end."""
    path = [os.environ.get("PYTHONPATH", ""), *([str(COMPILERS)] if importlib.util.find_spec("triton") is None else [])]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, path)]),
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("equal")


def test_memory_that_outlives_a_call_is_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cudagraph trees warm up with all allocations of their own thread in a pool, in which nothing may be left."""
    pytest.importorskip("triton")
    from attn.torch.kernels import direct

    threads, make = list[int](), direct._memory

    def seen(*sizes: Any) -> Any:
        threads.append(get_ident())
        return make(*sizes)

    monkeypatch.setattr(direct, "_scratches", direct._Scratches())
    monkeypatch.setattr(direct, "_memory", seen)
    device = torch.device("cpu")
    states, counters = direct.memory_of_stream(device, 5, 3)
    assert states.numel() >= 5 and counters.numel() >= 3 and not counters.any()
    assert direct.memory_of_stream(device, 7, 2)[0] is states
    assert len(threads) == 1 and threads[0] != get_ident()
    # between launches of a thread, which leave something in it, those of another may come
    with ThreadPoolExecutor(1) as other:
        assert other.submit(direct.memory_of_stream, device, 5, 3).result()[0] is not states
    like = torch.empty(2)
    assert direct.scratch(like, 9) is states
    assert direct.scratch(like, direct._MOST_KEPT + 1) is not direct.scratch(like, direct._MOST_KEPT + 1)
    assert direct.memory_of_stream(device, 9, 3)[0] is states


SCRATCH = """
import weakref
from threading import Thread
import torch
from attn.torch.kernels import direct

def launch(stream, floats=5):
    return [*map(weakref.ref, direct.memory_of(device, stream, False, floats, 3).memory)]

def live(memory):
    return [x() is not None for x in memory]

device, found = torch.device("cpu"), []
direct._of_graphs[device] = torch.zeros(4, dtype=torch.int32), 0
thread = Thread(target=lambda: found.append(launch(1)))
thread.start()
thread.join()
assert live(found[0]) == [False, False], "of a thread that has ended"
first, *_ = [launch(stream) for stream in range(1, direct._STREAMS + 1)]
assert live(first) == [True, True] and launch(1) == first
larger = launch(1, 1 << 21)
assert live(first) == [False, False] and live(larger) == [True, True], "a stream has one at a time"
last = [launch(stream) for stream in range(100, 100 + direct._STREAMS)]
assert live(larger) == [False, False], "of a stream that others have followed"
assert all(live(memory) == [True, True] for memory in last) and len(direct._scratches.kept) == direct._STREAMS
print("equal")
"""


@needs_compiler
def test_scratch_memory_ends_with_its_thread_and_its_stream(tmp_path: Path) -> None:
    """Nothing says when a stream is destroyed: its memory is freed once others of the thread have theirs."""
    assert_equal(SCRATCH, tmp_path)


def test_each_launch_in_a_graph_has_counters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from attn.torch.kernels import direct

    device, kept = torch.device("cpu"), list[torch.Tensor]()
    monkeypatch.setattr(direct, "_of_graphs", {device: (torch.zeros(12, dtype=torch.int32), 0)})
    monkeypatch.setattr(direct, "_captured", kept)
    found = [direct._counters_of_graph(device, count) for count in (3, 5, 4)]
    first, *_ = places = [x.data_ptr() for x in found]
    assert [x.numel() for x in found] == [3, 5, 4] and not any(x.any() for x in found)
    assert places[1] == first + 16 and kept == [found[2]], "the last finds no room: it is the graph's, and kept"


def test_a_launch_is_on_the_device_of_its_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from attn.torch.kernels.direct import on_device

    current = [0]

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    call = on_device(lambda out, x: (current[-1], x))
    for index in (0, 1):
        out: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index), get_device=lambda index=index: index)
        assert call(out, 3) == call(out=out, x=3) == (index, 3)
    assert current == [0]
    assert call(torch.zeros(1), 3) == (0, 3)


def test_a_kernel_belongs_to_the_device_of_its_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be prepared while another device is the current one: repeated launches would go to a stream of that one."""
    triton = pytest.importorskip("triton")
    from attn.torch.kernels import direct

    current = [0]
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: current[0]))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton.compiler, "CompiledKernel", SimpleNamespace)
    monkeypatch.setattr(direct, "launcher", lambda compiled: None)
    streams = list[int]()
    monkeypatch.setattr(direct.Compiled, "__call__", lambda self, programs, columns, device, *of: streams.append(device))

    class Kernel:
        arg_names = ("x",)

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arrays, **constants: SimpleNamespace()

    kernel, x = direct.Prepared(Kernel()), torch.zeros(4)
    current[0] = 1
    for _ in range(2):
        kernel(1, (x,))
    assert streams == [1]


def test_a_profiler_that_is_attached_later_sees_launches_that_were_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from attn.torch.kernels import direct

    made = list[str]()

    def general(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        made.append("general")
        return query

    def bind(*arguments: Any) -> Any:
        return lambda stream, values: made.append("prepared") is None

    kernel = direct.Prepared(None)
    kernel._kept[None] = direct.Compiled(None, SimpleNamespace(buffer=list, bind=bind), ())  # type: ignore[arg-type]
    x = torch.zeros(4)
    call = kernel.again(general, x.device, (4,), (1, 1), (), (), None)
    call(x, x, x)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    call(x, x, x)
    assert made == ["prepared", "general"]


@needs_compiler
def test_a_direct_launch_passes_what_tritons_own_passes(tmp_path: Path) -> None:
    assert_equal(SCRIPT, tmp_path)


MASKED = (
    DRIVER.partition("\ndef prefill")[0]
    + """
from attn.torch.kernels import dense_decode
from attn.torch.kernels.runs import Runs
placeholder.launcher_cls = lambda source, metadata: lambda *arguments: None
by_matrix, direct.launcher = [], lambda compiled: by_matrix.append(compiled.asm["ptx"].count("ldmatrix"))
for size in (64, 128, 256):
    key, numbers = torch.zeros(1, 2, 300, size, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    for mask in (None, torch.ones(1, 300, dtype=torch.bool)):
        row = dense_decode.Decoder(key.device, key.dtype, (8, 2, size), 0.3)
        row(torch.zeros(1, 8, 1, size, dtype=key.dtype), key, key, runs=Runs(numbers, numbers), mask=mask)
assert by_matrix[::2] == by_matrix[1::2] and min(by_matrix) > 8, by_matrix
print("equal", by_matrix)
"""
)


@needs_compiler
def test_a_mask_of_keys_does_not_change_how_keys_are_read(tmp_path: Path) -> None:
    assert_equal(MASKED, tmp_path)
