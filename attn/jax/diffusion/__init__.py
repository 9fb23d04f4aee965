"""Dense attention for diffusion models in jax."""
