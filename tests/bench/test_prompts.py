"""The prompts that come with the package: enough of each task, all different, none too short or too long, in good order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench import workloads
from outrider.bench.conversation import Prompt

DATA = Path(workloads.__file__).parent / "data"
TASKS = ("question", "creative", "chat", "support", "math", "turns")


def said(prompt: Prompt) -> str:
    return "\n".join((*(m["content"] for m in prompt.messages), *prompt.later))


@pytest.mark.parametrize("task", TASKS)
def test_sixty_of_each(task: str) -> None:
    lines = (DATA / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 60 and all(set(json.loads(line)) < {"prompt", "messages", "turns"} for line in lines)
    found = workloads.find(task).prompts
    assert len({said(p)[:40] for p in found}) == len(found) >= len(lines)
    words = [len(said(p).split()) for p in found]
    assert min(words) >= 4 and max(words) <= 400 and len(set(words)) > 15
    assert all(p.messages[-1]["role"] == "user" and not p.raw for p in found)


def test_all_tasks_differ_from_each_other() -> None:
    every = [p for w in workloads.built_in().values() for p in w.prompts]
    assert len({p.sha256 for p in every}) == len({said(p)[:40] for p in every}) == len(every)


def test_some_are_longer_than_others() -> None:
    mean = {task: sum(len(said(p)) for p in workloads.find(task).prompts) / len(workloads.find(task).prompts) for task in TASKS}
    assert mean["support"] > 3 * mean["creative"] and mean["math"] > mean["chat"]


def test_support_brings_its_template() -> None:
    assert all(len(said(p).split()) >= 60 for p in workloads.find("support").prompts)


def test_turns_build_on_each_other() -> None:
    prompts = workloads.find("turns").prompts
    assert {len(p.later) for p in prompts} == {1, 2, 3}
    assert all(words.strip() for p in prompts for words in p.later)
    assert not any(p.later for task in TASKS if task != "turns" for p in workloads.find(task).prompts)
