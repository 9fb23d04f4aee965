"""Who is examined, and the case from which all others of a subject start.

A subject is a backend class reduced to the facts that cases are derived from. Nothing else of it is known here, so that a
kernel without a framework can be one too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attn.capabilities import ENCODER_TYPES, AttentionType, Capabilities, Device, Feature, MultipleOf, Request, supports_size
from attn.errors import UnsupportedError
from attn.testing.case import Case

#: Lengths that most cases have, so that a compiled backend runs them with one program: decodes, a chunk, two prefills.
Q_LENS, M_LENS = (1, 6, 18, 1, 9), (33, 9, 18, 20, 40)
#: Block-sparse patterns (`Case.sparse`), the first the same for all heads, so that heads may be put in another order.
SPARSE = ((4, 2, 3, 1), (5, 1, 4, 0), (16, 2, 3, 0), (8, 0, 2, 0))


@dataclass(frozen=True)
class Subject:
    """Who is examined: the facts that cases are derived from. `refuses` gives a backend's reasons against a request."""

    name: str
    capabilities: Capabilities
    block_sizes: tuple[int | MultipleOf, ...] = (MultipleOf(1),)
    lse: bool = True
    device: Device | None = None
    refuses: Callable[[Request], Sequence[str]] = lambda request: ()
    latent_dims: tuple[tuple[int, int], ...] | None = None
    max_cache_span: int | None = None

    @property
    def compiles(self) -> bool:
        """Whether every new shape costs this subject a compilation."""
        return self.capabilities.framework == "jax"

    @property
    def is_latent(self) -> bool:
        """Whether it serves multi-head latent attention, dense or sparse."""
        return self.has(Feature.MLA) or self.has(Feature.SPARSE_MLA)

    @property
    def poisons(self) -> tuple[str, ...]:
        """What may lie in memory that is not in use: anything, or finite numbers for a backend that multiplies them by 0."""
        return ("mixed", "huge") if self.has(Feature.NAN_SAFE) else ("huge",)

    def has(self, feature: Feature) -> bool:
        return feature.value in self.capabilities.features

    def serves(self, case: Case) -> bool:
        """Whether everything the case asks for is declared, and not refused in this combination."""
        request = case.request()
        asked = Request(**{**vars(request), "features": request.features - {Feature.LSE.value}})
        right_size = case.is_encoder or supports_size(case.block_size, self.block_sizes)
        return not (self.capabilities.reasons(asked) or not right_size or (case.lse and not self.lse) or self.refuses(request))

    def sizes(self, wanted: Iterable[int], allowed: Sequence[int | MultipleOf]) -> list[int]:
        """Those of `wanted` that are allowed, and the smallest allowed ones when that leaves none."""
        found = [size for size in wanted if supports_size(size, allowed)]
        return found or [rule.minimum if isinstance(rule, MultipleOf) else rule for rule in allowed][:1]


def subject_of(backend: Any, capabilities: Capabilities | None = None, device: Device | None = None) -> Subject:
    """The subject that a backend class is. A class without capabilities needs some to be told here.

    Raises `UnsupportedError` when there are none.
    """
    own = getattr(backend, "capabilities", None)
    declared = capabilities or own
    if declared is None:
        raise UnsupportedError(f"{backend.get_name()} declares no capabilities: pass capabilities=Capabilities(...)")
    return Subject(
        backend.get_name(),
        declared,
        tuple(backend.get_supported_kernel_block_size()),
        bool(backend.get_impl_cls().can_return_lse_for_decode),
        device,
        (lambda request: backend.why_not(request, device)) if own is not None else (lambda request: ()),
        getattr(backend, "latent_dims", None),
        getattr(backend, "max_cache_span", None),
    )


def base_case(subject: Subject, name: str, q: Sequence[int] = Q_LENS, m: Sequence[int] = M_LENS, **changes: Any) -> Case:
    """A case of the subject's first choices, from which fixtures and properties differ in a field or two."""
    c = subject.capabilities
    kind = AttentionType.DECODER if AttentionType.DECODER in c.attn_types else c.attn_types[0]
    case = Case(
        name,
        tuple(q),
        tuple(q if kind in ENCODER_TYPES else m),
        head_size=subject.sizes((64, 128), c.head_sizes)[0],
        block_size=subject.sizes((16, 32, 64, 128, 256), subject.block_sizes)[0],
        dtype=main_dtypes(subject)[0],
        kv_cache_dtype="auto" if "auto" in c.kv_cache_dtypes else c.kv_cache_dtypes[0],
        attn_type=kind,
        causal=kind == AttentionType.DECODER,
        num_blocks=64,
        lse=subject.lse,
        poison=subject.poisons[0],
        sparse=SPARSE[0] if subject.has(Feature.BLOCK_SPARSE) else (),
    )
    if subject.is_latent:
        rank, rope = (subject.latent_dims or ((512, 64),))[0]
        case = case.replace(mla=(rank, 128, rope, 128), head_size=rank + rope, num_heads=4, num_kv_heads=1)
        case = case.replace(topk=0 if subject.has(Feature.MLA) else 24)
    return case.replace(**changes)


def main_dtypes(subject: Subject) -> list[str]:
    return [d for d in ("float32", "bfloat16", "float16") if d in subject.capabilities.dtypes] or list(
        subject.capabilities.dtypes
    )


def per_head_scales(num_kv_heads: int) -> dict[str, tuple[float, ...]]:
    """Scales that no two heads, nor keys and values, have in common."""
    return {
        "k_scale": tuple(round(0.03 * (1 + 0.5 * k), 4) for k in range(num_kv_heads)),
        "v_scale": tuple(round(0.021 * (1 + 0.4 * k), 4) for k in range(num_kv_heads)),
    }
