"""Attention for diffusion models: dense, mostly non-causal, long sequences."""
