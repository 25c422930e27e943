"""Five tasks of sixty prompts: all there, all different, long enough to mean something and short enough for a small model."""

from __future__ import annotations

import json
from importlib import resources

import pytest

TASKS = ("code", "edit", "summarise", "extract", "translate")
WORDS = {"code": (25, 120), "edit": (80, 250), "summarise": (120, 300), "extract": (45, 250), "translate": (25, 150)}
BYTES = 4096
"""Half the context of the embedded model. A byte-level tokenizer never makes more tokens than a text has bytes, so this leaves
the other half to the chat template and the answer."""


def prompts(task: str) -> list[str]:
    text = (resources.files("outrider.bench") / "data" / f"{task}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text.removesuffix("\n").split("\n")]


@pytest.mark.parametrize("task", TASKS)
def test_sixty_prompts_within_bounds(task: str) -> None:
    found = prompts(task)
    assert len(found) == 60
    words = [len(p.split()) for p in found]
    assert WORDS[task][0] <= min(words) and max(words) <= WORDS[task][1]
    assert max(len(p.encode()) for p in found) <= BYTES
    assert all(p == p.strip() and p.count("```") % 2 == 0 for p in found[10:])


def test_no_two_prompts_are_alike() -> None:
    every = [p for task in TASKS for p in prompts(task)]
    assert len({p[:40] for p in every}) == len(every)
    opening = [" ".join(p.lower().split()[:3]) for p in every]
    assert max(map(opening.count, opening)) <= 5
    runs = [{tuple(w[i : i + 12]) for i in range(len(w) - 11)} for w in (p.split() for p in every)]
    assert sum(map(len, runs)) - len(set().union(*runs)) <= 10


def test_edits_bring_a_file_of_ten_to_forty_lines() -> None:
    for prompt in prompts("edit"):
        snippet = [line for line in prompt.split("```")[1].strip().split("\n") if line]
        assert 10 <= len(snippet) - 1 <= 40, prompt[:40]


def test_translations_speak_many_languages() -> None:
    letters = [sum(not c.isascii() and c.isalpha() for c in p) / len(p) for p in prompts("translate")]
    assert sum(share > 0.005 for share in letters) >= 20 and sum(share > 0.5 for share in letters) >= 3
