"""The Triton kernels' declared grid, compiled for GPUs that are not present: `attn aot` for torch.

Triton compiles without a device, since it includes ptxas and LLVM. `Placeholder` replaces the driver, so the kernels' own host
functions run on tensors of the host, with the tiles and the specialisation that they choose for the target. Each kernel that
they launch is compiled, and the launch does nothing. A kernel is an entry of `KERNELS`.
"""

import functools
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attn.capabilities import Device, Request
from attn.dtypes import PER_TOKEN_HEAD, kv_cache_element
from attn.kernels.launch import UNBOUNDED, writes_rows
from attn.kernels.memory import group_reason, latent_reason
from attn.tables import Column
from attn.tools.aot.command import Choice, CompileCase, Kernel, grids, numbered, request_of, switches
from attn.torch.backends.rocm_attn import RocmAttentionBackend
from attn.torch.backends.triton_attn import TritonAttentionBackend

STEPS = ("compile",)
COLUMNS = (
    *(Column("registers", key="registers"), Column("spills", key="spills"), Column("stack B", key="stack")),
    *(Column("shared B", key="shared"), Column("limit B", key="limit"), Column("code KiB", key="code_kib", form=".0f")),
)


def cases(target: str) -> list[CompileCase]:
    """Every case of every kernel for a target."""
    return grids(KERNELS, target)


def environment(target: str, step: str, dump: str) -> dict[str, str]:
    """See `attn.tools.aot.command`."""
    # A cache of the process's own: what the user's holds would not be compiled. Nor would anything under an interpreter that
    # the caller has switched on.
    return {"TRITON_CACHE_DIR": dump, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}


def measure(case: CompileCase, target: str, step: str, dump: str) -> dict[str, Any]:
    """See `attn.tools.aot.command`. Raises RuntimeError if a program needs more shared memory than the architecture has."""
    # Triton is imported in this function only: the process that lists the cases needs no compiler.
    import triton

    from attn.kernels.memory import SHARED_MEMORY

    parts = []

    def listen(*, metadata: Mapping[str, Any], metadata_group: Mapping[str, str], **_: Any) -> None:
        # NVIDIA's last stage is the binary; AMD's figures are in the text of the assembly.
        files = {Path(name).suffix[1:]: path for name, path in metadata_group.items()}
        figures = _nvidia(files["cubin"]) if target.startswith("sm_") else _amd(files["amdgcn"])
        parts.append({"name": metadata["name"].lstrip("_"), **figures, "shared": metadata["shared"]})

    # Before the first launch: Triton would look for a GPU, and fail without one.
    triton.runtime.driver.set_active(_placeholder(target, SHARED_MEMORY[target]))
    triton.knobs.compilation.listener = listen
    KERNELS[case.kernel].make(dict(case.choice))
    for part in parts:
        part["limit"] = SHARED_MEMORY[target]
        # The placeholder accepts any binary, so the driver's own check (OutOfResources) never happens.
        if part["shared"] > part["limit"]:
            raise RuntimeError(f"{part['name']} needs {part['shared']} bytes of shared memory; {target} has {part['limit']}")
    # A host function that refused the choice quietly would count as compiled.
    if not parts:
        raise RuntimeError("no kernel was compiled")
    return {"parts": numbered(parts)}


def _placeholder(target: str, shared: int) -> Any:
    """A driver for a device of that architecture that is not present."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    if target.startswith("sm_"):
        gpu = GPUTarget("cuda", int(target[3:]), 32)
    else:
        # RDNA's wavefronts have 32 lanes, CDNA's 64.
        gpu = GPUTarget("hip", target, 32 if target.startswith("gfx1") else 64)

    class Utils:
        """Driver calls for a compiled binary: it always fits."""

        def get_device_properties(self, device: int) -> dict[str, int]:
            # The library's launch rules do not read these: for tensors of the host they assume 8 multiprocessors
            # (`direct.multiprocessors`).
            return {"max_shared_mem": shared, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": gpu.warp_size}

        def load_binary(self, *args: Any) -> tuple[None, None, int, int, int]:
            # (module, function, registers, spills, threads at most): Triton raises OutOfResources above the last one.
            return None, None, 0, 0, 1024

        def unload_module(self, *args: Any) -> None: ...

    class Placeholder(DriverBase):
        utils = Utils()

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return gpu

        # The host functions' tensors are on the host.
        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise RuntimeError("timing needs a device")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    return Placeholder()


def _nvidia(cubin: str) -> dict[str, Any]:
    """ptxas' registers and stack, and the instructions that move spilled registers."""
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    code = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    # Loads and stores of local memory, which is where ptxas spills: -res-usage counts the stack only.
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return {"registers": registers, "spills": spills, "stack": stack, "code_kib": Path(cubin).stat().st_size / 1024}


def _amd(assembly: str) -> dict[str, Any]:
    """LLVM's counts of vector registers (including accumulation registers), spilled ones, and private memory."""
    text = Path(assembly).read_text()

    def field(name: str) -> int:
        # From the metadata at the end of the assembly (amdhsa.kernels), in YAML.
        values = re.findall(rf"\.{name}:\s+(\d+)", text)
        return int(values[-1]) if values else 0

    names = {"registers": "vgpr_count", "spills": "vgpr_spill_count", "stack": "private_segment_fixed_size"}
    return {**{figure: field(name) for figure, name in names.items()}, "code_kib": len(text) / 1024}


# --- paged attention ------------------------------------------------------------------------------------------------

#: New tokens and lengths of each batch's requests; in "draft" every request fits in a decode tile.
BATCHES = {
    "decode": ((1, 1, 1), (900, 40, 2048)),
    "draft": ((3, 2, 3), (900, 40, 2048)),
    "mixed": ((1, 200, 1), (900, 300, 2048)),
    "prefill": ((300, 60), (800, 60)),
}
WINDOWS: dict[str, tuple[int | None, int | None]] = {
    **{"causal": (None, 0), "bidirectional": (None, None), "window": (127, 0), "two-sided": (64, 32), "tree": (None, 0)},
    **{"spans": (127, 0), "reach": (None, None)},
}

PAGED: dict[str, Sequence[Any]] = {
    "batch": tuple(BATCHES),
    "heads": ((8, 2), (4, 4), (16, 1), (6, 2), (32, 8)),
    "head_size": (64, 80, 96, 128, 192, 256, 512),
    "block_size": (16, 48, 64, 128, 256),
    "dtype": ("bfloat16", "float16", "float32"),
    "kv": ("auto", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head", "fp8_per_token_head"),
    "mask": tuple(WINDOWS),
    **switches("soft_cap", "alibi", "sinks", "lse", "per_head_scales", "output_scale"),
    "pattern": (False, True),  # block-sparse
    "large_cache": (False, True),  # 2 ** 31 elements and more
    "batch_invariant": (False, True),
}


def _normalise_paged(choice: Choice) -> Choice:
    # No scale of the layer applies: the switch would compile the same kernel under another name.
    if choice["kv"] == "auto" or choice["kv"] in PER_TOKEN_HEAD:
        choice["per_head_scales"] = False
    if choice.get("pattern"):  # block-sparse layers support only the causal mask
        choice["mask"] = "causal"
    return choice


def _refuse_paged(choice: Choice, arch: str) -> str:
    backend, platform = (TritonAttentionBackend, "cuda") if arch.startswith("sm_") else (RocmAttentionBackend, "rocm")
    return "; ".join(backend.why_not(request_of(choice), Device("torch", platform, arch=arch)))


def _launch_paged(choice: Choice) -> None:
    from attn.torch.kernels.direct import arch
    from attn.torch.kernels.paged_attention import paged_attention

    query_lens, seq_lens = BATCHES[choice["batch"]]
    (heads, kv_heads), size, page = choice["heads"], choice["head_size"], choice["block_size"]
    dtype, tokens, requests = getattr(torch, choice["dtype"]), sum(query_lens), len(query_lens)
    stored = getattr(torch, str(kv_cache_element(choice["kv"], choice["dtype"])))
    columns = -(-max(seq_lens) // page)
    # All pages have the number 0 in the table; only shapes, dtypes and alignments decide what is compiled.
    blocks = requests * columns
    if choice["large_cache"]:
        blocks = 2**31 // (page * kv_heads * size) + 1  # never written to, so never backed by memory
    cache = torch.empty((blocks, page, kv_heads, size), dtype=stored)
    scales: list[torch.Tensor | None] = [None, None]
    if choice["kv"] in PER_TOKEN_HEAD:
        # As many as pages in use: a large cache's scales, unlike its codes, are written here and would need memory.
        scales = [torch.ones(min(blocks, requests * columns), page, kv_heads) for _ in "kv"]
    elif choice["per_head_scales"]:
        scales = [torch.ones(kv_heads) for _ in "kv"]
    left, right = WINDOWS[choice["mask"]]
    scaled = choice["output_scale"]
    launch = functools.partial(
        paged_attention,
        output=torch.empty(tokens, heads, size, dtype=torch.float8_e4m3fn if scaled else dtype),
        lse=torch.empty(heads, tokens) if choice["lse"] else None,
        query=torch.empty(tokens, heads, size, dtype=dtype),
        key_cache=cache,
        value_cache=cache,
        query_start_loc=torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.zeros(requests, columns, dtype=torch.int32),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        scale=size**-0.5,
        left=left,
        right=right,
        soft_cap=30.0 if choice["soft_cap"] else 0.0,
        slopes=torch.ones(heads) if choice["alibi"] else None,
        sinks=torch.ones(heads) if choice["sinks"] else None,
        tree=torch.ones(requests, 8, 8, dtype=torch.bool) if choice["mask"] == "tree" else None,
        **_reach(choice["mask"], tokens, requests),
        k_scale=scales[0],
        v_scale=scales[1],
        invariant=choice["batch_invariant"],
        sparse=[64, 4, 8, 1, 0] if choice["pattern"] else None,
        output_scale=torch.ones(()) if scaled else None,
        keys_below=choice.get("keys_below"),
    )
    launch()
    # A second program of the same case: rows are written by the attention kernel itself, where it may.
    writes = writes_rows(arch(), heads // kv_heads, max(query_lens), dtype.itemsize, False)
    if writes and choice["kv"] not in PER_TOKEN_HEAD and not choice["batch_invariant"]:
        new = [torch.empty(tokens, kv_heads, size, dtype=dtype) for _ in "kv"]
        launch(key=new[0], value=new[1], slots=torch.zeros(tokens, dtype=torch.int64))


def _reach(mask: str, tokens: int, requests: int) -> dict[str, Any]:
    """Return the arguments of spans that a window cuts, or of everything else that a row may see (docs/semantics.md §18)."""
    if mask not in ("spans", "reach"):
        return {}
    spans = {"spans": torch.zeros(tokens, 2, dtype=torch.int32), "span_window": mask == "spans"}
    if mask == "spans":
        return spans
    flags, prefix = torch.ones(requests, dtype=torch.bool), torch.zeros(requests, dtype=torch.int32)
    return {**spans, "prefix": prefix, "is_causal": flags, "chunk_size": 512}


# --- single rows over keys in no cache --------------------------------------------------------------------------------

ROW: dict[str, Sequence[Any]] = {
    "heads": PAGED["heads"],
    "head_size": PAGED["head_size"],
    "dtype": PAGED["dtype"],
    # Seven parts are no power of two, so the merge has lanes that are masked.
    "splits": (1, 7),
    **switches("runs", "keys_masked", "soft_cap", "sinks", "tokens_first"),
}


def _launch_row(choice: Choice) -> None:
    from attn.torch.kernels.dense_decode import Decoder
    from attn.torch.kernels.runs import Runs

    (heads, kv_heads), size, dtype = choice["heads"], choice["head_size"], getattr(torch, choice["dtype"])
    lens, shape = torch.ones(3, dtype=torch.int32), (3, kv_heads, 900, size)
    cache = torch.empty(shape, dtype=dtype)
    if choice["tokens_first"]:
        # [B, K, S, D] with the strides of [B, S, K, D], as caches of some models have.
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    Decoder(cache.device, dtype, (heads, kv_heads, size), size**-0.5, 30.0 if choice["soft_cap"] else 0.0)(
        torch.empty(3, heads, 1, size, dtype=dtype),
        cache,
        cache,
        sinks=torch.ones(heads) if choice["sinks"] else None,
        runs=Runs(lens, lens) if choice["runs"] else None,
        mask=torch.ones(3, 900, dtype=torch.bool) if choice["keys_masked"] else None,
        splits=choice["splits"],
    )


# --- writing the cache ----------------------------------------------------------------------------------------------

WRITE: dict[str, Sequence[Any]] = {
    "heads": ((8, 2), (4, 4), (16, 1), (6, 3)),
    "head_size": (64, 80, 128, 256),
    "block_size": (16, 48, 128),
    "dtype": ("bfloat16", "float16", "float32"),
    "kv": PAGED["kv"],
    "per_head_scales": (False, True),
}


def _launch_write(choice: Choice) -> None:
    from attn.torch.kernels.kv_write import write_kv, write_kv_per_token

    (_, kv_heads), size, page = choice["heads"], choice["head_size"], choice["block_size"]
    stored = getattr(torch, str(kv_cache_element(choice["kv"], choice["dtype"])))
    new = [torch.empty(9, kv_heads, size, dtype=getattr(torch, choice["dtype"])) for _ in "kv"]
    caches = [torch.empty(4, page, kv_heads, size, dtype=stored) for _ in "kv"]
    slots = torch.zeros(9, dtype=torch.int64)
    if choice["kv"] in PER_TOKEN_HEAD:
        write_kv_per_token(*new, *caches, *(torch.empty(4, page, kv_heads) for _ in "kv"), slots)
    else:
        write_kv(*new, *caches, slots, *(torch.ones(kv_heads if choice["per_head_scales"] else ()) for _ in "kv"))


# --- prompts on Hopper ----------------------------------------------------------------------------------------------

HOPPER: dict[str, Sequence[Any]] = {
    "batch": ("mixed", "prefill"),
    "heads": PAGED["heads"],
    "head_size": (64, 72, 96, 128, 256, 512),
    "block_size": PAGED["block_size"],
    "dtype": ("bfloat16", "float16"),
    "mask": tuple(name for name in WINDOWS if name != "tree"),
    "keys_below": (190, 1000, UNBOUNDED),
    **switches("soft_cap", "sinks", "lse"),
}


def _launch_hopper(choice: Choice) -> None:
    """Launch a case for which `paged_attention` selects its Hopper kernel."""
    # `_launch_paged` reads every axis; those that the Hopper kernel does not serve are off.
    others = {axis: False for axis in PAGED if axis not in choice}
    _launch_paged({**others, **choice, "kv": "auto"})
    _check_on("hopper_prefill")


def _check_on(kernel: str) -> None:
    """Raise RuntimeError if a kernel is disabled: general kernels were compiled in its place."""
    from attn.kernels import hopper

    # A kernel that fails to compile is turned off for the process and replaced, without an error, by the general one.
    if why := hopper.why_off(kernel):
        raise RuntimeError(f"{kernel} is off: {why}")


# --- merging states -------------------------------------------------------------------------------------------------

MERGE: dict[str, Sequence[Any]] = {
    "states": (2, 5),
    "head_size": (64, 80, 128, 256),
    "dtype": ("bfloat16", "float16", "float32"),
    "apart": (False, True),
}


def _launch_merge(choice: Choice) -> None:
    from attn.torch.kernels.merge_states import merge_into, merge_states, merge_two_states

    outputs = torch.empty(choice["states"], 9, 4, choice["head_size"], dtype=getattr(torch, choice["dtype"]))
    lses = torch.empty(choice["states"], 4, 9)
    if choice["apart"]:
        merge_two_states(outputs[0], lses[0], outputs[1], lses[1])
        # The running state is in float32, whatever the results' dtype.
        merge_into(outputs[0].float(), lses[0], outputs[1], lses[1])
    else:
        merge_states(outputs, lses)


# --- rows of no request -----------------------------------------------------------------------------------------------

FILL: dict[str, Sequence[Any]] = {
    "num_heads": (8, 5, 128),
    "head_size": (64, 80, 128, 256),
    "dtype": ("bfloat16", "float16", "float32"),
    "requests": (8, 300),
    **switches("lse", "counters", "chooses"),
}


def _launch_fill(choice: Choice) -> None:
    """Launch the kernel as programs of jax do: torch's outputs have no such rows."""
    from attn.kernels import fill
    from attn.kernels.launch import block_of

    heads, size, requests = choice["num_heads"], choice["head_size"], choice["requests"]
    starts = torch.empty(requests + 1, dtype=torch.int32)
    args: dict[str, Any] = {"output": torch.empty(9, heads, size, dtype=getattr(torch, choice["dtype"])), "tokens": 9}
    args |= {"lse": torch.empty(heads, 9) if choice["lse"] else None, "lse_h": 9 if choice["lse"] else 0}
    args |= {"counters": starts[:2].clone() if choice["counters"] else None, "query_start_loc": starts, "num_reqs": requests}
    if choice["chooses"]:
        args |= {"whole": torch.empty_like(starts), "split": torch.empty_like(starts), "seq_lens": starts[1:].clone()}
        args |= {"left": 1 << 30, "most": 1, "keys_per_tile": 64, "whole_from": 26, "BLOCK_R": block_of(requests)}
    fill.fill[-(-9 // fill.ROWS),](**fill.constants(heads, size) | args)


# --- multi-head latent attention ------------------------------------------------------------------------------------

RANK, ROPE, VALUE = 512, 64, 128
LATENT: dict[str, Sequence[Any]] = {
    "batch": ("decode", "draft"),
    "num_heads": (16, 32, 128),
    "block_size": (16, 64, 128),
    "dtype": ("bfloat16", "float16", "float32"),
    "kv": ("auto", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"),
    **switches("lse", "limits", "indices", "uneven", "device_scale"),
}


def _normalise_latent(choice: Choice) -> Choice:
    if choice["indices"]:  # lists are of equal lengths
        choice["uneven"] = False
    if choice.get("kv") in ("auto", "fp8_ds_mla"):
        choice["device_scale"] = False
    return choice


def _refuse_latent(choice: Choice, arch: str) -> str:
    request = Request(RANK + ROPE, choice["dtype"], choice["kv"], choice["block_size"])
    return latent_reason(arch, request)


def _launch_latent(choice: Choice) -> None:
    from attn.torch.kernels.mla_decode import mla_decode

    query_lens, seq_lens = BATCHES[choice["batch"]]
    heads, page, tokens, requests = choice["num_heads"], choice["block_size"], sum(query_lens), len(query_lens)
    dtype, columns, packed = getattr(torch, choice["dtype"]), -(-max(seq_lens) // page), choice["kv"] == "fp8_ds_mla"
    stored = getattr(torch, str(kv_cache_element(choice["kv"], choice["dtype"])))
    mla_decode(
        out=torch.empty(tokens, heads, RANK, dtype=dtype),
        lse=torch.empty(heads, tokens) if choice["lse"] else None,
        query=torch.empty(tokens, heads, RANK + ROPE, dtype=dtype),
        # 656 bytes: docs/semantics.md §9.
        cache=torch.empty(requests * columns, page, 656 if packed else RANK + ROPE, dtype=stored),
        query_start_loc=torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.zeros(requests, columns, dtype=torch.int32),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        scale=(RANK + ROPE) ** -0.5,
        packed=packed,
        k_scale=torch.ones(()) if choice["device_scale"] else None,
        limits=torch.ones(tokens, dtype=torch.int32) if choice["limits"] else None,
        indices=torch.zeros(tokens, 64, dtype=torch.int32) if choice["indices"] else None,
        uneven=choice["uneven"],
    )


LATENT_WRITE: dict[str, Sequence[Any]] = {
    "sizes": ((RANK, ROPE), (96, 32), (256, 0)),
    "block_size": (16, 48),
    "dtype": ("bfloat16", "float16", "float32"),
    "kv": ("auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"),
    "device_scale": (False, True),
    "num_heads": (0, 16, 128),  # of the queries whose rotary part is copied; 0: none
}


def _normalise_latent_write(choice: Choice) -> Choice | None:
    if not choice["kv"].startswith("fp8_e"):
        choice["device_scale"] = False
    if choice["kv"] == "fp8_ds_mla":  # rows of one size
        choice["sizes"] = (RANK, ROPE)
    return choice


def _launch_latent_write(choice: Choice) -> None:
    from attn.torch.kernels.latent_write import write_latents

    (rank, rope), heads, dtype = choice["sizes"], choice["num_heads"], getattr(torch, choice["dtype"])
    stored = getattr(torch, str(kv_cache_element(choice["kv"], choice["dtype"])))
    write_latents(
        kv_c=torch.empty(9, rank, dtype=dtype),
        k_pe=torch.empty(9, rope, dtype=dtype),
        cache=torch.empty(4, choice["block_size"], 656 if stored == torch.uint8 else rank + rope, dtype=stored),
        slot_mapping=torch.zeros(9, dtype=torch.int64),
        k_scale=torch.ones(()) if choice["device_scale"] else None,
        query=torch.empty(9, heads, VALUE + rope, dtype=dtype) if heads else None,
        absorbed=torch.empty(9, heads, rank + rope, dtype=dtype) if heads else None,
    )


HOPPER_LATENT: dict[str, Sequence[Any]] = {
    "num_heads": (128, 64),
    "block_size": (64, 16),
    "dtype": ("bfloat16", "float16"),
    **switches("limits", "indices", "uneven"),
}


def _launch_hopper_latent(choice: Choice) -> None:
    """Launch a case for which `mla_decode` selects its Hopper kernel."""
    _launch_latent({**choice, "batch": "decode", "kv": "auto", "lse": True, "device_scale": False})
    _check_on("hopper_mla")


EXPANDED: dict[str, Sequence[Any]] = {
    "sizes": ((192, VALUE), (96, 64), (192, 192), (256, 256)),
    "dtype": ("bfloat16", "float16", "float32"),
    "keys": (360, 9000),
    **switches("causal", "lse"),
}


def _launch_expanded(choice: Choice) -> None:
    from attn.torch.kernels.direct import arch
    from attn.torch.kernels.mla_prefill import mla_prefill

    dtype, starts = getattr(torch, choice["dtype"]), torch.tensor([0, 300, 360], dtype=torch.int32)
    (size, width), keys = choice["sizes"], choice["keys"]
    query, key, value = (torch.empty(n, 8, columns, dtype=dtype) for n, columns in ((360, size), (keys, size), (keys, width)))
    results = torch.empty(360, 8, width, dtype=dtype), torch.empty(8, 360) if choice["lse"] else None
    key_starts = torch.tensor([0, keys - 60, keys], dtype=torch.int32)
    mla_prefill(*results, query, key, value, starts, key_starts, scale=size**-0.5, causal=choice["causal"])
    if arch() == "sm_90" and choice["dtype"] != "float32":
        _check_on("hopper_prefill")


# --- dense attention with 8-bit scores ------------------------------------------------------------------------------

INT8: dict[str, Sequence[Any]] = {
    "lengths": ((300, 300), (300, 77)),
    "heads": ((4, 4), (8, 2)),
    "head_size": (128, 256),
    "dtype": ("bfloat16", "float16"),
    **switches("causal", "lse"),
    "smooth": (True, False),
    "large": (False, True),  # 2 ** 31 elements and more
}


def _launch_int8(choice: Choice) -> None:
    from attn.torch.kernels.int8_attention import DenseKeys, int8_attention

    (rows, keys), (heads, kv_heads), size = choice["lengths"], choice["heads"], choice["head_size"]
    dtype, wide = getattr(torch, choice["dtype"]), 2**31 // keys // size if choice["large"] else kv_heads
    query = torch.empty(2, rows, heads, size, dtype=dtype)
    # A view whose strides, not its shape, reach 2**31 elements; the extra head keeps it from being contiguous.
    key = torch.empty(2, keys, wide + 1, size, dtype=dtype)[:, :, :kv_heads]  # never written to
    int8_attention(
        torch.empty_like(query),
        torch.empty(2, heads, rows) if choice["lse"] else None,
        query,
        DenseKeys(
            key, key, torch.full((2,), keys, dtype=torch.int32), torch.zeros(2, kv_heads, size) if choice["smooth"] else None
        ),
        scale=size**-0.5,
        causal=choice["causal"],
    )


KERNELS = {
    "paged_attention": Kernel(PAGED, _launch_paged, _normalise_paged, _refuse_paged),
    "hopper_prefill": Kernel(HOPPER, _launch_hopper, only_on=("sm_90",)),
    "dense_decode": Kernel(
        ROW, _launch_row, refusal=lambda row, arch: group_reason(arch, Request(row["head_size"], row["dtype"]))
    ),
    "kv_write": Kernel(WRITE, _launch_write, _normalise_paged),
    "merge_states": Kernel(MERGE, _launch_merge),
    "fill": Kernel(FILL, _launch_fill),
    "latent_write": Kernel(LATENT_WRITE, _launch_latent_write, _normalise_latent_write),
    "mla_decode": Kernel(LATENT, _launch_latent, _normalise_latent, _refuse_latent),
    "hopper_mla": Kernel(HOPPER_LATENT, _launch_hopper_latent, _normalise_latent, only_on=("sm_90",)),
    "mla_prefill": Kernel(EXPANDED, _launch_expanded),
    "int8_attention": Kernel(INT8, _launch_int8),
}
