"""Texts that several processes write: the same as those of one, whatever becomes of the others."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest

from outrider.train import crew
from outrider.train.corpus import Text, load, read_texts, texts, write_texts
from outrider.train.crew import Crew, Place, assist
from outrider.train.data import Writer
from outrider.train.run import Plan, Training

from .conftest import WRITING

SEVERAL = dataclasses.replace(WRITING, tokens=1500, code=0.25)


def training(model, path, **changes):
    made = Plan("draft_model:layers=1", model, texts=path, writing=SEVERAL, device="cpu", **changes)
    return Training(made, lambda what, share: None, lambda sign: None)


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("alone")
    assert training(model, path).write()
    return load(path)


@pytest.mark.slow
def test_three_write_what_one_would(model, tmp_path, alone, monkeypatch):
    own = []
    monkeypatch.setattr(Writer, "round", lambda self, number, was=Writer.round: own.append(number) or was(self, number))
    assert training(model, tmp_path, writers=3).write()
    found = load(tmp_path)
    assert found.manifest == alone.manifest and list(texts(found)) == list(texts(alone))
    assert own == [], "rounds came from the others"


@pytest.mark.slow
def test_helpers_that_fail_are_done_without(model, tmp_path, alone, monkeypatch):
    monkeypatch.setattr(crew, "_work", os._exit)  # with a plan for a status, which fails at once
    assert training(model, tmp_path, writers=2).write()
    assert list(texts(load(tmp_path))) == list(texts(alone))


def test_a_helper_writes_every_nth_round_and_not_too_far_ahead(llm, tmp_path, monkeypatch):
    writer = Writer(llm, SEVERAL, tmp_path, "f")
    monkeypatch.setattr(writer, "round", lambda number: [Text((1, number + 2), 1)])
    monkeypatch.setattr(crew, "_AHEAD", 2)
    place, asked = Place(tmp_path, writer.identity), iter([True] * 9)
    write_texts(place.path(3), [])
    assist(writer, 1, 2, lambda: next(asked, False))
    assert sorted((tmp_path / crew.ROUNDS).iterdir()) == [place.path(1), place.path(3)]
    assert read_texts(place.path(1)) == [Text((1, 3), 1)] and read_texts(place.path(3)) == []


def test_rounds_that_were_made_otherwise_lie_elsewhere(llm, tmp_path):
    one, other = (Place(tmp_path, Writer(llm, w, tmp_path, "f").identity) for w in (SEVERAL, WRITING))
    assert one.path(0) != other.path(0) and one.path(0) == Place(tmp_path, Writer(llm, SEVERAL, tmp_path, "f").identity).path(0)


def test_nobody_waits_beyond_the_time(llm, tmp_path, model):
    writer = Writer(llm, SEVERAL, tmp_path, "f")
    made = Crew(
        Plan("draft_model", model, texts=tmp_path, writing=SEVERAL, device="cpu", writers=2),
        Place(tmp_path, writer.identity),
        [],
        time.monotonic() - 1,
    )
    with made:
        assert made.source(writer, 1) is None
    assert not any(helper.is_alive() for helper in made.helpers.values())


def test_a_damaged_round_is_written_again(llm, tmp_path):
    writer = Writer(llm, SEVERAL, tmp_path, "f")
    place = Place(tmp_path, writer.identity)
    write_texts(place.path(0), [Text((1, 2), 1)])
    place.path(0).write_bytes(b"half a round")
    made = Crew(Plan("draft_model", "tiny", writing=SEVERAL), place, [], float("inf"))
    assert made.source(writer, 0) == writer.round(0)


def test_cards_by_the_names_that_are_visible(monkeypatch):
    monkeypatch.setenv(crew.VISIBLE, "2,5")
    assert crew.gpus() == ["2", "5"]
