"""vLLM's registry, of two members."""

import importlib
from enum import Enum


class AttentionBackendEnum(Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    CUSTOM = None

    @classmethod
    def register(cls, name, value):
        if name in cls._member_map_:
            raise ValueError(f"Backend {name} already exists in {cls.__name__}.")
        if not name.isidentifier():
            raise ValueError(f"Invalid or reserved backend name: {name}")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        setattr(cls, name, member)
        cls._member_map_[name] = cls._value2member_map_[value] = member
        cls._member_names_.append(name)
        return member

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
