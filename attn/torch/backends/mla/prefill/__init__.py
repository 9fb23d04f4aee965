"""MLA prefill for torch: attention with expanded heads."""
