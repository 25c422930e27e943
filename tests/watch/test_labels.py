"""Acceptance by label: apart, over time, in bounded memory; changes are told once."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest

from outrider import SamplingParams
from outrider.errors import BadInput
from outrider.types import NONE, Committed, Finish, StepEvent
from outrider.watch.labels import BUCKETS, MOST, OTHER, UNLABELLED, Labels

from .. import tiny


def item(label: str | None, hits: int, drafted: int = 3, late: bool = False) -> Committed:
    request = tiny.request([1], SamplingParams(temperature=0.0, label=label))
    origins = (0,) * hits + (NONE,)
    shape = ((5,) * len(origins), origins, drafted, hits, (1,) * drafted, (), "", Finish.RUNNING)
    return Committed(request, *shape, late=late)


def event(items: Sequence[Committed]) -> StepEvent:
    return StepEvent(tuple(items), draft_seconds=0.0, verify_seconds=0.1, seconds=0.1, prefill=0, rows=1)


def test_labels_are_counted_apart_and_late_rounds_not_at_all():
    labels = Labels(lambda: 7.0)
    labels.observe(event([item("code", 3), item("poetry", 0), item(None, 1, drafted=0), item("code", 3, late=True)]))
    assert list(labels) == ["code", "poetry", UNLABELLED]
    [period] = labels["code"].history.periods
    assert (period.begun, period.rounds, period.tokens, period.drafted, period.accepted) == (7.0, 1, 4, 3, 3)
    assert labels["code"].recent == 1.0 and labels["poetry"].recent == 0.0
    assert labels[UNLABELLED].history.periods[0].first == 0


def test_memory_is_bounded_whatever_comes():
    labels = Labels()
    for i in range(3 * MOST):
        labels.observe(event([item(f"label {i}", 1)]))
    assert len(labels) == MOST + 1 and sum(p.rounds for p in labels[OTHER].history.periods) == 2 * MOST
    labels.observe(event([item(None, 1)]))
    assert labels[UNLABELLED].history.total.rounds == 1, "a flood of labels leaves those without one where they belong"
    one = item("label 0", 2)
    for _ in range(5000):
        labels.observe(event([one]))
    history = labels["label 0"].history
    assert len(history.periods) <= BUCKETS and sum(p.rounds for p in history.periods) == 5001
    assert sum(p.accepted for p in history.periods) == 10_001


def test_a_change_is_logged_once_with_the_label(caplog):
    labels, dice = Labels(), random.Random(1)
    right, wrong = item("code", 1), item("code", 0)
    with caplog.at_level(logging.INFO, "outrider.watch"):
        for chance in (0.8, 0.2):
            for _ in range(600):
                labels.observe(event([right if dice.random() < chance else wrong]))
    [record] = caplog.records
    assert record.fields["label"] == "code" and record.fields["before"] > 0.7 > 0.4 > record.fields["after"]
    assert labels["code"].drift.alarms == 1


@pytest.mark.parametrize("label", ["", " x", "a\nb", "x" * 65, 7])
def test_what_cannot_be_a_label(label):
    with pytest.raises(BadInput, match="label must be"):
        SamplingParams(label=label)
