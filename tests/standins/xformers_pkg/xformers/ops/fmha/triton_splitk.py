"""xformers 0.0.35's `ops/fmha/triton_splitk.py`: what its operator says that it does not take."""

from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask


class FwOp:
    NAME = "triton_splitKF"
    BLOCK_N = 64

    @classmethod
    def not_supported_reasons(cls, query, key, bias):
        reasons, size, queries = [], query.shape[-1], bias.q_seqinfo
        if not isinstance(bias, PagedBlockDiagonalPaddedKeysMask):
            return [f"attn_bias type is {type(bias)}"]
        if size not in {16, 32, 64, 128, 256, 512}:
            reasons.append(f"Embed dim {size} not supported")
        if queries.max_seqlen != queries.min_seqlen or queries.max_seqlen > 16:
            reasons.append("Variable query len is not supported for causal masks, nor more than 16")
        if key.shape[1] % bias.page_size:
            reasons.append("key.shape[1] should be divisible by the page size")
        if bias.page_size % cls.BLOCK_N:
            reasons.append("page size should be divisible by the block size")
        return reasons
