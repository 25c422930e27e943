"""Lessons: what the target saw, for any batch, from the cache too."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from outrider.errors import DrafterMismatch, OutOfMemory, UnsupportedModel
from outrider.train.capture import LAST, Capture, batches, shuffled

from .. import tiny
from ..heads import teacher

NAMES = ("hidden:last", "hidden:0,2")


def test_a_lesson_is_what_the_model_sees(loaded, corpus):
    lesson = Capture(loaded, NAMES).lesson(corpus, [3, 0, 5], 30)
    out = loaded.model.model(input_ids=lesson.tokens, use_cache=False, output_hidden_states=True)
    assert torch.equal(lesson.features["hidden:last"], out.last_hidden_state)
    assert torch.allclose(lesson.features["hidden:0,2"], torch.cat([out.hidden_states[0], out.hidden_states[2]], -1))
    assert torch.allclose(lesson.logits(out.last_hidden_state), loaded.model(lesson.tokens).logits)
    for row, i in enumerate([3, 0, 5]):
        text = corpus.text(i)[:30]
        assert lesson.real[row].sum() == len(text)
        assert torch.equal(lesson.tokens[row, : len(text)], text.long())
        assert lesson.taught[row].nonzero()[:, 0].tolist() == list(range(int(corpus.prompts[i]), len(text)))


def test_who_shares_the_batch_does_not_matter(loaded, corpus):
    made = Capture(loaded)
    together, alone = made.lesson(corpus, [0, 1, 2], 64), made.lesson(corpus, [1], 64)
    length = alone.tokens.shape[1]
    assert torch.allclose(together.features[LAST][1, :length], alone.features[LAST][0], atol=1e-5)


def test_cached_features_are_those_that_were_computed(loaded, corpus, tmp_path, monkeypatch):
    made = Capture(loaded, NAMES, tmp_path)
    first = made.lesson(corpus, [0, 1, 2], 64)
    monkeypatch.setattr(made, "run", lambda tokens: pytest.fail("computed again"))
    again = made.lesson(corpus, [2, 0], 64)
    for name in NAMES:
        length = int(corpus.lengths[2])
        assert torch.equal(again.features[name][0, :length], first.features[name][2, :length])
        assert not again.features[name][1, int(corpus.lengths[0]) :].any()


def test_kept_features_need_no_second_pass(loaded, corpus, monkeypatch):
    made = Capture(loaded, NAMES, keep=2**20)
    first = [made.lesson(corpus, indices, 30) for indices in ([3, 0], [5])]
    assert sum(t.nbytes for kept in made.kept.values() for t in kept.values()) == made.size(
        dataclasses.replace(corpus, lengths=corpus.lengths[[3, 0, 5]]), 30
    )
    monkeypatch.setattr(made, "run", lambda tokens: pytest.fail("a pass"))
    again = made.lesson(corpus, [5, 3], 30)
    for name in NAMES:
        length = int(again.real[1].sum())
        assert torch.equal(again.features[name][1, :length], first[0].features[name][0, :length])
        assert torch.equal(again.features[name][0, : int(again.real[0].sum())], first[1].features[name][0])


def test_what_does_not_fit_is_passed_again(loaded, corpus, monkeypatch):
    """Of a batch of which a part is kept, the rest alone."""
    plain = Capture(loaded, NAMES).lesson(corpus, [3, 0, 5], 30)
    size = Capture(loaded, NAMES).size(dataclasses.replace(corpus, lengths=corpus.lengths[[3]]), 30)
    made, passed = Capture(loaded, NAMES, keep=size), []
    monkeypatch.setattr(made, "run", lambda tokens, was=made.run: passed.append(len(tokens)) or was(tokens))
    for _ in range(2):
        found = made.lesson(corpus, [3, 0, 5], 30)
        for name in NAMES:
            where = plain.real[:, :, None]
            assert torch.allclose(found.features[name] * where, plain.features[name] * where, atol=1e-5)
    assert list(made.kept) == [3] and made.room == 0 and passed == [3, 2]


def test_a_cache_without_room(loaded, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OutOfMemory, match="without --cache"):
        Capture(loaded, cache=tmp_path).lesson(corpus, [0], 64)


def test_a_feature_that_is_not_there(loaded):
    with pytest.raises(DrafterMismatch, match="has 3 layers"):
        Capture(loaded, ("hidden:3",))


def test_a_head_that_does_more_is_refused(loaded):
    model = tiny.model(dtype=torch.float32)
    plain = model.forward
    model.forward = lambda *a, **k: (out := plain(*a, **k), setattr(out, "logits", out.logits**3))[0]
    with pytest.raises(UnsupportedModel, match="relative difference"):
        Capture(dataclasses.replace(loaded, model=model))


def test_the_teacher_tells_the_facts(loaded, corpus):
    made = Capture(loaded).teacher(corpus.counts(48)[:40])
    assert made.embeddings.shape == made.head.shape == (48, 32) and len(made.counts) == 48
    assert made.config["model_type"] == "llama" and made.fingerprint == loaded.fingerprint
    assert made.config["num_hidden_layers"] == teacher().config["num_hidden_layers"]


def test_batches_hold_every_text_once_within_the_limit(corpus):
    every = list(range(len(corpus.starts)))
    made = batches(corpus, every, 200, 32)
    assert sorted(i for b in made for i in b) == every
    assert all(len(b) == 1 or len(b) * max(min(int(corpus.lengths[i]), 32) for i in b) <= 200 for b in made)
    first, same, other = (list(shuffled(corpus, every, (200, 32), seed)) for seed in ((0, 0), (0, 0), (0, 1)))
    assert first == same != other
    assert sorted(i for b in other for i in b) == every
