"""The lightning indexer of DeepSeek Sparse Attention: selects the keys that each row attends (DeepSeek-V3.2-Exp, 2025).

A few light heads score every earlier token, I(t, s) = sum over heads i of w(t, i) relu(q(t, i) . k(s)), and sparse MLA attends
the top positions of a row. Implemented with plain torch operators, in float32, one request after another; the counterpart of
`attn.jax.kernels.xla_mla.lightning_indexer`. The order of equal scores may differ between implementations.
"""

import torch

#: Scores computed at once, heads included: 64 MiB.
_SCORES_AT_ONCE = 1 << 24


def lightning_indexer(
    query: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the `topk` best-scored positions per row. Returns (indices [T, topk] int32, scores [T, B * P] float32).

    query: [T, I, E]; weights: [T, I], including any scale of the model's; key_cache: [N, P, E], the index keys on the batch's
    pages; query_start_loc: [R + 1], seq_lens: [R], block_table: [R, B], int32. A row's positions come best first, padded with
    -1; scores past its own position are -inf. Lengths are fetched to the host.
    """
    page, columns = key_cache.shape[1], block_table.shape[1] * key_cache.shape[1]
    scores = torch.full((query.shape[0], columns), -torch.inf, dtype=torch.float32, device=query.device)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for r, total in enumerate(lens):
        request_rows = slice(starts[r], starts[r + 1])
        # rows of a request without keys keep their scores of -inf, and so indices of -1
        if request_rows.start == request_rows.stop or total == 0:
            continue
        keys = key_cache[block_table[r, : -(-total // page)].long()].flatten(0, 1)[:total].float()
        j = torch.arange(total, device=query.device)
        # rows at a time, so that memory does not grow with a prompt's length times its context
        step = max(1, _SCORES_AT_ONCE // (query.shape[1] * total))
        for first in range(request_rows.start, request_rows.stop, step):
            rows = slice(first, min(first + step, request_rows.stop))
            dots = torch.relu(query[rows].float() @ keys.T)
            logits = torch.bmm(weights[rows, None].float(), dots)[:, 0]
            # both ends are aligned: the last row is at the last position
            position = torch.arange(rows.start, rows.stop, device=query.device) - request_rows.stop + total
            scores[rows, :total] = torch.where(j <= position[:, None], logits, -torch.inf)
    # `topk` sorts, so that scores of -inf come last; a table may have fewer slots than are asked for
    best, indices = scores.topk(min(topk, columns), dim=1)
    indices = torch.where(best > -torch.inf, indices, -1).to(torch.int32)
    return torch.nn.functional.pad(indices, (0, topk - indices.shape[1]), value=-1), scores
