"""The backends for jax, one module each."""
