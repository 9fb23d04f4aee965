"""A small decoder for the examples: checkpoint reader, paged serving, and dense reference."""
