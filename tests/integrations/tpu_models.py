"""Greedy text of tiny models of transformers whose attention is tpu-inference's call, over the engine's pages and batches.

The models are `tiny_transformers`'s: their layers call this module's implementation, which packs no masks: a layer's rules and
the runner's batch are all that the engine knows. Text is compared with eager's, token for token.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from attn.integrations import tpu_inference as integration
from tests.integrations import tpu_interface
from tests.integrations.tiny_transformers import SMALL, image_model, sharpened

NAME, ROWS, NEW = "tpu_engine", 48, 8
#: Prompts by length, where images are (first token, number of tokens), and how many tokens of the second are in the first step.
LENGTHS, IMAGES, FIRST = (29, 23), (((4, 9), (18, 7)), ((9, 12),)), 8


class Model(NamedTuple):
    """A model, the compiled calls of its layers, its kinds of tokens as eager takes them, and the chunk of a layer, if any."""

    model: Any
    calls: dict[Any, Any]
    kinds: str | None = None
    chunk: Any = lambda module: None


def gemma3() -> Model:
    """Every other layer has a window, which does not cut images; images are tokens, so that no tower is needed."""
    return Model(image_model("gemma3"), {}, "token_type_ids")


def llama4() -> Model:
    """Layers with rotary embeddings have chunks of 6, shorter than every prompt."""
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **{**SMALL, "head_dim": 64, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 6},
        no_rope_layers=[1, 0],
        interleave_moe_layer_step=2,
        attn_implementation="eager",
    )
    model = sharpened(transformers.Llama4ForCausalLM(config))
    return Model(model, {}, None, lambda module: 6 if module.use_rope else None)


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.integers(2, 60, n).tolist() for n in LENGTHS]


@torch.no_grad()
def eager(served: Model) -> list[list[int]]:
    """Greedy tokens by transformers' eager attention, each prompt alone."""
    served.model.set_attn_implementation("eager")
    found = []
    for ids, images in zip(prompts(), IMAGES, strict=True):
        kinds = torch.zeros(1, len(ids), dtype=torch.long)
        for start, n in images:
            kinds[0, start : start + n] = 1
        more = {} if served.kinds is None else {served.kinds: kinds}
        out = served.model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, **more)
        found.append(out[0, len(ids) :].tolist())
    return found


class Runner(NamedTuple):
    """What the engine's runner knows of a step."""

    requests: dict[str, Any]
    mesh: Any
    model_config: Any
    step: Any


def batch_of(first: list[int], new: list[int], images: bool, mesh: Any, model: str = "gemma3_text", parts: int = 12) -> Any:
    """The batch of a step that the engine's runner makes. first: the position of each request's first new token; parts: what a
    step has."""
    from attn.integrations._tpu_inference import _with_images

    plain, _ = tpu_interface.metadata(new, [a + n for a, n in zip(first, new, strict=True)])
    names = [f"request {r}" for r in range(len(new))]
    features = [
        [
            SimpleNamespace(
                modality="image", mm_position=SimpleNamespace(extract_embeds_range=lambda a=a, n=n: [(a, a + n - 1)])
            )
            for a, n in own
        ]
        for own in IMAGES
    ]
    requests = {
        name: SimpleNamespace(num_computed_tokens=at, mm_features=own)
        for name, at, own in zip(names, first, features, strict=False)
    }
    config = SimpleNamespace(is_mm_prefix_lm=images, hf_text_config=SimpleNamespace(model_type=model))
    step = (np.zeros(ROWS), None, plain, *[None] * 5, {0: names}, ROWS, None, None)[:parts]
    scheduled = SimpleNamespace(num_scheduled_tokens=dict(zip(names, new, strict=True)))
    prepare = _with_images(lambda runner, scheduled: runner.step)
    return prepare(Runner(requests, mesh, config, step), scheduled)[2]


@torch.no_grad()
def engine(served: Model, layer: Any, images: bool = True, backend: Any = None) -> list[list[int]]:
    """Greedy tokens with the engine's call: prompts in two steps, then both requests decode in one batch.

    layer: (module, its window, its chunk) -> function (q, k, v, cache, batch, mesh) -> (cache, output). images: whether the
    runner says where images are. backend: whose cache it is, if not this library's.
    """
    model, mesh, caches, batch = served.model, tpu_interface.mesh(), {}, None

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **more: Any) -> Any:
        index, rows = module.layer_idx, query.shape[2]
        if (layer, index) not in served.calls:
            served.calls[layer, index] = jax.jit(
                layer(module, more.get("sliding_window"), served.chunk(module)), static_argnums=5
            )
        if index not in caches:
            shape = (backend or integration.create()).get_kv_cache_shape(
                tpu_interface.BLOCKS, tpu_interface.PAGE, key.shape[1], key.shape[3], jnp.dtype("float32")
            )
            caches[index] = jnp.zeros(shape)
        q, k, v = (np.pad(x[0].transpose(0, 1).numpy(), ((0, ROWS - rows), (0, 0), (0, 0))) for x in (query, key, value))
        caches[index], out = served.calls[layer, index](q, k, v, caches[index], batch, mesh)
        return torch.from_numpy(np.array(out[:rows]))[None], None

    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    model.set_attn_implementation(NAME)
    tokens, made, done = prompts(), [[] for _ in LENGTHS], [0, 0]
    for step in range(NEW + 1):
        new = [LENGTHS[0] if not step else 1, FIRST if not step else LENGTHS[1] - FIRST if step == 1 else 1]
        batch = batch_of(done, new, images, mesh)
        ids = [own[a : a + n] for own, a, n in zip(tokens, done, new, strict=True)]
        at = [torch.arange(a, a + n) for a, n in zip(done, new, strict=True)]
        logits = model(torch.tensor([sum(ids, [])]), position_ids=torch.cat(at)[None], use_cache=False).logits[0]
        done = [a + n for a, n in zip(done, new, strict=True)]
        for r, end in enumerate(np.cumsum(new)):
            if done[r] == len(tokens[r]):
                made[r].append(int(logits[end - 1].argmax()))
                tokens[r].append(made[r][-1])
    return [own[:NEW] for own in made]
