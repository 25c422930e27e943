"""Texts that the target writes: what is in them, that a run which was killed goes on, and what cannot be used."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time

import pytest

from outrider import SamplingParams
from outrider.errors import BadInput, BadWeights, OutOfMemory, OutriderError
from outrider.train import corpus as corpora
from outrider.train import prompts
from outrider.train.corpus import Seen, Store, Text, is_held, load, texts
from outrider.train.data import Writer, Writing

from .conftest import WRITING


def writer(llm, path, **changes):
    return Writer(llm, dataclasses.replace(WRITING, **changes), path, "f")


def quiet(what, share):
    pass


def test_the_target_writes_what_it_would_write(llm, corpus):
    assert corpus.manifest["taught"] >= WRITING.tokens
    assert len(corpus.starts) == corpus.manifest["texts"] and len(corpus.tokens) == corpus.manifest["tokens"]
    greedy = 0
    for text in itertools.islice(texts(corpus), 12):
        params = SamplingParams(temperature=0.0, max_tokens=WRITING.answer)
        greedy += llm.generate([text.tokens[: text.prompt]], params)[0].token_ids == text.tokens[text.prompt :]
    assert 3 <= greedy <= 9, "one of three temperatures is 0"


def test_answers_end_with_their_end(corpus):
    ended = [t for t in texts(corpus) if len(t.tokens) - t.prompt < WRITING.answer]
    assert ended and all(t.tokens[-1] == 1 and 1 not in t.tokens[t.prompt : -1] for t in ended)


def test_held_out_texts_are_those_whose_prompt_says_so(corpus):
    held = set(corpus.split(True))
    assert held and not held & set(corpus.split(False))
    for i, text in enumerate(texts(corpus)):
        assert is_held(text.tokens[: text.prompt], WRITING.held) == (i in held)


def test_counts_are_of_written_tokens_to_train_on(corpus):
    counts = corpus.counts(48)
    taught = sum(int(corpus.lengths[i] - corpus.prompts[i]) for i in corpus.split(False))
    assert counts.sum() == taught and len(counts) == 48


def test_a_run_that_was_killed_goes_on(llm, tmp_path):
    """Killed after a shard, before the manifest: the round is written again, and nothing is there twice."""
    writer(llm, tmp_path / "whole", tokens=1200).write(quiet)
    first = writer(llm, tmp_path / "parts", tokens=1200)
    assert not first.write(quiet, until=time.monotonic() - 1)
    first.store.add(first.round(0), 1)
    (tmp_path / "parts" / "shard-00002.safetensors").write_bytes(b"half a shard")
    assert writer(llm, tmp_path / "parts", tokens=1200).write(quiet)
    whole, parts = load(tmp_path / "whole"), load(tmp_path / "parts")
    assert whole.manifest == parts.manifest and list(texts(whole)) == list(texts(parts))
    assert writer(llm, tmp_path / "whole", tokens=900).finished


def test_other_settings_do_not_mix(llm, tmp_path):
    first = writer(llm, tmp_path)
    first.store.add(first.round(0), 1)
    with pytest.raises(BadInput, match=r"made otherwise.*settings"):
        writer(llm, tmp_path, seed=1)
    with pytest.raises(BadInput, match=r"made otherwise.*fingerprint"):
        Writer(llm, WRITING, tmp_path, "g")


def test_a_full_disk_leaves_what_was_there(llm, tmp_path, monkeypatch):
    first = writer(llm, tmp_path)
    first.store.add(first.round(0), 1)
    before = list(texts(load(tmp_path)))
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OutOfMemory, match=r"No space left.*run the same command again"):
        first.store.add(first.round(1), 2)
    assert list(texts(load(tmp_path))) == before


def test_copies_are_left_out():
    seen = Seen(frame=2)
    text = Text(tuple(range(100)), 4)
    assert seen.add(text) and not seen.add(text)
    assert not seen.add(Text((7, 7, *range(2, 99)), 4)), "nearly the same"
    assert seen.add(Text((0, 1, *range(50, 0, -1)), 4)), "the frame does not count"
    assert seen.add(Text((1, 2), 1)) and not seen.add(Text((1, 2), 1)), "short texts are compared as a whole"


def test_a_target_with_nothing_to_say(llm, tmp_path):
    made = writer(llm, tmp_path)
    made.round = lambda number: [Text((1, 2, 3), 1)]
    with pytest.raises(OutriderError, match="nothing new in 20 rounds"):
        made.write(quiet)


def test_prompts_of_ones_own_come_first(llm, tmp_path):
    lines = [{"prompt": "abc"}, {"text": "def"}]
    (tmp_path / "some.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    (tmp_path / "more.txt").write_text("ghi\n\njkl")
    made = writer(llm, tmp_path / "out", files=(str(tmp_path / "some.jsonl"), str(tmp_path / "more.txt")))
    found = {llm.tokenizer.decode(t.tokens[: t.prompt]) for t in made.round(0)}
    assert found == {"abc", "def", "ghijkl"}
    assert len(made.round(1)) > 3, "then the target goes on by itself"
    (tmp_path / "more.txt").write_text("other")
    made.store.add([Text((1, 2), 1)], 1)
    with pytest.raises(BadInput, match="made otherwise"):
        writer(llm, tmp_path / "out", files=(str(tmp_path / "some.jsonl"), str(tmp_path / "more.txt")))


def test_conversations_end_with_the_users_turn(tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": turns}))
    assert prompts.read([str(tmp_path / "x.jsonl")]) == [prompts.Given(messages=(turns[0],))]


BAD = [
    ("x.jsonl", '{"prompt": "a"}\n{"prompt"', "line 2: no JSON"),
    ("x.jsonl", '{"prompt": "a"}\n[]', "line 2: not a JSON object"),
    ("x.jsonl", '{"prompt": ""}', "line 1: neither messages nor"),
    ("x.jsonl", '{"messages": [{"role": "user"}]}', "line 1: messages must be"),
    ("x.jsonl", '{"messages": [{"role": "assistant", "content": "x"}]}', "line 1: messages without a turn"),
    ("x.jsonl", "\n", "is empty"),
    ("x.txt", " \n", "is empty"),
    ("x.csv", "", "training data are .jsonl"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_bad_files(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=message):
        prompts.read([str(tmp_path / name)])


def test_rows_of_parquet_are_prompts(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    turns = [{"role": "user", "content": "hi"}]
    rows = [{"messages": turns, "prompt": None}, {"messages": None, "prompt": "go on"}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert prompts.read([str(tmp_path / "x.parquet")]) == [prompts.Given(messages=(turns[0],)), prompts.Given(text="go on")]
    for records, message in (
        ([{"prompt": "a"}, {"prompt": None}], "row 2"),
        ([{"question": "a"}], "x.parquet has none of the columns messages"),
    ):
        parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "x.parquet")
        with pytest.raises(BadInput, match=message):
            prompts.read([str(tmp_path / "x.parquet")])
    for file in ("x.parquet", "none.parquet"):
        (tmp_path / "x.parquet").write_bytes(b"PAR1 but no more")
        with pytest.raises(BadInput, match="cannot be read as parquet"):
            prompts.read([str(tmp_path / file)])


def test_parquet_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"pip install 'outrider\[parquet\]'"):
        prompts.read([str(tmp_path / "x.parquet")])


def test_files_that_are_no_text(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        prompts.read([str(tmp_path / "none.txt")])
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="cannot be read as UTF-8"):
        prompts.read([str(tmp_path / "x.txt")])


@pytest.mark.parametrize("changes", [{"tokens": 0}, {"held": 0.0}, {"held": 0.9}, {"temperatures": ()}], ids=str)
def test_bad_settings(changes):
    with pytest.raises(BadInput):
        Writing(**changes)


def test_damaged_corpora(tmp_path):
    with pytest.raises(BadInput, match="no texts to train on"):
        load(tmp_path)
    Store(tmp_path, {"model": "m"}, 0.1).add([Text((1, 2, 3), 1)], 1)
    [shard] = tmp_path.glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(BadWeights, match="is damaged"):
        load(tmp_path)
    (tmp_path / corpora.MANIFEST).write_text("{}")
    with pytest.raises(BadWeights, match="is damaged"):
        load(tmp_path)


@pytest.mark.parametrize("token", [2**16 - 1, 2**16, 200_000])
def test_tokens_of_any_vocabulary_come_back(token, tmp_path):
    Store(tmp_path, {"model": "m"}, 0.1).add([Text((1, token, 3), 1)], 1)
    assert list(texts(load(tmp_path))) == [Text((1, token, 3), 1)]
