"""Programs told apart in a device's trace."""

import pytest

from pallas import benchmark, timing


def test_programs_are_parted_at_the_widest_gaps():
    first, second, third = [(0.0, 10.0), (11.0, 30.0), (12.0, 20.0)], [(100.0, 130.0), (131.0, 140.0)], [(300.0, 305.0)]
    parted = timing.part_programs(first + second + third, 3)
    assert parted == [first, second, third]
    assert [timing.elapsed(program) for program in parted] == [30, 40, 5]
    assert [timing.idle_share(program) for program in parted] == [1 / 30, 1 / 40, 0]
    assert timing.part_programs(first, 1) == [first]


def test_a_program_that_waited_for_the_host_is_taken_again(monkeypatch):
    late, prompt = [(0.0, 10.0), (90.0, 100.0)], [(0.0, 10.0), (11.0, 21.0)]
    takes = iter([late, late, prompt])
    monkeypatch.setattr(timing, "_take", lambda run, carry, programs: (carry, next(takes)))
    assert timing.device_call_us(lambda carry: carry, 1.0, 3, programs=1) == pytest.approx(21 / 3 / 1e3)
    assert next(takes, None) is None


def test_nobody_traces_while_the_clock_runs(monkeypatch):
    held = []
    monkeypatch.setattr(timing, "_take", lambda *_: (held.append(timing.TURN.locked()), (1.0, [(0.0, 1.0)]))[1])
    timing.device_call_us(lambda carry: carry, 1.0, 1, programs=1)

    class Function:
        def lower(self):
            held.append(timing.TURN.locked())
            return self

        def compile(self):
            held.append(timing.TURN.locked())
            return lambda: 1.0

    assert benchmark.compiled({"one": (Function(), ())})["one"]() == 1.0
    assert held == [True, True, False]


def test_a_device_without_kernels_is_an_error():
    with pytest.raises(RuntimeError, match="0 kernels of 2 programs"):
        timing.device_call_us(lambda carry: carry, 1.0, 1, programs=2)
