"""The interface and registry of diffusion backends."""
