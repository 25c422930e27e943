"""Drafts of another tokenizer: nothing lost where all tokens are shared, nothing wrong where few are."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import SamplingParams
from outrider.drafters import translate
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.translate import ByIds, ByText, shared
from outrider.errors import BadInput, DrafterMismatch, OutriderWarning
from outrider.protocols import Start
from outrider.sampling import TextSampler
from outrider.types import Batch, Budget, Request

from .. import tiny, tongues
from ..contract.test_text import OPTIONS, check_statistics, plain, requests
from .test_draft_model import check_memory

PROMPTS = tiny.prompts(3, seed=33)


@pytest.fixture(autouse=True)
def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys know few letters."""
    monkeypatch.setattr(translate, "_SAMPLE", "abc")


def run(drafter: DraftModel, params: SamplingParams, rule: str = "coupled") -> list[Request]:
    made = [tiny.request(p, params, rule=rule) for p in PROMPTS]
    tiny.World().run(drafter, made, rule)
    return made


# All tokens shared: the same model in other words must lose nothing


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("frame", [False, True])
@pytest.mark.parametrize("option", ["greedy", "sampled", "penalties", "masks"])
def test_by_ids_the_targets_twin_is_always_right(option: str, frame: bool, width: int) -> None:
    """Noise, penalties and masks are the target's, at the target's positions and ids. (With a start token of its own, the draft
    reads another context, so it may err; it must not be lost.)"""
    drafter = tongues.foreign(3, frame=frame, depth=3, width=width)
    ours = requests(OPTIONS[option])
    assert tuple(map(tuple, tiny.World().run(drafter, ours))) == plain(option)
    assert isinstance(drafter.bridge, ByIds)
    drafted, accepted = sum(r.stats.drafted for r in ours), sum(r.stats.accepted for r in ours)
    assert frame or width > 1 or accepted == drafted > 0
    assert accepted > 0
    if width > 1 and not frame:
        assert all(sum(r.stats.accepted_at) == sum(r.stats.offered_at) for r in ours), "every depth has the right guess"


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_by_ids_draws_carry_their_law(rule: str) -> None:
    """q = p under the classical rules: every drawn guess is accepted."""
    params = SamplingParams(temperature=1.0, max_tokens=1 + 4 * 4, ignore_eos=True, seed=4)
    for request in run(tongues.foreign(3, depth=3), params, rule):
        assert (request.stats.rounds, request.stats.accepted) == (5, 12)


def test_by_text_the_targets_twin_is_right_at_zero() -> None:
    """One letter per token on both sides: the text is read as it was written."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, allowed_token_ids=tuple(range(2, 48)))
    drafter = tongues.foreign(3, depth=3, match="text", width=2)
    ours = run(drafter, params)
    assert isinstance(drafter.bridge, ByText) and drafter.width == 1
    loose = [tiny.request(p, params) for p in PROMPTS]
    tiny.World().run(tiny.draft_model(3, depth=3), loose)
    assert [r.output for r in ours] == [r.output for r in loose]
    assert sum(r.stats.accepted for r in ours) > 0.7 * sum(r.stats.accepted for r in loose), (
        "special tokens are the only difference"
    )


# Few tokens shared, other ones: speed may go, nothing else


@pytest.mark.parametrize("match", ["ids", "text", "auto"])
@pytest.mark.parametrize("common", [40, 20])
@pytest.mark.parametrize("option", ["greedy", "sampled", "masks"])
def test_other_words_change_nothing(option: str, common: int, match: str) -> None:
    drafter = tongues.draft(tiny.decoder_first("llama", 2), tongues.pairs(common), depth=4, match=match)
    ours = requests(OPTIONS[option])
    assert tuple(map(tuple, tiny.World().run(drafter, ours))) == plain(option)
    assert sum(r.stats.drafted for r in ours) > 10
    for request in ours:
        check_statistics(request)
    assert not drafter._memory and drafter.cache.free() == drafter.cache.capacity
    assert not drafter.bridge._shadows.by_id  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [tongues.foreign, tongues.draft], ids=["same words", "other words"])
@pytest.mark.parametrize("match", ["ids", "text"])
def test_its_memory_is_fresh_after_every_round(match: str, make: Any) -> None:
    """The draft's KV is that of its shadow, whatever was written anew."""
    if make is tongues.foreign:
        drafter = tongues.foreign(2, depth=3, match=match)
    else:
        drafter = tongues.draft(tiny.decoder_first("llama", 2), tongues.pairs(30), depth=3, match=match)
    world = tiny.World()
    engine = world.engine(drafter)
    made = [tiny.request(p, SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=4)) for p in PROMPTS]
    for request in made:
        engine.add(request)
    checked = 0
    while engine.step() is not None:
        for request in made:
            shadow = drafter.bridge._shadows.by_id.get(request.id)  # type: ignore[union-attr]
            if shadow is not None and request.id in drafter._memory:
                check_memory(drafter, shadow.request)
                checked += 1
    assert engine.drafter.working and checked > 20


@pytest.mark.parametrize("chunk", [2, 5])
def test_long_texts_are_settled_and_stay_the_text(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "_CHUNK", chunk)
    drafter = tongues.draft(tiny.decoder_first("llama", 2), tongues.pairs(20), depth=3, match="text")
    tiny.World().engine(drafter)
    ours, theirs = tongues.target(), tongues.pairs(46)
    drafter.bridge._shadows.theirs = drafter.bridge.theirs = theirs  # type: ignore[union-attr]
    rng, request = random.Random(1), tiny.request([5])
    anchors = set()
    for _ in range(60):
        request.tokens.extend(rng.randrange(2, 48) for _ in range(rng.randint(1, 4)))
        batch = drafter.bridge.shadow(Batch((request,), (1,), (True,), (9,)), Budget((3,), (3,)))  # type: ignore[union-attr]
        assert theirs.decode(batch.requests[0].tokens) == ours.decode(request.tokens)
        shadow = drafter.bridge._shadows.by_id[request.id]  # type: ignore[union-attr]
        anchors.add(shadow.anchor)
        assert len(request.tokens) - shadow.anchor <= 2 * chunk
    assert len(anchors) > 3


def test_what_was_settled_is_not_read_again() -> None:
    """The cost of a round does not grow with the text."""
    drafter = tongues.foreign(2, match="text")
    tiny.World().engine(drafter)
    bridge: Any = drafter.bridge
    request = tiny.request([2 + i % 40 for i in range(5000)])
    batch, budget = Batch((request,), (1,), (True,), (9,)), Budget((3,), (3,))
    bridge.shadow(batch, budget)
    read = []
    plain_decode = bridge.begin.tokenizer.decode
    bridge.begin.tokenizer.decode = lambda ids, skip_special=True: read.append(len(ids)) or plain_decode(ids, skip_special)
    request.tokens.append(7)
    bridge.shadow(batch, budget)
    assert max(read) <= 2 * translate._CHUNK + 5 and bridge.kept(request) >= 5000


# Which way, or none


def begin(vocab: dict[str, int] | None, tokenizer: Any = None) -> Start:
    cpu = torch.device("cpu")
    return Start("big", 48, 256, cpu, torch.float64, TextSampler(48), vocab, tokenizer=tokenizer)  # type: ignore[arg-type]


def way(match: str, theirs: tongues.Toy | None, ours: tongues.Toy) -> str:
    return type(translate.bridge(match, "small", 48, theirs, begin(ours.vocab, ours))).__name__


def test_auto_goes_by_ids_where_most_are_shared_and_by_text_else() -> None:
    ours = tongues.target()
    assert way("auto", tongues.pairs(40), ours) == "ByIds"
    assert way("auto", tongues.pairs(10), ours) == "ByText"
    assert way("text", tongues.pairs(40), ours) == "ByText"
    assert way("ids", tongues.pairs(10), ours) == "ByIds"


def test_a_hopeless_pair_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "_SAMPLE", "a!b")  # survives no toy
    ours, strange = tongues.target(), tongues.Toy(["<a>", "<b>", "Ω", "Ж", "a"])
    for match in translate.MATCHES:
        with pytest.raises(DrafterMismatch, match=rf"small and the target big share \d+ tokens.*match={match}.*--draft ngram"):
            way(match, tongues.Toy(["<a>", "<b>", *(chr(1000 + i) for i in range(40))]), ours)
    assert way("auto", strange, ours) == "ByIds", "a few shared tokens are better than nothing"
    with pytest.raises(DrafterMismatch, match="match=text"):
        translate.bridge("text", "small", 48, None, begin(ours.vocab, ours))


def test_an_unknown_match_is_refused() -> None:
    with pytest.raises(BadInput, match="match must be auto, ids, text or same"):
        tiny.World().engine(tongues.foreign(2, match="magic"))
    with pytest.raises(DrafterMismatch, match="do not share a tokenizer"):
        tiny.World().engine(tongues.foreign(2, match="same"))


def test_a_draft_of_the_same_tokenizer_is_not_translated() -> None:
    same = tongues.draft(tiny.decoder_first("llama", 2), tongues.target())
    tiny.World().engine(same)
    assert same.bridge is None


# Vocabularies


def test_spellings_of_the_same_bytes_meet() -> None:
    gpt = {"Ġhello": 3, "Ã©": 4, "Ċ": 5, "hello": 6, "<|end|>": 7, "Ġ": 8, "!": 9}
    llama = {"▁hello": 13, "é": 14, "<0x0A>": 15, "hello": 16, "<|end|>": 17, "▁": 18, "x": 19}
    assert shared(gpt, llama) == [(3, 13), (4, 14), (5, 15), (6, 16), (7, 17), (8, 18)]
    assert shared(llama, gpt) == [(b, a) for a, b in shared(gpt, llama)]


@settings(max_examples=100, deadline=None)
@given(
    one=st.lists(st.text("ab▁", min_size=1, max_size=3), unique=True, max_size=12),
    two=st.lists(st.text("ab▁ ", min_size=1, max_size=3), unique=True, max_size=12),
)
def test_shared_tokens_are_one_to_one(one: list[str], two: list[str]) -> None:
    found = shared({w: i for i, w in enumerate(one)}, {w: i for i, w in enumerate(two)})
    assert len({a for a, _ in found}) == len({b for _, b in found}) == len(found)
    assert all(one[a].replace("▁", " ") == two[b].replace("▁", " ") for a, b in found)
    assert {one[a].replace("▁", " ") for a, _ in found} == {w.replace("▁", " ") for w in one} & {w.replace("▁", " ") for w in two}


def test_tokens_that_are_not_shared_reach_the_draft_as_text() -> None:
    ours, theirs = tongues.target(), tongues.Toy(["<s>", "</s>", *tongues.LETTERS[:3], "xy", "x", "y"], frame=True)
    bridge = translate.bridge("ids", "small", 8, theirs, begin(ours.vocab, ours))
    request = tiny.request(ours.encode("abxyc"))
    made = bridge.shadow(Batch((request,), (1,), (True,), (9,)), Budget((3,), (3,)))
    assert made.requests[0].tokens == [theirs.vocab[w] for w in ("<s>", "a", "b", "x", "y", "c")]
    other = tongues.Toy(["<s>", "</s>", *tongues.LETTERS[:3], "xy"])
    bridge = translate.bridge("ids", "small", 6, other, begin(ours.vocab, ours))
    made = bridge.shadow(Batch((request,), (1,), (True,), (9,)), Budget((3,), (3,)))
    assert made.requests[0].tokens == [other.vocab[w] for w in ("a", "b", "xy", "c")]
    request.tokens.extend(ours.encode("ba"))
    made = bridge.shadow(Batch((request,), (1,), (True,), (9,)), Budget((3,), (3,)))
    assert other.decode(made.requests[0].tokens) == "abxycba" and bridge.kept(request) == 4


def test_both_start_tokens_are_one() -> None:
    ours = tongues.Toy(tongues.target().words, frame=True)
    theirs, _ = tongues.shuffled(frame=True)
    for match in ("ids", "text"):
        bridge = translate.bridge(match, "small", 48, theirs, begin(ours.vocab, ours))
        request = tiny.request(ours.encode("abc"))
        made = bridge.shadow(Batch((request,), (1,), (True,), (9,)), Budget((3,), (3,)))
        assert made.requests[0].tokens == theirs.encode("abc")


def test_a_tokenizer_that_fails_switches_only_the_drafter_off() -> None:
    drafter = tongues.foreign(2, match="text")
    engine = tiny.World().engine(drafter)
    ours = tiny.request(PROMPTS[0], OPTIONS["sampled"])
    engine.add(ours)

    def fail(*args: object, **named: object) -> str:
        raise RuntimeError("no such word")

    drafter.bridge.begin.tokenizer.decode = fail  # type: ignore[union-attr, method-assign]
    with pytest.warns(OutriderWarning, match="no such word"):
        while engine.step() is not None:
            pass
    assert len(ours.output) == 28
