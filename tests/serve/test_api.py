"""The endpoints, as raw HTTP: what comes back, and that it is what the library writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider import LLM, SamplingParams

from .conftest import NAME, Running

FEW = {str(t): 50.0 for t in range(100, 106)}
"""Few tokens, so that the text repeats itself and lookup has something to find."""


def lines(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    """The objects of a stream; the last line must be the end mark."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        found = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]


def test_models(server: Running) -> None:
    found = server.client.get("/v1/models").json()
    assert [card["id"] for card in found["data"]] == [NAME]
    assert found["data"][0]["max_model_len"] == 128 and found["data"][0]["outrider"]["drafter"] == "ngram"
    assert server.client.get(f"/v1/models/{NAME}").json()["id"] == NAME
    assert server.client.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_the_librarys(server: Running, library: LLM, temperature: float) -> None:
    found = server.chat("hello", temperature=temperature, seed=7, model=NAME)
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=7)
    want = library.chat([{"role": "user", "content": "hello"}], params)
    assert found["choices"][0]["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    assert found["choices"][0]["finish_reason"] == want.finish_reason
    assert found["seed"] == 7 and found["object"] == "chat.completion" and found["model"] == NAME
    usage = found["usage"]
    assert usage["prompt_tokens"] == len(want.prompt_token_ids) and usage["completion_tokens"] == len(want.token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_drawn_seed_replays_the_answer(server: Running) -> None:
    first = server.chat(ignore_eos=True)
    assert 0 <= first["seed"] < 2**53
    again = server.chat(ignore_eos=True, seed=first["seed"])
    assert again["choices"] == first["choices"]
    assert server.chat(ignore_eos=True)["seed"] != first["seed"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_add_up_to_the_whole(server: Running, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hello"}
    body = {**prompt, "max_tokens": 40, "seed": 3, "n": 2, "logit_bias": FEW, "return_token_ids": True}
    whole = server.post(path, body).json()
    for usage in (False, True):
        events = lines(server, path, {**body, "stream_options": {"include_usage": usage}})
        assert len({e["id"] for e in events}) == 1
        last = events[-1]
        assert ("usage" in last and last["choices"] == []) is usage
        assert last["timings"]["draft_n"] == whole["timings"]["draft_n"] > 0
        for choice in whole["choices"]:
            mine = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
            text = "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in mine)
            assert text == (choice["message"]["content"] if "message" in choice else choice["text"])
            assert [t for c in mine for t in c.get("token_ids", [])] == choice["token_ids"]
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]


def test_speculation_is_shown_and_can_be_told_what_to_do(server: Running) -> None:
    body = {"logit_bias": FEW, "seed": 1, "max_tokens": 48, "ignore_eos": True}
    on = server.complete(**body)
    off = server.complete(**body, speculation={"draft": "none"})
    shallow = server.complete(**body, speculation={"depth": 1, "draft": "ngram"})
    assert on["choices"] == off["choices"] == shallow["choices"]
    figures = on["metrics"]["speculative_decoding"]
    steps, accepted = figures["num_spec_steps"], figures["num_accepted_draft_tokens"]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert figures["draft_acceptance_rate"] == pytest.approx(accepted / figures["num_draft_tokens"])
    assert sum(figures["acceptance_histogram"]) == steps
    assert sum(k * count for k, count in enumerate(figures["acceptance_histogram"])) == accepted > 0
    assert on["timings"]["draft_n"] == figures["num_draft_tokens"] and on["timings"]["draft_n_accepted"] == accepted
    assert on["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == accepted
    assert off["timings"]["draft_n"] == 0 and len(shallow["metrics"]["speculative_decoding"]["acceptance_by_position"]) == 1
    lossy = server.complete(**body, speculation={"accept": "typical"})
    assert lossy["metrics"]["speculative_decoding"]["lossless"] is False and figures["lossless"] is True


def test_origins_cover_the_text(server: Running) -> None:
    body = {"prompt": "hello", "logit_bias": FEW, "seed": 1, "max_tokens": 60, "outrider": True, "speculation": {"depth": 1}}
    events = lines(server, "/v1/completions", body)
    pieces = [piece for e in events for c in e["choices"] for piece in c["outrider"]["pieces"]]
    whole = server.post("/v1/completions", body).json()["choices"][0]
    assert "".join(text for text, origin in pieces if origin != "rejected") == whole["text"]
    assert {origin for _, origin in pieces} == {"draft", "target", "bonus", "rejected"}
    assert [r["pieces"] for r in whole["outrider"]["rounds"]] == [c["outrider"]["pieces"] for e in events for c in e["choices"]]


def test_logprobs_in_both_shapes(server: Running) -> None:
    chat = server.chat(logprobs=True, top_logprobs=3, seed=2, ignore_eos=True)["choices"][0]["logprobs"]["content"]
    assert len(chat) == 16 and all(len(place["top_logprobs"]) == 3 for place in chat)
    for place in chat:
        values = [top["logprob"] for top in place["top_logprobs"]]
        assert values == sorted(values, reverse=True) and place["logprob"] <= values[0] <= 0
        assert place["bytes"] is None or bytes(place["bytes"]).decode() == place["token"]
    body = {"prompt": "hello", "logprobs": 2, "seed": 2, "echo": True, "max_tokens": 5}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    assert whole["text"].startswith("hello")
    table = whole["logprobs"]
    count = len(server.llm.tokenizer.encode("hello")) + 5
    assert {len(column) for column in table.values()} == {count}
    assert table["token_logprobs"][0] is None and all(v <= 0 for v in table["token_logprobs"][1:])
    assert table["text_offset"][0] == 0 and table["text_offset"] == sorted(table["text_offset"])
    events = lines(server, "/v1/completions", body)
    for name, column in table.items():
        assert [v for e in events for c in e["choices"] for v in c["logprobs"][name]] == column


def test_scoring_a_prompt_writes_nothing(server: Running) -> None:
    ids = server.llm.tokenizer.encode("hello hello")
    found = server.complete([ids, [104, 105]], echo=True, max_tokens=0, logprobs=1)
    first, second = found["choices"]
    assert first["text"] == "hello hello" and len(first["logprobs"]["tokens"]) == len(ids)
    assert len(second["logprobs"]["tokens"]) == 2
    assert found["usage"]["completion_tokens"] == 0


def test_several_prompts_keep_their_order(server: Running) -> None:
    prompts = ["hello", "hell", "he"]
    found = server.complete(prompts, n=2, seed=5, echo=True)["choices"]
    assert [c["index"] for c in found] == list(range(6))
    for i, choice in enumerate(found):
        assert choice["text"].startswith(prompts[i // 2])
    alone = server.complete("hell", n=2, seed=5, echo=True)["choices"]
    assert [c["text"] for c in alone] == [c["text"] for c in found[2:4]]


def test_stop_strings_and_ids(server: Running) -> None:
    text = server.complete(seed=4, ignore_eos=True, max_tokens=30)["choices"][0]["text"]
    stop = text[10:12]
    cut = server.complete(seed=4, ignore_eos=True, max_tokens=30, stop=[stop])["choices"][0]
    assert cut["text"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"


def test_content_in_parts_and_default_length(server: Running) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "seed": 1, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/chat/completions", body).json()
    assert whole["usage"]["total_tokens"] == 128 and whole["choices"][0]["finish_reason"] == "length"
    same = server.chat("hello", seed=1, temperature=0, ignore_eos=True, max_tokens=200)
    assert same["choices"][0]["message"] == whole["choices"][0]["message"]


def test_health_and_request_ids(server: Running) -> None:
    health = server.client.get("/health", headers={"x-request-id": "abc-1"})
    assert health.json()["status"] == "ok" and health.headers["x-request-id"] == "abc-1"
    assert len(server.client.get("/health", headers={"x-request-id": "no spaces"}).headers["x-request-id"]) == 32
    assert "/v1/chat/completions" in server.client.get("/openapi.json").json()["paths"]


def test_metrics_count(server: Running) -> None:
    def read() -> dict[str, float]:
        rows = [line.rsplit(" ", 1) for line in server.client.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in rows}

    before = read()
    found = server.complete(logit_bias=FEW, seed=1, max_tokens=40)
    after = read()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown["outrider_generation_tokens_total"] == found["usage"]["completion_tokens"]
    assert grown["outrider_spec_decode_num_draft_tokens_total"] == found["timings"]["draft_n"] > 0
    assert grown["outrider_spec_decode_num_accepted_tokens_total"] == found["timings"]["draft_n_accepted"]
    by_depth = [v for k, v in grown.items() if k.startswith("outrider_spec_decode_num_accepted_tokens_per_pos_total")]
    assert sum(by_depth) == found["timings"]["draft_n_accepted"]
    assert grown["outrider_spec_decode_num_drafts_total"] == found["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert after["outrider_spec_decode_verify_seconds_total"] > 0 and after["outrider_plain_tokens_per_second"] > 0
    assert {"outrider_kv_cache_usage_perc", "outrider_num_requests_waiting", "outrider_spec_decode_losing"} <= set(after)
