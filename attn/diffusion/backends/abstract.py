"""The interface of dense attention for image and video models: takes [B, S, H, D], returns [B, S, H, Dv].

Attention is dense, mostly without causality, over long sequences, with padding masks and, in multimodal models, a second
stream (text) that is attended together with the first (image): the joint stream, placed before or after it.

Shape letters: B batch, S query rows, M keys, H query heads, K kv heads, D head_size; J rows of the joint stream.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from attn.backends.facts import Implementation, LayerBackend
from attn.capabilities import Device, Request

Array = Any

#: Sources of keys: the same sequence, another one (text, a reference image), or both streams together.
ROLES = ("self", "cross", "joint")
JOINT_STRATEGIES = ("front", "rear")


@dataclass(frozen=True)
class DiffusionRequest(Request):
    """A layer's request to a diffusion backend. `attn_type` is not used; `block_size` is None: there is no cache.

    `error_budget` is the allowed relative RMS error of the output: 0 is exact arithmetic in the dtype, which excludes
    backends that quantise. `causal`: whether the layer is; `key_mask`: calls may mask out keys (`kv_lens`, masks [B, M]);
    `rows`, `keys`: of a call, including joint streams, if known in advance.
    """

    error_budget: float = 0.0
    causal: bool = False
    key_mask: bool = False
    rows: int | None = None
    keys: int | None = None


@dataclass
class DiffusionAttentionMetadata:
    """The inputs of a call other than query, key and value.

    attn_mask: bool, True = attend: [B, M] for valid keys (padding), or broadcastable to [B, H, S, M].
    kv_lens: [B] ints on the host, numbers of valid keys, if padding is at the end; instead of a mask.
    joint_query: [B, J, H, D]; joint_key, joint_value: [B, J, K, D]: a second stream, placed before ("front") or after
        ("rear") the first; all three, or only key and value for a stream without queries. The result has rows in that order.
    joint_attn_mask: bool [B, J], valid keys of the joint stream.
    """

    attn_mask: Array | None = None
    kv_lens: Any = None
    joint_query: Array | None = None
    joint_key: Array | None = None
    joint_value: Array | None = None
    joint_attn_mask: Array | None = None
    joint_strategy: str = "front"

    def has_joint(self, name: str) -> bool:
        """Whether there is a joint stream. Raises ValueError, citing `name`, for a part of one and an unknown strategy."""
        if self.joint_query is self.joint_key is self.joint_value is self.joint_attn_mask is None:
            return False
        if self.joint_key is None or self.joint_value is None:
            raise ValueError(f"{name}: a joint stream needs joint_key and joint_value, with or without joint_query")
        if self.joint_strategy not in JOINT_STRATEGIES:
            known = ", ".join(JOINT_STRATEGIES)
            raise ValueError(f"{name}: joint_strategy={self.joint_strategy!r} is unknown; known: {known}")
        return True


class DiffusionAttentionBackend(LayerBackend):
    """A family of dense attention kernels.

    `name`, `impl_cls` and `capabilities` as for attention backends; MASK declares masks beyond key padding, BACKWARD gradients.
    `error` is the relative RMS error that its
    arithmetic adds to its dtype's own (0: none), measured, described in `error_note`; a backend with one is chosen only within
    a request's `error_budget`.

    Limits of the calls that the kernels take, judged by `why_not_call` alone: `min_keys`, the fewest keys; `key_multiple`,
    which their number must be a multiple of where the layer is not causal; `key_masks`, whether keys may be left out;
    `causal_unequal`, whether a causal layer may have another number of rows than of keys.
    """

    impl_cls: ClassVar[type["DiffusionAttentionImpl"]]
    metadata_cls: ClassVar[type[DiffusionAttentionMetadata]] = DiffusionAttentionMetadata
    lse_flag = "can_return_lse"
    error: ClassVar[float] = 0.0
    min_keys: ClassVar[int] = 1
    key_multiple: ClassVar[int] = 1
    key_masks: ClassVar[bool] = True
    causal_unequal: ClassVar[bool] = True
    error_note: ClassVar[str] = ""

    @classmethod
    def get_supported_head_sizes(cls) -> list[Any]:
        """Return sizes, or rules for them; empty if none are declared."""
        return [] if cls.capabilities is None else list(cls.capabilities.head_sizes)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        """Return every reason why this backend does not serve `request` (on `device`); empty if it does."""
        why = [] if cls.capabilities is None else cls.capabilities.reasons(request, device, cls.served_features())
        # A plain `Request`, without this family's fields, asks for exact arithmetic.
        budget = getattr(request, "error_budget", 0.0)
        if cls.error > budget:
            why.append(f"relative error {cls.error:g} ({cls.error_note}): error_budget={budget:g} allows less")
        # Known when the layer is chosen where the caller says it (`rows`, `keys`); each call is judged again by its own
        # shapes.
        if isinstance(request, DiffusionRequest):
            why += cls.why_not_call(request.rows, request.keys, request.causal, request.key_mask)
        return why

    @classmethod
    def limits(cls) -> list[str]:
        """Return short descriptions of the error and of unsupported calls, for tables."""
        words = {
            f"error {cls.error:g}": cls.error,
            f"{cls.min_keys} keys and more": cls.min_keys > 1,
            f"keys in multiples of {cls.key_multiple} without causality": cls.key_multiple > 1,
            "no masks of keys": not cls.key_masks,
            "causal with as many rows as keys": not cls.causal_unequal,
        }
        return [text for text, applies in words.items() if applies]

    @classmethod
    def why_not_call(cls, rows: int | None, keys: int | None, causal: bool, key_mask: bool) -> list[str]:
        """Return every reason why a call of `rows` rows and `keys` keys (None: unknown) is not served."""
        why = []
        # A call without keys is served without the kernel: its rows are 0.
        if keys is not None and 0 < keys < cls.min_keys:
            why.append(f"keys={keys} (supports {cls.min_keys} and more)")
        if keys is not None and keys % cls.key_multiple and not causal:
            why.append(f"keys={keys} without causality (supports multiples of {cls.key_multiple})")
        if key_mask and not cls.key_masks:
            why.append("a mask of keys is not supported (avoid padding, or use another backend)")
        # Causality is aligned to the last key (docs/semantics.md §3), which padding at the end is not.
        if causal and key_mask:
            why.append("causal layer over padded keys: positions of padded rows are undefined")
        if causal and not cls.causal_unequal and None not in (rows, keys) and rows != keys:
            why.append(f"causal with rows={rows} and keys={keys} (supports equally many)")
        return why


class DiffusionAttentionImpl(Implementation, ABC):
    """Dense attention of one layer.

    num_heads, head_size; softmax_scale: 1 / sqrt(head_size) when None; causal: bottom-right; num_kv_heads: num_heads when
    None.
    """

    backend: ClassVar[type[DiffusionAttentionBackend]]
    framework: ClassVar[str] = "torch"

    #: Whether `forward_lse` works: partial results of this backend can be merged (ring attention).
    can_return_lse: ClassVar[bool] = False

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
    ) -> None:
        raise NotImplementedError

    @abstractmethod
    def forward(self, query: Array, key: Array, value: Array, attn_metadata: DiffusionAttentionMetadata | None = None) -> Array:
        """Compute attention. query: [B, S, H, D]; key, value: [B, M, K, D]. Returns [B, S, H, D] (with a joint query,
        [B, J + S, H, D] or [B, S + J, H, D]). A row that sees no key is 0."""
        raise NotImplementedError

    def forward_lse(
        self, query: Array, key: Array, value: Array, attn_metadata: DiffusionAttentionMetadata | None = None
    ) -> tuple[Array, Array]:
        """Return `forward`'s result and the natural log-sum-exp [B, H, S] float32 (-inf for a row that sees no key)."""
        raise NotImplementedError
