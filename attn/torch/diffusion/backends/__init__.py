"""The diffusion backends for torch."""
