"""MLA prefill under jax: attention of expanded heads."""
