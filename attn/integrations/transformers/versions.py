"""Which transformers this integration is for, and which is installed."""

#: The oldest transformers whose interfaces these are, and the oldest whose continuous batching reads a window's keys right.
OLDEST, WINDOWS_IN_PAGES = (5, 4), (5, 16)


def installed() -> tuple[int, int]:
    """(major, minor) of transformers."""
    from transformers import __version__

    major, minor, *_ = __version__.split(".")
    return int(major), int(minor)


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
