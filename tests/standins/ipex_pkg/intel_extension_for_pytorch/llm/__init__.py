from intel_extension_for_pytorch.llm import functional as functional
from intel_extension_for_pytorch.llm import modules as modules
