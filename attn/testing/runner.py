"""The base of the conformance drivers (`attn.torch.testing`, `attn.jax.testing`): arguments, layers and batches."""

from abc import abstractmethod
from typing import Any, ClassVar

from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import Feature
from attn.imports import resolve_obj_by_qualname
from attn.testing.bits import Array
from attn.testing.case import Case, Scale
from attn.testing.draw import Call, layer_arguments


class BaseRunner:
    """Runs calls on a backend class: `TorchRunner(backend, device)(call)`.

    `build` constructs the layer's implementation, `layer` the layer as a user does, and `open` a layer with a cache for several
    calls, each over a batch of its own or over that of `metadata`.
    """

    framework: ClassVar[str]
    backend: Any

    @abstractmethod
    def _array(self, values: Any) -> Any:
        """Copy a NumPy array or numbers to the device."""

    @abstractmethod
    def _dtype(self, name: str) -> Any:
        """Return the framework's dtype."""

    @abstractmethod
    def metadata(self, call: Call) -> Any:
        """Build the call's batch, for layers that share it."""

    @abstractmethod
    def _of_impl(self, call: Call) -> dict[str, Any]:
        """Return the arguments of an implementation that only this framework takes, or takes as arrays."""

    @abstractmethod
    def _of_latent_layer(self, call: Call) -> dict[str, Any]:
        """Return an MLA layer's up-projection and indexer."""

    @abstractmethod
    def _own_sinks(self, sinks: Array) -> Any:
        """Return sinks as a user passes them to a layer."""

    def build(self, call: Call) -> Any:
        """Return the implementation of the call's layer. Raises what its constructor raises."""
        impl = self.backend.get_impl_cls()(**{**layer_arguments(call), **self._of_impl(call)})
        # What the layer sets after it has made an implementation; the constructor does not take them.
        impl.need_to_return_lse_for_decode = call.case.lse
        impl.batch_invariant = Feature.BATCH_INVARIANT.value in call.case.features
        if (record := self.backend.capabilities) is not None:  # the same prefill backend, whatever the poison
            impl.prefill_features = record.features & {Feature.NAN_SAFE}
        return impl

    def layer(self, call: Call, **changes: Any) -> Any:
        """Return the call's layer as a user builds it, with some arguments changed. Raises what its constructor raises."""
        case = call.case
        declared = frozenset() if self.backend.capabilities is None else self.backend.capabilities.features
        arguments = {
            "num_heads": case.num_heads,
            "scale": case.scale,
            "kv_cache_dtype": case.kv_cache_dtype,
            "dtype": self._dtype(case.dtype),
            "block_size": case.block_size,
            "backend": self.backend.get_name(),
            # A backend may return the LSE without listing it in its record; `return_lse` below asks for it.
            "features": sorted(case.request().features & declared),
            "return_lse": case.lse,
            "k_scale": self._scale(case, case.k_scale),
        }
        if case.mla:
            sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            arguments |= {**dict(zip(sizes, case.mla, strict=True)), **self._of_latent_layer(call)}
        else:
            plain = layer_arguments(call)
            names = ("head_size", "num_kv_heads", "alibi_slopes", "sliding_window", "logits_soft_cap", "attn_type")
            arguments |= {key: plain[key] for key in (*names, "kv_sharing_target_layer_name")}
            # `layer_arguments` leaves them out where they are not set: a layer has a default of its own, which is then tested.
            arguments |= {key: plain[key] for key in ("chunk_size", "span_window") if key in plain}
            arguments |= {"sinks": None if call.sinks is None else self._own_sinks(call.sinks)}
            arguments |= {"v_scale": self._scale(case, case.v_scale)}
        layer = resolve_obj_by_qualname(f"attn.{self.framework}.{'MLA' if case.mla else ''}Attention")
        return layer(**{**arguments, **changes})

    def _scale(self, case: Case, scale: Scale) -> Any:
        """Return a scale as a user passes it: a number, a list, or an array on the device."""
        # Users pass scales in each of these ways; the seed decides, so that a case stays the same when it is repeated.
        return self._array(scale) if case.data_seed % 2 else list(scale) if isinstance(scale, tuple) else scale

    def _batch(self, call: Call) -> CommonAttentionMetadata:
        """Return the call's batch with copied arrays, of NumPy or on the device."""
        batch, arrays = call.writable_batch(), call.case.arrays
        if arrays == "numpy":
            return batch
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "tree_mask", "spans", "prefix")
        host = {name: getattr(batch, name) for name in names}
        device = {name: None if x is None else self._array(x) for name, x in host.items()}
        # "bare": without the host copies a backend must read the lengths from the device, or do without.
        mirrors = {} if arrays == "device" else {"query_start_loc_cpu": None, "seq_lens_cpu": None}
        return batch.replace(**device, **mirrors)
