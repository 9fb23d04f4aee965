"""Dense attention for diffusion models under jax."""
