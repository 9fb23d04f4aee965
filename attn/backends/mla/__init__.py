"""Multi-head latent attention: the framework-neutral part."""
