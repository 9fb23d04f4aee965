"""In place of vLLM's build of FlashMLA: that it can be imported is all that is asked."""
