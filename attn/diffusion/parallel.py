"""Ulysses and ring attention over a group whose members share a sequence, for both frameworks.

Each member holds S / W rows of every array. *Ulysses* (arXiv 2309.14509) exchanges rows for heads, so that a member attends to
whole sequences with H / W heads. It needs two all-to-alls and supports any backend, masks and joint streams; the number of
members must divide the heads. *Ring* (arXiv 2310.01889) keeps queries, passes keys and values around, and merges partial
results by log-sum-exp. It supports any number of heads; it needs a backend that returns the log-sum-exp, and is not causal.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from attn.arguments import check_flag, check_heads, list_of_names
from attn.arrays import ops_of
from attn.capabilities import Feature, check_known
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.errors import ShapeError, UnsupportedError
from attn.imports import resolve_obj_by_qualname

STRATEGIES = ("ulysses", "ring")


class BaseSequenceParallel:
    """The layer of one member of a group: what the framework's class adds is how the members communicate."""

    framework: ClassVar[str]
    members: ClassVar[str]  #: their name in errors
    strategy: str
    size: int  #: W
    local: Any  #: the layer that a member computes with

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_kv_heads: int | None = None,
        *,
        strategy: str = "ulysses",
        features: Collection[str] = (),
        **more: Any,
    ) -> None:
        super().__init__()
        self.strategy = strategy
        # First, since it sets `size`, by which the heads below are divided, and takes the group's arguments out of
        # those for the layer.
        choice = self._join(**more)
        check_known("strategy", self.strategy, STRATEGIES)
        num_heads, num_kv_heads, head_size = check_heads(num_heads, num_kv_heads, head_size)
        features = list_of_names("features", features)
        if self.strategy == "ring":
            # With contiguous shards, the member of the first rows sees one W-th of the keys and would be idle for the
            # rest of the ring.
            if check_flag("causal", causal):
                raise UnsupportedError(
                    f"ring: a causal layer is not supported ({self.members} would wait for each other): use ulysses"
                )
            features = (*features, Feature.LSE.value)  # to merge partial results
        else:
            for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
                if heads % self.size:
                    over = f"{name}={heads} over {self.size} {self.members}"
                    raise ShapeError(f"{over}: Ulysses needs a multiple (ring does not)")
            # The layer of a member sees whole sequences of its share of the heads, so any backend can serve it.
            num_heads, num_kv_heads = num_heads // self.size, num_kv_heads // self.size
        layer = resolve_obj_by_qualname(f"attn.{self.framework}.DiffusionAttention")
        self.local = layer(num_heads, head_size, softmax_scale, causal, num_kv_heads, features=features, **choice)

    # how the members communicate

    @abstractmethod
    def _join(self, **more: Any) -> dict[str, Any]:
        """Set `size` and what communication needs, from the arguments that name the group; return the other arguments."""

    @abstractmethod
    def _exchanged(self, x: Any, split: int, join: int) -> Any:
        """Exchange rows for heads or heads for rows: member i receives slice i of dimension `split`, joined along `join`."""

    @abstractmethod
    def _gathered(self, x: Any, dim: int) -> Any:
        """Concatenate all members' arrays along `dim`."""

    @abstractmethod
    def _own_heads(self, x: Any) -> Any:
        """Return this member's slice of dimension 2; None of None."""

    @abstractmethod
    def _passed(self, arrays: list[Any]) -> Callable[[], list[Any]]:
        """Start sending arrays (None: nothing) to the next member; return what waits for the previous member's."""

    # the strategies

    def _attend(self, query: Any, key: Any, value: Any, attn_metadata: DiffusionAttentionMetadata | None) -> Any:
        """Compute this member's rows. Raises `UnsupportedError` for `kv_lens` and for masks that are not of keys."""
        meta = attn_metadata or DiffusionAttentionMetadata()
        meta.has_joint(self.strategy)  # a part of a stream would be dropped below
        # Lengths count keys of the whole sequence, of which a member has one shard, and a full mask has rows and keys
        # of several members.
        if meta.kv_lens is not None or (meta.attn_mask is not None and meta.attn_mask.ndim != 2):
            raise UnsupportedError(f"{self.strategy}: supports only masks of keys [B, M / W] (others span the {self.members})")
        return (self._ulysses if self.strategy == "ulysses" else self._ring)(query, key, value, meta)

    def _ulysses(self, query: Any, key: Any, value: Any, meta: DiffusionAttentionMetadata) -> Any:
        whole = DiffusionAttentionMetadata(
            # Keys of the whole sequence follow after the exchange, so the mask of keys has to be whole too.
            attn_mask=None if meta.attn_mask is None else self._gathered(meta.attn_mask, 1),
            # The joint stream is on every member already: each takes its own heads of it and nothing is sent.
            joint_query=self._own_heads(meta.joint_query),
            joint_key=self._own_heads(meta.joint_key),
            joint_value=self._own_heads(meta.joint_value),
            joint_attn_mask=meta.joint_attn_mask,
            joint_strategy=meta.joint_strategy,
        )
        # [B, S / W, H, D] -> [B, S, H / W, D].
        out = self.local(*(self._exchanged(x, 2, 1) for x in (query, key, value)), whole)
        joint = 0 if meta.joint_query is None else meta.joint_query.shape[1]
        if not joint:
            return self._exchanged(out, 1, 2)
        front = meta.joint_strategy == "front"
        text, image = (out[:, :joint], out[:, joint:]) if front else (out[:, -joint:], out[:, :-joint])
        # Text rows go to every member with all heads (joined along the heads), image rows back to the member that has them.
        streams = [self._gathered(text, 2), self._exchanged(image, 1, 2)]
        return ops_of(self.framework).concat(streams if front else streams[::-1], 1)

    def _ring(self, query: Any, key: Any, value: Any, meta: DiffusionAttentionMetadata) -> Any:
        xp, impl, states = ops_of(self.framework), self.local.impl, []
        if meta.joint_query is not None:  # its rows see every key on every member, so the results are equal
            front = meta.joint_strategy == "front"
            query = xp.concat([meta.joint_query, query] if front else [query, meta.joint_query], 1)
        if meta.joint_key is not None:  # replicated on every member: it counts once
            own = DiffusionAttentionMetadata(attn_mask=meta.joint_attn_mask)
            states.append(impl.forward_lse(query, meta.joint_key, meta.joint_value, own))
        # Each member starts with its own shard; after W - 1 passes it has seen all of them. The order does not matter
        # to a merge by log-sum-exp.
        current = [key, value, meta.attn_mask]
        for step in range(self.size):
            arrived = self._passed(current) if step < self.size - 1 else list  # while this member attends to its arrays
            own = DiffusionAttentionMetadata(attn_mask=current[2])
            states.append(impl.forward_lse(query, current[0], current[1], own))
            current = arrived()
        batch, rows, heads, size = query.shape
        merge = resolve_obj_by_qualname(f"attn.{self.framework}.merge_attn_states")
        merged, _ = merge(
            # In float32 until all states are merged: rounding each to 16 bits would add W errors.
            [xp.cast(out, like=lse).reshape(batch * rows, heads, size) for out, lse in states],
            # [B, H, S] -> [H, B * S], the layout of `merge_attn_states`.
            [lse.swapaxes(0, 1).reshape(heads, batch * rows) for _, lse in states],
        )
        return xp.cast(merged, like=query).reshape(batch, rows, heads, size)
