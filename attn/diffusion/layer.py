"""Arguments and backend choice of the diffusion layers of both frameworks; the choice is made in the constructor."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from attn.arguments import check_heads
from attn.diffusion.backends.abstract import DiffusionAttentionBackend, DiffusionAttentionImpl
from attn.diffusion.selector import DiffusionAttentionConfig, Name, make_diffusion_request, select_diffusion
from attn.selection.platforms import Platform
from attn.selection.verdicts import Selection


class BaseDiffusionAttention:
    """Dense attention for image and video models: takes and returns [B, S, H, D].

    num_heads, head_size, softmax_scale (1 / sqrt(head_size) when None), causal (bottom-right), num_kv_heads.
    role: what the layer does, any name; category: self, cross or joint (the role if it is one of these).
    config: backends by role, category and default; backend: one by name, overriding them. Both are used or rejected.
    error_budget: allowed relative RMS error of an approximate backend; 0 excludes approximate backends.
    features: further requirements, such as `["mask"]` for masks beyond key padding or `["backward"]`.
    key_mask: whether calls will mask out keys (`kv_lens`, masks [B, M]); excludes backends that cannot.

    `selection` is the decision with all its reasons; print it. Raises ValueError for invalid arguments and `UnsupportedError`
    with every candidate's reasons if no backend serves the layer.
    """

    framework: ClassVar[str]
    selection: Selection
    backend: type[DiffusionAttentionBackend]
    impl: DiffusionAttentionImpl

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_kv_heads: int | None = None,
        *,
        role: str = "self",
        category: str | None = None,
        dtype: Any = None,
        config: DiffusionAttentionConfig | None = None,
        backend: Name | None = None,
        error_budget: float = 0.0,
        features: Any = (),
        key_mask: bool = False,
        prefix: str = "",
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_size = check_heads(num_heads, num_kv_heads, head_size)
        request = make_diffusion_request(
            head_size,
            self._default_dtype() if dtype is None else dtype,
            features=features,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            error_budget=error_budget,
            causal=causal,
            key_mask=key_mask,
        )
        named: dict[str, Any] = {"role": role, "category": category, "config": config, "backend": backend}
        # Kept for another choice: a torch layer selects again when its module is cast, or is called on another platform, under
        # the same conditions but for that.
        self._select: Callable[..., Selection] = functools.partial(select_diffusion, framework=self.framework, **named)
        self._shape = (num_heads, head_size, softmax_scale, causal, num_kv_heads, prefix)
        self._choose(request)

    def _choose(self, request: Any, platform: Platform | None = None) -> None:
        """Select the backend for a request, and make its implementation. platform: None is the framework's current one."""
        selection = self._select(request, platform=platform)
        impl = self._impl_of(selection)
        # together: a constructor that raises leaves a layer that is cast as it was
        self.backend, self.selection, self.impl = selection.require(), selection, impl

    def _impl_of(self, selection: Selection) -> DiffusionAttentionImpl:
        """Make the implementation of what was selected. Raises `UnsupportedError` with all reasons if nothing was."""
        impl: DiffusionAttentionImpl = selection.require().get_impl_cls()(*self._shape)
        return impl

    @staticmethod
    def _default_dtype() -> Any:
        """Return the dtype of a layer created without one."""
        raise NotImplementedError
