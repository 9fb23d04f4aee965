"""NO_ATTENTION, the placeholder backend as a member of the registry."""

from attn.backends.placeholder_attn import PlaceholderAttentionBackend
from attn.capabilities import Device, Request


class NoAttentionBackend(PlaceholderAttentionBackend):
    """Serves attention-free models on every platform; rejects every request for attention."""

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        # Without a record every request would be accepted, and an automatic choice could end here.
        return ["serves attention-free models only (is_attention_free=True)"]
