"""Launch rules: what they promise for any shape and architecture. Under a second."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attn.torch.kernels.launch import (
    SHARED_MEMORY,
    decode_launch,
    long_decode,
    power_of_two,
    prefill_launch,
    prefill_programs,
    split_size,
)


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


def test_a_long_sequence_alone_has_a_launch_of_its_own() -> None:
    launch, split = long_decode("sm_90", 4, 128, 2, 2, 8, 32768, 132) or (None, 0)
    assert launch is not None and split % launch.block_n == 0
    assert -(-32768 // split) * 8 <= 2 * 132, "all programs at once"
    for arch, units, keys in (("sm_80", 8, 32768), ("sm_90", 16, 32768), ("sm_90", 8, 8192)):
        assert long_decode(arch, 4, 128, 2, 2, units, keys, 132) is None


def test_a_mixed_batch_shares_the_device_where_that_is_shorter() -> None:
    second = 480e12, 4e12  # of a prefill, of a decode, on the whole device
    assert prefill_programs(0.13e-3 * second[0], 0.25e-3 * second[1], 132) in range(60, 80)
    assert prefill_programs(0.2e-3 * second[0], 0.03e-3 * second[1], 132) == 132
    assert prefill_programs(second[0], 0.0, 132) == 132
