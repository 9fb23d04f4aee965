"""One layer's call as transformers makes it, and its errors for unsupported calls."""

import functools
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import AttentionType, Feature, layer_kind
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.errors import UnsupportedError
from attn.selector import requested_for_kind
from attn.visibility import LayerMask, Visibility

if TYPE_CHECKING:
    from attn.integrations.transformers.masks import Described

NAME = "attn"

#: Unsupported arguments of a call that change the meaning of attention -> the feature of backends, if any.
UNKNOWN = {
    **dict.fromkeys(("alibi", "alibi_slopes"), Feature.ALIBI),
    "indexer": Feature.SPARSE_MLA,
    **dict.fromkeys(("head_mask", "block_mask", "chunk_size", "block_indices", "sinks")),
}
#: What rows see without a window: every key, or none after their own.
EVERYTHING, CAUSAL = Visibility(LayerMask(causal=False)), Visibility(LayerMask())


def visible(causal: bool, window: int | None) -> Visibility:
    """Return what rows of a layer see; window: the number of keys up to a row's own that it sees."""
    if window is None:
        return CAUSAL if causal else EVERYTHING
    # transformers counts the row's own key: docs/semantics.md §4
    return Visibility(LayerMask(causal, (window - 1, 0 if causal else None)))


@dataclass(frozen=True, eq=False)
class Requested:
    """The backend requested by name, and by what; None for the fastest.

    A new object wherever selection may choose another, so a key of what was chosen.
    """

    backend: str | None = None
    source: str = ""


@functools.lru_cache(256)
def known_request(state: Any, backend: str | None, source: str) -> Requested:
    """Return the one request of these. state: of `selection_state`."""
    return Requested(backend, source)


@functools.lru_cache(256)
def requested(state: Any, backend: str | None, causal: bool, window: int | None) -> tuple[Visibility, Requested]:
    """Return `request` of these, made once. state: of `selection_state`."""
    return request(backend, causal, window)


def request(backend: str | None, causal: bool, window: int | None) -> tuple[Visibility, Requested]:
    """Return what rows of a layer see, and what is requested for it: `backend`, else that of the layer's kind."""
    seen = visible(causal, window)
    if backend is not None:
        return seen, Requested(backend, f'attn_implementation="{NAME}:{backend}"')
    source = _request_source(causal, window is not None)
    return seen, Requested(source.partition("=")[2], source) if source else Requested()


@torch.compiler.assume_constant_result
def _request_source(causal: bool, windowed: bool) -> str:
    """Return `source=BACKEND` of the backend requested for a kind of layer, or "". Encoders include cross attention."""
    attn_type = AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY
    member, source = requested_for_kind(layer_kind(attn_type, {Feature.SLIDING_WINDOW} if windowed else ()))
    return "" if member is None else f"{source}={member.name}"


@dataclass(eq=False)
class ModuleCall:
    """A layer's call: query [B, H, S, D]; key [B, K, T, D], value [B, K, T, Dv].

    mask: as transformers passes it. seen: what rows see beside the mask. `masks.read` interprets the mask: it adds what the
    mask says to `seen`, whose spans are [B, S, 2] on the host, and to `valid`, the keys that are not padding, None if all are.
    Only a mask that nothing describes is left in `mask`: bool [B or 1, 1 or H, S, T], which includes all of `seen`.
    bias: added to scores, broadcastable to [B, H, S, T].
    """

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    seen: Visibility
    scale: float
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dropout: float = 0.0
    requested: Requested = field(default_factory=Requested)
    valid: "Described | None" = None

    @property
    def backend(self) -> str | None:
        return self.requested.backend

    @property
    def plain(self) -> bool:
        """Whether the call is a softmax over the valid keys, all of them or those up to the row's own."""
        layer, batch = self.seen
        whole = layer.window[0] is None and layer.chunk_size is None and batch.spans is None
        return whole and self.soft_cap is None and self.sinks is None

    @property
    def square(self) -> bool:
        """Whether there are as many rows as keys."""
        return self.query.shape[2] == self.key.shape[2]

    @property
    def wide(self) -> bool:
        """Whether values are wider than keys."""
        return self.value.shape[3] > self.query.shape[3]

    @property
    def wants_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        # parameters, which require gradients in training even where the inputs do not
        sinks = self.sinks is not None and self.sinks.requires_grad
        return sinks or self.query.requires_grad or self.key.requires_grad or self.value.requires_grad

    @property
    def layer_name(self) -> str:
        if isinstance(self.module, InGraph):
            return self.module.layer_name
        index = getattr(self.module, "layer_idx", None)
        return f"{type(self.module).__name__}{'' if index is None else f' of layer {index}'}"

    @property
    def label(self) -> str:
        """The layer's name, and what requested its backend by name."""
        return f"{self.layer_name} ({self.requested.source})" if self.backend else self.layer_name

    def refusal(self, subject: str, advice: str) -> UnsupportedError:
        return UnsupportedError(f"{self.label}: {subject} not supported; {advice}")

    def non_causal_window(self) -> UnsupportedError:
        return self.refusal("a non-causal window without a mask", "let transformers make the mask")

    def by_name(self, subject: str, feature: Feature) -> UnsupportedError:
        """Return the error for a backend requested by name when no paged one has `feature`; it lists the dense ones."""
        backends = having(DiffusionAttentionBackendEnum, {feature})
        return self.refusal(subject, f'attn_implementation="{NAME}" uses {backends}, or the formula')


@dataclass(frozen=True, eq=False)
class InGraph:
    """Substitute for the module in a call made by an operator of a graph; one per layer name."""

    layer_name: str


in_graph = functools.lru_cache(1024)(InGraph)


_FIELDS = tuple(field.name for field in fields(ModuleCall))


def replaced(call: ModuleCall, **changes: Any) -> ModuleCall:
    return ModuleCall(**{name: getattr(call, name) for name in _FIELDS} | changes)  # torch before 2.12 does not trace `vars`


def widened(call: ModuleCall) -> torch.Tensor:
    """Pad values with zeros to the width of keys."""
    missing = call.query.shape[-1] - call.value.shape[-1]
    return call.value if missing == 0 else F.pad(call.value, (0, missing))  # `F.pad` copies even if nothing is missing


def rows_first(call: ModuleCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View query [B, S, H, D], key and value [B, T, K, D] in the order of this library, the values widened."""
    return call.query.transpose(1, 2), call.key.transpose(1, 2), widened(call).transpose(1, 2)


def having(registry: Any, features: Collection[str]) -> str:
    """Return the torch backends of a registry that have all of `features` on any device."""
    known = [member for member in registry if str(member.value or "").startswith("attn.torch.")]
    records = [(member.name, member.get_class().capabilities) for member in known]
    names = [name for name, record in records if record is not None and record.features.issuperset(features)]
    return ", ".join(names) or "no backend"


def refuse_unknown(call: ModuleCall, kwargs: dict[str, Any]) -> None:
    for name, feature in UNKNOWN.items():
        if kwargs.get(name) is not None:
            backends = "no backends" if feature is None else f"layers of {having(AttentionBackendEnum, {feature})}"
            raise call.refusal(name, f"{backends} support it: use eager")


def require(call: ModuleCall, allowed: torch.Tensor, subject: str, advice: str) -> None:
    """Raise the refusal of `subject` unless `allowed` is true everywhere; in a graph, when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(allowed.all(), str(call.refusal(subject, advice)))
    elif not bool(allowed.all()):
        raise call.refusal(subject, advice)


def dropout_name(call: ModuleCall) -> str:
    """Return the config's name for the dropout of attention weights: attention_dropout, attention_probs_dropout_prob, ..."""
    config = getattr(call.module, "config", None)
    options = {} if config is None else config.to_dict()
    names = [name for name, value in options.items() if "drop" in name and value == call.dropout]
    # several may have this value: one that names attention first
    names.sort(key=lambda name: ("att" not in name, name))
    return names[0] if names else "the dropout of attention weights"
