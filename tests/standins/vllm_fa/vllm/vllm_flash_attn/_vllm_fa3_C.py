"""In place of vLLM's build of FlashAttention 3: that it can be imported is all that is asked."""
