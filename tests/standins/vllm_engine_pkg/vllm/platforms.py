"""vLLM's CPU platform: it selects its own backend, whatever was requested."""

from vllm.v1.attention.backends.registry import AttentionBackendEnum


class CpuPlatform:
    def is_cpu(self):
        return True

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return AttentionBackendEnum.CPU_ATTN.get_path()


current_platform = CpuPlatform()
