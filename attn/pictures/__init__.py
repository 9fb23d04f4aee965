"""Pictures of what this library decides and does: masks, weights, pages, capabilities (extra `plots`: matplotlib).

    from attn import pictures
    pictures.mask(16, causal=True, window=(4, 0))       # a notebook shows it
    pictures.mask(16).save("mask.svg")                  # .svg, .png, .pdf

Each function returns a `Picture`; `attn.bench.chart` returns one of times. Nothing touches pyplot: no window opens, no figure
is left behind.
"""

from attn.pictures.cache import pages
from attn.pictures.masks import mask, masks, tree, visible, weights, weights_of
from attn.pictures.matrix import capabilities
from attn.pictures.picture import Picture

__all__ = ["Picture", "capabilities", "mask", "masks", "pages", "tree", "visible", "weights", "weights_of"]
