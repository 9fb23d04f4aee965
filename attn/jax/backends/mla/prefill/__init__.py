"""MLA prefill for jax: attention with expanded heads."""
