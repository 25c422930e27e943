"""Labels, losing and traces at the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider import LLM
from outrider.watch import reader
from outrider.watch.gain import Gain

from .conftest import Running, running


def rows(server: Running) -> dict[str, float]:
    text = server.client.get("/metrics").text
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}


@pytest.mark.parametrize("where", ["metadata", "header"])
def test_a_label_is_counted_wherever_it_stands(server: Running, where: str) -> None:
    label = f"kind {where}"
    headers = {"X-Outrider-Label": label if where == "header" else "overruled"}
    body = {"prompt": "hello hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    body |= {"metadata": {"label": label, "team": 3}} if where == "metadata" else {}
    assert server.post("/v1/completions", body, headers=headers).status_code == 200
    server.at_rest()
    found = rows(server)
    assert found[f'outrider_label_generation_tokens_total{{label="{label}"}}'] == 8
    assert found[f'outrider_label_drift_alarms_total{{label="{label}"}}'] == 0
    assert 0 <= found[f'outrider_label_acceptance{{label="{label}"}}'] <= 1
    assert not any("overruled" in name for name in found)


def test_a_label_that_cannot_be_one_is_refused(server: Running) -> None:
    for metadata in ({"label": ""}, {"label": 5}, {"label": "x" * 65}):
        reply = server.post("/v1/completions", {"prompt": "hello", "metadata": metadata})
        assert reply.status_code == 400 and "label must be" in reply.json()["error"]["message"]
    reply = server.post("/v1/completions", {"prompt": "hello"}, headers={"X-Outrider-Label": "x" * 65})
    assert reply.status_code == 400


def test_losing_is_told_in_answers_and_metrics(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gain = server.llm.watch.gain
    before = gain.losing
    monkeypatch.setattr(Gain, "_judge", lambda self: None)  # what these rounds really bring is not the question
    try:
        gain.losing = True
        assert server.complete()["metrics"]["speculative_decoding"]["losing"] is True
    finally:
        gain.losing = before
    assert {"outrider_spec_decode_losing", "outrider_spec_decode_speedup"} <= rows(server).keys()


def test_a_server_traces_all_requests(load: Callable[..., LLM], tmp_path: Path) -> None:
    llm = load(trace=tmp_path / "t.jsonl")
    with running(llm) as server:
        server.complete(metadata={"label": "here"})
        server.chat()
    llm.close()
    shares = [share for one in reader.read(tmp_path / "t.jsonl").rounds for share in one.requests]
    assert {share.label for share in shares} == {"here", None}


def test_measuring_plain_decoding_is_nobodys_work(load: Callable[..., LLM]) -> None:
    with running(load()) as server:
        assert not any("outrider_label" in name for name in rows(server))
