"""Launch rules: what they promise for any shape and architecture. Under a second."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attn.torch.kernels.launch import SHARED_MEMORY, decode_launch, power_of_two, prefill_launch, split_size


@pytest.mark.parametrize("arch", [*SHARED_MEMORY, "interpreter", "sm_999"])
def test_tiles_hold_a_group(arch: str) -> None:
    for group in (1, 3, 8, 71, 256):
        for head_size in (32, 96, 256):
            for itemsize, stored in ((2, 1), (2, 2), (4, 4)):
                for rule in (decode_launch, prefill_launch):
                    launch = rule(arch, group, head_size, itemsize, stored)
                    assert launch.block_m >= group
                    assert launch.block_m % 16 == 0 and launch.block_n % 16 == 0


def test_splits_cover_the_keys_and_fill_an_idle_device() -> None:
    for units in (1, 8, 512):
        for keys in (1, 100, 4096, 131072):
            size = split_size(units, keys, 32, 132)
            assert size % 32 == 0 and 1 <= -(-keys // size) <= 128
    assert split_size(512, 4096, 32, 132) >= 4096, "a full device needs no split"
    assert 16 <= 32768 // split_size(8, 32768, 32, 132) <= 64, "eight programs leave most of it idle"


def test_power_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
