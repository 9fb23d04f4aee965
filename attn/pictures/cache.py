"""Plot a paged cache: the request of each slot, and the slots that a step writes."""

from itertools import cycle
from typing import Any

from attn.backends.metadata import CommonAttentionMetadata
from attn.pictures.picture import COLOURS, HIDDEN, Picture, drawn

_WIDTH = 64  #: slots per row


def pages(batch: CommonAttentionMetadata, num_blocks: int, block_size: int | None = None) -> Picture:
    """Plot every block of a cache of `num_blocks`, a cell per slot: colour is the request, a frame marks slots written by
    this step.

    A slot that several requests read (a shared prefix) is black; free ones are grey. The batch must be on the host. Raises
    ValueError if it is not, and for block ids outside the cache.
    """
    import numpy as np

    size = block_size or batch.block_size
    if size is None:
        raise ValueError("the batch has no block_size: pass block_size=")
    lens = batch.seq_lens_cpu
    if lens is None or not isinstance(batch.block_table, np.ndarray) or not isinstance(batch.slot_mapping, np.ndarray):
        raise ValueError("the batch is on a device: pages() reads NumPy arrays (batch.on_host())")
    batch.validate(size, num_blocks)
    # Values of a cell: -2 no block (the last row's rest), -1 free, r request r, num_reqs shared.
    owner = np.full((num_blocks, size), -1)
    for request, length in enumerate(lens[: batch.num_reqs].tolist()):
        blocks = batch.block_table[request, : -(-length // size)]
        slots = (blocks[:, None] * size + np.arange(size)).ravel()[:length]
        # A view: `owner` has one row per block, and a slot's number is its index in the flat array.
        flat = owner.reshape(-1)
        flat[slots] = np.where(flat[slots] == -1, request, batch.num_reqs)  # used by another request too: shared
    written = batch.slot_mapping[: batch.num_actual_tokens]
    written = written[written >= 0]
    across = max(1, _WIDTH // size)
    rows = -(-num_blocks // across)
    cells = np.full((rows * across, size), -2)
    cells[:num_blocks] = owner
    picture = cells.reshape(rows, across * size)

    def draw(axis: Any) -> None:
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch, Rectangle

        # Black, the last of the colours, is kept for shared slots.
        colours = [colour for _, colour in zip(range(batch.num_reqs), cycle(COLOURS[:-1]), strict=False)]
        # In the order of a cell's values, from -2 on; vmin and vmax give each of them one colour.
        palette = ListedColormap(["white", HIDDEN, *colours, "black"])
        axis.imshow(picture, cmap=palette, vmin=-2, vmax=batch.num_reqs, interpolation="nearest", aspect="auto")
        for block in range(num_blocks):
            corner = (block % across * size - 0.5, block // across - 0.5)
            axis.add_patch(Rectangle(corner, size, 1, fill=False, edgecolor="white", linewidth=2))
            paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
            axis.text(corner[0] + 0.25, corner[1] + 0.12, str(block), fontsize=7, va="top", bbox=paper)
        for slot in written.tolist():
            block, offset = divmod(slot, size)
            corner = (block % across * size + offset - 0.5, block // across - 0.5)
            axis.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="black", linewidth=1.4))
        axis.set(xticks=[], yticks=[], title=f"{num_blocks} blocks of {size} slots; framed: written by this step")
        named = [Patch(color=colour, label=f"request {r}: {lens[r]} tokens") for r, colour in enumerate(colours)]
        shared = [Patch(color="black", label="shared")] if (owner == batch.num_reqs).any() else []
        axis.legend(
            handles=[*named, *shared, Patch(color=HIDDEN, label="free")], fontsize=7, loc="upper left", bbox_to_anchor=(1, 1)
        )

    return drawn(9, max(1.6, 0.36 * rows + 0.8), draw)
