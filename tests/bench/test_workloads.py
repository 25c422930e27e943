"""What the benchmark asks: ten prompts of each kind, and files of the user's own, read or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench import workloads
from outrider.errors import BadInput
from outrider.llm import LLM

KINDS = ("code", "chat", "summarise", "question", "creative", "repetitive")


def said(prompt: workloads.Prompt) -> str:
    return "\n".join(m["content"] for m in prompt.messages)


def test_the_first_six_and_those_that_came_later() -> None:
    assert workloads.names()[:6] == workloads.DEFAULT == KINDS
    assert {"support", "math", "turns"} <= set(workloads.names())
    every = [p for name in KINDS for p in workloads.find(name).prompts]
    assert all(len(workloads.find(name).prompts) >= 10 for name in KINDS)
    assert len({p.sha256 for p in every}) == len(every) >= 60
    assert all(p.messages[-1]["role"] == "user" for p in every)
    assert any(len(p.messages) > 2 for p in workloads.find("chat").prompts)


def test_the_repetitive_ones_bring_the_text_they_ask_for() -> None:
    long = {name: sum(len(said(p)) for p in workloads.find(name).prompts[:10]) for name in KINDS}
    assert long["repetitive"] > 2 * long["creative"] and long["summarise"] > 2 * long["question"]


def test_limit() -> None:
    some = workloads.find("code").first(3)
    assert (some.name, some.prompts) == ("code", workloads.find("code").prompts[:3])
    assert workloads.find("code").first(None) == workloads.find("code")


def test_a_spread_is_even_and_always_the_same() -> None:
    math = workloads.find("math")
    some = math.spread(4)
    n = len(math.prompts)
    assert some.prompts == tuple(math.prompts[i] for i in (0, n // 4, n // 2, 3 * n // 4)) and some == math.spread(4)
    assert math.spread(None) == math.spread(n) == math.spread(10 * n) == math
    assert len({p.sha256 for p in math.spread(n - 1).prompts}) == n - 1 and math.spread(1).prompts == math.prompts[:1]


def test_gather(tmp_path: Path) -> None:
    default = workloads.gather([])
    assert [(w.name, len(w.prompts)) for w in default] == [(name, 10) for name in KINDS]
    assert [len(w.prompts) for w in workloads.gather([], 2)] == [2] * 6
    assert tuple(w.name for w in workloads.gather(["all"], 1)) == workloads.names()
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    mine, math = workloads.gather([str(tmp_path / "a.txt"), "math"], 2)
    assert [said(p) for p in mine.prompts] == ["one", "two"] and math == workloads.find("math").spread(2)
    assert workloads.gather(["math"]) == (workloads.find("math"),)


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\u2028there"}]
    lines = [{"prompt": "one"}, {"messages": talk}, {"turns": ["first", "second"], "question_id": 81}]
    file.write_text("\n".join(json.dumps(x, ensure_ascii=False) for x in lines) + "\n\n")
    found = workloads.find(str(file))
    assert (found.name, found.source) == ("mine", str(file))
    assert [said(p) for p in found.prompts] == ["one", "Be brief.\nHi\u2028there", "first"]
    assert [p.later for p in found.prompts] == [(), (), ("second",)] and found.reader == "prompts, messages or turns"
    assert found.prompts[1].messages == tuple(talk)


def test_txt(tmp_path: Path) -> None:
    file = tmp_path / "mine.TXT"
    file.write_bytes(b"\n  one\n  more\r\n\r\n \ntwo\n\n\n")
    assert [said(p) for p in workloads.read(file).prompts] == ["  one\n  more", "two"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.csv", b"x", "jsonl"),
        ("a.txt", b" \n\n", "no prompts"),
        ("a.txt", b"\xff", "UTF-8"),
        ("a.jsonl", b"\n", "no prompts"),
        ("a.jsonl", b'{"prompt": "x"}\n{', "line 2: not JSON"),
        ("a.jsonl", b"[1]", "line 1: expected an object"),
        ("a.jsonl", b'{"prompt": " "}', "line 1: expected prompt"),
        ("a.jsonl", b'{"prompt": 3}', "line 1: expected prompt"),
        ("a.jsonl", b'{"turns": []}', "line 1: expected prompt"),
        ("a.jsonl", b'{"messages": []}', "line 1: messages"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "line 1: messages"),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": "x"}]}', "line 1: messages"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput, match=words):
        workloads.find(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "words"), [("creativ", "did you mean 'creative'"), ("\0", "no workload"), ("x.jsonl", "no workload")]
)
def test_names_that_are_none(name: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        workloads.find(name)


class Picky:
    """A tokenizer whose template knows no system role, or that has no template at all."""

    def __init__(self, has_chat: bool) -> None:
        self.has_chat = has_chat

    def encode(self, text: str) -> str:
        return text

    def chat(self, messages) -> str:
        if messages[0]["role"] == "system":
            raise BadInput("no system role")
        return "|".join(f"{m['role']} {m['content']}" for m in messages)


def test_models_of_other_habits(llm: LLM) -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    prompt = workloads.Prompt((system, user))
    assert prompt.encode(Picky(True)) == "user Be brief.\n\nHi"  # type: ignore[arg-type,comparison-overlap]
    assert prompt.encode(Picky(False)) == "Be brief.\n\nHi"  # type: ignore[arg-type,comparison-overlap]
    with pytest.raises(BadInput, match="no system role"):
        workloads.Prompt((system,)).encode(Picky(True))  # type: ignore[arg-type]
    assert workloads.Prompt((user,), raw=True).encode(Picky(True)) == "Hi"  # type: ignore[arg-type,comparison-overlap]
    assert prompt.encode(llm.tokenizer) == llm.tokenizer.chat([system, user])


def test_a_hash_names_what_is_asked() -> None:
    one, other = (workloads.Prompt(({"role": "user", "content": text},)) for text in ("a", "b"))
    again = workloads.Prompt(({"content": "a", "role": "user"},), question=3)
    assert one.sha256 == again.sha256 != other.sha256
    raw, talk = workloads.Prompt(one.messages, raw=True), workloads.Prompt(one.messages, later=("b",))
    assert len({p.sha256 for p in (one, raw, talk)}) == 3
