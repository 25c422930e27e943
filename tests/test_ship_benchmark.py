"""The commands that train the shipped drafters: what they train can be trained, and what comes back lands in the package."""

from __future__ import annotations

import json
import tarfile

import pytest
from benchmarks.gpu import ship

from outrider import trained
from outrider.train.run import method


@pytest.mark.parametrize("run", ship.RUNS, ids=lambda run: run.name)
def test_every_run_names_what_can_be_trained(run):
    assert method(run.spec)[0] == run.method


def test_a_drafter_is_taken_into_the_package(tmp_path, monkeypatch, capsys):
    was = trained.SHIPPED / "medusa"
    place = tmp_path / "shipped" / "medusa"
    place.mkdir(parents=True)
    (place / "old.safetensors").write_bytes(b"x")
    monkeypatch.setattr(ship, "SHIPPED", place.parent)
    with tarfile.open(tmp_path / "medusa.tar", "w") as tar:
        for file in sorted(was.iterdir()):
            tar.add(file, f"medusa/{file.name}")
    assert ship.take([tmp_path / "medusa.tar"]) == 0
    assert {f.name for f in place.iterdir()} == {f.name for f in was.iterdir()}
    for file in place.iterdir():
        assert file.stat().st_mode & 0o777 == 0o644
        if file.name != "curve.svg":  # whose picture is drawn anew
            assert file.read_bytes() == (was / file.name).read_bytes()
    assert json.loads((place / "card.json").read_text())["model"] in capsys.readouterr().out


def test_parts_join_to_what_they_were_cut_from(tmp_path, monkeypatch):
    monkeypatch.setattr(ship, "OUT", tmp_path / "out")
    monkeypatch.setattr(ship, "PART", 100)
    (tmp_path / "texts" / "rounds").mkdir(parents=True)
    (tmp_path / "texts" / "a").write_bytes(bytes(range(256)))
    (tmp_path / "texts" / "rounds" / "b").write_bytes(b"left behind")
    ship._parts("texts", tmp_path / "texts")
    parts = sorted((tmp_path / "out").iterdir(), key=lambda p: int(p.suffix[1:]))
    assert len(parts) > 2
    (tmp_path / "whole.tar.gz").write_bytes(b"".join(p.read_bytes() for p in parts))
    with tarfile.open(tmp_path / "whole.tar.gz") as tar:
        assert [m.name for m in tar.getmembers() if m.isfile()] == ["texts/a"]


def test_the_models_file_goes_by_its_name(tmp_path, monkeypatch):
    from outrider.models import embedded

    monkeypatch.setattr(ship, "STATE", tmp_path)
    file = tmp_path / "model.gguf"
    with file.open("wb") as made:
        made.truncate(embedded.SIZE)
    monkeypatch.setenv("OUTRIDER_MODEL", str(file))
    monkeypatch.syspath_prepend(str(ship.wheel()))
    assert embedded.find().resolve() == file
