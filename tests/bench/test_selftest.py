"""The self-test must miss what is not there and say so; its power is measured, not assumed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from outrider.bench import exact, faults, selftest


def test_a_check_without_a_fault_misses() -> None:
    plant = selftest.plants()[0]
    found = selftest.run(selftest.Plant("nothing", nullcontext, plant.check), tries=2)
    assert found.clean and not found.caught and not found.ok and found.seeds == 2


def test_a_check_that_always_complains_is_not_clean() -> None:
    found = selftest.run(selftest.Plant("noisy", nullcontext, lambda seed: True))
    assert found.caught and not found.clean and not found.ok


def test_there_are_enough_faults_and_all_are_explained() -> None:
    assert len(faults.faults()) >= 20
    assert [p.name for p in selftest.plants()] == [*faults.faults(), *(f"law: {name}" for name in exact.planted())]
    assert all(fault.__doc__ for fault in faults.faults().values())
    assert (1 - selftest.RATE) ** selftest.TRIES < 0.01


def test_faults_are_taken_out_again() -> None:
    plant = next(p for p in selftest.plants() if p.name == "redraw after mismatch")
    with selftest.vectorised():
        with plant.fault():
            assert plant.check(0)
        assert not plant.check(0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", selftest.plants(), ids=lambda plant: plant.name)
def test_power(plant: selftest.Plant) -> None:
    """Of 40 seeds, so many that the true rate is RATE or more with 0.999 confidence."""
    with selftest.vectorised(), plant.fault():
        assert sum(selftest.noticed(plant.check, 100 + seed) for seed in range(40)) >= 28
