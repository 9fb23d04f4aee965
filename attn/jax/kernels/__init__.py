"""Kernels as pure functions of arrays. They import no other part of `attn`."""
