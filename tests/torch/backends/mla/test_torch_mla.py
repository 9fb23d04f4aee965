"""A DeepSeek-V3-shaped model through the paged MLA path: token for token what dense attention says (about 12 s)."""

import math

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave  # noqa: E402

from attn.serving import Scheduler  # noqa: E402
from attn.torch import MLAAttention  # noqa: E402

VOCAB, NEW, PROMPTS = 97, 64, (5, 40, 23, 1)
H, L, DN, DR, DV = 4, 32, 24, 16, 40
BLOCK = 16


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=H,
        num_key_value_heads=H, first_k_dense_replace=2, q_lora_rank=48, kv_lora_rank=L, qk_nope_head_dim=DN,
        qk_rope_head_dim=DR, v_head_dim=DV, max_position_embeddings=256, attn_implementation="eager",
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config).eval()


class Paged:
    """The model's own weights and norms around `MLAAttention` layers and their paged caches."""

    def __init__(self, model, num_blocks: int, **choice) -> None:
        self.model = model.model
        self.head = model.lm_head
        self.layers = [
            MLAAttention(
                H, L, DN, DR, DV, layer.self_attn.kv_b_proj, layer.self_attn.scaling, block_size=BLOCK, dtype=torch.float32,
                **choice,
            )
            for layer in self.model.layers
        ]  # fmt: skip
        self.caches = [layer.new_kv_cache(num_blocks) for layer in self.layers]
        self.builder = self.layers[0].backend.get_builder_cls()(self.layers[0].kv_cache_spec)

    @torch.no_grad()
    def logits(self, step) -> torch.Tensor:
        metadata = self.builder.build(0, step.attn_metadata)
        positions = torch.from_numpy(step.positions)[None].long()
        x = self.model.embed_tokens(torch.from_numpy(step.token_ids).long())
        rotary = self.model.rotary_emb(x, positions)
        for block, attention, cache in zip(self.model.layers, self.layers, self.caches, strict=True):
            own = block.self_attn
            y = block.input_layernorm(x)
            query = own.q_b_proj(own.q_a_layernorm(own.q_a_proj(y))).view(len(x), H, DN + DR)
            kv_c, k_pe = own.kv_a_proj_with_mqa(y).split([L, DR], -1)
            turned = apply_rotary_pos_emb_interleave(query[None, ..., DN:].transpose(1, 2), k_pe[None, None], *rotary)
            query = torch.cat([query[..., :DN], turned[0][0].transpose(0, 1)], -1)
            out = attention(query, own.kv_a_layernorm(kv_c), turned[1][0, 0], cache, metadata)
            x = x + own.o_proj(out.flatten(1))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return self.head(self.model.norm(x)[torch.from_numpy(step.sample_rows).long()])


def dense(model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one sequence, attention written out unabsorbed."""
    x = model.model.embed_tokens(tokens)
    rotary = model.model.rotary_emb(x, torch.arange(len(tokens))[None])
    hidden = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for block in model.model.layers:
        own = block.self_attn
        y = block.input_layernorm(x)
        query = own.q_b_proj(own.q_a_layernorm(own.q_a_proj(y))).view(len(x), H, DN + DR).transpose(0, 1)
        kv_c, k_pe = own.kv_a_proj_with_mqa(y).split([L, DR], -1)
        q_pe, k_pe = apply_rotary_pos_emb_interleave(query[None, ..., DN:], k_pe[None, None], *rotary)
        nope, value = own.kv_b_proj(own.kv_a_layernorm(kv_c)).view(len(x), H, -1).transpose(0, 1).split([DN, DV], -1)
        key = torch.cat([nope, k_pe[0].expand(H, -1, -1)], -1)
        scores = torch.cat([query[..., :DN], q_pe[0]], -1) @ key.transpose(1, 2) / math.sqrt(DN + DR)
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        x = x + own.o_proj(out.transpose(0, 1).flatten(1))
        x = x + block.mlp(block.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))


@pytest.mark.parametrize("budget", [256, 20], ids=["whole prompts", "chunks"])
def test_greedy_tokens_are_those_of_dense_attention(model, budget):
    rng = np.random.default_rng(1)
    scheduler = Scheduler(32, BLOCK, vocab_size=VOCAB, max_model_len=256, token_budget=budget)
    requests = [scheduler.submit(rng.integers(0, VOCAB, n).tolist(), NEW) for n in PROMPTS]
    paged = Paged(model, 32, backend="TORCH_MLA")
    widest = 0
    while (step := scheduler.schedule()) is not None:
        widest = max(widest, step.attn_metadata.max_query_len)
        scheduler.commit(paged.logits(step).argmax(-1).tolist())
    assert widest > 16  # prefills were expanded, the rest absorbed
    for request in requests:
        tokens = torch.tensor(request.tokens)
        assert len(request.output) == NEW and len(set(request.output)) > 8
        with torch.no_grad():
            theirs, ours = model(tokens[None]).logits[0].argmax(-1), dense(model, tokens).argmax(-1)
        first = request.num_prompt_tokens - 1
        assert request.output == theirs[first:-1].tolist() == ours[first:-1].tolist()
