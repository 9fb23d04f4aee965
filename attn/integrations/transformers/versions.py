"""Supported and installed versions of transformers."""

#: The oldest supported transformers, and the oldest whose continuous batching reads a window's keys correctly.
OLDEST, WINDOWS_IN_PAGES = (5, 4), (5, 16)
#: The oldest whose CUDA graphs of continuous batching suit every step that they are replayed for: older ones keep the largest
#: length of the step that was captured. The oldest that stores a layer's keys and values in one tensor.
GRAPHS, JOINED = (5, 6), (5, 18)


def installed() -> tuple[int, int]:
    """Return (major, minor) of the installed transformers."""
    from transformers import __version__

    major, minor, *_ = __version__.split(".")
    return int(major), int(minor)


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
