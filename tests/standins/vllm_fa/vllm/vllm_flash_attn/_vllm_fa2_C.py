"""In place of vLLM's build of FlashAttention 2: that it can be imported is all that is asked."""
