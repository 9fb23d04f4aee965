"""The decode-context-parallel (DCP) group that attention implementations use.

The frameworks do the communication; this module only holds the process's rank in the group, as vLLM's
`vllm.distributed.parallel_state.get_dcp_group` does.
"""

from dataclasses import dataclass
from typing import Any

_DCP: "DCPGroup | None" = None


@dataclass(frozen=True)
class DCPGroup:
    """One rank's view of the group. A rank holds `interleave` consecutive tokens before the next rank takes over.

    `process_group` is the framework's handle (a torch `ProcessGroup`, a JAX mesh axis name); the core never uses it.
    """

    world_size: int
    rank_in_group: int
    interleave: int = 1
    process_group: Any = None

    def __post_init__(self) -> None:
        # Ranks and lengths are computed from these by division and modulus, which would give wrong keys, not an error.
        if self.world_size < 1 or not 0 <= self.rank_in_group < self.world_size or self.interleave < 1:
            raise ValueError(f"{self}: need world_size >= 1, 0 <= rank_in_group < world_size, interleave >= 1")


def get_dcp_group() -> DCPGroup:
    """Return the current group. Raises AssertionError if none is set, which callers interpret as "no DCP"."""
    if _DCP is None:  # raised, not asserted: under `python -O` an assert would return None
        raise AssertionError("decode context parallel group is not initialized")
    return _DCP


def set_dcp_group(group: DCPGroup | None) -> None:
    """Set (or, with None, unset) the process's group, for implementations built afterwards."""
    global _DCP
    _DCP = group


def world_size() -> int:
    """Return the number of ranks in the current group; 1 if none is set."""
    return 1 if _DCP is None else _DCP.world_size
