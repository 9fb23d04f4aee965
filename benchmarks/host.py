"""The host's part of an eager call of this package's Triton backends: the time of Python and torch, without any kernel.

    python -m benchmarks.host [--only MLA] [--entries] [--profile]
    python -m benchmarks.host --build [--device cuda]
    python -m benchmarks.host --adapters
    python -m benchmarks.host --count

Needs Triton but no GPU: tensors are on the CPU, a placeholder driver stands for a GPU (sm_90), for which kernels are
compiled, and a launch only counts. TRITON_ATTN makes the launches that it would on an H200. So a figure contains the
checks, the launch rules, torch's operators and Triton's handling of the arguments, and excludes the driver's part, which is
in proportion to the number of launches. Layers are tiny, and matrix products are replaced by their dispatch alone, because
a CPU would compute them. "first" is the first layer's call over a batch, "us" that of the layers after it, which repeat its
launches; of dense calls, which have no cache, the first of a layer, and those like it. With --entries each kernel's
function is also called alone, with the arguments that the layer's first call passes to it. --build times what makes a batch
instead: `from_lens` of lists of block ids, of arrays of them and of a table, and a builder of a device, from such a batch
of arrays, from one whose table was padded, and from tensors on that device. That is one without memory (`meta`), for which
launches cost nothing, unless --device names another. --adapters times a layer's call by FLASH_ATTN and FLASHINFER instead,
of 64 decodes of which nothing is written, around a vendor's function that does nothing. --count counts instead of timing:
of a repeated call without an output, on a stream of its own, and of a builder, torch's operators and how many of them
allocate, launches and other calls of the driver, functions of Python, and calls of functions in C (NumPy's operators, which
are none, left out). Figures are the least of several runs, in processor time; torch's own attention over one key, in the
same run, gives the scale.
"""

import argparse
import collections
import cProfile
import functools
import pstats
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.tools.aot.triton import _placeholder
from attn.torch import kv_cache as caches
from attn.torch.backends import _flash_providers
from attn.torch.backends._triton import TritonPagedImpl
from attn.torch.backends.mla.prefill.triton import TritonPrefillBackend
from attn.torch.diffusion.backends.triton_attn import TritonAttentionImpl
from attn.torch.kernels import direct, kept
from attn.torch.kernels import driver as direct_driver
from attn.torch.metadata import PagedAttentionMetadataBuilder

HEADS, PAGE, KEYS = 2, 64, 1000
RANK, NOPE, ROPE, VALUE = 512, 16, 64, 16
#: The requests of a batch: new tokens of each.
BATCHES = {
    "1 decode": [1],
    "64 decodes": [1] * 64,
    "200 ragged decodes": [1] * 200,
    "63 decodes and a prompt": [1] * 63 + [40],
    "16 requests of 4 rows": [4] * 16,
    "4 prompts": [300] * 4,
}
#: Dense calls of two sequences: rows and keys of each, and how many of the keys count, where some are padding.
DENSE: dict[str, tuple[Any, ...]] = {
    "2 sequences of 64 rows": (64, 64),
    "64 rows over 32 keys": (64, 32),
    "64 rows over 64 and 50 keys": (64, 64, [64, 50]),
    "a row over 300 and 50 keys": (1, 300, [300, 50]),
}
ROWS = [
    ("TRITON_ATTN", "auto"),
    ("TRITON_ATTN", "fp8"),
    ("TRITON_MLA", "auto"),
    ("TRITON_MLA", "fp8"),
    ("TRITON_MLA", "fp8_ds_mla"),
    ("TRITON_MLA_SPARSE", "auto"),
    ("TRITON_MLA_SPARSE", "fp8_ds_mla"),
]
REPEATS, NUMBER = 40, 25


@contextmanager
def without_kernels() -> Iterator[list[str]]:
    """Replace drivers and matrix products; yields the names of the kernels and products of the calls so far."""
    seen: list[str] = []
    tiny, tiny_out = torch.ones(1, 1, 1), torch.ones(1, 1, 1)
    driver, product = _placeholder("sm_90", 232448), torch.bmm

    def launcher(source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: seen.append(metadata.name)

    names: list[str] = []  # by function

    def load(name: str, *_: Any) -> tuple[Any, ...]:
        names.append(name)
        return driver, len(names) - 1, 0, 0, 1024  # without a module Triton loads it at every launch

    driver.launcher_cls = launcher
    driver.utils.load_binary = load
    triton.runtime.driver.set_active(driver)
    cuda = SimpleNamespace(
        cuLaunchKernelEx=lambda config, function, *_: seen.append(names[function]) or 0,
        cuTensorMapEncodeTiled=lambda *_: 0,
        cuTensorMapReplaceAddress=lambda *_: 0,
    )

    def bmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        seen.append("bmm")
        product(tiny, tiny, out=tiny_out)
        return a.new_empty(*a.shape[:2], b.shape[2]) if out is None else out

    with (
        mock.patch.object(torch, "bmm", bmm),
        mock.patch.object(direct_driver, "_library", lambda: cuda),
        mock.patch.object(direct_driver, "_unused", lambda *_: 2),
    ):
        yield seen


_planned = TritonPagedImpl._plan


def _plan(self: Any, metadata: Any, kv_cache: torch.Tensor) -> Any:
    """`TritonPagedImpl._plan` for an H200's multiprocessors, which it does not make for tensors on the CPU."""
    with mock.patch.object(direct, "multiprocessors", lambda device: 132):
        return _planned(self, metadata, SimpleNamespace(is_cuda=True, device=None, element_size=kv_cache.element_size))


class Calls(NamedTuple):
    """A layer's eager calls over one batch: the first one, and one that repeats its launches."""

    first: Callable[[], Any]
    again: Callable[[], Any]


def calls_of(backend: str, kv_cache_dtype: str, query_lens: list[int]) -> Calls:
    """Return a layer's eager calls over a batch: requests of up to 4 rows with `KEYS` keys each, prompts without context."""
    cls: Any = AttentionBackendEnum[backend].get_class()
    cls.is_interpreted = staticmethod(lambda: True)  # else tensors on the CPU are an error
    if issubclass(cls.get_impl_cls(), TritonPagedImpl):
        cls.get_impl_cls()._plan = _plan
    dtype, mla, tokens = torch.bfloat16, "MLA" in backend, sum(query_lens)
    size, kv_heads = (RANK + ROPE, 1) if mla else (128, HEADS)
    ragged = len(query_lens) > 64
    seq_lens = [(KEYS * (i + 1) // len(query_lens) if ragged else KEYS) if n <= 4 else n for i, n in enumerate(query_lens)]
    columns = -(-max(seq_lens) // PAGE)
    tables = list(np.arange(len(query_lens) * columns, dtype=np.int32).reshape(-1, columns))
    spec = KVCacheSpec(PAGE, kv_heads, size, "bfloat16", kv_cache_dtype, len(tables) * columns)
    batch = CommonAttentionMetadata.from_lens(query_lens, seq_lens, tables, PAGE)
    metadata = cls.get_builder_cls()(spec, ["layer"], None, torch.device("cpu")).build(0, batch)
    cache = caches.allocate(cls, spec, len(tables) * columns)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.5), _k_scale_float=0.5, _v_scale_float=0.5)
    if mla:
        chosen = SimpleNamespace(topk_indices=torch.zeros(tokens, 512, dtype=torch.int32))
        more = {
            "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
            "kv_b_proj": torch.randn(RANK, HEADS, NOPE + VALUE, dtype=dtype),
            "indexer": chosen if "SPARSE" in backend else None,
        }  # fmt: skip
        new = [torch.randn(tokens, width, dtype=dtype) for width in (RANK, ROPE)]
        query, out = torch.randn(tokens, HEADS, NOPE + ROPE, dtype=dtype), torch.empty(tokens, HEADS, VALUE, dtype=dtype)
    else:
        more = {}
        new = [torch.randn(tokens, HEADS, size, dtype=dtype) for _ in "kv"]
        query = torch.randn(tokens, HEADS, size, dtype=dtype)
        out = torch.empty_like(query)
    impl = cls.get_impl_cls()(HEADS, size, 0.1, kv_heads, kv_cache_dtype=kv_cache_dtype, **more)
    if mla:
        impl._choose_prefill = lambda *_: TritonPrefillBackend(HEADS, NOPE + ROPE, VALUE, 0.1)
    again = functools.partial(impl.forward, layer, query, *new, cache, metadata, out)
    return Calls(lambda: (metadata.kept().calls.clear(), again()), again)


def entries_of(call: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """Return, by name, the calls of functions that launch kernels that a layer's call makes, with the same arguments."""
    found: dict[str, Callable[[], Any]] = {}
    run = direct._run

    def record(function: Any, first: Any, args: Any, kwargs: Any) -> Any:
        entry = getattr(sys.modules[function.__module__], function.__name__)
        found[function.__name__] = functools.partial(entry, *args, **kwargs)
        return run(function, first, args, kwargs)

    with mock.patch.object(direct, "_run", record):
        call()
    return found


#: Requests, keys of all of them, whether their lengths are log-normal.
BUILT = ((64, 64_000, False), (64, 64_000, True), (200, 300_000, True), (256, 2_000_000, True))
_WAYS = ("lists", "arrays", "table", "build: arrays", "build: table", "tensors")


def ways_of(requests: int, keys: int, ragged: bool, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return what makes a batch of decodes with pages of 16 keys, by `_WAYS`."""
    rng = np.random.default_rng(0)
    shares = rng.lognormal(0, 1, requests) if ragged else np.ones(requests)
    seq_lens = np.maximum(1, shares / shares.sum() * keys).astype(np.int32)
    used = -(-seq_lens // 16)
    ids = rng.permutation(int(used.sum())).astype(np.int32)
    arrays = np.split(ids, np.cumsum(used)[:-1])
    lists, lens = [array.tolist() for array in arrays], seq_lens.tolist()
    from_lens = functools.partial(CommonAttentionMetadata.from_lens, [1] * requests, lens, block_size=16)
    batch, padded = from_lens(arrays), from_lens(arrays)
    table = padded.block_table
    spec = KVCacheSpec(16, 8, 128, "bfloat16", "auto", len(ids))
    builder = PagedAttentionMetadataBuilder(spec, ["layer"], None, device)
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    there = padded.replace(**{name: torch.from_numpy(getattr(padded, name)).to(device) for name in names})
    calls = (
        functools.partial(from_lens, lists),
        functools.partial(from_lens, arrays),
        functools.partial(from_lens, table),
        functools.partial(builder.build, 0, batch),
        functools.partial(builder.build, 0, padded),
        functools.partial(builder.build, 0, there),
    )
    return dict(zip(_WAYS, calls, strict=True))


def builds(device: torch.device) -> None:
    """Print what making a batch takes."""

    print(f"{'requests':10s}{'keys':10s}{'lengths':10s}" + "".join(f"{way:>16s}" for way in _WAYS))
    for requests, keys, ragged in BUILT:
        ways = ways_of(requests, keys, ragged, device)
        least = dict.fromkeys(ways, float("inf"))
        for _ in range(REPEATS):
            for way, call in ways.items():
                least[way] = min(least[way], timeit.timeit(call, timer=time.process_time, number=5) / 5 * 1e6)
        lengths = "ragged" if ragged else "equal"
        print(f"{requests:<10d}{keys:<10d}{lengths:10s}" + "".join(f"{least[way]:16.1f}" for way in _WAYS), flush=True)


def adapters() -> None:
    """Print what a layer's call takes beside the vendor's function and, for scale, a copy of its output."""
    query = torch.zeros(64, 4, 64, dtype=torch.bfloat16)
    log, out = torch.zeros(4, 64), torch.zeros_like(query)
    vendor = SimpleNamespace(
        flash_attn_with_kvcache=lambda *_, **__: (query, log), run=lambda *_, out=None, **__: query if out is None else out
    )
    provider = next(provider for provider in _flash_providers.PROVIDERS if provider.name == "FlashAttention 3")
    provider = SimpleNamespace(bind=provider.bind, load=lambda: vendor)
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0), _k_scale_float=1.0, _v_scale_float=1.0)
    calls: dict[str, Callable[[], Any]] = {"copy": functools.partial(out.copy_, query)}
    batch = CommonAttentionMetadata.from_lens([1] * 64, [KEYS] * 64, np.arange(64 * 63, dtype=np.int32).reshape(64, 63), 16)
    for backend in ("FLASH_ATTN", "FLASHINFER"):
        cls: Any = AttentionBackendEnum[backend].get_class()
        spec = KVCacheSpec(16, 2, 64, "bfloat16", "auto", 64 * 63)
        metadata = cls.get_builder_cls()(spec, ["layer"], None, torch.device("cpu")).build(0, batch)
        with mock.patch.object(cls, "why_not", lambda *_: []):  # no package needs to be installed
            impl, cache = cls.get_impl_cls()(4, 64, 0.1, 2), caches.allocate(cls, spec, 64 * 63)
        impl._provider, metadata.planned = lambda *_: provider, lambda group: vendor
        calls[backend] = functools.partial(impl.forward, layer, query, None, None, cache, metadata, out)
        calls[f"{backend}, new output"] = functools.partial(impl.forward, layer, query, None, None, cache, metadata)
    least = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        for _ in range(2 * REPEATS):
            for name, call in calls.items():
                least[name] = min(least[name], timeit.timeit(call, timer=time.process_time, number=NUMBER) / NUMBER * 1e6)
    print("\n".join(f"{name:32s}{took:8.1f}" for name, took in least.items()))


class _Operators(TorchDispatchMode):
    """Lists torch's operators while it is entered, and those among them that return memory that no argument has."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.allocating = list[str](), list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.all.append(function.__name__)
        if isinstance(result, torch.Tensor):
            given = [x.untyped_storage()._cdata for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
            self.allocating += [function.__name__] * (result.untyped_storage()._cdata not in given)
        return result


#: What asks a GPU's driver and is replaced here, by where it is: its result. The stream is not the default one.
_QUERIES: tuple[tuple[Any, str, Any], ...] = (
    (torch._C, "_cuda_getDevice", 0),
    (torch.cuda, "current_device", 0),
    (torch._C, "_cuda_getCurrentRawStream", 7),
    (torch.cuda, "is_current_stream_capturing", False),
)


def counted(call: Callable[[], Any]) -> tuple[list[str], list[str], int, int]:
    """Return torch's operators of a call, those that allocate, and how many functions of Python and of C it calls."""
    with _Operators() as operators:
        call()
    for _ in range(3):
        call()  # recognised again: under the mode tensors are not those of the last call
    calls = collections.Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    call()
    sys.setprofile(None)
    return operators.all, operators.allocating, calls["call"], calls["c_call"] - 1  # the last one ends the profile


@contextmanager
def _as_on_a_gpu() -> Iterator[list[str]]:
    """Let launches that are kept on a CPU ask the driver what they do on a GPU; yields the queries so far."""
    asked: list[str] = []
    make = kept.KeptLaunches.__init__

    def init(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self._index, self._stream = 0, torch._C._cuda_getCurrentRawStream  # type: ignore[attr-defined]

    with ExitStack() as stack:
        for module, query, result in _QUERIES:
            replaced = functools.partial(lambda query, result, *_: asked.append(query) or result, query, result)
            stack.enter_context(mock.patch.object(module, query, replaced, create=True))
        stack.enter_context(mock.patch.object(kept.KeptLaunches, "__init__", init))
        yield asked


def counts(seen: list[str]) -> None:
    """Print what calls and builders ask torch and the driver for. seen: as `without_kernels` yields it."""
    head = f"{'':44s}{'torch':>6s}{'memory':>7s}{'Python':>7s}{'C':>5s}  "
    with _as_on_a_gpu() as asked:
        print(head + "driver")
        for backend, kind in (("TRITON_ATTN", "auto"), ("TRITON_ATTN", "fp8"), ("TRITON_MLA", "auto")):
            for name, lens in BATCHES.items():
                again = calls_of(backend, kind, lens).again
                call = functools.partial(again.func, *again.args[:-1])
                call()
                call()
                asked.clear()
                seen.clear()
                call()
                driver = ", ".join(f"{n} {name}" for name, n in collections.Counter([*seen, *asked]).items())
                operators, allocating, python, c = counted(call)
                row = f"{backend}, {kind}, {name}"
                print(f"{row:44s}{len(operators):6d}{len(allocating):7d}{python:7d}{c:5d}  {driver}", flush=True)
    print(head + "operators")
    for requests, keys, ragged in BUILT:
        for way, call in list(ways_of(requests, keys, ragged, torch.device("meta")).items())[3:]:
            call()
            operators, allocating, python, c = counted(call)
            row = f"{requests} {'ragged' if ragged else 'equal'}, {way}"
            print(f"{row:44s}{len(operators):6d}{len(allocating):7d}{python:7d}{c:5d}  {', '.join(operators)}", flush=True)


def dense_calls(rows: int, keys: int, lens: list[int] | None = None) -> Calls:
    query, key = (torch.ones(2, n, HEADS, PAGE, dtype=torch.bfloat16) for n in (rows, keys))
    impl, call = TritonAttentionImpl(HEADS, PAGE), (query, key, key, lens and DiffusionAttentionMetadata(kv_lens=lens))
    for _ in range(3):  # checked, made, and repeated
        impl.forward(*call)
    first = lambda: TritonAttentionImpl(HEADS, PAGE).forward(*call)  # noqa: E731
    return Calls(first, lambda: impl.forward(*call))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose backend contains this")
    parser.add_argument("--entries", action="store_true", help="also time each kernel's function alone")
    parser.add_argument("--profile", action="store_true", help="print where the time of each row goes")
    parser.add_argument("--build", action="store_true", help="time what makes a batch instead")
    parser.add_argument("--device", type=torch.device, default="meta", help="where --build puts batches (default: %(default)s)")
    parser.add_argument("--adapters", action="store_true", help="time the adapters of vendors' functions instead")
    parser.add_argument("--count", action="store_true", help="count operators, memory and calls of the driver instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.build or arguments.adapters:
        builds(arguments.device) if arguments.build else adapters()
        return
    with without_kernels() as seen, torch.no_grad():
        if arguments.count:
            counts(seen)
            return
        one = torch.ones(1, 1, 1, 8)
        sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, one, one, one)
        rows: dict[tuple[str, str, str], Calls] = {("torch's SDPA", "", "one key"): Calls(sdpa, sdpa)}
        rows |= {
            (*row, name): calls_of(*row, lens) for row in ROWS if arguments.only in row[0] for name, lens in BATCHES.items()
        }
        if arguments.only in "TRITON_ATTN":
            rows |= {("TRITON_ATTN", "none", name): dense_calls(*shape) for name, shape in DENSE.items()}
        if arguments.entries:
            rows |= {
                (row[0], row[1], f"{row[2]}: {name}"): Calls(entry, entry)
                for row, calls in rows.items()
                for name, entry in entries_of(calls.first).items()
            }
        launches = {}
        for row, calls in rows.items():
            calls.first()
            seen.clear()
            calls.again()
            launches[row] = ", ".join(seen)
        least = {row: [float("inf")] * 2 for row in rows}
        for _ in range(REPEATS):  # interleaved, so that other load on the machine slows no row in all of its runs
            for row, calls in rows.items():
                for i, call in enumerate(calls):
                    took = timeit.timeit(call, timer=time.process_time, number=NUMBER) / NUMBER * 1e6
                    least[row][i] = min(least[row][i], took)
        print(f"{'backend':20s}{'cache':12s}{'batch':44s}{'first':>8s}{'us':>8s}  launches")
        for row, calls in rows.items():
            backend, kind, name = row
            first, again = least[row]
            print(f"{backend:20s}{kind:12s}{name:44s}{first:8.1f}{again:8.1f}  {launches[row]}", flush=True)
            if arguments.profile:
                with cProfile.Profile() as profile:
                    for _ in range(NUMBER):
                        calls.again()
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
