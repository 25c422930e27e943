"""Negative controls: bugs of the kind engines ship, planted one by one. The contract must catch every one of them.

Each test runs the same comparison as the contract does, with one piece replaced by a broken twin, and demands that it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from outrider import registry
from outrider.accept import coupled
from outrider.cache.paged import PagedCache
from outrider.config import SamplingParams
from outrider.drafters.draft_model import DraftModel
from outrider.models.layout import Layout
from outrider.models.target import ModelTarget
from outrider.scheduler import Scheduler
from outrider.types import NONE, Finish

from .. import probes, tiny
from .drafters import every
from .test_state import assert_fresh
from .test_text import OPTIONS, PROMPTS, answers, plain, requests

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def vectorised(monkeypatch: Patch) -> None:
    """Judge with the vectorised rule, whose pieces are broken below (on CPU its plain twin would)."""
    monkeypatch.setattr(coupled, "walk", coupled.vectorised)


def differs(option: str, *names: str, seeds: int = 1) -> bool:
    """Whether the contract's comparison notices: a changed text, or a crash of the run."""
    for name in names:
        for seed in range(seeds):
            want = plain(option, seed=11 + 100 * seed)
            drafter = every()[name](answers(option, seed=11 + 100 * seed))
            try:
                got = tiny.World().run(drafter, requests(OPTIONS[option], seed=11 + 100 * seed))
            except (AssertionError, IndexError, RuntimeError):
                return True
            if tuple(map(tuple, got)) != want:
                return True
    return False


def clean(option: str, *names: str) -> None:
    """The control of the control: without the bug, the same comparison passes (and the plain answers are made)."""
    assert not differs(option, *names)


def test_stale_kv_after_a_branch(monkeypatch: Patch) -> None:
    """The accepted branch's KV is left where it was drafted."""
    clean("sampled", "bushy")
    monkeypatch.setattr(ModelTarget, "keep", lambda self, batch, proposal, verdict: None)
    assert differs("sampled", "bushy", seeds=3)


def test_stale_kv_is_seen_in_the_cache_too(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ModelTarget, "keep", lambda self, batch, proposal, verdict: None)
    world = tiny.World()
    engine = world.engine(every()["bushy"](answers("sampled")))
    made = requests(OPTIONS["sampled"], PROMPTS[:3])
    for request in made:
        engine.add(request)
    with pytest.raises(AssertionError, match="stale"):
        while engine.step() is not None:
            for request in (r for r in made if r.finish is Finish.RUNNING):
                assert_fresh(world, request)


def test_draft_cache_hole(monkeypatch: Patch) -> None:
    """After full acceptance the draft takes its last guess to have KV. The text stays right; self-draft must notice."""

    def commits_all() -> bool:
        drafter = tiny.draft_model(3, depth=3)
        params = replace(OPTIONS["sampled"], ignore_eos=True, max_tokens=1 + 4 * 8)
        made = requests(params)
        tiny.World().run(drafter, made)
        return all(r.stats.accepted == 24 for r in made)

    assert commits_all()
    right = DraftModel._ready

    def hole(self: DraftModel, request: object, nodes: int) -> bool:
        memory = self._memory.get(request.id)  # type: ignore[attr-defined]
        full = memory is not None and len(memory.ran) == self.depth - 1
        ok = right(self, request, nodes)  # type: ignore[arg-type]
        if full and ok:
            memory.computed = len(request.tokens) - 1  # type: ignore[attr-defined, union-attr]
        return ok

    monkeypatch.setattr(DraftModel, "_ready", hole)
    assert not commits_all()


@pytest.mark.parametrize("shift", [1, -1])
def test_off_by_one_position(monkeypatch: Patch, shift: int) -> None:
    """Draft nodes sit one position too far, or too near."""
    clean("sampled", "replay")
    right = Layout.build.__func__  # type: ignore[attr-defined]

    def wrong(cls: type[Layout], *args: object, **kwargs: object) -> Layout:
        made = right(cls, *args, **kwargs)
        position = made.rows.position + shift * (made.rows.slot > 0)
        return replace(made, rows=replace(made.rows, position=position))

    monkeypatch.setattr(Layout, "build", classmethod(wrong))
    assert differs("sampled", "replay", seeds=3)


def _slots(monkeypatch: Patch, change: Callable[[object], object]) -> None:
    right = Layout.slots
    monkeypatch.setattr(Layout, "slots", lambda self, batch: change(right(self, batch)))


def test_penalties_of_the_wrong_slot(monkeypatch: Patch) -> None:
    """Every slot sees the history of the request, without the guesses on its own path (as several servers did)."""
    clean("penalties", "replay", "bushy")
    _slots(monkeypatch, lambda s: replace(s, path=torch.full_like(s.path, NONE)))  # type: ignore[attr-defined, type-var]
    assert differs("penalties", "replay", "bushy", seeds=3)


def test_penalties_of_a_sibling(monkeypatch: Patch) -> None:
    """Paths of a tree are mixed up between rows."""
    clean("penalties", "bushy")
    _slots(monkeypatch, lambda s: replace(s, path=s.path.roll(1, 0)))  # type: ignore[attr-defined, type-var]
    assert differs("penalties", "bushy", seeds=3)


def test_min_tokens_counts_rounds(monkeypatch: Patch) -> None:
    """The length seen by min_tokens leaves out the guesses before the slot."""
    params = SamplingParams(temperature=0.0, min_tokens=9, max_tokens=28, logit_bias={tiny.EOS: 100.0}, seed=11)

    def lengths() -> tuple[int, int]:
        first, second = (tiny.request(PROMPTS[0], params) for _ in range(2))
        whole = tiny.World().run(registry.parse("none"), [first])[0]
        tiny.World().run(probes.Replay({tuple(PROMPTS[0]): whole}, depth=5), [second])
        return len(first.output), len(second.output)

    assert lengths() == (10, 10)
    _slots(monkeypatch, lambda s: replace(s, position=s.position - s.depth))  # type: ignore[attr-defined, type-var]
    assert lengths() != (10, 10)


def test_eos_overrun(monkeypatch: Patch) -> None:
    """A stop token inside an accepted block does not end the text."""
    clean("masks", "replay")
    right = coupled.cut

    def wrong(batch: object, path: object, accepted: object, tokens: torch.Tensor) -> object:
        verdict = right(batch, path, accepted, tokens)  # type: ignore[arg-type]
        deaf = replace(batch, requests=tuple(replace(r, stop_ids=frozenset()) for r in batch.requests))  # type: ignore[attr-defined, type-var]
        inside = (verdict.finish == Finish.STOP.value) & (verdict.counts < accepted + 1)
        return right(deaf, path, accepted, tokens) if bool(inside.any()) else verdict  # type: ignore[arg-type]

    monkeypatch.setattr(coupled, "cut", wrong)
    assert differs("masks", "replay", "replay:32", seeds=6)


def test_length_overrun(monkeypatch: Patch) -> None:
    """max_tokens is only looked at between rounds."""
    base = OPTIONS["sampled"]
    request = tiny.request(PROMPTS[0], replace(base, max_tokens=10, seed=11), bad_words=((7,), (3, 8)))
    monkeypatch.setattr("outrider.control.Fixed.budget", _greedy_budget)
    right = coupled.cut

    def wrong(batch: object, path: object, accepted: object, tokens: object) -> object:
        long = replace(batch, requests=tuple(replace(r, params=replace(r.params, max_tokens=999)) for r in batch.requests))  # type: ignore[attr-defined, type-var]
        return right(long, path, accepted, tokens)  # type: ignore[arg-type]

    whole = plain("sampled")[0]
    drafter = probes.Replay({tuple(PROMPTS[0]): whole}, depth=5)
    assert tiny.World().run(drafter, [request])[0] == list(whole[:10])
    monkeypatch.setattr(coupled, "cut", wrong)
    engine = tiny.World().engine(probes.Replay({tuple(PROMPTS[0]): whole}, depth=5))
    engine.add(again := tiny.request(PROMPTS[0], replace(base, max_tokens=10, seed=11), bad_words=((7,), (3, 8))))
    for _ in range(4):
        engine.step()
    assert len(again.output) > 10


def _greedy_budget(self: object, batch: object) -> object:
    from outrider.types import Budget

    able = [5 if ready and pending == 1 else 0 for ready, pending in zip(batch.ready, batch.pending, strict=True)]  # type: ignore[attr-defined]
    return Budget(tuple(able), tuple(able))


def test_noise_keyed_by_slot(monkeypatch: Patch) -> None:
    """Noise depends on where in the block a token falls, not on its position in the text."""
    clean("sampled", "replay")
    _slots(monkeypatch, lambda s: replace(s, position=s.depth))  # type: ignore[attr-defined, type-var]
    assert differs("sampled", "replay")


def test_retry_with_a_new_seed(monkeypatch: Patch) -> None:
    """A preempted request comes back with fresh noise."""
    right = Scheduler._preempt

    def wrong(self: Scheduler) -> None:
        right(self)
        self.waiting[0].key += 1

    def equal() -> bool:
        got = tiny.World(tokens=96).run(registry.parse("none"), requests(OPTIONS["sampled"]))
        return tuple(map(tuple, got)) == plain("sampled")

    assert equal()
    monkeypatch.setattr(Scheduler, "_preempt", wrong)
    assert not equal()


def test_redraw_after_mismatch(monkeypatch: Patch) -> None:
    """After a mismatch a fresh token is drawn instead of the one that mismatched."""
    clean("sampled", "replay")
    right = coupled.Coupled.__call__

    def wrong(self: coupled.Coupled, proposal: object, scores: object, batch: object) -> object:
        verdict = right(self, proposal, scores, batch)  # type: ignore[arg-type]
        missed = (verdict.accepted < proposal.sizes) & (verdict.counts == verdict.accepted + 1)  # type: ignore[attr-defined]
        tokens = verdict.tokens.clone()
        last = (verdict.counts - 1).clamp(min=0)[:, None]
        redrawn = (tokens.gather(1, last) + 1) % tiny.VOCAB
        tokens.scatter_(1, last, torch.where(missed[:, None], redrawn, tokens.gather(1, last)))
        return replace(verdict, tokens=tokens)

    monkeypatch.setattr(coupled.Coupled, "__call__", wrong)
    assert differs("sampled", "replay")


def test_padding_that_leaks(monkeypatch: Patch) -> None:
    """Columns beyond a request's size are judged like guesses: a shorter tree in a ragged batch gains tokens nobody scored."""
    clean("sampled", "bushy")
    right = coupled.agreeing

    def wrong(proposal: object, choice: torch.Tensor) -> torch.Tensor:
        full = torch.full_like(proposal.sizes, proposal.columns)  # type: ignore[attr-defined]
        filler = choice.gather(1, proposal.parents.clamp(min=-1) + 1)  # type: ignore[attr-defined]
        unused = torch.arange(proposal.columns) >= proposal.sizes[:, None]  # type: ignore[attr-defined]
        return right(replace(proposal, sizes=full, tokens=torch.where(unused, filler, proposal.tokens)), choice)  # type: ignore[type-var, attr-defined]

    monkeypatch.setattr(coupled, "agreeing", wrong)
    assert differs("sampled", "replay", "draft_model:width=3", "ngram", seeds=2)


def test_siblings_see_each_other(monkeypatch: Patch) -> None:
    """The tree is verified under a causal mask over slots instead of an ancestor mask."""
    clean("sampled", "bushy")
    right = Layout.build.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Layout, "build", classmethod(lambda cls, *a, **k: replace(right(cls, *a, **k), ancestors=None)))
    assert differs("sampled", "bushy", seeds=3)


def test_two_requests_share_a_block(monkeypatch: Patch) -> None:
    """The allocator hands out a block that is still in use."""
    clean("greedy", "ngram")
    right = PagedCache.slots
    monkeypatch.setattr(PagedCache, "slots", lambda self, request, start, end: right(self, request, start, end) % 64 + 8)
    assert differs("greedy", "ngram")
