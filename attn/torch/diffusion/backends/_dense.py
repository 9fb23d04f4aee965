"""Base classes of the diffusion backends for torch: array operations, checks specific to torch, and packing.

Most kernels support ragged batches but no masks. For them, `pack` concatenates the present keys: without causality the order
of keys is irrelevant, so any key mask is equivalent to a shorter sequence.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from attn.arguments import fold_sign
from attn.backends.checks import check_array
from attn.capabilities import Feature
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.backends.dense import DenseAttentionImpl, DenseCall
from attn.errors import DeviceError, UnsupportedError
from attn.torch import graphs
from attn.torch.alignment import aligned
from attn.torch.kernels.runs import stream_of
from attn.torch.metadata import keep
from attn.torch.ops import Ops


class DenseImpl(DenseAttentionImpl):
    framework, ops = "torch", Ops
    #: Whether `torch.compile` can trace `_attend`, or that of single rows; if not, the call is one operator in the graph.
    traceable: ClassVar[bool] = False
    traces_rows: ClassVar[bool] = False
    #: Whether single rows read only the keys that their mask leaves, where they are.
    masks_rows: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graph_key = graphs.dense_key(self)
        #: Launches of calls without masks, padding apart, by what decides them; None: such a call was made once, and checked.
        self._launches: dict[Any, Callable[..., torch.Tensor] | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_launches": {}}  # a copy makes its own

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: DiffusionAttentionMetadata | None = None,
    ) -> torch.Tensor:
        if (launch := self.repeated(query, key, value, attn_metadata)) is not None:
            return launch(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        # Checked before the operator all the same (`_prepared`): an error then shows where the graph is traced.
        if self.traceable or not torch.compiler.is_compiling() or (self.traces_rows and query.shape[1] == 1):
            return super().forward(query, key, value, attn_metadata)
        return graphs.dense(self, self._prepared(query, key, value, attn_metadata))

    def repeated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: DiffusionAttentionMetadata | None = None,
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """Return what `launcher` or, for `kv_lens`, `padded_launcher` does for calls like an earlier one, which was checked;
        None for a first one, and for calls with anything else.

        Calls are alike if shapes, strides, dtypes, devices and lengths are. None too where a call is traced or needs gradients.
        """
        # tensors of other types, and of a graph, take the way that has all checks
        if not type(query) is type(key) is type(value) is torch.Tensor or torch.compiler.is_compiling():
            return None
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return None
        shapes, strides = (query.shape, key.shape, value.shape), (query.stride(), key.stride(), value.stride())
        dtypes, devices = (query.dtype, key.dtype, value.dtype), (query.device, key.device, value.device)
        kind: tuple[Any, ...] = (*shapes, *strides, *dtypes, *devices)
        lens = None
        if attn_metadata is not None:
            lens, stream = _lens_alone(attn_metadata), stream_of(query.device)
            # A launch holds lengths on the device, which its stream wrote: a captured graph would outlive them.
            if lens is None or (stream and torch.cuda.is_current_stream_capturing()):
                return None
            kind = *kind, lens, stream
        launch = self._launches.get(kind)
        if launch is not None:
            return launch
        if kind in self._launches:
            if lens is None or min(lens) == key.shape[1]:
                launch = self.launcher(query, key, value)
            else:
                launch = self.padded_launcher(query, key, value, lens)
            # without one more look at shapes and strides, which are those of `kind`
            if (bound := getattr(launch, "bound", None)) is not None:
                launch = bound(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
            self._launches[kind] = launch
        elif query.numel() and key.numel():  # others need no kernel
            keep(self._launches, kind, None)
        return launch

    def _prepared(self, *args: Any) -> DenseCall:
        call = super()._prepared(*args)
        # after all checks: a copy of arrays that are then refused would be in vain
        return call._replace(query=aligned(call.query), key=aligned(call.key), value=aligned(call.value))

    def launcher(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Check a call without masks, query [B, S, H, D] and key, value [B, M, K, D], and return a function that computes calls
        like it, of query [B, H, S, D] and key, value [B, K, M, D], without checking them again; it returns [B, S, H, D]."""
        self._prepared(query, key, value, None)
        return self._attend_heads_first

    def padded_launcher(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: tuple[int, ...]
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """`launcher` for calls of which each entry's first `lens` keys are present."""
        call = self._prepared(query, key, value, DiffusionAttentionMetadata(kv_lens=lens))
        padding = {"present": call.present, "lens": call.lens}  # not the call, which holds its arrays
        return lambda *arrays: self._attend(self._heads_first(*arrays)._replace(**padding))

    def _attend_heads_first(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self._attend(self._heads_first(query, key, value))

    def _heads_first(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> DenseCall:
        # views [B, S, H, D]: kernels take any strides of the outer dimensions
        q, k, v = (aligned(x.transpose(1, 2)) for x in (query, key, value))
        return DenseCall(fold_sign(q, self.signed_scale), k, v)

    def _check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for name, array in (("query", query), ("key", key), ("value", value)):
            if not isinstance(array, torch.Tensor):
                check_array(self.backend, name, array, "torch")
        super()._check(query, key, value)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.device != query.device:
                raise DeviceError(f"{self._name}: {name} is on {tensor.device}, query on {query.device}")
            if tensor.requires_grad and torch.is_grad_enabled() and Feature.BACKWARD not in self._capabilities.features:
                hint = "call under torch.no_grad(), or detach"
                raise UnsupportedError(f"{self._name}: {name} requires grad: {Feature.BACKWARD.value} not supported ({hint})")


def _lens_alone(meta: DiffusionAttentionMetadata) -> tuple[int, ...] | None:
    """Return `kv_lens` as a key, of a call that has nothing else; None for any other, which may be an invalid one."""
    if type(meta) is not DiffusionAttentionMetadata or not isinstance(lens := meta.kv_lens, list | tuple):
        return None
    alone = meta.attn_mask is meta.joint_query is meta.joint_key is meta.joint_value is meta.joint_attn_mask is None
    # plain ints: equal ones of other types, as True, may be refused
    return tuple(lens) if alone and {*map(type, lens)} == {int} else None


def pack(call: DenseCall) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return (key, value [total, K, D] of the present keys, entry by entry, lengths [B] int32 on the host).

    Waits for the device if the lengths are known only from a mask on it.
    """
    key, value = call.key.flatten(0, 1), call.value.flatten(0, 1)
    if call.present is None:
        # all present: views, if batch and length are one dimension in memory
        return key, value, np.full(call.key.shape[0], call.key.shape[1], np.int32)
    lens = call.present.sum(1).cpu().numpy() if call.lens is None else np.array(call.lens)
    # `nonzero` waits for the device, because its size is a number of the host
    index = call.present.flatten().nonzero()[:, 0]
    return key.index_select(0, index), value.index_select(0, index), lens.astype(np.int32)


def state_of_nothing(call: DenseCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (0, -inf [B, H, S] float32) of a call without rows or without keys, of which kernels take no arrays; else None."""
    batch, rows, heads, _ = call.query.shape
    if batch and rows and call.key.shape[1]:
        return None
    return torch.zeros_like(call.query), call.query.new_full((batch, heads, rows), -torch.inf, dtype=torch.float32)


def without_keys_zeroed(
    call: DenseCall, out: torch.Tensor, lse: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [B, S, H, D], lse [B, H, S]) with rows that see no key set to 0 and -inf.

    If every row sees a key, the output is returned without being read.
    """
    # only a mask of keys, or more rows than keys under causality, leaves rows without a key
    if call.present is None and not (causal and call.query.shape[1] > call.key.shape[1]):
        return out, lse
    # either infinity: libraries differ in what they return for such rows
    empty = lse.isinf()
    return torch.where(empty.transpose(1, 2)[..., None], 0, out), torch.where(empty, -torch.inf, lse)


def bottom_right(rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask [S, M], True = attend, aligned so that the last row sees every key."""
    # the diagonal that ends in the lower right corner
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
