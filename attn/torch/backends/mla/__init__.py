"""Multi-head latent attention under torch."""
