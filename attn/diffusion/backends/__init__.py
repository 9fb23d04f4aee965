"""The diffusion family's interface and registry."""
