"""The mask of attention: a layer's rules and a batch's arrays, as one value.

A row at position p of its request sees key j if

    (j <= p  if causal, or an edge of the draft tree)  and  p - left <= j <= p + right
    or  first <= j <= last  for the row's span, which the window cuts if `span_window`
    or  j < prefix
    and  j >= p // chunk_size * chunk_size

with each part only where it is set (docs/semantics.md §4, §11, §18). `LayerMask` has the parts that are constants of a layer,
`BatchMask` those that are arrays of a batch, `Visibility` both. Rows are drawn as rows, keys as columns:

    causal      left=1      chunk_size=2    prefix [2]    spans (1, 2)
    x . . .     x . . .     x . . .         x x . .       x . . .
    x x . .     x x . .     x x . .         x x . .       x x x .
    x x x .     . x x .     . . x .         x x x .       x x x .
    x x x x     . . x x     . . x x         x x x x       x x x x

The formulas use operators and indexing only, so arrays of NumPy, torch and JAX all work, traced ones included.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from attn.arrays import check_array, on_host
from attn.errors import MetadataError, ShapeError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    IntArray = npt.NDArray[np.integer[Any]]

#: (left, right), inclusive distances from a row's position; None: unbounded.
Window = tuple[int | None, int | None]


def _fields_set(mask: Any) -> str:
    """Return a mask's class and the fields that are not its defaults, arrays by dtype and shape."""
    text = []
    for name, value in mask._asdict().items():
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            text.append(f"{name}={str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        elif value != mask._field_defaults[name]:
            text.append(f"{name}={value!r}")
    return f"{type(mask).__name__}({', '.join(text)})"


class LayerMask(NamedTuple):
    """The mask of a layer: constants, hashable.

    causal: whether rows see no later key, where the batch does not say otherwise. window: (left, right). chunk_size: positions
    of a chunk, before which a row sees no key. span_window: whether the window cuts spans; None: the layer does not say.
    """

    causal: bool = True
    window: Window = (None, None)
    chunk_size: int | None = None
    span_window: bool | None = None

    def __and__(self, other: "LayerMask") -> "LayerMask":
        """Return the mask of the keys that both masks allow. Raises ValueError where no one mask is that."""
        sides = zip(self.window, other.window, strict=True)
        # The narrower bound on each side; unbounded only where both are.
        left, right = (min((x for x in side if x is not None), default=None) for side in sides)
        for name in ("chunk_size", "span_window"):
            one, two = getattr(self, name), getattr(other, name)
            if None not in (one, two) and one != two:
                raise ValueError(f"{name}={one} and {name}={two} have no common mask")
        chunk = self.chunk_size if other.chunk_size is None else other.chunk_size
        cuts = self.span_window if other.span_window is None else other.span_window
        # Exact for keys by position only: whether a window cuts a span has to be the same for both, and so has the chunk.
        return LayerMask(self.causal or other.causal, (left, right), chunk, cuts)

    def within_int32(self) -> "LayerMask":
        """Return the same mask without the bounds that no sequence reaches: added to a position in 32 bits, they overflow."""
        left, right, chunk = (None if x is not None and x >= 1 << 30 else x for x in (*self.window, self.chunk_size))
        return self._replace(window=(left, right), chunk_size=chunk)

    def __repr__(self) -> str:
        return _fields_set(self)


class BatchMask(NamedTuple):
    """The masks of a batch, as arrays of one framework; each None if the batch has none.

    tree: [R, W, W] bool, which of a request's new tokens see each other instead of causality, in requests of at most W.
    spans: [T, 2] int32, the first and last key of each row's span, (-1, -1) for none. prefix: [R] int32, keys that all rows of
    a request see. is_causal: [R] bool, if some requests are causal and some are not.
    """

    tree: Any = None
    spans: Any = None
    prefix: Any = None
    is_causal: Any = None

    def map(self, function: Callable[[Any], Any]) -> "BatchMask":
        """Return a mask with `function` of each array."""
        return BatchMask(*(None if array is None else function(array) for array in self))

    def select(self, requests: slice, rows: slice) -> "BatchMask":
        """Return the mask of some requests, and of their rows."""
        # Spans are the one array with an entry per row; the others have one per request.
        return BatchMask(*(x if x is None else x[rows if name == "spans" else requests] for name, x in self._asdict().items()))

    def validate(
        self, num_reqs: int, num_rows: int, query_lens: "IntArray | None" = None, seq_lens: "IntArray | None" = None
    ) -> Self:
        """Check the masks of a batch of R requests and T new tokens; returns them.

        query_lens, seq_lens: [R], the new tokens of each request, and all of its tokens, on the host. Ranks, extents and dtypes
        are always checked; values only if they and the lengths are on the host. Raises `ShapeError`, `DTypeError` or
        `MetadataError`, with a batch's names of the arrays: `tree_mask`, `spans`, `prefix`, `causal`.
        """
        for name, array, extents, dtype in (
            ("tree_mask", self.tree, (num_reqs, None, None), "bool"),
            ("spans", self.spans, (None, 2), "int32"),
            ("prefix", self.prefix, (num_reqs,), "int32"),
            ("causal", self.is_causal, (num_reqs,), "bool"),
        ):
            if array is not None:
                check_array(name, array, extents, (dtype,))
        if self.tree is not None and self.tree.shape[1] != self.tree.shape[2]:
            raise ShapeError(f"tree_mask has shape {list(self.tree.shape)}: must be [R, W, W]")
        if self.spans is not None and self.spans.shape[0] < num_rows:
            raise ShapeError(f"spans has {self.spans.shape[0]} rows: must be at least num_actual_tokens={num_rows}")
        tree, spans, prefix = on_host(self.tree), on_host(self.spans), on_host(self.prefix)
        if tree is not None and query_lens is not None:
            _check_tree(tree, query_lens)
        if prefix is not None and seq_lens is not None:
            _check_prefix(prefix, seq_lens)
        if spans is not None and query_lens is not None and seq_lens is not None:
            _check_spans(spans, query_lens, seq_lens)
        return self

    def __repr__(self) -> str:
        return _fields_set(self)

    @property
    def is_plain(self) -> bool:
        """Whether the layer alone decides."""
        return self.tree is self.spans is self.prefix is self.is_causal is None

    @property
    def has_ranges(self) -> bool:
        """Whether rows may see keys that neither causality nor the window allows: spans and prefixes."""
        return self.spans is not None or self.prefix is not None


def _check_tree(tree: "npt.NDArray[np.bool_]", query_lens: "IntArray") -> None:
    """Check the trees in use: a token sees itself and no later token."""
    import numpy as np

    node = np.arange(tree.shape[1])
    # [R, W]: nodes in use. A longer request is causal and does not use its tree, so its entries may be anything.
    inside = (node < query_lens[:, None]) & (query_lens <= len(node))[:, None]
    # [R, W, W]. Kernels rely on it: they skip keys after a row, and a row that does not see itself could see no key at all.
    wrong = np.where(node[:, None] == node, ~tree, tree & (node > node[:, None])) & inside[:, :, None] & inside[:, None, :]
    if wrong.any():
        r, i, j = (int(x) for x in np.argwhere(wrong)[0])
        bound = "True on the diagonal" if i == j else "False above the diagonal: ancestors come before their descendants"
        raise MetadataError("tree_mask", (r, i, j), bool(tree[r, i, j]), bound)


def _check_prefix(prefix: "IntArray", seq_lens: "IntArray") -> None:
    """Check that prefixes are within the tokens that will be in the cache."""
    bad = (prefix < 0) | (prefix > seq_lens)
    if bad.any():
        r = int(bad.argmax())
        raise MetadataError("prefix", r, int(prefix[r]), f"between 0 and seq_lens[{r}] = {seq_lens[r]}")


def _check_spans(spans: "IntArray", query_lens: "IntArray", seq_lens: "IntArray") -> None:
    """Check that spans are within the tokens that will be in the cache."""
    import numpy as np

    # Rows past the batch's own are padding.
    first, last = spans[: int(query_lens.sum())].T
    row_seq_lens = np.repeat(seq_lens, query_lens)
    bad = ((first < 0) | (last < first) | (last >= row_seq_lens)) & ~((first == -1) & (last == -1))
    if bad.any():
        t = int(bad.argmax())
        r = int(np.repeat(np.arange(len(query_lens)), query_lens)[t])
        bound = f"(first, last) with 0 <= first <= last < seq_lens[{r}] = {seq_lens[r]}, or (-1, -1) for none"
        if 0 <= first[t] <= last[t]:  # the rest of an image, for example, is in a later chunk
            bound += f"; schedule the tokens up to position {last[t]} in this step, as later keys are not in the cache yet"
        raise MetadataError("spans", t, [int(first[t]), int(last[t])], bound)


#: A layer and a batch that ask for nothing besides causality.
CAUSAL, PLAIN = LayerMask(), BatchMask()


class _Ints:
    """The functions that `Visibility.bounds` needs, for Python's ints."""

    minimum, maximum = staticmethod(min), staticmethod(max)

    @staticmethod
    def where(condition: Any, yes: Any, no: Any) -> Any:
        return yes if condition else no


class Visibility(NamedTuple):
    """Which keys each row sees: the mask of a layer as it applies to a batch, and the masks of that batch."""

    layer: LayerMask
    batch: BatchMask = PLAIN

    def __and__(self, other: "Visibility") -> "Visibility":
        """Return the mask of the keys that both masks allow. Raises ValueError where no one mask is that.

        Spans and prefixes add keys to those of the layer. So if one mask has any, the other has the same arrays, with the same
        window if that cuts spans, or limits rows by chunks alone. Trees meet causality, or trees of their size.
        """
        causal, tree, is_causal = self._common_causality(other)
        spans, prefix = self._common_ranges(other)
        layer = (self.layer & other.layer)._replace(causal=causal)
        return Visibility(layer, BatchMask(tree, spans, prefix, is_causal))

    def _common_causality(self, other: "Visibility") -> tuple[bool, Any, Any]:
        """Return `causal`, `tree` and `is_causal` of both masks."""
        masks = self, other
        flags = [mask.batch.is_causal for mask in masks if mask.batch.is_causal is not None]
        # Flags of requests replace the layer's causality and its tree.
        layers = [mask for mask in masks if mask.layer.causal and mask.batch.is_causal is None]
        trees = [mask.batch.tree for mask in layers if mask.batch.tree is not None]
        if trees and (flags or trees[0].shape != trees[-1].shape):
            raise ValueError(f"{self} and {other} have no common mask: a tree meets causality, or a tree of its size")
        # A tree is a part of causality, and a causal layer makes every request causal.
        if layers or not flags:
            return bool(layers), trees[0] & trees[-1] if trees else None, None
        return False, None, flags[0] | flags[-1]

    def _common_ranges(self, other: "Visibility") -> tuple[Any, Any]:
        """Return `spans` and `prefix` of both masks."""
        one, two = self.batch, other.batch
        for batch, mask in ((one, other), (two, self)):
            # Chunks limit all keys, also those that ranges add.
            unlimited = mask.layer._replace(chunk_size=None, span_window=None) == LayerMask(False) and mask.batch.is_plain
            if unlimited or not (one.has_ranges or two.has_ranges):
                return batch.spans, batch.prefix
        cut = one.spans is not None and self.layer.span_window and self.layer.window != other.layer.window
        if one.spans is not two.spans or one.prefix is not two.prefix or cut:
            raise ValueError(f"{self} and {other} have no common mask: one adds keys that the other may not allow")
        return one.spans, one.prefix

    @property
    def window(self) -> Window:
        """The window, with a right bound of 0 if rows see no later key."""
        left, right = self.layer.window
        # A causal layer with a right bound above 0 sees no later key either: kernels then compare one bound.
        return left, 0 if self.layer.causal else right

    def select(self, request: int, rows: slice) -> "Visibility":
        """Return the mask of one request, whose rows are `rows`. `is_causal` must be on the host."""
        layer, batch = self.layer, self.batch.select(slice(request, request + 1), rows)
        # A request longer than its tree mask is causal (`CommonAttentionMetadata.tree_mask`).
        if batch.tree is not None and rows.stop - rows.start > batch.tree.shape[1]:
            batch = batch._replace(tree=None)
        # One request has one causality, so its own replaces the layer's.
        if batch.is_causal is not None:
            layer, batch = layer._replace(causal=bool(batch.is_causal[0])), batch._replace(is_causal=None)
        return Visibility(layer, batch)

    def allowed(self, position: Any, key: Any, request: Any = 0, row: Any = None, context: Any = 0, new: Any = 0) -> Any:
        """Return whether rows see keys: bool, of the shape to which the arguments broadcast.

        position: the rows' positions in their requests (negative before the first key); key: the keys' positions. request: the
        rows' requests, which index `tree`, `prefix` and `is_causal`; row: the rows' numbers in the batch, which index `spans`
        (`...` if these are as the rows are);
        context: the position of each request's first row, and new: its number of rows, for trees.
        """
        (left, right), (tree, spans, prefix, is_causal) = self.layer.window, self.batch
        past = key <= position
        # `past | True` has the shape and the framework of the arrays, which the constant True has not.
        seen = past if self.layer.causal else past | True
        if is_causal is not None:
            seen = past | ~is_causal[request]
        elif self.layer.causal and tree is not None:
            width = tree.shape[-1]
            node, row_node = key - context, position - context
            inside = (node >= 0) & (node < width) & (row_node >= 0) & (row_node < width)
            # Multiplied by the bool, indices outside the tree become 0, a valid one: NumPy and torch raise for others.
            # `inside` then leaves the value out.
            edge = tree[request, row_node * inside, node * inside]
            # Within a tree a row sees all context (node < 0) and its edges; a request of more new tokens than the tree
            # has is causal.
            seen = ((new <= width) & ((node < 0) | (inside & edge))) | ((new > width) & past)
        if left is not None:
            seen = seen & (key >= position - left)
        if right is not None:
            seen = seen & (key <= position + right)
        if spans is not None:
            # (-1, -1), no span, holds for no key: none is at -1.
            among = (key >= spans[row, 0]) & (key <= spans[row, 1])
            if self.layer.span_window and left is not None:
                among = among & (key >= position - left)
            if self.layer.span_window and right is not None:  # a right bound of 0 is causality, which does not cut spans
                among = among & ((key <= position + right) | (right == 0))
            seen = seen | among
        # After the window, which does not cut a prefix, and before the chunk, which does (docs/semantics.md §18).
        if prefix is not None:
            seen = seen | (key < prefix[request])
        if self.layer.chunk_size is not None:
            seen = seen & (key >= position // self.layer.chunk_size * self.layer.chunk_size)
        return seen

    def bounds(
        self, first: Any, last: Any, end: Any, spans: Any = None, prefix: Any = None, ordered: Any = None, xp: Any = _Ints
    ) -> tuple[Any, Any]:
        """Return (low, high): every key below `end` that a row at a position from `first` to `last` sees is in low..high - 1.

        Ints, or arrays of one shape with `xp`, their module. spans: (first, last) over the spans of these rows, last < first
        for none; prefix: the greatest of their requests; ordered: whether these rows see no later key, if that is not the
        layer's `causal` (rows of trees are not ordered).
        """
        left, right = self.layer.window
        # 0 * first is a zero of the arguments' shape and framework.
        low = 0 * first if left is None else xp.maximum(first - left, 0 * first)
        high = end if right is None else xp.minimum(end, last + right + 1)
        # `ordered` may be an array: in a batch of mixed causality, or with trees, rows of one launch differ.
        high = xp.where(self.layer.causal if ordered is None else ordered, xp.minimum(high, last + 1), high)
        # The range may only be too wide, never too narrow, so `span_window`, which cuts spans, is left out.
        if spans is not None:
            has_span = spans[0] <= spans[1]
            low = xp.where(has_span, xp.minimum(low, spans[0]), low)
            high = xp.where(has_span, xp.maximum(high, spans[1] + 1), high)
        if prefix is not None:
            # One range covers both: the keys between a prefix and a window are read too, and masked.
            low, high = xp.where(prefix > 0, 0 * low, low), xp.maximum(high, prefix)
        if self.layer.chunk_size is not None:
            low = xp.maximum(low, first // self.layer.chunk_size * self.layer.chunk_size)
        high = xp.minimum(high, end)
        # So that high - low is a number of keys, also where no key is seen.
        return low, xp.maximum(low, high)

    def common(self, first: Any, last: Any, end: Any, ordered: Any = None, xp: Any = _Ints) -> tuple[Any, Any]:
        """Return (low, high): every row at a position from `first` to `last` sees all the keys low..high - 1.

        Arguments as of `bounds`. Spans, prefixes and trees are not counted.
        """
        left, right = self.layer.window
        # The last row's window begins last, and the first row's causality ends first: between them every row sees every
        # key. `low` may be negative; if no key is seen by every row, it may exceed `high`.
        low = 0 * last if left is None else last - left
        high = end if right is None else xp.minimum(end, first + right + 1)
        high = xp.where(self.layer.causal if ordered is None else ordered, xp.minimum(high, first + 1), high)
        if self.layer.chunk_size is not None:
            low = xp.maximum(low, last // self.layer.chunk_size * self.layer.chunk_size)
        return low, high

    def as_array(self, num_rows: int, num_keys: int) -> "npt.NDArray[np.bool_]":
        """Return the mask of the last `num_rows` rows of one request of `num_keys` keys: [n, m] bool, for NumPy's arrays."""
        import numpy as np

        rows, keys = np.arange(num_rows)[:, None], np.arange(num_keys)[None]
        context = num_keys - num_rows
        return self.allowed(rows + context, keys, 0, rows, context, num_rows)

    def __repr__(self) -> str:
        return f"Visibility({self.layer})" if self.batch.is_plain else f"Visibility({self.layer}, {self.batch})"
