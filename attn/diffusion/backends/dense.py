"""Base class of diffusion backends in both frameworks: checks, the joint stream, masks in one form, then one hook.

It uses array operations that each framework provides (`Ops`), so that invalid arguments raise the same message everywhere. A
backend adds `_attend`, over dense [B, S, H, D] arrays: a `DenseCall`.
"""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

from attn.arguments import as_int, check_flag, check_heads, check_scale, fold_sign, refuse
from attn.arrays import to_framework
from attn.capabilities import Feature
from attn.diffusion.backends.abstract import Array, DiffusionAttentionImpl, DiffusionAttentionMetadata, DiffusionRequest
from attn.dtypes import dtype_name
from attn.errors import DTypeError, ShapeError, UnsupportedError


class DenseCall(NamedTuple):
    """The arguments of `_attend`, checked, as one stream.

    query: [B, S, H, D]; key, value: [B, M, K, D]. Keys that are not present may have any content.
    Which keys a call attends: all (no field set), some of each batch entry (present: bool [B, M]; lens: [B] on the host, if
    those are each entry's first keys), or those of a full mask (mask: bool, four-dimensional, broadcastable to [B, H, S, M]).
    """

    query: Array
    key: Array
    value: Array
    present: Array | None = None
    lens: tuple[int, ...] | None = None
    mask: Array | None = None


class DenseAttentionImpl(DiffusionAttentionImpl):
    """Base class. A framework's base provides the array operations; an implementation passes its backend and has `_attend`."""

    ops: ClassVar[Any]  #: `attn.torch.ops.Ops` or `attn.jax.ops.Ops`

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
    ) -> None:
        """Raise ValueError for invalid arguments and `UnsupportedError` with this backend's reasons for unsupported ones."""
        self.num_heads, self.num_kv_heads, self.head_size = check_heads(num_heads, num_kv_heads, head_size)
        self.signed_scale = check_scale(softmax_scale, head_size)
        self.scale = abs(self.signed_scale)  # kernels receive the magnitude; `_prepared` negates the query (`fold_sign`)
        self.causal, self.prefix = check_flag("causal", causal), prefix
        request = DiffusionRequest(
            self.head_size,
            # Any served dtype: the call checks its own arrays.
            self._capabilities.dtypes[0],
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            error_budget=self.backend.error,  # an explicit choice accepts its error
            causal=self.causal,
        )
        refuse(self.backend, request)

    def forward(self, query: Array, key: Array, value: Array, attn_metadata: DiffusionAttentionMetadata | None = None) -> Array:
        call = self._prepared(query, key, value, attn_metadata)
        # Kernels are not launched for empty grids, and a softmax over no keys is the zero of docs/semantics.md §1.
        if call.query.shape[1] == 0 or call.key.shape[1] == 0:
            return self.ops.zeros_like(call.query)
        return self._attend(call)

    def forward_lse(
        self, query: Array, key: Array, value: Array, attn_metadata: DiffusionAttentionMetadata | None = None
    ) -> tuple[Array, Array]:
        if not self.can_return_lse:
            raise UnsupportedError(f"{self._name}: {Feature.LSE.value} not supported")
        return self._attend_lse(self._prepared(query, key, value, attn_metadata))

    def _prepared(self, query: Array, key: Array, value: Array, attn_metadata: DiffusionAttentionMetadata | None) -> DenseCall:
        """Check the call and join its streams."""
        if hasattr(attn_metadata, "shape"):
            words = "attn_metadata is an array: pass a mask as DiffusionAttentionMetadata(attn_mask=...)"
            raise TypeError(f"{self._name}: {words}")
        meta = attn_metadata or DiffusionAttentionMetadata()
        self._check(query, key, value)
        # Of the first stream alone; the joint stream's own mask is joined below.
        present, lens = self._present(meta, key)
        if meta.has_joint(self._name):
            query, key, value, present = self._joined(meta, query, key, value, present)
            # The keys that are present no longer come first of all, so lengths do not describe them.
            lens = None
        # After joining, because a full mask spans the rows and keys of both streams.
        mask = self._full_mask(meta, query, key)
        if why := self.backend.why_not_call(query.shape[1], key.shape[1], self.causal, present is not None):
            raise UnsupportedError(f"{self._name}: {'; '.join(why)}", why)
        return DenseCall(fold_sign(query, self.signed_scale), key, value, present, lens, mask)

    @abstractmethod
    def _attend(self, call: DenseCall) -> Array:
        """Compute attention. Returns [B, S, H, D]; a row that sees no key is 0."""

    def _attend_lse(self, call: DenseCall) -> tuple[Array, Array]:
        """Compute `_attend` and the log-sum-exp [B, H, S], if `can_return_lse`."""
        raise NotImplementedError

    # --- checks and masks --------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return self.backend.get_name()

    @property
    def _capabilities(self) -> Any:
        assert self.backend.capabilities is not None
        return self.backend.capabilities

    def _check(self, query: Array, key: Array, value: Array) -> None:
        for name, array, heads in (
            ("query", query, self.num_heads),
            ("key", key, self.num_kv_heads),
            ("value", value, self.num_kv_heads),
        ):
            shape = tuple(array.shape)
            if len(shape) != 4 or shape[2:] != (heads, self.head_size):
                raise ShapeError(f"{self._name}: {name} has shape {list(shape)}: must be [B, S, {heads}, {self.head_size}]")
            if shape[0] != query.shape[0]:
                raise ShapeError(f"{self._name}: {name} has batch {shape[0]}, query {query.shape[0]}: must be equal")
            if array.dtype != query.dtype:
                raise DTypeError(f"{self._name}: {name} has dtype {array.dtype}, query {query.dtype}: must be equal")
        if key.shape[1] != value.shape[1]:
            raise ShapeError(f"{self._name}: key has {key.shape[1]} rows, value {value.shape[1]}: must be equal")
        if (dtype := dtype_name(query.dtype)) not in self._capabilities.dtypes:
            raise DTypeError(f"{self._name}: query has dtype {dtype} (supports {', '.join(self._capabilities.dtypes)})")

    def _present(self, meta: DiffusionAttentionMetadata, key: Array) -> tuple[Array | None, tuple[int, ...] | None]:
        """Return the valid keys, [B, M], from kv_lens or a mask of keys, and their numbers; Nones if all are valid."""
        batch, length = key.shape[:2]
        if meta.kv_lens is not None:
            if meta.attn_mask is not None:
                raise ValueError(f"{self._name}: kv_lens and attn_mask both select keys: pass one of them")
            lens = tuple(-1 if (n := as_int(passed)) is None else n for passed in meta.kv_lens)
            if len(lens) != batch or not all(0 <= n <= length for n in lens):
                lengths = [*meta.kv_lens]
                raise ValueError(f"{self._name}: kv_lens={lengths} must be {batch} ints of 0..{length}, one per batch entry")
            # No padding: a kernel without masks, and a backend that has none, serves the call.
            if all(n == length for n in lens):
                return None, None
            # [M] < [B, 1] -> [B, M], beside the lengths: some kernels take one, some the other.
            return self.ops.arange(0, length, key) < self.ops.asarray(lens, key)[:, None], lens
        if meta.attn_mask is None or meta.attn_mask.ndim != 2:
            return None, None
        return self._key_mask("attn_mask", meta.attn_mask, key), None

    def _mask(self, name: str, array: Any, like: Array) -> Array:
        # A mask may come from the host or another framework: it is small beside what it masks.
        mask = self.ops.asarray(to_framework(array, self.framework), like)
        if dtype_name(mask.dtype) != "bool":
            raise DTypeError(f"{self._name}: {name} has dtype {mask.dtype}: must be bool, True = attend")
        return mask

    def _key_mask(self, name: str, array: Any, key: Array) -> Array:
        mask = self._mask(name, array, key)
        if tuple(mask.shape) != tuple(key.shape[:2]):
            raise ShapeError(f"{self._name}: {name} has shape {list(mask.shape)}: must be {list(key.shape[:2])}")
        return mask

    def _joined(
        self, meta: DiffusionAttentionMetadata, query: Array, key: Array, value: Array, present: Array | None
    ) -> tuple[Array, Array, Array, Array | None]:
        """Concatenate both streams in the order of the strategy."""
        # Empty rows of the right dtype and device, so that one concatenation serves both cases.
        joint_query = query[:, :0] if meta.joint_query is None else meta.joint_query
        joint = (joint_query, meta.joint_key, meta.joint_value)
        self._check(*joint)
        front = meta.joint_strategy == "front"

        def together(second: Array, first: Array) -> Array:
            return self.ops.concat([second, first] if front else [first, second], 1)

        mask = None
        if present is not None or meta.joint_attn_mask is not None:
            # A mask of one stream makes one of both: all keys of the other are present.
            text, image = self.ops.ones(joint[1]), self.ops.ones(key) if present is None else present
            if meta.joint_attn_mask is not None:
                text = self._key_mask("joint_attn_mask", meta.joint_attn_mask, joint[1])
            mask = together(text, image)
        q, k, v = (together(second, first) for second, first in zip(joint, (query, key, value), strict=True))
        return q, k, v, mask

    def _full_mask(self, meta: DiffusionAttentionMetadata, query: Array, key: Array) -> Array | None:
        """Return the four-dimensional mask, checked; None if there is none."""
        if meta.attn_mask is None or meta.attn_mask.ndim == 2:
            return None
        if Feature.MASK not in self._capabilities.features:
            raise UnsupportedError(f"{self._name}: {Feature.MASK.value} not supported (a [B, M] mask of keys is)")
        mask = self._mask("attn_mask", meta.attn_mask, query)
        full = (query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        if mask.ndim != 4 or any(have not in (1, want) for have, want in zip(mask.shape, full, strict=True)):
            raise ShapeError(f"{self._name}: attn_mask has shape {list(mask.shape)}: must broadcast to {list(full)}")
        return mask
