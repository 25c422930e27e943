"""The `openai` client's calls work unchanged."""

from __future__ import annotations

import openai
import pytest

from .conftest import NAME, Running


def test_chat_and_streams(server: Running) -> None:
    client = server.openai()
    ask = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "seed": 3}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert whole.usage and whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    with client.chat.completions.stream(**ask, stop=text[8:10]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(text[8:10])]


def test_completions(server: Running) -> None:
    client = server.openai()
    ask = {"model": NAME, "prompt": ["hello", "hell"], "max_tokens": 8, "seed": 3, "temperature": 1.0, "logprobs": 2, "n": 2}
    whole = client.completions.create(**ask)
    assert len(whole.choices) == 4 and all(c.logprobs.tokens for c in whole.choices)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {c.index: c.text for c in whole.choices}


def test_speculation_through_the_clients_extra_body(server: Running) -> None:
    client = server.openai()
    ask = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "seed": 3}
    plain = client.chat.completions.create(**ask, extra_body={"speculation": {"draft": "none"}, "top_k": 4})
    fast = client.chat.completions.create(**ask, extra_body={"top_k": 4})
    assert plain.choices[0].message.content == fast.choices[0].message.content
    assert plain.timings["draft_n"] == 0 and fast.timings["draft_n"] > 0


def test_errors_are_the_clients_own(server: Running) -> None:
    client = server.openai()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="x", temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    assert [m.id for m in client.models.list()] == [NAME]
