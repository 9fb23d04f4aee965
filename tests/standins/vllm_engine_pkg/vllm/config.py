"""vLLM's current configuration of a model; the stand-in has none."""


def get_current_vllm_config_or_none():
    return None
