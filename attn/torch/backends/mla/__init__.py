"""Multi-head latent attention (MLA) for torch."""
