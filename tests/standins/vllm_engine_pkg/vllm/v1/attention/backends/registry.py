"""vLLM's registry, of two members."""

import importlib
from enum import Enum


class AttentionBackendEnum(Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    CUSTOM = None

    def get_path(self, include_classname=True):
        path = _OVERRIDES.get(self, self.value)
        if not path:
            raise ValueError(f"Backend {self.name} must be registered before use.")
        return path

    def get_class(self):
        module, _, name = self.get_path().rpartition(".")
        return getattr(importlib.import_module(module), name)

    def is_overridden(self):
        return self in _OVERRIDES

    def clear_override(self):
        _OVERRIDES.pop(self, None)


_OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    _OVERRIDES[backend] = class_path
    return lambda cls: cls
