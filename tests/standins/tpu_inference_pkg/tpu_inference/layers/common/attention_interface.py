"""The call of both kinds of models. JAX models name no backend."""

from tpu_inference.layers.common.attention_backend import RPAAttentionBackend


def attention(
    kv_cache, q, k, v, attention_metadata, mesh, head_dim_original=None, sm_scale=None, attention_chunk_size=None, q_scale=None,
    k_scale=None, v_scale=None, sinks=None, update_kv_cache=True, use_causal_mask=None, shared_attention_metadata=None,
    attn_logits_soft_cap=None, decode_query_size=1, attention_backend=None,
):  # fmt: skip
    if head_dim_original is None:
        head_dim_original = q.shape[-1]
    if sm_scale is None:
        sm_scale = head_dim_original**-0.5
    md = attention_metadata
    if use_causal_mask is None:
        use_causal_mask = md.use_causal_mask
    shared_md = shared_attention_metadata if shared_attention_metadata is not None else md
    return (attention_backend or RPAAttentionBackend()).attention(
        kv_cache, q, k, v, md, shared_md, mesh, head_dim_original=head_dim_original, sm_scale=sm_scale,
        attention_chunk_size=attention_chunk_size, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, sinks=sinks,
        update_kv_cache=update_kv_cache, use_causal_mask=use_causal_mask, attn_logits_soft_cap=attn_logits_soft_cap,
        decode_query_size=decode_query_size,
    )  # fmt: skip
