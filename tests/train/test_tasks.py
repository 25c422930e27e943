"""Programming tasks: many, the same for the same seed, and nothing of what the benchmark asks."""

from __future__ import annotations

import dataclasses
import random
import re

from outrider.bench.workloads import built_in
from outrider.train import subjects
from outrider.train.data import Writer
from outrider.train.snippets import FAULTY, SOUND
from outrider.train.tasks import KINDS, task

from .conftest import WRITING

RUN = 8
"""Words in a row that would be somebody's own."""


def made(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [task(rng) for _ in range(count)]


def runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def test_many_differ_and_a_seed_tells_which():
    found = made(4000)
    assert len(set(found)) > 3000 and made(50) == found[:50] != made(50, seed=1)
    assert all(text.strip() == text and "NOUN" not in text and "FIELD" not in text and "{group}" not in text for text in found)


def test_kinds_all_come_and_lists_hold_each_thing_once():
    rng = random.Random(0)
    assert all(maker(rng) for maker, _ in KINDS)
    for name in ("FUNCTIONS", "PROGRAMS", "STRUCTURES", "CONCEPTS", "TABLES", "QUERIES", "SHELL", "SET_UP", "ANALYSES", "NOUNS"):
        things = getattr(subjects, name)
        assert len(set(things)) == len(things), name
    assert len(set(SOUND + FAULTY)) == len(SOUND) + len(FAULTY)


def test_nothing_of_them_is_in_the_benchmark():
    """Not one run of eight words."""
    asked = set[tuple[str, ...]]()
    for workload in built_in().values():
        for prompt in workload.prompts:
            for message in prompt.messages:
                asked |= runs(message["content"])
    assert len(asked) > 10_000
    for seed in range(3):
        for text in made(5000, seed):
            assert not runs(text) & asked, text


def test_the_share_that_was_asked_for(llm, tmp_path):
    half = Writer(llm, dataclasses.replace(WRITING, code=0.5), tmp_path, "f")
    prompts = half._invent(random.Random(7))
    rng = random.Random(7)
    want = [half._turn(task(rng)) for _ in range(WRITING.batch // 2)]
    assert prompts[: len(want)] == want and len(prompts) > len(want)
    none = Writer(llm, WRITING, tmp_path, "f")
    assert none._invent(random.Random(7)) != prompts
