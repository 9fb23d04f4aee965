"""The diffusion backends of the jax wing."""
