"""The diffusion backends of the torch wing."""
