"""The configuration that vLLM makes a model under; here there is none."""


def get_current_vllm_config_or_none():
    return None
