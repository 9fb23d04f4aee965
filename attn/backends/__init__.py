"""The attention family: abstract interfaces, registry, and the neutral batch."""
