"""Building blocks for your own server, under either framework: block pool, scheduler and shape buckets.

    scheduler = Scheduler(num_blocks=1024, block_size=16, token_budget=256, max_num_reqs=16, max_model_len=2048)
    request = scheduler.submit(prompt, max_new_tokens=64)       # more may be submitted between steps
    while (step := scheduler.schedule()) is not None:
        logits = model(step.token_ids, step.positions, layer.build(step.attn_metadata))[step.sample_rows]
        scheduler.commit(logits.argmax(-1))                     # one token for each of step.sampled

`Scheduler` decides which tokens of which requests form the next batch. `BlockPool` counts the users of each cache block and
finds blocks by content. `Buckets` pads steps to a few shapes, so that JAX compiles few programs. All run on the host and import
no framework.
"""

from attn.imports import lazy

_FACE = {
    "BlockPool": "attn.serving.block_pool",
    "Buckets": "attn.serving.buckets",
    "GenerationRequest": "attn.serving.scheduler",
    "PoolError": "attn.serving.block_pool",
    "RequestError": "attn.serving.scheduler",
    "Scheduler": "attn.serving.scheduler",
    "Stats": "attn.serving.scheduler",
    "Step": "attn.serving.scheduler",
    "block_key": "attn.serving.block_pool",
}
__all__ = list(_FACE)
__getattr__, __dir__ = lazy(__name__, _FACE)
