"""Backends of the torch wing, one module each."""
