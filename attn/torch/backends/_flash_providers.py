"""The packages that provide FlashAttention: one algorithm with different signatures and gaps.

| provider | module | page size | windows | soft cap | ALiBi | other masks |
|---|---|---|---|---|---|---|
| FlashAttention 4 | `flash_attn.cute.interface` (CuTe DSL) | multiple of 16 | yes | yes | no | yes |
| FlashAttention 3 | `flash_attn_interface` (Hopper) | multiple of 16 | yes | yes | no | no |
| vLLM's FlashAttention 3 | `vllm.vllm_flash_attn` (Hopper) | multiple of 16 | yes | yes | no | no |
| FlashAttention 2 | `flash_attn.flash_attn_interface` | multiple of 256 | yes | yes | yes | no |
| vLLM's FlashAttention 2 | `vllm.vllm_flash_attn` | multiple of 16 | yes | yes | yes | no |
| PyTorch | `torch.nn.attention.varlen` (since 2.12) | multiple of 256 | yes | no | no | no |

Each is a `Provider`: a capability record, the arguments that its functions must have (a version without one of them is
rejected with that reason), and the call itself, derived from a `VarlenCall` in this library's conventions. Providers return the
log-sum-exp of rows without a key as +inf or -inf, and define sinks differently (FlashAttention 4 includes them in the
log-sum-exp, in bfloat16). So sinks are never passed to a provider: the backend applies them, from the log-sum-exp.
Other masks (`MASK_FEATURES`) are FlashAttention 4's `mask_mod`, which it calls for each row and key in place of causality and
the window. It then computes every tile of keys: its lists of tiles to skip (`block_sparse_tensors`) are not for pages on sm_90,
where their loads take the numbers of tiles for those of pages, and it refuses them on sm_100.
Signatures are those of FlashAttention 4.0.0b36, of the Dao-AILab/flash-attention repository at 0251105a, of vLLM 0.24 to 0.33
and of torch 2.13.
Loading a vLLM build imports the package `vllm`, which sets environment variables for its own workers, as `import vllm`
always does (`vllm/env_override.py`: one compile thread for Inductor, among others). vLLM's FlashAttention 2 contains machine
code for sm_8x and PTX; on later architectures the driver compiles each kernel at its first call.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attn import __version__
from attn.capabilities import (
    ATTN_TYPES,
    MASK_FEATURES,
    WINDOW_FEATURES,
    Capabilities,
    Device,
    Feature,
    MultipleOf,
    Request,
    arch_matches,
)
from attn.errors import BackendLoadError, UnsupportedError
from attn.imports import assumed, installed, loading
from attn.torch.backends._paged import is_captured
from attn.torch.backends._vendor import lacking
from attn.visibility import BatchMask, LayerMask, Visibility

_FEATURES = WINDOW_FEATURES | {Feature.SOFT_CAP, Feature.SINKS, Feature.LSE, Feature.KV_SHARING}


class VarlenCall(NamedTuple):
    """Attention over a batch, in this library's conventions: a `PagedCall` with the layer's settings.

    query: [T, H, D]; key, value: a cache [N, P, K, D] with block_table [R, B] and lens [R], int32, or the batch's own rows
    [T, K, D] with neither. starts: [R + 1] int32, of the queries; key_starts: [R + 1] int32, of the keys. window: keys
    p - left <= j <= p + right, None = unbounded; causal attention has right = 0. alibi_slopes: [H] float32. mask: what the rows
    see, None if the window says all of it.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    starts: torch.Tensor
    key_starts: torch.Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    window: tuple[int | None, int | None]
    lens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    soft_cap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    mask: Visibility | None = None

    @property
    def causal(self) -> bool:
        """Whether no row sees a later key."""
        return self.window[1] == 0

    def lens_of(self) -> tuple[Any, ...]:
        """Return the arguments of FlashAttention's functions for sequences of different lengths after query, key and value."""
        return (self.starts, self.key_starts, self.max_query_len, self.max_seq_len)

    def rules(self, window: tuple[int, int]) -> dict[str, Any]:
        """Return the arguments of FlashAttention 2 and 3 that turn scores into weights; window: `sides` in some form."""
        return {"softmax_scale": self.scale, "causal": self.causal, "window_size": window, "softcap": self.soft_cap}

    def sides(self) -> tuple[int, int]:
        """Return the window with -1 for unbounded."""
        left, right = self.window
        return (-1 if left is None else left, -1 if right is None else right)

    def sides_beside_causal(self) -> tuple[int, int]:
        """Return the window for a function that also takes `causal`.

        With one token per request the right bound is redundant. Omitting it lets FlashAttention 2 pack the heads of a group
        and split the keys, which needs one row per request.
        """
        left, right = self.sides()
        return left, -1 if right == 0 and self.max_query_len == 1 and len(self.query) == len(self.starts) - 1 else right


State = tuple[torch.Tensor, torch.Tensor]  #: output [T, H, D], lse [H, T] float32
#: Attends query, key and value, of a `VarlenCall`'s shapes, over its batch; with `alibi_slopes` too, if the layer has any.
Bound = Callable[..., State]


def _bound(function: Callable[..., Any], *arguments: Any, **named: Any) -> Bound:
    """Return a closure over a package's function and the arguments that were derived once for a batch."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> State:
        # some versions return more: the probabilities that dropout would need
        return function(query, key, value, *arguments, **named, **more)[:2]  # type: ignore[no-any-return]

    return attend


@functools.lru_cache(256)
def _mask_mod(to_vector: Callable[[Any, Any], Any], layer: LayerMask, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return FlashAttention 4's `mask_mod` for a layer and the arrays of a batch that its `aux_tensors` are, one program each.

    to_vector: makes a vector of one number, as which the kernel passes and takes numbers. lens: `offset_q`, the request's first
    row in the batch, `seqlen_q` and `seqlen_k`.
    """

    def mask_mod(batch: Any, head: Any, row: Any, key: Any, lens: Any, arrays: Any) -> Any:
        request, q_row, key = batch[0], row[0], key[0]
        # positions of rows: both ends are aligned (docs/semantics.md §3)
        context = lens.seqlen_k - lens.seqlen_q
        # the rows of a tile past the request's last are computed too, and must not be read past the batch's last
        position = lens.offset_q + q_row * (q_row < lens.seqlen_q)
        mask = Visibility(layer, BatchMask(**dict(zip(names, arrays or (), strict=True))))
        # The one formula of the library, on the compiler's symbols: `mask_mod` is traced once for each kind of mask.
        seen = mask.allowed(q_row + context, key, request, position, context, lens.seqlen_q)
        return to_vector(seen, type(seen))

    mask_mod.__cute_hash__ = f"attn {__version__} {layer!r} {names}"  # type: ignore[attr-defined]  # the formula is not its source
    return mask_mod


def _fa4(module: Any, call: VarlenCall) -> Bound:
    # `causal` excludes tiles that no row sees; beside a window the kernel takes both bounds from that.
    plain = call.causal and call.window[0] is None
    window = (None, None) if plain else call.window
    if call.block_table is not None and 64 < call.query.shape[2] <= 96 and not plain and window == (None, None):
        # hides no key, and gives tiles a size that is right over pages (`_FA4_WRONG_OVER_PAGES`)
        window = call.max_seq_len, call.max_seq_len
    rules: dict[str, Any] = {"causal": plain, "window_size": window}
    if call.mask is not None:
        arrays = {name: array for name, array in call.mask.batch._asdict().items() if array is not None}
        mask_mod = _mask_mod(module.utils.scalar_to_ssa, call.mask.layer, tuple(arrays))
        # in place of causality and window, which the mask decides too
        rules = {"mask_mod": mask_mod, "aux_tensors": list(arrays.values()) or None}
    return _bound(
        module.flash_attn_varlen_func,
        cu_seqlens_q=call.starts,
        # over pages the lengths say where keys end (`seqused_k`)
        cu_seqlens_k=call.key_starts if call.block_table is None else None,
        max_seqlen_q=call.max_query_len,
        max_seqlen_k=call.max_seq_len,
        seqused_k=call.lens,
        page_table=call.block_table,
        softmax_scale=call.scale,
        softcap=call.soft_cap,
        return_lse=True,
        **rules,
    )


def _fa3(module: Any, call: VarlenCall) -> Bound:
    rules = call.rules(call.sides())
    if call.block_table is None:
        return _bound(module.flash_attn_varlen_func, *call.lens_of(), **rules, return_attn_probs=True)
    return _bound(
        module.flash_attn_with_kvcache,
        cache_seqlens=call.lens,
        page_table=call.block_table,
        cu_seqlens_q=call.starts,
        max_seqlen_q=call.max_query_len,
        **rules,
        return_softmax_lse=True,
    )


def _fa2(module: Any, call: VarlenCall) -> Bound:
    rules = call.rules(call.sides_beside_causal())
    starts, lens, table = call.key_starts, call.lens, call.block_table
    attend = _bound(module.flash_attn_varlen_func, *call.lens_of(), **rules, return_attn_probs=True, block_table=table)
    if lens is None:
        return attend

    def summing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> State:
        # The kernel reads sums of lengths alone. A graph makes them, since its owner overwrites the lengths between replays.
        if is_captured(query):
            torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
        return attend(query, key, value, **more)

    return summing


def _vllm(module: Any, call: VarlenCall, version: int) -> Bound:
    # pass the cumulative key lengths or the lengths, never both: the function computes the other
    paged = {"seqused_k": call.lens, "block_table": call.block_table}
    keys = {"cu_seqlens_k": call.key_starts} if call.block_table is None else paged
    return _bound(
        module.flash_attn_varlen_func,
        *(call.max_query_len, call.starts, call.max_seq_len),
        **call.rules(call.sides_beside_causal()),
        return_softmax_lse=True,
        fa_version=version,
        **keys,
    )


def _varlen(module: Any, call: VarlenCall) -> Bound:
    # FlashAttention 2's kernel takes both cumulative key lengths and lengths, and only pages of a multiple of 256
    paged = {} if call.block_table is None else {"seqused_k": call.lens, "block_table": call.block_table}
    log = module.AuxRequest(lse=True)
    rules = {"scale": call.scale, "window_size": call.sides(), "enable_gqa": True}
    return _bound(module.varlen_attn, *call.lens_of(), return_aux=log, **rules, **paged)


@dataclass(frozen=True)
class Provider:
    """One package that provides FlashAttention.

    capabilities, block_size: what it supports. needs: its functions, each with the arguments that it must have, and
    mask_needs for `MASK_FEATURES`. bind: derives what attends, from a module and a call. compiled: its extension module, if
    `module` can be imported without it.
    """

    name: str
    module: str
    install: str
    capabilities: Capabilities
    block_size: MultipleOf
    needs: tuple[tuple[str, tuple[str, ...]], ...]
    bind: Callable[[Any, VarlenCall], Bound]
    narrow_values: Callable[[int, int], bool] = lambda keys, values: False  #: whether values need no padding
    sizes_on: tuple[tuple[str, MultipleOf], ...] = ()  #: head sizes on architectures that serve fewer than the record
    sizes_over_pages: MultipleOf = MultipleOf(1)
    #: head sizes that it gets wrong over pages: on which architectures, with which features (None: always), and why
    wrong_over_pages: tuple[tuple[str, MultipleOf, frozenset[Feature] | None, str], ...] = ()
    compiled: str = ""
    mask_needs: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def present(self) -> bool:
        """Whether the module and its extension are installed, checked without importing anything."""
        return installed(self.module) and (not self.compiled or installed(self.compiled))

    def load(self) -> Any:
        """Import and return the module. Raises `BackendLoadError` if it, or its extension, is installed but broken."""
        with loading(self.module):
            module = importlib.import_module(self.module)
            if self.compiled:  # the module hides that its extension failed to load
                importlib.import_module(self.compiled)
        return module

    def attend(self, module: Any, call: VarlenCall) -> State:
        """Attend a call, with what `load` returned."""
        # passed by name only where there are some: not every provider takes them
        slopes = {} if call.alibi_slopes is None else {"alibi_slopes": call.alibi_slopes}
        return self.bind(module, call)(call.query, call.key, call.value, **slopes)

    def reasons(self, request: Request, device: Device | None) -> list[str]:
        """Return why this provider does not serve the request; empty if it does.

        The package is imported only if there is no other reason. A failed import is a reason too.
        """
        # The record first, since the rest imports the package, which may take seconds.
        why = self.capabilities.reasons(request, device)
        for rule, sizes in self.sizes_on:
            if device is not None and arch_matches(device.arch, rule) and request.head_size not in sizes:
                why.append(f"head_size={request.head_size} on {device.arch} (supports {sizes})")
        if request.block_size is not None and request.block_size not in self.block_size:
            why.append(f"block_size={request.block_size} (supports {self.block_size})")
        if request.block_size is not None:
            size, features = request.head_size, request.features
            if size not in self.sizes_over_pages:
                why.append(f"head_size={size} over pages (supports {self.sizes_over_pages})")
            for rule, sizes, wrong, message in self.wrong_over_pages:
                applies = device is not None and arch_matches(device.arch, rule)
                if applies and size in sizes and (wrong is None or wrong & features):
                    why.append(f"head_size={size} over pages ({message})")
        try:
            return why or ([] if assumed(self.module) else list(_lacking(self, not MASK_FEATURES.isdisjoint(request.features))))
        except BackendLoadError as error:
            return [str(error)]


@functools.cache
def _lacking(provider: Provider, masks: bool) -> tuple[str, ...]:
    """Return the functions and arguments that the installed version lacks, those for masks included if `masks`."""
    return lacking(provider.module, provider.load(), provider.needs + (provider.mask_needs if masks else ()))


#: Head sizes that FlashAttention 4's release 4.0.0b36 got wrong over pages on an H200: 160 ended in an illegal access; 80 and
#: 96 read wrong keys in tiles of 144 keys, which it uses without causality or a window, and so under any `mask_mod`. The sizes
#: between those that ran right (64, 112, 128, 192, 256) are refused too.
_FA4_WRONG_OVER_PAGES = (
    ("sm_90", MultipleOf(1, 129, 191), None, "4.0.0b36 reads outside of the cache on sm_90"),
    ("sm_90", MultipleOf(1, 65, 96), MASK_FEATURES, "4.0.0b36 is wrong with masks on sm_90"),
)


def _record(archs: tuple[str, ...], features: frozenset[Feature]) -> Capabilities:
    return Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(MultipleOf(8, 32, 256),),
        attn_types=ATTN_TYPES,
        features=features,
        archs=(("cuda", archs),),
    )


def _hopper_narrow(keys: int, values: int) -> bool:
    """Whether FlashAttention 3 is compiled for these key and value head sizes (quoted from its error for others)."""
    return (128 < keys <= 192 and 96 < values <= 128) or (keys <= 64 and values <= 512)


_VLLM = "vllm.vllm_flash_attn.flash_attn_interface"
_VLLM_NEEDS = (
    (
        "flash_attn_varlen_func",
        ("seqused_k", "block_table", "window_size", "softcap", "alibi_slopes", "return_softmax_lse", "fa_version"),
    ),
)

#: In order of preference. On Hopper FlashAttention 3 comes before 4, which splits no keys (9x slower for one request of 32k
#: on an H200), and both come before 2. Within a generation the original package comes before vLLM's fork,
#: which requires an import of vLLM (vLLM's 2 serves smaller pages).
PROVIDERS: tuple[Provider, ...] = (
    Provider(
        "FlashAttention 3", "flash_attn_interface", "flash-attn-3", _record(("sm_90",), _FEATURES), MultipleOf(16),
        (("flash_attn_with_kvcache", ("page_table", "cu_seqlens_q", "softcap", "return_softmax_lse")),
         ("flash_attn_varlen_func", ("window_size", "softcap", "return_attn_probs"))), _fa3, _hopper_narrow,
    ),
    Provider(
        "vLLM's FlashAttention 3", _VLLM, "vllm", _record(("sm_90",), _FEATURES), MultipleOf(16), _VLLM_NEEDS,
        functools.partial(_vllm, version=3), _hopper_narrow, compiled="vllm.vllm_flash_attn._vllm_fa3_C",
    ),
    Provider(
        "FlashAttention 4", "flash_attn.cute.interface", "flash-attn-4",
        _record(("sm_90", "sm_10*"), _FEATURES | MASK_FEATURES), MultipleOf(16),
        (("flash_attn_varlen_func", ("page_table", "seqused_k", "window_size", "softcap", "return_lse")),), _fa4,
        sizes_on=(("sm_10*", MultipleOf(8, 32, 128)),),  # its interface asserts these; 256 has a kernel of its own there
        sizes_over_pages=MultipleOf(16),  # it asserts this too, unless a page is a tile of keys
        wrong_over_pages=_FA4_WRONG_OVER_PAGES,
        mask_needs=(("flash_attn_varlen_func", ("mask_mod", "aux_tensors")), ("utils.scalar_to_ssa", ())),
    ),
    Provider(
        "FlashAttention 2", "flash_attn.flash_attn_interface", "flash-attn",
        _record(("sm_80+",), _FEATURES | {Feature.ALIBI}), MultipleOf(256),
        (("flash_attn_varlen_func", ("block_table", "window_size", "softcap", "alibi_slopes")),), _fa2,
    ),
    Provider(
        "vLLM's FlashAttention 2", _VLLM, "vllm", _record(("sm_80+",), _FEATURES | {Feature.ALIBI}), MultipleOf(16),
        _VLLM_NEEDS, functools.partial(_vllm, version=2), compiled="vllm.vllm_flash_attn._vllm_fa2_C",
    ),
    Provider(
        "PyTorch's varlen_attn", "torch.nn.attention.varlen", "torch>=2.12",
        _record(("sm_80+",), _FEATURES - {Feature.SOFT_CAP}), MultipleOf(256),
        (("varlen_attn", ("block_table", "seqused_k", "window_size", "enable_gqa", "scale")),), _varlen,
    ),
)  # fmt: skip


def present() -> Sequence[Provider]:
    """Return the installed providers, in order of preference."""
    return [provider for provider in PROVIDERS if provider.present()]


def best(request: Request, device: Device | None) -> Provider | None:
    """Return the best installed provider that serves the request, or None."""
    return next((provider for provider in present() if not provider.reasons(request, device)), None)


def why_none(request: Request, device: Device | None) -> list[str]:
    """Return nothing if a provider serves the request; otherwise that none is installed, or each provider's reasons."""
    installed = present()
    if not installed:
        names = ", ".join(f"{p.name} (pip install {p.install!r})" for p in PROVIDERS)
        return [f"none of its providers is installed: {names}"]
    if best(request, device) is not None:
        return []
    return [f"{provider.name}: {', '.join(provider.reasons(request, device))}" for provider in installed]


@functools.lru_cache(1024)
def chosen(request: Request, arch: str) -> Provider:
    """Return the best provider for a request on an architecture (empty: unknown), cached for the process.

    Raises `UnsupportedError` with every provider's reasons if none serves the request.
    """
    # without an architecture (tests on a CPU) only the record's other limits are judged
    device = Device("torch", "cuda", arch=arch) if arch else None
    provider = best(request, device)
    if provider is None:
        why = why_none(request, device)
        raise UnsupportedError(f"FLASH_ATTN does not serve {request}: {'; '.join(why)}", why)
    return provider
