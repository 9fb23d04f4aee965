"""Dense attention for diffusion models under torch."""
