"""What an engine watches without being asked: labels and gain, and nothing of them after a switch."""

from __future__ import annotations

from dataclasses import replace

from .conftest import PARAMS


def test_every_engine_counts_by_label_and_starts_anew_with_another_drafter(load):
    llm = load()
    results = llm.generate(["hello hello", "abcabcabc"], [PARAMS, replace(PARAMS, label="letters")])
    assert set(llm.watch.labels) == {"unlabelled", "letters"}
    period = llm.watch.labels["letters"].history.total
    stats = results[1].stats
    assert (period.tokens, period.drafted, period.accepted) == (stats.tokens, stats.drafted, stats.accepted)
    llm.switch("none")
    assert not llm.watch.labels


def test_the_speed_up_is_in_the_statistics_where_there_is_something_to_compare(load):
    assert load(draft="none").generate("hello hello", PARAMS)[0].stats.speedup is None
    llm = load()
    llm.generate("hello hello", replace(PARAMS, draft="none"))
    found = llm.generate("hello hello", replace(PARAMS, max_tokens=60))[0].stats
    assert found.speedup is not None and found.speedup > 0 and found.losing == llm.watch.gain.losing
