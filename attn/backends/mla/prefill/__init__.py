"""MLA prefill: abstract interface, registry, selector."""
