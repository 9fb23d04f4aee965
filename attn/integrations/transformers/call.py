"""One layer's call in this library's order of dimensions, and its errors for unsupported calls."""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Feature
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.errors import UnsupportedError

NAME = "attn"


#: Unsupported arguments of a call that change the meaning of attention -> the feature of backends, if any.
UNKNOWN = {
    "alibi": Feature.ALIBI, "alibi_slopes": Feature.ALIBI, "head_mask": None, "block_mask": None,
    "indexer": Feature.SPARSE_MLA, "chunk_size": None,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A layer's call: query [B, S, H, D]; key [B, T, K, D], value [B, T, K, Dv], in the library's order of dimensions."""

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

    def refusal(self, what: str, advice: str) -> UnsupportedError:
        asked = f' (attn_implementation="{NAME}:{self.backend}")' if self.backend else ""
        return UnsupportedError(f"{self.layer_name}{asked}: {what} not supported; {advice}")

    def by_name(self, what: str, feature: Feature) -> UnsupportedError:
        """Return the error for a backend requested by name when no paged one has `feature`; it lists the dense ones."""
        found = having(DiffusionAttentionBackendEnum, {feature})
        return self.refusal(what, f'attn_implementation="{NAME}" uses {found}, or the formula')


@dataclass(frozen=True, eq=False)
class InGraph:
    """Substitute for the module in a call made by an operator of a graph; one per layer name."""

    layer_name: str


in_graph = functools.lru_cache(1024)(InGraph)


def replaced(call: Call, **changes: Any) -> Call:
    return Call(**{**vars(call), **changes})


def widened(call: Call) -> torch.Tensor:
    """Pad values with zeros to the width of keys."""
    return F.pad(call.value, (0, call.query.shape[-1] - call.value.shape[-1]))


def having(registry: Any, features: Collection[str]) -> str:
    """Return the torch backends of a registry that have all of `features` on any device."""
    known = [member for member in registry if str(member.value or "").startswith("attn.torch.")]
    have = [
        member.name
        for member in known
        if (record := member.get_class().capabilities) is not None and record.features.issuperset(features)
    ]
    return ", ".join(have) or "no backend"


def refuse_unknown(call: Call, attention_mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        where = _dropout_name(getattr(call.module, "config", None), dropout)
        raise call.refusal(
            f"dropout of attention weights ({dropout})",
            f"no backend supports it: set {where} to 0 in the model's config, or use eager",
        )
    if kwargs.get("output_attentions"):
        raise call.refusal("output_attentions", "attention weights are never materialised: use eager")
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        raise call.refusal(f"a mask of type {type(attention_mask).__name__}", "must be a tensor or None")
    for name, feature in UNKNOWN.items():
        if kwargs.get(name) is not None:
            able = "no backends" if feature is None else f"layers of {having(AttentionBackendEnum, {feature})}"
            raise call.refusal(name, f"{able} support it: use eager")


def _dropout_name(config: Any, dropout: float) -> str:
    """Return the config's name for the dropout of attention weights: attention_dropout, attention_probs_dropout_prob, ..."""
    options = {} if config is None else config.to_dict()
    names = [name for name, value in options.items() if "drop" in name and value == dropout]
    names.sort(key=lambda name: ("att" not in name, name))
    return names[0] if names else "the dropout of attention weights"
