"""Negative controls: bugs of the kind engines ship, planted one by one. The contract must catch every one of them.

The bugs and the comparisons that must notice them are the audit's own (`outrider.bench.faults`, `outrider.bench.selftest`): one
list serves both. What looks into the cache, which only tests can, is added here.
"""

from __future__ import annotations

import pytest

from outrider.bench import selftest
from outrider.bench.faults import faults
from outrider.types import Finish

from .. import tiny
from .drafters import every
from .test_state import assert_fresh
from .test_text import OPTIONS, PROMPTS, answers, requests


@pytest.mark.parametrize("plant", selftest.plants(), ids=lambda plant: plant.name)
def test_planted_fault_is_caught(plant: selftest.Plant) -> None:
    found = selftest.run(plant)
    assert found.clean, "the comparison complains about the right engine"
    assert found.caught


def test_stale_kv_is_seen_in_the_cache_too() -> None:
    with faults()["stale kv"]():
        world = tiny.World()
        engine = world.engine(every()["bushy"](answers("sampled")))
        made = requests(OPTIONS["sampled"], PROMPTS[:3])
        for request in made:
            engine.add(request)
        with pytest.raises(AssertionError, match="stale"):
            while engine.step() is not None:
                for request in (r for r in made if r.finish is Finish.RUNNING):
                    assert_fresh(world, request)
