"""Backends of the jax wing, one module each."""
