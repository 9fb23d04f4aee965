"""The diffusion backends for jax."""
