"""A small decoder for the examples: checkpoint reader, paged serving, and dense reference.

The wheel ships the model's 3.65 MB of weights (`model`), so that `attn demo` and `attn generate` run right after `pip install`,
without a download.
"""
