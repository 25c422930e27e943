"""`audit --endpoint A --against B`: what differs between two servers, where it parts, and whether rounding explains it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.bench.endpoint import Endpoint
from outrider.bench.parity import Plan, Report, audit
from outrider.cli.app import app

from .stub import Stub, serving

SEA = ["The ", "sea ", "is ", "wide ", "and ", "blue."]
LAKE = ["The ", "sea ", "was ", "wide ", "and ", "blue."]


@pytest.fixture
def pair() -> Iterator[tuple[Stub, Stub, list[str]]]:
    one, other = Stub(), Stub()
    with serving(one) as first, serving(other) as second:
        yield one, other, [first, second]


def compared(urls: list[str], prompts: int = 3) -> tuple[Report, dict[str, Any]]:
    report = audit(*(Endpoint.find(url) for url in urls), Plan(prompts, 20))
    return report, {line.kind: line for line in report.lines}


def test_two_that_write_the_same(pair: tuple[Stub, Stub, list[str]]) -> None:
    report, lines = compared(pair[2])
    assert report.ok and not report.differences
    assert {k: line.verdict for k, line in lines.items()} == dict.fromkeys(
        ("greedy", "seeded", "logprobs", "endpoint, again", "against, again"), "equal"
    )
    assert lines["logprobs"].compared == 18 and lines["logprobs"].largest == 0


@pytest.mark.parametrize(("gap", "verdict"), [(1.0, "fault"), (0.01, "rounding")])
def test_a_greedy_text_that_turns(pair: tuple[Stub, Stub, list[str]], gap: float, verdict: str) -> None:
    one, other, urls = pair
    other.words, one.gap, other.gap = LAKE, gap, 1.0
    report, lines = compared(urls)
    assert lines["greedy"].verdict == verdict and lines["greedy"].rate == 1.0 and lines["greedy"].first == 8
    assert report.ok is (verdict == "rounding")
    first = report.differences[0]
    assert (first.character, first.token, first.near_tie) == (8, 2, gap < 0.5) and first.gap == pytest.approx(gap)
    assert first.first.startswith("is wide") and first.second.startswith("was wide")
    assert lines["seeded"].verdict == "differ" and lines["logprobs"].compared == 6


def test_a_server_without_logprobs(pair: tuple[Stub, Stub, list[str]]) -> None:
    one, other, urls = pair
    other.logprobs, other.words = False, LAKE
    report, lines = compared(urls)
    assert lines["logprobs"].verdict == "not compared" and urls[1] in lines["logprobs"].note
    assert lines["greedy"].verdict == "fault" and report.differences[0].gap == 1.0  # as the other one's show
    one.logprobs = False
    report, lines = compared(urls)
    assert "how close" in lines["greedy"].note and report.differences[0].token is None


def test_a_server_that_does_not_repeat_itself(pair: tuple[Stub, Stub, list[str]]) -> None:
    one, _, urls = pair

    class Fickle(dict[int, str]):
        count = 0

        def get(self, key: int, default: Any = None) -> Any:
            Fickle.count += 1
            return f"{Fickle.count} " if key == 3 else default

    one.changes = Fickle()
    report, lines = compared(urls)
    assert lines["endpoint, again"].verdict == "differ" and lines["against, again"].verdict == "equal"
    assert lines["greedy"].verdict == "equal" and report.ok


def test_half_a_character_at_the_end_is_no_difference(pair: tuple[Stub, Stub, list[str]]) -> None:
    pair[1].words = [*SEA, "\ufffd", "\ufffd"]
    report, lines = compared(pair[2])
    assert report.ok and lines["greedy"].verdict == lines["seeded"].verdict == "equal"


def test_wrong_logprobs_are_a_fault(pair: tuple[Stub, Stub, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    _, other, urls = pair
    from . import stub

    kept = stub.rows
    wrong = {"content": [{"token": "sea ", "logprob": -3.0, "top_logprobs": []}]}
    monkeypatch.setattr(stub, "rows", lambda s, w, i, chat: wrong if s is other and i == 1 else kept(s, w, i, chat))
    report, lines = compared(urls)
    assert lines["logprobs"].verdict == "fault" and lines["logprobs"].differ == 3 and not report.ok


def test_answers_that_break_off(pair: tuple[Stub, Stub, list[str]]) -> None:
    _, other, urls = pair
    ends = [Endpoint.find(url) for url in urls]
    other.breaks = "error"
    report = audit(*ends, Plan(2, 20))
    assert not report.ok and "engine died" in report.errors[0]
    assert next(line for line in report.lines if line.kind == "greedy").verdict == "not compared"


def test_command(pair: tuple[Stub, Stub, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    _, other, (first, second) = pair

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["audit", *args], catch_exceptions=False)

    both = ["--endpoint", first, "--against", second, "--prompts", "2"]
    shown = run(*both)
    assert shown.exit_code == 0 and "no fault found" in shown.stdout and "one make only" in shown.stdout
    other.words, other.key = LAKE, "secret"
    assert run(*both).exit_code == 2
    monkeypatch.setenv("OTHER_KEY", "secret")
    found = run(*both, "--against-key-env", "OTHER_KEY", "--json")
    assert found.exit_code == 1 and json.loads(found.stdout)["verdict"] == "fault"
    told = run(*both, "--against-key-env", "OTHER_KEY")
    assert "character 8 (token 2): 'is wide and blue.' against 'was wide and blue.'" in told.stdout
    alone = run("--endpoint", first)
    assert alone.exit_code == 2 and "--against" in alone.stderr
    assert "--draft" in run(*both, "--draft", "none").stderr
    gone = run("--endpoint", first, "--against", "http://127.0.0.1:9")
    assert gone.exit_code == 2 and "cannot reach http://127.0.0.1:9" in gone.stderr
