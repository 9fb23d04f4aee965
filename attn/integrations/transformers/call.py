"""One layer's call in this library's order of dimensions, and its errors for unsupported calls."""

import functools
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F

from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import AttentionType, Feature, layer_kind
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.errors import UnsupportedError
from attn.selector import asked_for_kind

NAME = "attn"


#: Unsupported arguments of a call that change the meaning of attention -> the feature of backends, if any.
UNKNOWN = {
    "alibi": Feature.ALIBI, "alibi_slopes": Feature.ALIBI, "head_mask": None, "block_mask": None,
    "indexer": Feature.SPARSE_MLA, "chunk_size": None, "block_indices": None, "sinks": None,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A layer's call: query [B, S, H, D]; key [B, T, K, D], value [B, T, K, Dv], in the library's order of dimensions.

    backend: requested by name, by `asked_by`; None for the fastest. chunk, spans, span_window: as in `Padding`.
    """

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    causal: bool
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None
    backend: str | None
    asked_by: str = ""
    chunk: int | None = None
    spans: Any = None
    span_window: bool | None = None

    @property
    def plain(self) -> bool:
        """Whether the call is a plain softmax over the visible keys."""
        return self.soft_cap is None and self.sinks is None and self.window is None

    @property
    def wants_grad(self) -> bool:
        tensors = (self.query, self.key, self.value, self.sinks)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    @property
    def layer_name(self) -> str:
        if isinstance(self.module, InGraph):
            return self.module.layer_name
        index = getattr(self.module, "layer_idx", None)
        return f"{type(self.module).__name__}{'' if index is None else f' of layer {index}'}"

    @property
    def place(self) -> str:
        """The layer's name, and what requested its backend by name."""
        return f"{self.layer_name} ({self.asked_by})" if self.backend else self.layer_name

    def refusal(self, what: str, advice: str) -> UnsupportedError:
        return UnsupportedError(f"{self.place}: {what} not supported; {advice}")

    def non_causal_window(self) -> UnsupportedError:
        return self.refusal("a non-causal window without a mask", "let transformers make the mask")

    def by_name(self, what: str, feature: Feature) -> UnsupportedError:
        """Return the error for a backend requested by name when no paged one has `feature`; it lists the dense ones."""
        found = having(DiffusionAttentionBackendEnum, {feature})
        return self.refusal(what, f'attn_implementation="{NAME}" uses {found}, or the formula')


@dataclass(frozen=True, eq=False)
class InGraph:
    """Substitute for the module in a call made by an operator of a graph; one per layer name."""

    layer_name: str


in_graph = functools.lru_cache(1024)(InGraph)


def requested(backend: str | None, causal: bool, windowed: bool) -> tuple[str | None, str]:
    """Return the backend requested by name, and by what: `backend`, else that of the layer's kind. A graph keeps it."""
    if backend is not None:
        return backend, f'attn_implementation="{NAME}:{backend}"'
    found = _of_kind(causal, windowed)
    return (found.partition("=")[2], found) if found else (None, "")


@torch.compiler.assume_constant_result
def _of_kind(causal: bool, windowed: bool) -> str:
    """Return `source=BACKEND` of the backend requested for a kind of layer, or "". Encoders include cross attention."""
    attn_type = AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY
    member, source = asked_for_kind(layer_kind(attn_type, {Feature.SLIDING_WINDOW} if windowed else ()))
    return "" if member is None else f"{source}={member.name}"


_FIELDS = tuple(field.name for field in fields(Call))


def replaced(call: Call, **changes: Any) -> Call:
    return Call(**{name: getattr(call, name) for name in _FIELDS} | changes)  # torch before 2.12 does not trace `vars`


def widened(call: Call) -> torch.Tensor:
    """Pad values with zeros to the width of keys."""
    missing = call.query.shape[-1] - call.value.shape[-1]
    return call.value if missing == 0 else F.pad(call.value, (0, missing))  # `F.pad` copies even if nothing is missing


def having(registry: Any, features: Collection[str]) -> str:
    """Return the torch backends of a registry that have all of `features` on any device."""
    known = [member for member in registry if str(member.value or "").startswith("attn.torch.")]
    have = [
        member.name
        for member in known
        if (record := member.get_class().capabilities) is not None and record.features.issuperset(features)
    ]
    return ", ".join(have) or "no backend"


def refuse_unknown(call: Call, attention_mask: Any, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        raise call.refusal(f"a mask of type {type(attention_mask).__name__}", "must be a tensor or None")
    for name, feature in UNKNOWN.items():
        if kwargs.get(name) is not None:
            able = "no backends" if feature is None else f"layers of {having(AttentionBackendEnum, {feature})}"
            raise call.refusal(name, f"{able} support it: use eager")


def require(call: Call, allowed: torch.Tensor, what: str, advice: str) -> None:
    """Raise the refusal of `what` unless `allowed` is true everywhere; in a graph, when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(allowed.all(), str(call.refusal(what, advice)))
    elif not bool(allowed.all()):
        raise call.refusal(what, advice)


def dropout_name(call: Call, dropout: float) -> str:
    """Return the config's name for the dropout of attention weights: attention_dropout, attention_probs_dropout_prob, ..."""
    config = getattr(call.module, "config", None)
    options = {} if config is None else config.to_dict()
    names = [name for name, value in options.items() if "drop" in name and value == dropout]
    names.sort(key=lambda name: ("att" not in name, name))
    return names[0] if names else "the dropout of attention weights"
