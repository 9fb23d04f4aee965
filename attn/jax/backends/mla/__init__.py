"""Multi-head latent attention (MLA) for jax."""
