"""A drafter that lays hands on the requests it is shown: they are put back, it is switched off, the text is plain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider import registry, trust
from outrider.config import SamplingParams
from outrider.drafters.hybrid import Hybrid
from outrider.errors import OutriderWarning
from outrider.protocols import Drafter
from outrider.types import Batch, Budget, Proposal, Request

from . import tiny

PROMPTS = tiny.prompts(3, seed=5)


def requests() -> list[Request]:
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=3)
    return [tiny.request(p, params) for p in PROMPTS]


CHANGES: dict[str, Callable[[Request], object]] = {
    "append": lambda r: r.tokens.append(5),
    "last": lambda r: r.tokens.__setitem__(-1, 5),
    "all": lambda r: r.tokens.__setitem__(slice(None), [5] * len(r.tokens)),
    "pop": lambda r: r.tokens.pop(),
    "clear": lambda r: r.tokens.clear(),
    "another list": lambda r: setattr(r, "tokens", [5]),
    "id": lambda r: setattr(r, "id", 5),
    "key": lambda r: setattr(r, "key", r.key + 1),
    "computed": lambda r: setattr(r, "computed", 0),
    "stops": lambda r: setattr(r, "stop_ids", frozenset(range(40))),
}


class Meddler(Drafter):
    name = "meddler"
    depth = nodes = 3

    def __init__(self, change: Callable[[Request], object], where: str) -> None:
        self.change, self.where = change, where

    def meddle(self, where: str, batch: Batch) -> None:
        if where == self.where and any(len(r.tokens) > r.prompt_len + 4 for r in batch.requests):
            self.change(batch.requests[0])

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        self.meddle("propose", batch)
        return Proposal.chains([[2, 3][: budget.depth[b]] for b in range(len(batch))])

    def observe(self, batch: Batch, *seen: object) -> None:
        self.meddle("observe", batch)


@pytest.mark.parametrize("where", ["propose", "observe"])
@pytest.mark.parametrize("change", CHANGES)
def test_requests_are_put_back(change: str, where: str) -> None:
    plain = tiny.World().run(registry.parse("none"), requests())
    with pytest.warns(OutriderWarning, match="changed a request"):
        got = tiny.World().run(Meddler(CHANGES[change], where), requests(), may_fail=True)
    assert got == plain


def test_only_the_packages_own_drafters_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "TRUSTING", True)
    mine, theirs = registry.parse("ngram"), Meddler(CHANGES["last"], "propose")
    assert trust.own(mine) and not trust.own(theirs)
    assert not trust.own(Hybrid.of([mine, theirs])), "a member of somebody else's is enough"
    assert trust.own(Hybrid.of([mine, registry.parse("suffix")]))


def test_what_one_does_to_its_guesses_is_nobody_elses() -> None:
    """Its tensors are its own: whatever it writes into them, others' guesses stay what they are."""
    mine = Proposal.chains([[5, 6, 7]])
    mine.source[0, 2], mine.parents[0, 1], mine.tokens[0, 0] = -7, 9, -3
    mine.source[0, :2] = 4
    other = Proposal.chains([[5, 6, 7]])
    assert [t.tolist() for t in (other.source, other.parents, other.tokens)] == [[[0, 0, 0]], [[-1, 0, 1]], [[5, 6, 7]]]
