"""A small decoder for the examples: its training, its checkpoint, and the reader of such checkpoints."""
