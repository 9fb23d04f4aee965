"""The subject of a test, and the base case from which its other cases are derived.

A subject is a backend class reduced to the facts that cases are derived from, so that a kernel without a framework can be a
subject too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attn.capabilities import ENCODER_TYPES, AttentionType, Capabilities, Device, Feature, MultipleOf, Request, supports_size
from attn.errors import UnsupportedError
from attn.testing.case import Case

#: The lengths of most cases, so that a compiled backend runs them with one program: decodes, a chunk, two prefills.
Q_LENS, M_LENS = (1, 6, 18, 1, 9), (33, 9, 18, 20, 40)
#: Block-sparse patterns (`Case.sparse`). The first is the same for all heads, so that heads may be reordered.
SPARSE = ((4, 2, 3, 1), (5, 1, 4, 0), (16, 2, 3, 0), (8, 0, 2, 0))


@dataclass(frozen=True)
class Subject:
    """The facts that cases are derived from. `refuses` returns a backend's reasons to reject a request."""

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
        """Whether this subject compiles for every new shape."""
        return self.capabilities.framework == "jax"

    @property
    def is_latent(self) -> bool:
        """Whether it serves multi-head latent attention, dense or sparse."""
        return self.has(Feature.MLA) or self.has(Feature.SPARSE_MLA)

    @property
    def poisons(self) -> tuple[str, ...]:
        """Poisons of unused memory: any value, or finite numbers for a backend that multiplies them by 0."""
        return ("mixed", "huge") if self.has(Feature.NAN_SAFE) else ("huge",)

    def has(self, feature: Feature) -> bool:
        return feature.value in self.capabilities.features

    def serves(self, case: Case) -> bool:
        """Whether everything that the case requests is declared, and the backend supports the combination."""
        request = case.request()
        # Whether the LSE is returned is a fact of the implementation (`lse`), which records of jax do not list.
        plain = Request(**{**vars(request), "features": request.features - {Feature.LSE.value}})
        # An encoder has no pages: its case's block size is never used.
        right_size = case.is_encoder or supports_size(case.block_size, self.block_sizes)
        return not (self.capabilities.reasons(plain) or not right_size or (case.lse and not self.lse) or self.refuses(request))

    @staticmethod
    def sizes(preferred: Iterable[int], allowed: Sequence[int | MultipleOf]) -> list[int]:
        """Return the sizes of `preferred` that are allowed or, if none is, the first allowed size."""
        supported = [size for size in preferred if supports_size(size, allowed)]
        return supported or [rule.minimum if isinstance(rule, MultipleOf) else rule for rule in allowed][:1]


def subject_of(backend: Any, capabilities: Capabilities | None = None, device: Device | None = None) -> Subject:
    """Return the subject of a backend class; `capabilities` replaces the class's own.

    Raises `UnsupportedError` if the class declares no capabilities and none are passed.
    """
    record = getattr(backend, "capabilities", None)
    declared = capabilities or record
    if declared is None:
        raise UnsupportedError(f"{backend.get_name()} declares no capabilities: pass capabilities=Capabilities(...)")
    return Subject(
        backend.get_name(),
        declared,
        tuple(backend.get_supported_kernel_block_size()),
        bool(backend.get_impl_cls().can_return_lse_for_decode),
        device,
        # `why_not` reads the class's record: a class without one is judged by the passed capabilities alone.
        (lambda request: backend.why_not(request, device)) if record is not None else (lambda request: ()),
        getattr(backend, "latent_dims", None),
        getattr(backend, "max_cache_span", None),
    )


def base_case(subject: Subject, name: str, q: Sequence[int] = Q_LENS, m: Sequence[int] = M_LENS, **changes: Any) -> Case:
    """Return a case of the subject's preferred sizes and dtype; fixtures and properties differ from it in a field or two."""
    c = subject.capabilities
    attn_type = AttentionType.DECODER if AttentionType.DECODER in c.attn_types else c.attn_types[0]
    case = Case(
        name,
        tuple(q),
        tuple(q if attn_type in ENCODER_TYPES else m),
        head_size=subject.sizes((64, 128), c.head_sizes)[0],
        block_size=subject.sizes((16, 32, 64, 128, 256), subject.block_sizes)[0],
        dtype=main_dtypes(subject)[0],
        kv_cache_dtype="auto" if "auto" in c.kv_cache_dtypes else c.kv_cache_dtypes[0],
        attn_type=attn_type,
        causal=attn_type == AttentionType.DECODER,
        num_blocks=64,
        lse=subject.lse,
        poison=subject.poisons[0],
        sparse=SPARSE[0] if subject.has(Feature.BLOCK_SPARSE) else (),
    )
    if subject.is_latent:
        # DeepSeek's sizes, where a backend supports any.
        rank, rope = (subject.latent_dims or ((512, 64),))[0]
        case = case.replace(mla=(rank, 128, rope, 128), head_size=rank + rope, num_heads=4, num_kv_heads=1)
        # Sparse MLA alone: fewer keys than most contexts of `M_LENS` have, so that the selection matters.
        case = case.replace(topk=0 if subject.has(Feature.MLA) else 24)
    return case.replace(**changes)


def main_dtypes(subject: Subject) -> list[str]:
    return [d for d in ("float32", "bfloat16", "float16") if d in subject.capabilities.dtypes] or list(
        subject.capabilities.dtypes
    )


def per_head_scales(num_kv_heads: int) -> dict[str, tuple[float, ...]]:
    """Return scales that are distinct for all heads, and for keys and values."""
    return {
        "k_scale": tuple(round(0.03 * (1 + 0.5 * k), 4) for k in range(num_kv_heads)),
        "v_scale": tuple(round(0.021 * (1 + 0.4 * k), 4) for k in range(num_kv_heads)),
    }
