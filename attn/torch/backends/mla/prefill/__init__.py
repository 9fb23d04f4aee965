"""MLA prefill under torch: attention of expanded heads."""
