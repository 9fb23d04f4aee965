"""Intel Extension for PyTorch, as far as its `llm` part (v2.8.0+cpu) goes."""

from intel_extension_for_pytorch import llm as llm
