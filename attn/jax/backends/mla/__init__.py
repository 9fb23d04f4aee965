"""Multi-head latent attention under jax."""
