"""Programs told apart in a device's trace."""

import pytest

from pallas import timing


def test_programs_are_parted_at_the_widest_gaps():
    first, second, third = [(0.0, 10.0), (11.0, 30.0), (12.0, 20.0)], [(100.0, 130.0), (131.0, 140.0)], [(300.0, 305.0)]
    assert timing.program_times(first + second + third, 3) == [30, 40, 5]
    assert timing.program_times(first, 1) == [30]


def test_a_device_without_kernels_is_an_error():
    with pytest.raises(RuntimeError, match="0 kernels of 2 programs"):
        timing.device_call_us(lambda carry: carry, 1.0, 1, programs=2)
