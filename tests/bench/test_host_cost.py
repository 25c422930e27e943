"""The benchmark of the host's part plays all rounds, and the texts come out as they were given."""

from __future__ import annotations

import json

import pytest
from benchmarks import host_cost


def test_a_played_device(capsys: pytest.CaptureFixture[str]) -> None:
    host_cost.main(["--requests", "3", "--tokens", "24", "--round", "1e-4", "--repeats", "1", "--draft", "ngram", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["draft"] == "ngram" and found["plain"]["rounds"] >= 24 and found["rounds"] <= found["plain"]["rounds"] + 2
    assert found["plain"]["guessing"] == 0 and found["seconds"] > 0 and found["round"] >= 1e-4 / 2
