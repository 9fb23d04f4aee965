"""Kernels as pure functions of arrays: they import nothing of `attn` but kernels."""
