"""Other people's files: told apart by what stands in them, read whole, or refused with the line and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.bench import readers
from outrider.bench.conversation import Prompt, Workload
from outrider.errors import BadInput

Make = Callable[..., Path]
ASK = {"role": "user", "content": "Hi"}
CHAT = {"body": {"model": "m", "messages": [ASK]}}
SHARE = {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def write(*entries: Any, array: bool = False, name: str = "mine.jsonl") -> Path:
        path = tmp_path / name
        lines = [e if isinstance(e, str) else json.dumps(e) for e in entries]
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n" if array else "\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def said(found: Workload) -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in p.messages] for p in found.prompts]


def test_logs_of_chat_requests(make: Make) -> None:
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]
    talk = [{"role": "developer", "content": "Be brief."}, ASK, {"role": "assistant", "content": "Yes?"}]
    talk.append({"role": "user", "content": parts})  # type: ignore[dict-item]
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": talk, "max_tokens": 5}}
    found = readers.read(make(CHAT, "", batch))
    assert found.reader == "OpenAI requests" and not any(p.raw or p.later for p in found.prompts)
    assert said(found) == [
        [("user", "Hi")],
        [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "What now?")],
    ]


def test_logs_of_completions_stay_raw(make: Make) -> None:
    found = readers.read(make({"body": {"prompt": "Once upon"}}, {"url": "/v1/completions", "body": {"prompt": ["a", "b"]}}))
    assert said(found) == [[("user", "Once upon")], [("user", "a")], [("user", "b")]]
    assert all(p.raw for p in found.prompts)


@pytest.mark.parametrize("array", [True, False])
def test_share_gpt(make: Make, array: bool) -> None:
    longer = {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "gpt", "value": "Welcome."},
            {"from": "human", "value": "One"},
            {"from": "gpt", "value": "1"},
            {"from": "user", "value": "Two"},
        ]
    }
    silent = {"conversations": [{"from": "gpt", "value": "Anyone?"}]}
    found = readers.read(make(SHARE, {"conversations": []}, longer, silent, array=array, name="share.json"))
    assert found.reader == "ShareGPT conversations; 2 without a question left out"
    assert said(found) == [[("user", "Hi")], [("system", "Be brief."), ("user", "One")]]
    assert [p.later for p in found.prompts] == [(), ("Two",)]


def test_questions_of_spec_bench_as_they_are(make: Make) -> None:
    found = readers.read(make({"question_id": 1, "category": "rag", "turns": ["a", "b"]}))
    assert found.reader == "Spec-Bench questions" and found.prompts == (Prompt((({"role": "user", "content": "a"}),), ("b",)),)


def test_content_decides_not_the_name(make: Make) -> None:
    assert readers.read(make(CHAT, name="requests.log")).reader == "OpenAI requests"
    assert readers.read(make({"prompt": "x"}, array=True, name="x.jsonl")).reader == "prompts, messages or turns"
    path = make({"prompt": "x"}, name="bom.json")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert said(readers.read(path)) == [[("user", "x")]]


@pytest.mark.parametrize(
    ("entries", "array", "words"),
    [
        ([CHAT, {"prompt": "x"}], False, "line 2: expected body, as in the objects before it"),
        ([SHARE, SHARE, {"id": 1}], True, "line 4: expected conversations, as in"),
        ([{"body": "x"}], False, "line 1: expected a body"),
        ([{"body": {"input": "x"}}], False, "line 1: expected a body with messages or prompt"),
        ([{"body": {"prompt": [1, 2]}}], False, "line 1: the body's prompt must be text"),
        ([{"body": {"prompt": []}}], False, "line 1: the body's prompt must be text"),
        ([{"body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}}], False, "line 1: .*pictures"),
        ([{"body": {"messages": [{"role": "tool", "content": "x"}, ASK]}}], False, "line 1: .* tool calls"),
        ([{"body": {"messages": [{"role": "assistant", "content": None}, ASK]}}], False, "line 1: messages must have a content"),
        ([{"conversations": "x"}], False, "line 1: conversations must be a list"),
        ([{"conversations": [{"from": "human"}]}], False, "line 1: conversations must be a list"),
        ([{"conversations": [{"from": "tool", "value": "x"}]}], False, "line 1: .* speaker 'tool'"),
        ([{"turns": ["a", 3]}], False, "line 1: expected prompt"),
        (['{"prompt": "a\\ud800"}'], False, "line 1: half of a character"),
        ([{"turns": ["a", "b\udc00"]}], False, "line 1: half of a character"),
        ([{"turns": "a"}], False, "line 1: expected prompt"),
        ([{"prompt": "a"}, "[1]"], False, "line 2: expected an object"),
        ([{"prompt": "a"}, "7"], True, "line 3: expected an object"),
        ([{"prompt": "a"}, '{"prompt": '], True, "line 4: not JSON"),
        ([{"prompt": "a"}, '{"prompt": "b"} {}'], True, "line 3: not JSON .*comma"),
        (["[" * 100_000], False, "line 1: not JSON"),
        (['{"a":' * 100_000], False, "line 1: not JSON"),
        (["[]"], False, "no prompts"),
        ([" [ ] "], False, "no prompts"),
        (["[", "{}"], False, "line 2: expected prompt"),
        ([], True, "no prompts"),
        ([{"conversations": []}], False, "no prompts"),
    ],
)
def test_lines_that_are_bad(make: Make, entries: list[Any], array: bool, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        readers.read(make(*entries, array=array))


def test_an_array_that_breaks_off(make: Make) -> None:
    with pytest.raises(BadInput, match=r"line 2: not JSON .*comma or the array's end"):
        readers.read(make('[{"prompt": "a"}'))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", b"", "no prompts"),
        ("a.json", b" \n ", "no prompts"),
        ("a.bin", b"\x00\x01\x02", "zero bytes"),
        ("a.jsonl", b'{"prompt": "\xff"}', "UTF-8"),
        ("a.parquet", b"PAR1", "a workload is a .jsonl or .json file"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput, match=words):
        readers.read(tmp_path / name)


def test_files_that_are_too_large_or_not_there(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(CHAT)
    monkeypatch.setattr(readers, "LARGEST", 8)
    with pytest.raises(BadInput, match="take a part of it"):
        readers.read(path)
    with pytest.raises(BadInput, match="cannot read the workload"):
        readers.read(tmp_path / "nothing.jsonl")
    monkeypatch.undo()
    with pytest.raises(BadInput, match="cannot read the workload"):
        readers.read(tmp_path)
