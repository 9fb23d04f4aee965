"""Plots of masks, attention weights, cache pages and backend capabilities (extra `plots`: matplotlib).

    from attn import pictures
    pictures.mask(16, causal=True, window=(4, 0))       # displayed by a notebook
    pictures.mask(16).save("mask.svg")                  # .svg, .png, .pdf

Each function returns a `Picture`; `attn.tools.bench.chart` returns one of times. None uses pyplot: no window opens, no global
figure is created.
"""

from attn.pictures.cache import pages
from attn.pictures.masks import mask, masks, tree, visible, weights, weights_of
from attn.pictures.matrix import capabilities
from attn.pictures.picture import Picture

__all__ = ["Picture", "capabilities", "mask", "masks", "pages", "tree", "visible", "weights", "weights_of"]
