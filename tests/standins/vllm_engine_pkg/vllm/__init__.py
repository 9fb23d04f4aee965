"""vLLM's attention interface, without vLLM: a regular package, so that it comes before one that is installed."""
