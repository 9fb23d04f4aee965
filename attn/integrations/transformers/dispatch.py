"""The route by which a call is computed (see the package's docstring), decided once for the calls that a model repeats.

A launch serves the calls of one layer that have the same facts: sizes except those that grow with every token, dtypes, devices,
options, and the environment. It is chosen and checked at the first of them. Layers whose calls have no mask share launches and,
in a step, what is prepared for the first of them (`runs`). Calls that need more than a launch (gradients, a mask that is no
pattern and, unless a backend attends runs of keys, padding) have none, and are decided each time.
"""

import enum
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import attn
from attn.capabilities import AttentionType, Feature
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum as Dense
from attn.errors import UnsupportedError
from attn.functional import DenseParams, OptionalArrays
from attn.integrations.transformers.call import (
    EVERYTHING,
    NAME,
    ModuleCall,
    dropout_name,
    in_graph,
    known_request,
    replaced,
    rows_first,
    visible,
    widened,
)
from attn.integrations.transformers.masks import as_bool, as_drawn, drawn, once, read, with_bias
from attn.integrations.transformers.packing import layer_of, pack
from attn.selector import selection_state
from attn.torch.diffusion.chosen import CallProperties, impl_for, known, properties_of, sizes_that_decide
from attn.torch.graphs import uncaptured
from attn.torch.kernels.runs import Runs
from attn.torch.layer import Attention
from attn.torch.metadata import keep
from attn.weights import dense

#: (query, key, value, sinks, each entry's run of valid keys or None for all) -> [B, S, H, Dv].
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Runs | None], torch.Tensor]


class DenseLaunch(NamedTuple):
    """How a layer's calls of the same facts are computed. of_any: what computes them for any layer with these facts, if values
    need no padding; its `bound`, if it has one, prepares calls of the same shapes and strides."""

    run: Run
    of_any: Any = None

    def bound(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None) -> Run | None:
        """Return what does the same as `run` with less work of the host for arrays of these shapes and strides; None if nothing
        could be prepared, which may be another in the next call."""
        prepare = getattr(self.of_any, "bound", None)
        if prepare is None:
            return self.run
        prepared = prepare(query, key, value, *(() if sinks is None else (sinks,)))
        # `of_any` itself, where it prepares nothing: its arguments are not those of a `Run`
        return None if prepared is self.of_any else prepared


_MASK_AT_ONCE = 1 << 26  #: rows x keys of a masked prompt: torch makes a bias of the mask in each layer

_launches: "weakref.WeakKeyDictionary[Any, dict[Any, DenseLaunch | None]]" = weakref.WeakKeyDictionary()
#: Of calls that see all keys: launches by what decides them, for which later steps need no `ModuleCall`, and what computes
#: those of the same facts, as all layers of a step have.
plain_launches: dict[Any, DenseLaunch] = {}
runs: dict[Any, Run] = {}


class Route(enum.Enum):
    """The implementation that computes a call (see the package's docstring)."""

    DENSE = "dense"
    PACKED = "packed"
    FORMULA = "formula"
    SDPA = "sdpa"
    OPERATOR = "operator"


def classify(call: ModuleCall, graph: bool = False, gaps: bool = False) -> Route:
    """Return the route of a call whose mask was read, by what it requires.

    graph: whether a graph is traced. gaps: whether some keys between valid ones are not valid.
    """
    # what the diffusion registry's backends compute, without a name that only the other registry has
    simple = call.plain and call.backend is None
    if call.bias is not None or call.dropout:
        return Route.SDPA
    if graph and not simple:
        return Route.OPERATOR
    # dense backends mask keys or are causal, not both: with padding, causal rows have positions of their own
    if simple and (not call.seen.layer.causal or (call.square and call.valid is None)):
        return Route.FORMULA if call.wide else Route.DENSE
    # no paged backend has gradients, values wider than keys, or masks; and positions in a window count keys without gaps
    if call.wants_grad or call.wide or call.mask is not None or (gaps and call.seen.layer.window[0] is not None):
        return Route.FORMULA
    return Route.PACKED


def attend(call: ModuleCall, graph: bool = False) -> torch.Tensor:
    """Compute a call, whose mask is read first; returns [B, S, H, Dv]. graph: whether a graph is traced."""
    if not graph:
        call = with_bias(call)
    if call.mask is not None and call.query.shape[2] == 1 and (graph or not hasattr(call.mask, "attn_described")):
        row = _as_row(call, graph)
        if row is not None:
            return row
    # before the mask is read, which a graph cannot trace
    if graph or call.bias is not None or call.dropout:
        route = classify(call, graph)
        if route is Route.SDPA:
            return by_sdpa(call)
        if route is Route.OPERATOR:
            return as_operator(call)
    read(call)
    if call.mask is None and call.seen.batch.spans is None and not graph:
        launch = launch_of(call)
        if launch is not None:
            runs = None if call.valid is None else call.valid.runs()
            if runs is not None or call.valid is None:
                return launch.run(call.query, call.key, call.value, call.sinks, runs)
    windowed = call.seen.layer.window[0] is not None
    route = classify(call, gaps=windowed and call.valid is not None and call.valid.lens()[2] is None)
    if route is Route.DENSE:
        return by_dense(call)
    return pack(call) if route is Route.PACKED else by_formula(call)


def facts_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, options: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Return all of a call without a mask but where its arrays are, with `options` of the layer; None if more may decide.

    Layers of a step have the same ones.
    """
    # gradients and casts depend on more than these facts
    if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
        return None
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), query.dtype, key.dtype, value.dtype,
        query.device, key.get_device(), value.get_device(), None if sinks is None else sinks.dtype, options,
    )  # fmt: skip


def deciding(facts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what decides the launch of a call with these facts: nothing that is another in each step."""
    # strides, which only a prepared launch depends on, are left out
    (batch, heads, rows, size), k, v, _, _, _, *constants = facts
    # the checks of `launch_of`: shapes that match, and no empty array
    fits = batch == k[0] == v[0] and k[1:3] == v[1:3] and batch * rows * k[2] > 0
    return fits, heads, k[1], size, k[3], v[3], sizes_that_decide(rows, k[2]), *constants


def run_for(
    facts: tuple[Any, ...], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
) -> Run | None:
    """Return the function that computes calls with these facts, and store it in `runs` if it serves any layer; None if no
    call of equal `deciding` facts was launched."""
    decided = deciding(facts)
    # Launches that hold a module's own layer are of these sinks. An object that has the address of one that is gone finds a
    # layer with the same rules, and its sinks are passed with the call.
    launch = plain_launches.get(decided) or (None if sinks is None else plain_launches.get((decided, id(sinks))))
    if launch is None or (sinks is not None and launch.of_any is None):
        return None if launch is None else launch.run
    bound = launch.bound(query, key, value, sinks)
    # not kept: the first launch of a length may only compile the kernel, and the next layer's is prepared
    return launch.run if bound is None else keep(runs, facts, bound)


def launched(facts: tuple[Any, ...], sinks: torch.Tensor | None, launch: DenseLaunch) -> None:
    """Keep a launch of calls with these facts, of layers with the same sinks only if it holds them."""
    decided = deciding(facts)
    keep(plain_launches, decided if sinks is None or launch.of_any is not None else (decided, id(sinks)), launch)


def launch_of(call: ModuleCall) -> DenseLaunch | None:
    """Return the launch of calls like this one, which is made at the first; None if there is none."""
    query, key, value, seen, valid = call.query, call.key, call.value, call.seen, call.valid
    batch, heads, rows, size = query.shape
    key_batch, kv_heads, keys, key_size = key.shape
    value_batch, value_heads, values, value_size = value.shape
    if batch != key_batch or batch != value_batch or kv_heads != value_heads or keys != values or size != key_size:
        return None
    device = query.device
    if device != key.device or device != value.device or not (batch and rows and keys) or call.wants_grad:
        return None
    # runs of keys are for single rows and whole prompts; a description of one layer alone would be fetched in each
    if valid is not None and (rows not in (1, keys) or valid.all_rows or not valid.shared):
        return None
    facts = (
        call.requested, heads, kv_heads, size, value_size, query.dtype, key.dtype, value.dtype, device, call.scale, seen.layer,
        call.soft_cap, call.sinks is None, valid is None, *sizes_that_decide(rows, keys),
    )  # fmt: skip
    # weak: a model that is deleted takes its launches along
    launches = _launches.setdefault(call.module, {})
    return launches[facts] if facts in launches else keep(launches, facts, _decided(call))


def _decided(call: ModuleCall) -> DenseLaunch | None:
    """Choose how to compute calls like this one; None if no launch can be repeated."""
    rows, width, padded = call.query.shape[2], call.value.shape[3], call.valid is not None
    # columns that values lack of the keys' width
    pads, route = call.query.shape[3] - width, classify(call)
    # decided in each call: the formula has no launch, and dense backends take padding as a mask
    if route is Route.FORMULA or (route is Route.DENSE and padded and rows > 1):
        return None
    masked = _masked(call) if padded else None
    if masked is not None:
        return DenseLaunch(masked)
    plain = None if padded else _dense(call, route)
    if plain is not None:
        if pads:
            return DenseLaunch(lambda query, key, value, sinks, runs: plain(query, key, F.pad(value, (0, pads)))[..., :width])
        return DenseLaunch(lambda query, key, value, sinks, runs: plain(query, key, value), plain)
    causal = call.seen.layer.causal
    try:
        # an encoder's rows are its keys; other rows without causality need a decoder's
        layer = layer_of(call, AttentionType.DECODER if causal or not call.square else AttentionType.ENCODER_ONLY)
    except UnsupportedError:
        if route is Route.DENSE:
            return None
        raise
    impl: Any = layer.impl
    if not (impl.attends_valid_keys if padded else impl.attends_keys):
        return None
    # a kernel of single rows, which takes the sinks with the call
    row = impl.row_launcher(call.query.device, call.query.dtype) if rows == 1 else None

    def launch(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, runs: Runs | None
    ) -> torch.Tensor:
        if pads:
            value = F.pad(value, (0, pads))
        if row is not None:
            out: torch.Tensor = row(query, key, value, sinks, runs)
        else:
            # set before each call: layers with other sinks share the launch
            impl.sinks = None if sinks is None else as_float(sinks)
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            out = impl.attend_keys(q, k, v, causal) if runs is None else impl.attend_keys(q, k, v, causal, valid=runs)
        return out[..., :width] if pads else out

    # padding copies values, which a prepared launch would have to repeat
    return DenseLaunch(launch, None if pads else row)


def _dense(call: ModuleCall, route: Route) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the launch of a plain call by a dense backend: the fastest, or the one that has the name of the requested one."""
    if route is Route.DENSE:
        return chosen_for(call, None).launcher(*rows_first(call))  # type: ignore[no-any-return]
    if not call.plain or (call.seen.layer.causal and not call.square) or call.backend not in Dense.names():
        return None
    try:
        return chosen_for(call, None, call.backend).launcher(*rows_first(call))  # type: ignore[no-any-return]
    except UnsupportedError:
        return None


def _waits(device: torch.device) -> bool:
    """Whether the host waits for a device when it reads its elements."""
    return device.type != "cpu"


def _masked(call: ModuleCall) -> Run | None:
    """Return the launch of a plain call with padding by the dense backend of the requested name, if it takes masks.

    The paged backend of such a name attends requests one by one, and waits for the device for each. On a CPU nothing waits,
    and that takes less time than hiding the padding, for which keys and values are copied.
    """
    if not call.plain or call.backend not in Dense.names() or not _waits(call.query.device):
        return None
    causal, width = call.seen.layer.causal, call.value.shape[3]
    assert call.valid is not None
    try:  # a backend of masks, even where one of keys would do; the mask says causality too
        impl = chosen_for(replaced(call, seen=EVERYTHING), call.valid.present[:, None, None], call.backend)
    except UnsupportedError:
        return None

    def launch(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, runs: Runs | None
    ) -> torch.Tensor:
        assert runs is not None
        batch, keys = len(query), key.shape[2]
        step = max(1, _MASK_AT_ONCE // keys**2) if causal else batch
        if step < batch:
            parts = zip(*(x.split(step) for x in (query, key, value, runs.first, runs.number)), strict=True)
            return torch.cat([launch(q, k, v, sinks, Runs(*run)) for q, k, v, *run in parts])
        if pads:
            value = F.pad(value, (0, key.shape[3] - width))
        if causal:  # the backend itself hides what is behind a mask of keys: padding may hold anything
            gone = ~runs.mask(keys, False)[:, None, :, None]
            key, value = key.masked_fill(gone, 0), value.masked_fill(gone, 0)
        arrays = (x.transpose(1, 2) for x in (query, key, value))
        out: torch.Tensor = impl.forward(*arrays, DiffusionAttentionMetadata(attn_mask=runs.mask(keys, causal)))
        return out[..., :width]

    pads = call.query.shape[3] != width
    return launch


#: Sinks by identity: the tensor, its version, and its values in float32.
_floats: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}


def as_float(sinks: torch.Tensor) -> torch.Tensor:
    """Return a module's sinks in float32, converted again only when they have changed."""
    version = -1 if sinks.is_inference() else sinks._version
    cached = _floats.get(id(sinks))
    # A tensor of inference mode has no version: it is converted each time.
    if cached is None or cached[0] is not sinks or cached[1] != version or version < 0:
        cached = keep(_floats, id(sinks), (sinks, version, sinks.detach().float()))
    return cached[2]


def by_dense(call: ModuleCall) -> torch.Tensor:
    """Compute by the diffusion registry's choice."""
    mask = call.mask if call.valid is None else call.valid.present
    out: torch.Tensor = chosen_for(call, mask).forward(*rows_first(call), DiffusionAttentionMetadata(attn_mask=mask))
    return out[..., : call.value.shape[-1]]


def chosen_for(call: ModuleCall, mask: torch.Tensor | None, backend: str | None = None) -> Any:
    """Return the implementation that the diffusion registry chooses for a call with this mask, or that of `backend`."""
    query, key = call.query.transpose(1, 2), call.key.transpose(1, 2)
    return impl_for(properties_of(query, key, call.scale, call.seen.layer.causal, mask, call.wants_grad, backend))


def by_formula(call: ModuleCall) -> torch.Tensor:
    """Compute by `attn.attention`, under a mask that includes causality and window."""
    if call.backend is not None:
        if call.mask is not None:
            raise call.by_name(f"{Feature.MASK.value} (other than a causal or windowed pattern)", Feature.MASK)
        if call.wants_grad:
            paged = "gradients by a backend requested by name, which is one over pages,"
            raise call.refusal(paged, f'attn_implementation="{NAME}" computes them, by a dense backend or by the formula')
        raise call.by_name("values wider than keys, or a window over keys with gaps", Feature.MASK)
    out: torch.Tensor = attn.attention(
        call.query,
        call.key,
        call.value,
        scale=call.scale,
        logits_soft_cap=call.soft_cap,
        sinks=call.sinks,
        mask=as_drawn(call) if call.mask is None else call.mask,
        layout="BHSD",
    )
    return out.transpose(1, 2)


def by_sdpa(call: ModuleCall) -> torch.Tensor:
    """Compute with a bias added to scores (T5), or with dropout of weights, which only torch's SDPA supports."""
    if call.backend is not None or call.soft_cap is not None or call.sinks is not None:
        subject, advice = "position_bias", f'use "{NAME}" without these'
        if call.dropout:
            subject = f"dropout of attention weights ({call.dropout})"
            advice += f", set {dropout_name(call)} to 0 in the model's config, or use eager"
        raise call.refusal(f"{subject} with a cap, sinks or a backend by name", advice)
    call = drawn(call)
    allowed: Any = call.mask
    added = allowed
    if call.bias is not None:
        added = torch.where(allowed, call.bias[..., : allowed.shape[-1]].to(call.query.dtype), -torch.inf)
    out = F.scaled_dot_product_attention(
        call.query, call.key, call.value, attn_mask=added, dropout_p=call.dropout, scale=call.scale, enable_gqa=True
    )
    # kernels of torch differ in a row that sees no key
    return torch.where(allowed.any(-1)[..., None], out, 0).transpose(1, 2)


def selected(call: ModuleCall, indices: torch.Tensor) -> ModuleCall:
    """Return the call of a layer that sees the keys `indices` [B, S, n] only (DeepSeek-V3.2), within its mask."""
    seen = indices.new_zeros(*indices.shape[:2], call.key.shape[2], dtype=torch.bool).scatter(-1, indices.long(), True)
    call = drawn(call)
    assert call.mask is not None
    call.mask = seen[:, None, :, : call.key.shape[2]] & call.mask  # indices may be of a static cache's unused slots too
    return call


@torch.no_grad()
def weights(call: ModuleCall) -> torch.Tensor:
    """Return the attention weights [B, H, S, T] by the formula, in the query's dtype; a row without keys is 0."""
    keys = call.key.shape[2]
    call = drawn(call)
    query, key, _ = rows_first(call)
    rules = DenseParams(causal=False, scale=call.scale, window=(None, None), cap=call.soft_cap)
    probabilities = dense(query, key, rules, OptionalArrays(None, call.sinks, call.mask))
    # over all keys that the caller passed: unused slots of a static cache have weight 0
    return F.pad(probabilities, (0, keys - probabilities.shape[-1])).to(call.query.dtype)


def _as_row(call: ModuleCall, graph: bool) -> torch.Tensor | None:
    """Compute a single row under a materialised mask, which includes causality and the window, by a launch that CUDA graphs may
    capture, in a graph by an operator; return None if the backend of such layers has none."""
    heads, kv_heads, size = (known(x) for x in (call.query.shape[1], call.key.shape[1], call.query.shape[3]))
    mask, keys = call.mask, call.key.shape[2]
    if mask is None or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != 1 or mask.shape[3] < keys:
        return None
    if call.wants_grad or call.wide or call.bias is not None or call.dropout:
        return None
    window = call.seen.window if call.seen.layer.window[0] is not None else None
    facts = call.backend, heads, kv_heads, size, call.query.dtype, call.scale, window, call.soft_cap, call.sinks is not None
    if not _has_row_operator(call.query.device.type, *facts):
        return None
    from attn.torch.kernels.dense_decode import row, run_of

    def keys_and_run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        of_keys = as_bool(call, mask)[:, 0, 0, :keys].expand(len(call.query), -1).detach()  # no view of it
        return of_keys, run_of(of_keys)

    of_keys, run = keys_and_run() if graph else once(mask, (len(call.query), keys), keys_and_run)
    out = row(call.query, call.key, widened(call), call.scale, call.soft_cap or 0.0, call.sinks, of_keys, run)
    return out[..., : call.value.shape[-1]]


@torch.compiler.assume_constant_result
def _has_row_operator(device: str, *facts: Any) -> bool:
    return device != "cpu" and _chosen_has_row_operator(selection_state(), device, facts)


@functools.lru_cache(1024)
def _chosen_has_row_operator(state: Any, device: str, facts: tuple[Any, ...]) -> bool:
    """Ask the backend that is chosen for such layers. state: of the environment and the registries; facts: of `_as_row`."""
    backend, heads, kv_heads, size, dtype, scale, window, cap, has_sinks = facts
    if backend is None and window is None and cap is None and not has_sinks:
        # a single row sees the keys that its mask leaves, whatever is behind it
        of_call: dict[str, Any] = {"causal": False, "mask": False, "grad": False, "key_mask": True, "rows": 1, "keys": 0}
        return bool(impl_for(CallProperties(None, 0.0, device, heads, kv_heads, size, dtype, scale, **of_call)).masks_rows)
    rules = {"sliding_window": window, "logits_soft_cap": cap, "sinks": [0.0] * heads if has_sinks else None}
    try:
        layer = Attention(heads, size, scale, kv_heads, dtype=dtype, backend=backend, **rules)
    except UnsupportedError:
        return False
    return bool(layer.impl.has_row_operator)  # type: ignore[attr-defined]


def as_operator(call: ModuleCall) -> torch.Tensor:
    """Run a call that a graph cannot trace as one operator; its mask is materialised, and recognised when it runs."""
    if call.wants_grad:
        combined = "gradients in a graph together with a window, a cap, sinks or a backend by name"
        raise call.refusal(combined, "no backend supports them: use torch.no_grad(), or train without torch.compile")
    left = call.seen.layer.window[0]
    return _operator(  # type: ignore[no-any-return]
        *(call.query, call.key, call.value, call.mask, call.sinks),
        causal=call.seen.layer.causal,
        scale=call.scale,
        window=None if left is None else left + 1,
        soft_cap=call.soft_cap,
        backend=call.requested.backend,
        source=call.requested.source,
        layer_name=call.layer_name,
    )


@uncaptured("attn::transformers", mutates_args=())
def _operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    backend: str | None,
    source: str,
    layer_name: str,
) -> torch.Tensor:
    call = ModuleCall(in_graph(layer_name), query, key, value, mask, visible(causal, window), scale, soft_cap)
    # one object for equal requests, which launches are kept by
    call.sinks, call.requested = sinks, known_request(selection_state(), backend, source)
    return attend(call).contiguous()


@_operator.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    return query.new_empty(*query.transpose(1, 2).shape[:3], value.shape[3])
