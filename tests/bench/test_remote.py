"""`bench --endpoint`: figures against a server of another make, and against ours; whatever servers do wrong is said in words."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.bench.counters import Counters
from outrider.bench.endpoint import Endpoint, Unanswered
from outrider.bench.remote import Plan, measure, percentiles
from outrider.bench.workloads import Prompt, Workload
from outrider.cli.app import app
from outrider.errors import BadInput

from .stub import METRICS, Stub, serving

WORDS = Workload("words", "here", tuple(Prompt(({"role": "user", "content": f"hello {n}"},)) for n in range(4)))


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


@pytest.fixture
def stub() -> Iterator[tuple[Stub, str]]:
    made = Stub()
    with serving(made) as url:
        yield made, url


def test_a_server_of_another_make(stub: tuple[Stub, str]) -> None:
    server, url = stub
    server.metrics = METRICS
    found = measure(Endpoint.find(f"{url}/v1/"), Plan((WORDS,), max_tokens=5, repeats=2, batch=3, seed=4))
    [row] = found.rows
    assert found.ok and not row.failed and row.answers == 8 and row.tokens == 40 and row.counted
    assert row.tokens_per_second > 0 and row.first["p50"] > 0 and set(row.between) == {"p50", "p95", "p99"}
    assert row.acceptance is not None and row.acceptance.source == "metrics"
    assert (row.acceptance.drafted, row.acceptance.accepted, row.acceptance.rate, row.acceptance.length) == (32, 24, 0.75, 2.5)
    assert row.acceptance.by_position == (1.0, 0.5)
    assert row.speedup is None and all("speculation" not in body for body in server.asked)
    assert server.asked[-1]["seed"] == 4 and server.asked[-1]["stream_options"] == {"include_usage": True}


def test_servers_that_tell_less(stub: tuple[Stub, str]) -> None:
    server, url = stub
    server.usage, server.chat = False, False
    endpoint = Endpoint.find(url, model="anything")
    assert not endpoint.chat and endpoint.counts and endpoint.model == "anything"
    server.strict = True
    assert not Endpoint.find(url).counts
    server.strict = False
    [row] = measure(endpoint, Plan((WORDS,), repeats=1)).rows
    assert row.tokens == 24 and not row.counted and row.acceptance is None
    assert server.asked[-1]["prompt"] == "hello 3"


def test_command(stub: tuple[Stub, str], tmp_path: Any) -> None:
    server, url = stub
    file, out = tmp_path / "mine.txt", tmp_path / "out.json"
    file.write_text("one\n\ntwo\n")
    ask = ["bench", "--endpoint", url, "--workload", str(file), "--repeats", "1"]
    shown = invoke(*ask, "--output", str(out))
    assert shown.exit_code == 0 and "tok/s" in shown.stdout and "nothing about speculation" in shown.stdout
    assert json.loads(out.read_text())["rows"][0]["tokens"] == 12
    assert json.loads(invoke(*ask, "--json").stdout)["model"] == "m"
    server.breaks = "cut"
    cut = invoke(*ask, "--model", "m")
    assert cut.exit_code == 1 and "FAILED: " in cut.stdout and "cut short" in cut.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--draft", "none"], "--draft"),
        (["--device", "cpu", "--dtype", "float32"], "--device, --dtype"),
        (["--api-key-env", "NO_SUCH_KEY_HERE"], "not set"),
        (["--timeout", "0"], "--timeout"),
    ],
)
def test_options_that_make_no_sense(options: list[str], said: str) -> None:
    found = invoke("bench", "--endpoint", "http://127.0.0.1:1", *options)
    assert found.exit_code == 2 and said in found.stderr and "Traceback" not in found.stderr


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://h ost", "http://h/?a=b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(BadInput, match="no server's address"):
        Endpoint.find(url)


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(Unanswered, match="is the server running"):
            Endpoint.find(url)


def test_servers_that_misbehave(stub: tuple[Stub, str]) -> None:
    server, url = stub

    def said(**options: Any) -> str:
        with pytest.raises((Unanswered, BadInput)) as error:
            Endpoint.find(url, **options).ask([{"role": "user", "content": "x"}])
        return str(error.value)

    server.models = ["a", "b"]
    assert "2 models (a, b)" in said()
    server.models = ["m"]
    assert "no /v1/models" in said_of(f"{url}/elsewhere")
    for breaks, what in [("cut", "cut short"), ("error", "engine died"), ("garbage", "other than JSON")]:
        server.breaks = breaks
        assert what in said()
    server.breaks, server.key = None, "secret"
    assert "asks for a key" in said() and "--api-key-env" in said()
    assert "refuses the key" in said(key="other")
    server.key, server.silence = None, 0.4
    assert "silent for 0.2 s" in said(timeout=0.2)


def said_of(url: str, timeout: float = 60.0) -> str:
    with pytest.raises(Unanswered) as error:
        Endpoint.find(url, timeout=timeout).ask([{"role": "user", "content": "x"}])
    return str(error.value)


def test_failed_answers_are_counted(stub: tuple[Stub, str]) -> None:
    server, url = stub
    endpoint = Endpoint.find(url)
    server.breaks = "error"
    found = measure(endpoint, Plan((WORDS,), repeats=1, batch=2))
    assert not found.ok and found.rows[0].failed == 4 and found.rows[0].answers == 0 and "engine died" in found.errors[0]


def test_a_server_that_is_gone_is_not_asked_for_hours(stub: tuple[Stub, str]) -> None:
    server, url = stub
    endpoint = Endpoint.find(url, timeout=0.1)
    server.silence = 0.5
    many = Workload("many", "here", WORDS.prompts * 5)
    asked = len(server.asked)
    found = measure(endpoint, Plan((many, many), repeats=3))
    assert not found.ok and not found.rows and "given up" in found.errors[0] and "silent" in found.errors[0]
    assert len(server.asked) - asked < 10


def test_a_key_is_for_the_server_that_was_named(stub: tuple[Stub, str]) -> None:
    other, there = stub
    other.key = "secret"
    here = Stub(moved=there)
    with serving(here) as url, pytest.raises(Unanswered, match="points to"):
        Endpoint.find(url, key="secret")
    assert not other.asked


@pytest.mark.parametrize(
    "garbage",
    [
        {"choices": ["x"]},
        {"choices": 3},
        {"choices": [{"delta": "x"}]},
        {"choices": [{"delta": {"content": ["x"]}}]},
        {"choices": [{"delta": {"content": "x"}, "logprobs": {"content": [{"token": "x"}]}}]},
        {"choices": [{"delta": {"content": "x"}, "logprobs": {"content": [{"token": "x", "logprob": "much"}]}}]},
        {"choices": [{"text": "x", "logprobs": {"tokens": ["x"], "token_logprobs": [1], "top_logprobs": ["x"]}}]},
    ],
)
def test_objects_that_are_no_part_of_an_answer(stub: tuple[Stub, str], garbage: Any) -> None:
    server, url = stub
    server.breaks = json.dumps(garbage)
    assert "no part of an answer" in said_of(url)


@pytest.mark.parametrize("line", ["data: " + "[" * 100_000, "data: {\x1b[2J"])
def test_lines_that_are_no_json(stub: tuple[Stub, str], line: str) -> None:
    server, url = stub
    server.breaks = line
    said = said_of(url)
    assert "other than JSON" in said and said.isprintable()


def test_signs_of_life_are_no_answer(stub: tuple[Stub, str]) -> None:
    server, url = stub
    server.breaks = "alive"
    assert "silent for 0.2 s" in said_of(url, timeout=0.2)


def test_counters_that_tell_nothing() -> None:
    huge = 'x_spec_decode_num_accepted_tokens_per_pos_total{position="99999999999"} 1\n'
    assert not Counters.read(huge).by_position
    before, after = (Counters.read(f"x_spec_decode_num_draft_tokens_total {n}") for n in (50, 7))
    assert not after.since(before).known and not after.since(Counters.read(None)).known and before.since(after).drafted == 43
    assert not Counters.read("x_spec_decode_num_draft_tokens_total NaN").known


def test_counters_of_several_makes() -> None:
    ours = "outrider_spec_decode_num_draft_tokens_total 5.0\noutrider_spec_decode_num_draft_tokens_created 1.7e9\n"
    assert Counters.read(ours).drafted == 5 and Counters.read(ours).known
    two = 'vllm:spec_decode_num_draft_tokens_total{engine="0"} 5\nvllm:spec_decode_num_draft_tokens_total{engine="1"} 6\n'
    assert Counters.read(two).drafted == 11
    assert Counters.read("llamacpp:spec_decode_num_accepted_tokens_total 3").accepted == 3
    gauges = Counters.read('sglang:spec_accept_length{tp="0"} 2.5\nsglang:spec_accept_rate 0.5\n')
    assert (gauges.length, gauges.rate, gauges.known) == (2.5, 0.5, False)
    assert not Counters.read(None).known and not Counters.read("x spec_decode_num_drafts nan text").known


def test_percentiles() -> None:
    assert percentiles([]) == {} and percentiles([0.002])["p99"] == 2.0
    assert percentiles([0.001 * n for n in range(101)]) == pytest.approx({"p50": 50.0, "p95": 95.0, "p99": 99.0})
