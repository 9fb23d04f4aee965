"""The mesh axes over which the engine shards a batch's rows and a layer's heads."""


class ShardingAxisName:
    ATTN_DATA = ("data", "attn_dp")
    ATTN_HEAD = ("model", "expert")
