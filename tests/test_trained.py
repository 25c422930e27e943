"""Drafters that were trained are found by the weights they were trained for."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch

from outrider import choice, registry, trained
from outrider.drafters import members, pick


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The user's place, in a package that ships nothing."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(trained, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "home"


def drafter(path, method="draft_model", fingerprint="f", tau=2.0):
    path.mkdir(parents=True)
    card = {"method": method, "fingerprint": fingerprint, "model": "m", "tau": tau}
    (path / trained.CARD).write_text(json.dumps(card))
    (path / trained.CONFIG).write_text("{}")
    return path


def test_home_goes_by_the_environment(monkeypatch):
    monkeypatch.setenv("OUTRIDER_HOME", "~/there")
    assert str(trained.home()) == os.path.expanduser("~/there")
    monkeypatch.delenv("OUTRIDER_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert str(trained.home()) == "/data/outrider"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert str(trained.home()) == os.path.expanduser("~/.local/share/outrider")


def test_the_best_that_fits_is_found_first(home, tmp_path):
    assert trained.entries() == []
    a, b = drafter(home / "drafters" / "a", tau=1.5), drafter(tmp_path / "b", tau=2.5)
    drafter(home / "drafters" / "c", fingerprint="g", tau=9.0)
    d = drafter(home / "drafters" / "d", method="other", tau=2.0)
    trained.enlist(a)
    trained.enlist(b)
    trained.enlist(b)
    assert [e.path for e in trained.find("f")] == [b, d, a]
    assert [e.path for e in trained.find("f", "draft_model")] == [b, a]
    assert trained.find("") == [] and trained.find("h") == []


def test_three_come_with_the_package():
    assert [e.method for e in trained.entries() if e.path.parent == trained.SHIPPED] == ["eagle", "draft_model", "medusa"]


def test_what_is_gone_or_damaged_is_passed_over(home, tmp_path):
    gone, bad, half = (drafter(tmp_path / name) for name in ("gone", "bad", "half"))
    for path in (gone, bad, half):
        trained.enlist(path)
    (home / "drafters" / "junk.json").write_text("{")
    (home / "drafters" / "empty").mkdir()
    (gone / trained.CARD).unlink()
    (half / trained.CONFIG).unlink()
    (bad / trained.CARD).write_text('{"method": "x"}')
    assert trained.entries() == []


def test_files_are_whole_or_as_they_were(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    trained.write_json(path, {"a": 1})
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        trained.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_auto_prefers_what_was_trained_with_what_repeats(tmp_path):
    found = trained.Trained("draft_model", tmp_path, "f", "m", 2.5)
    name, picked, why = pick(registry.names(), [found])
    assert (name, picked) == ("hybrid", found) and members(registry.names(), found) == "suffix+draft_model"
    assert "suffix where the text repeats itself" in why and "2.50 tokens per round" in why
    assert pick(["suffix"], [found])[:2] == ("suffix", None)
    name, picked, why = pick(["suffix", "draft_model"], [found])
    assert (name, picked) == ("draft_model", found) and "2.50 tokens per round" in why
    name, picked, why = pick(registry.names(), [replace(found, tau=1.1)])
    assert (name, picked) == ("suffix", None) and "only 1.10 tokens per round" in why
    assert pick(registry.names(), [found], card=True)[:2] == ("hybrid", found)
    name, picked, why = pick(registry.names(), [replace(found, tau=1.5)], card=True)
    assert (name, picked) == ("suffix", None) and "less than 1.6 does not pay here" in why


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_takes_lookups_and_the_best_that_was_trained(device, monkeypatch):
    monkeypatch.setattr(choice, "pick_device", torch.device)
    notices: list[str] = []
    made = choice.Choice("smollm2-135m-instruct", notices, device).drafter("auto")
    assert made.name == "hybrid" and "picked hybrid" in notices[-1] and "else eagle" in notices[-1]
    assert [m.drafter.name for m in made.members] == ["suffix", "eagle"]


def test_a_spec_may_lack_its_path():
    assert registry.lacks("draft_model:depth=3", "path")
    assert not registry.lacks("draft_model:path=x", "path")
    assert not registry.lacks("ngram", "path")
    made = registry.parse("draft_model:depth=3", {"path": "a,b=c"})
    assert made.config.path == "a,b=c" and made.depth == 3


def test_a_hybrid_may_lack_a_members_path():
    assert registry.lacks("hybrid:members=suffix+eagle(depth=3)", "path")
    assert not registry.lacks("hybrid:members=suffix+eagle(path=x)", "path")
    assert not registry.lacks("hybrid", "path") and registry.opens("hybrid:merge=yes", "members")
    made = registry.parse(
        "hybrid:members=suffix+draft_model(depth=3)", None, lambda spec: {"path": "a,b+c)"} if "draft" in spec else {}
    )
    assert [m.drafter.name for m in made.members] == ["suffix", "draft_model"]
    assert made.members[1].drafter.config.path == "a,b+c)" and made.members[1].drafter.depth == 3
