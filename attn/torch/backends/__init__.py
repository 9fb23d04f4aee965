"""The backends for torch, one module each."""
