"""The interface of an MLA prefill backend: attention over expanded heads, returning partial states to merge.

A long query is cheaper with the latent expanded to ordinary heads, Dn + Dr wide for queries and keys and Dv for values
(docs/semantics.md §9). The new tokens attend one another causally; the earlier tokens, the context, are gathered from the
cache in chunks of bounded size, attended without a mask, and merged by log-sum-exp. The MLA template gathers, expands and
merges; a prefill backend computes the two attentions. A chunk comes with the metadata and the rows of the requests that it
holds keys of, which need not be all of the batch.

Shape letters: T tokens, R requests, H heads, m keys of a chunk; D = Dn + Dr; Dv v_head_dim.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from attn.backends.facts import Backend
from attn.capabilities import Device, MultipleOf, Request, supports_size

if TYPE_CHECKING:
    from attn.backends.metadata import IntArray

Array = Any


@dataclass(frozen=True)
class MLAPrefillRequest(Request):
    """A layer's request to a prefill backend: `head_size` is Dn + Dr, `v_head_dim` the size of a value head."""

    v_head_dim: int = 128


@dataclass(frozen=True)
class MLAContextChunk:
    """A chunk of every request's context, the requests' keys concatenated.

    key_start_loc: [R + 1] int32 on the device, cumulative keys (equal neighbours: no keys of that request);
    key_start_loc_cpu: its NumPy mirror; num_keys: m; max_keys: the longest request's.
    """

    key_start_loc: Array
    key_start_loc_cpu: "IntArray"
    num_keys: int
    max_keys: int


@dataclass
class MLAPrefillMetadata:
    """The prefill requests of a batch, packed.

    query_start_loc: [R + 1] int32 on the device, cumulative new tokens; query_start_loc_cpu: its NumPy mirror.
    chunks: the context, empty if no request has any. plans: what a backend stores for the following layers, under its own
    key (a vendor's plan depends on the batch, not on the layer).
    """

    query_start_loc: Array
    query_start_loc_cpu: "IntArray"
    num_reqs: int
    max_query_len: int
    chunks: tuple[MLAContextChunk, ...] = ()
    plans: dict[Any, Any] = field(default_factory=dict)


class PrefillCall(NamedTuple):
    """The arguments of `_attend`: each request's new tokens attend one another causally, or the request's keys in one chunk.

    q: [T, H, D]; k: [m, H, D]; v: [m, H, Dv], m = T for the new tokens; dense in the last dimension, strided elsewhere (k's
    and v's heads may lie in one array: a backend that needs them contiguous makes them so).
    chunk_idx: which of `meta.chunks`, attended without a mask, or None for the new tokens.
    return_lse: whether the log-sum-exp is read.
    """

    q: Array
    k: Array
    v: Array
    meta: MLAPrefillMetadata
    chunk_idx: int | None = None
    return_lse: bool = True

    @property
    def causal(self) -> bool:
        # Every cached token is before every new one, so the context needs no mask; among themselves, new tokens are
        # causal. (Both parts together are the causal attention over all keys, merged by log-sum-exp.)
        return self.chunk_idx is None

    @property
    def key_start_loc(self) -> Array:
        """[R + 1] int32 on the device: where each request's keys begin in k."""
        return self.meta.query_start_loc if self.chunk_idx is None else self.meta.chunks[self.chunk_idx].key_start_loc

    @property
    def key_start_loc_cpu(self) -> "IntArray":
        """Its NumPy mirror."""
        return self.meta.query_start_loc_cpu if self.chunk_idx is None else self.meta.chunks[self.chunk_idx].key_start_loc_cpu

    @property
    def max_keys(self) -> int:
        """Keys of the longest request."""
        return self.meta.max_query_len if self.chunk_idx is None else self.meta.chunks[self.chunk_idx].max_keys


class MLAPrefillBackend(Backend):
    """One layer's prefill attention. The constructor takes what is constant over calls; limits are data. `scale` is above 0:
    the MLA template negates the queries of a layer whose scale is negative.

    `name` and `capabilities` as for attention backends (`head_sizes` are Dn + Dr); `v_head_dims`: the supported sizes of a
    value head. A subclass implements `_attend`.
    """

    v_head_dims: ClassVar[tuple[int | MultipleOf, ...]] = (MultipleOf(1),)

    def __init__(self, num_heads: int, qk_head_dim: int, v_head_dim: int, scale: float) -> None:
        self.num_heads, self.qk_head_dim, self.v_head_dim, self.scale = num_heads, qk_head_dim, v_head_dim, scale

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        """Return every reason why this backend does not serve `request` (on `device`); empty if it does."""
        why = [] if cls.capabilities is None else cls.capabilities.reasons(request, device)
        if isinstance(request, MLAPrefillRequest) and not supports_size(request.v_head_dim, cls.v_head_dims):
            why.append(f"v_head_dim={request.v_head_dim} (supports {', '.join(map(str, cls.v_head_dims))})")
        return why

    def _attend(self, call: PrefillCall) -> tuple[Array, Array]:
        """(out [T, H, Dv] in q's dtype, lse [H, T] float32, or float64 for float64 queries, natural). The lse may be None
        unless `call.return_lse`; of a request without keys it is -inf, and its out is never read."""
        raise NotImplementedError

    def run_prefill_new_tokens(self, q: Array, k: Array, v: Array, meta: MLAPrefillMetadata, return_lse: bool) -> Any:
        """Compute causal attention of each request's new tokens over themselves.

        q, k: [T, H, D]; v: [T, H, Dv], as in `PrefillCall`. Returns out [T, H, Dv] in q's dtype, or with `return_lse` (out,
        lse [H, T] float32, or float64 for float64 queries, natural log).
        """
        # Without context there is nothing to merge with: kernels then need not store the log-sum-exp.
        out, lse = self._attend(PrefillCall(q, k, v, meta, None, return_lse))
        return (out, lse) if return_lse else out

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: Array, k: Array, v: Array, meta: MLAPrefillMetadata
    ) -> tuple[Array, Array]:
        """Compute unmasked attention of each request's queries over its keys of `meta.chunks[chunk_idx]`.

        q: [T, H, D]; k: [m, H, D]; v: [m, H, Dv]. Returns (out [T, H, Dv], lse [H, T] float32, natural log); a request
        without keys in the chunk has lse -inf, and its out is not read.
        """
        return self._attend(PrefillCall(q, k, v, meta, chunk_idx))
