"""The decode-context-parallel (DCP) group that attention implementations ask for.

Communication itself belongs to the frameworks; this holds only who we are in the group, as vLLM's
`vllm.distributed.parallel_state.get_dcp_group` does.
"""

from dataclasses import dataclass
from typing import Any

_DCP: "DCPGroup | None" = None


@dataclass(frozen=True)
class DCPGroup:
    """One rank's view of the group. `interleave` consecutive tokens go to a rank before the next one takes over.

    `process_group` is the framework's own handle (a torch `ProcessGroup`, a JAX mesh axis name); the core never looks
    into it.
    """

    world_size: int
    rank_in_group: int
    interleave: int = 1
    process_group: Any = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank_in_group < self.world_size or self.interleave < 1:
            raise ValueError(f"{self}: need world_size >= 1, 0 <= rank_in_group < world_size, interleave >= 1")


def get_dcp_group() -> DCPGroup:
    """The current group. Raises AssertionError while none is set, which callers read as "no DCP"."""
    if _DCP is None:  # raised, not asserted: `python -O` would hand out None
        raise AssertionError("decode context parallel group is not initialized")
    return _DCP


def set_dcp_group(group: DCPGroup | None) -> None:
    """Set (or, with None, unset) the process's group; implementations built afterwards see it."""
    global _DCP
    _DCP = group


def world_size() -> int:
    """Ranks in the current group; 1 while none is set."""
    return 1 if _DCP is None else _DCP.world_size
