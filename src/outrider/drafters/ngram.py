"""Prompt lookup: what followed the last few tokens the last time they occurred (Saxena 2023).

The longest n-gram wins, among equals the most recent occurrence; a hash index makes a lookup and an update O(1) per token and n.
A guess is deterministic, so it costs nothing but the rows it adds to the pass. It pays on text that repeats its context: editing,
extraction, summaries with quotes, code; on free prose it mostly stays silent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import BadInput
from ..protocols import Drafter
from ..registry import register
from ..types import Batch, Budget, Proposal, Request


@dataclass(slots=True)
class Index:
    """Where each n-gram of a sequence was last followed by something: `places[gram]` is the index of the following token."""

    smallest: int
    largest: int
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    length: int = 0

    def extend(self, tokens: list[int]) -> None:
        """Take in the tokens not seen yet. The grams that end at the last token are left out until they have a successor."""
        places, sizes = self.places, range(self.smallest, self.largest + 1)
        for end in range(max(self.length, 1), len(tokens)):
            for n in sizes:
                if n <= end:
                    places[tuple(tokens[end - n : end])] = end
        self.length = max(self.length, len(tokens))

    def follow(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` guesses for what follows `tokens`; a match near the end repeats its period."""
        for n in range(min(self.largest, len(tokens)), self.smallest - 1, -1):
            at = self.places.get(tuple(tokens[-n:]))
            if at is not None:
                found = tokens[at : at + count]
                return found if len(found) == count else (found * (count // len(found) + 1))[:count]
        return []


@register("ngram")
class NGram(Drafter):
    """Prompt lookup decoding, one chain per request."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`max` and `min`: longest and shortest n-gram looked up; `depth`: tokens guessed."""

        max: int = 4
        min: int = 2
        depth: int = 10

    def __init__(self, config: Config) -> None:
        if not 1 <= config.min <= config.max:
            raise BadInput(f"ngram needs 1 <= min <= max, got min={config.min}, max={config.max}")
        if config.depth < 1:
            raise BadInput(f"ngram needs depth >= 1, got {config.depth}; use --draft none for plain decoding")
        self.config, self.depth, self.nodes = config, config.depth, config.depth
        self._indexes: dict[int, Index] = {}

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        guesses = [self._guess(r, budget.depth[b]) for b, r in enumerate(batch.requests)]
        return Proposal.chains(guesses)

    def preview(self, request: Request, most: int) -> list[int]:
        """See `protocols.Drafter`."""
        return self._guess(request, most)

    def release(self, request: Request) -> None:
        self._indexes.pop(request.id, None)

    def _guess(self, request: Request, depth: int) -> list[int]:
        if depth == 0:
            return []
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = Index(self.config.min, self.config.max)
        index.extend(request.tokens)
        return index.follow(request.tokens, depth)
