"""Dense attention for diffusion models in torch."""
