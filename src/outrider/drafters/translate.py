"""A draft model of another tokenizer (Timor et al. 2025, "Accelerating LLM inference with lossless speculative decoding for
heterogeneous vocabularies").

**By ids** (token-level intersection): tokens whose bytes are the same in both vocabularies are shared. The draft's scores of
shared tokens are moved to the target's ids, everything else is impossible; noise, processors and draws are then the target's, as
for a draft of the same family. Tokens of the text that are not shared reach the draft through their text.

**By text** (string-level match): the text is written in the draft's tokens, the draft goes on greedily, and what it wrote is read
in the target's tokens. Guesses are certain ones (no q): the draft's chances belong to other tokens.

Either way the draft runs over *shadows*: requests that hold the text in its own tokens. Guesses cost nothing but speed if a
translation is poor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import SamplingParams
from ..errors import DrafterMismatch
from ..protocols import DraftSampler, Start, Tokenizer
from ..types import NONE, Batch, Budget, Proposal, Request, Slots

MATCHES = ("auto", "ids", "text")
_ENOUGH, _LEAST = 0.5, 0.1
"""Share of the smaller vocabulary that must be shared for `auto` to go by ids, and for going by ids at all."""
_CHUNK = 64
"""Target tokens after which the text before a word is no more read anew."""
_SAMPLE = 'The quick brown fox (1984) said: "naïve café"\n\n    return x[i] + 3.14  # 你好\n'
"""Must survive a tokenizer for its text to be worth anything."""


class Words(Tokenizer, Protocol):
    """A tokenizer that tells its vocabulary."""

    @property
    def vocab(self) -> Mapping[str, int]: ...


class Bridge(Protocol):
    """Between a draft and a target that number their tokens differently."""

    @property
    def sampler(self) -> DraftSampler:
        """What the draft chooses with, in its own ids."""
        ...

    @property
    def chains(self) -> bool:
        """Whether it can only carry chains."""
        ...

    def shadow(self, batch: Batch, budget: Budget) -> Batch:
        """The batch in the draft's tokens; requests without budget stay as they are."""
        ...

    def kept(self, request: Request) -> int:
        """How many tokens of the shadow are as they were before the last `shadow`."""
        ...

    def back(self, batch: Batch, made: Proposal, budget: Budget) -> Proposal:
        """The draft's guesses in the target's tokens."""
        ...

    def seen(self, batch: Batch) -> Batch | None:
        """The batch as the draft knows it, for `observe`; None if its columns are not those of the proposal."""
        ...

    def release(self, request: Request) -> None: ...


def bridge(match: str, name: str, size: int, tokenizer: object, start: Start) -> Bridge:
    """How to get from the draft `name` (scores over `size` ids) to the target; `match` as in `MATCHES`. Raises `DrafterMismatch`
    where nothing works."""
    theirs: Any = tokenizer
    pairs = shared(getattr(theirs, "vocab", None) or {}, start.vocab or {})
    least = max(1, min(len(getattr(theirs, "vocab", None) or {}), len(start.vocab or {})))
    share = len(pairs) / least
    speak = start.tokenizer is not None and theirs is not None
    if match == "ids" or (match == "auto" and share >= _ENOUGH):
        if share >= _LEAST:
            return ByIds(pairs, (size, start.vocab_size), theirs, start)
    elif speak and survives(theirs) and survives(start.tokenizer):
        return ByText(theirs, start)
    elif match == "auto" and share >= _LEAST:
        return ByIds(pairs, (size, start.vocab_size), theirs, start)
    raise DrafterMismatch(
        f"the draft model {name} and the target {start.name} share {len(pairs)} tokens ({share:.0%} of the smaller vocabulary), "
        f"and match={match} cannot bridge that; use a draft of the same family, another match ({', '.join(MATCHES)}), "
        "or --draft ngram, which needs no model"
    )


def survives(tokenizer: Any) -> bool:
    """Whether text comes back from a tokenizer as it went in, up to spaces at its ends."""
    return bool(tokenizer.decode(tokenizer.encode(_SAMPLE, special=False)).strip() == _SAMPLE.strip())


def shared(theirs: Mapping[str, int], ours: Mapping[str, int]) -> list[tuple[int, int]]:
    """`(draft id, target id)` of the tokens that stand for the same bytes. Byte-level vocabularies (GPT-2's alphabet) and those
    of sentencepiece (a low line for a space, `<0x0A>` for a byte) are told apart by their spelling."""
    mine, pairs = dict(_spelled(ours)), dict[int, int]()
    for spelled, i in sorted(_spelled(theirs), key=lambda item: item[1]):
        if spelled in mine:
            pairs.setdefault(mine[spelled], i)  # one to one: the first wins
    return sorted((a, b) for b, a in pairs.items())


def _spelled(vocab: Mapping[str, int]) -> list[tuple[bytes, int]]:
    alphabet = _alphabet() if any(t.startswith("Ġ") for t in vocab) else None
    return [(_bytes(token, alphabet), i) for token, i in vocab.items()]


def _bytes(token: str, alphabet: dict[str, int] | None) -> bytes:
    if alphabet is not None:
        values = [alphabet.get(c) for c in token]
        return token.encode() if None in values else bytes(v for v in values if v is not None)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the rest are moved up to 256 and on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(moved)}


@dataclass(slots=True)
class Shadow:
    """A request in the draft's tokens. `read` target tokens are in it; those before `anchor` are settled, as the first `settled`
    tokens of the shadow. `kept`: tokens that the last update left as they were. `first`: whether the target's text has a start
    token, for which the draft has one of its own."""

    request: Request
    read: int = 0
    first: int = 0
    anchor: int = 0
    settled: int = 0
    kept: int = 0


class Shadows:
    """Shadows by request; what both ways have in common."""

    def __init__(self, theirs: Words, ours: Tokenizer | None) -> None:
        self.theirs, self.ours = theirs, ours
        self.by_id: dict[int, Shadow] = {}

    def open(self, request: Request) -> Shadow:
        """The shadow of a request; a new one starts as the draft's own texts do."""
        found = self.by_id.get(request.id)
        if found is None or found.read > len(request.tokens):
            frame = list(self.theirs.encode("")) if self.theirs is not None else []
            own = replace(request, tokens=frame, computed=0, text=None, twin=None)
            first = int(bool(frame) and self.ours is not None and not self.ours.decode(request.tokens[:1]))
            found = self.by_id[request.id] = Shadow(own, read=first, first=first, anchor=first, settled=len(frame))
        return found

    def batch(self, batch: Batch) -> Batch:
        known = (self.by_id.get(r.id) for r in batch.requests)
        return replace(batch, requests=tuple(r if s is None else s.request for r, s in zip(batch.requests, known, strict=True)))

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of target tokens, special ones included."""
        return "" if self.ours is None else self.ours.decode(tokens, skip_special=False)


class ByIds:
    """Token-level intersection."""

    chains = False

    def __init__(self, pairs: list[tuple[int, int]], sizes: tuple[int, int], theirs: Any, start: Start) -> None:
        pairs = [(a, b) for a, b in pairs if a < sizes[0] and b < sizes[1]]
        self._shadows = Shadows(theirs, start.tokenizer)
        self._to_draft = {b: a for a, b in pairs}
        self.sampler: SharedSampler = SharedSampler(start.sampler, pairs, sizes, start.device)

    def shadow(self, batch: Batch, budget: Budget) -> Batch:
        for request, nodes in zip(batch.requests, budget.nodes, strict=True):
            if nodes:
                self._read(self._shadows.open(request), request.tokens)
        made = self._shadows.batch(batch)
        self.sampler.real = {r.id: r for r in batch.requests}
        self.sampler.shift = {s.id: len(r.tokens) - len(s.tokens) for r, s in zip(batch.requests, made.requests, strict=True)}
        return made

    def _read(self, shadow: Shadow, tokens: list[int]) -> None:
        """Append what is new: shared tokens as they are, the rest by their text."""
        own, rest = shadow.request.tokens, list[int]()
        shadow.kept = len(own)
        for token in [*tokens[shadow.read :], NONE]:
            known = self._to_draft.get(token)
            if known is None and token != NONE:
                rest.append(token)
                continue
            if rest and self._shadows.theirs is not None:
                own += self._shadows.theirs.encode(self._shadows.spell(rest), special=False)
            rest = []
            if known is not None:
                own.append(known)
        shadow.read = len(tokens)
        if not own:
            own.append(0)

    def kept(self, request: Request) -> int:
        return self._shadows.by_id[request.id].kept

    def back(self, batch: Batch, made: Proposal, budget: Budget) -> Proposal:
        return made

    def seen(self, batch: Batch) -> Batch | None:
        return self._shadows.batch(batch)

    def release(self, request: Request) -> None:
        self._shadows.by_id.pop(request.id, None)


class SharedSampler:
    """The lent sampler as the draft sees it: the draft's ids outside, the target's inside. `real` are the requests by id, `shift`
    how much longer they are than their shadows."""

    def __init__(self, inner: DraftSampler, pairs: list[tuple[int, int]], sizes: tuple[int, int], device: torch.device) -> None:
        self.inner, (self._size, self._vocab) = inner, sizes
        table = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(device)
        self._theirs, self._ours = table[:, 0], table[:, 1]
        self._to_target = torch.full((self._size + 1,), NONE, dtype=torch.int64, device=device)
        self._to_draft = torch.full((self._vocab + 1,), NONE, dtype=torch.int64, device=device)
        self._to_target[self._theirs], self._to_draft[self._ours] = self._ours, self._theirs
        self.real: dict[int, Request] = {}
        self.shift: dict[int, int] = {}

    def choose(self, logits: Tensor, slots: Slots) -> Tensor:
        return self._to_draft[self.inner.choose(self._over(logits), self._slots(slots))]  # NONE stays NONE

    def scores(self, logits: Tensor, slots: Slots) -> Tensor:
        found = self.inner.scores(self._over(logits), self._slots(slots))
        narrow = torch.full((len(found), self._size), float("-inf"), dtype=found.dtype, device=found.device)
        narrow[:, self._theirs] = found[:, self._ours]
        return narrow

    def law(self, logits: Tensor, slots: Slots) -> Tensor:
        """Over the target's ids."""
        return self.inner.law(self._over(logits), self._slots(slots))

    def check(self, params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()) -> None:
        self.inner.check(params, bad_words)

    def release(self, request: Request) -> None:
        self.inner.release(request)

    def attach(self, batch: Batch, proposal: Proposal) -> Proposal:
        """The proposal in the target's ids, with q of what drew it."""
        tokens = self._to_target[proposal.tokens].clamp(min=0)
        real = replace(batch, requests=tuple(self.real[r.id] for r in batch.requests))
        return self.inner.attach(real, replace(proposal, tokens=tokens))

    def _over(self, logits: Tensor) -> Tensor:
        wide = torch.full((len(logits), self._vocab), float("-inf"), dtype=logits.dtype, device=logits.device)
        wide[:, self._ours] = logits[:, self._theirs]
        return wide

    def _slots(self, slots: Slots) -> Slots:
        requests = tuple(self.real[r.id] for r in slots.requests)
        shift = torch.tensor([self.shift[r.id] for r in slots.requests]).to(slots.position.device)
        path = self._to_target[slots.path]
        return replace(slots, requests=requests, position=slots.position + shift[slots.request], path=path)


class Greedy:
    """A sampler that takes the likeliest token, and owes nobody a law."""

    def scores(self, logits: Tensor, slots: Slots) -> Tensor:
        return logits

    law = scores

    def choose(self, logits: Tensor, slots: Slots) -> Tensor:
        return logits.argmax(1)

    def check(self, params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def attach(self, batch: Batch, proposal: Proposal) -> Proposal:
        return proposal


@dataclass(slots=True)
class ByText:
    """String-level match."""

    theirs: Words
    begin: Start
    chains: bool = True
    sampler: DraftSampler = field(default_factory=Greedy)
    _shadows: Shadows = field(init=False)

    def __post_init__(self) -> None:
        self._shadows = Shadows(self.theirs, self.begin.tokenizer)

    def shadow(self, batch: Batch, budget: Budget) -> Batch:
        for request, nodes in zip(batch.requests, budget.nodes, strict=True):
            if nodes:
                self._read(self._shadows.open(request), request.tokens)
        return self._shadows.batch(batch)

    def _read(self, shadow: Shadow, tokens: list[int]) -> None:
        """Write the text after the anchor anew. Every `_CHUNK` tokens the anchor moves on, to the start of a word."""
        old = list(shadow.request.tokens)
        while len(tokens) - shadow.anchor > 2 * _CHUNK:
            cut = self._word(tokens, shadow.anchor + _CHUNK, shadow.anchor + 2 * _CHUNK)
            shadow.request.tokens[shadow.settled :] = self._ids(
                self._text(tokens[:cut], shadow.anchor), shadow.anchor > shadow.first
            )
            shadow.anchor, shadow.settled = cut, len(shadow.request.tokens)
        text = self._text(tokens, shadow.anchor).rstrip("\ufffd")
        shadow.request.tokens[shadow.settled :] = self._ids(text, shadow.anchor > shadow.first)
        if not shadow.request.tokens:
            shadow.request.tokens.append(0)
        shadow.kept = _common(old, shadow.request.tokens)
        shadow.read = len(tokens)

    def _word(self, tokens: list[int], low: int, high: int) -> int:
        """A place between `low` and `high` at which a word starts."""
        return next((i for i in range(high, low, -1) if self._text(tokens[: i + 1], i)[:1].isspace()), high)

    def _text(self, tokens: Sequence[int], start: int) -> str:
        """The text of `tokens[start:]`; tokens before it are read along, since some tokenizers drop a space at the start."""
        before = list(tokens[max(0, start - 4) : start])
        whole, head = self._shadows.spell([*before, *tokens[start:]]), self._shadows.spell(before)
        return whole[len(head) :] if whole.startswith(head) else self._shadows.spell(tokens[start:])

    def _ids(self, text: str, inside: bool) -> list[int]:
        return _after(self.theirs, text, inside)

    def kept(self, request: Request) -> int:
        return self._shadows.by_id[request.id].kept

    def back(self, batch: Batch, made: Proposal, budget: Budget) -> Proposal:
        guesses = [
            self._guess(r, row[:size], depth) if size and depth else []
            for r, row, size, depth in zip(batch.requests, made.tokens.tolist(), made.sizes.tolist(), budget.depth, strict=True)
        ]
        return Proposal.chains(guesses, made.tokens.device)

    def _guess(self, request: Request, drafted: list[int], depth: int) -> list[int]:
        """What the draft wrote, in the target's tokens: as they follow the last ones, or alone if those would be other tokens
        then."""
        shadow = self._shadows.by_id[request.id]
        ours = self.begin.tokenizer
        assert ours is not None
        tail = shadow.request.tokens[-8:]
        head, whole = (self.theirs.decode(ids, skip_special=False) for ids in (tail, [*tail, *drafted]))
        fresh = whole[len(head) :].rstrip("\ufffd") if whole.startswith(head) else ""
        if not fresh:
            return []
        known = request.tokens[max(shadow.first, len(request.tokens) - 8) :]
        start = len(request.tokens) - len(known)
        ids = _after(ours, self._text(request.tokens, start) + fresh, start > shadow.first)
        if ids[: len(known)] != known:
            ids = [*known, *_after(ours, fresh, True)]
        return [t for t in ids[len(known) : len(known) + depth] if t < self.begin.vocab_size]

    def seen(self, batch: Batch) -> Batch | None:
        return None

    def release(self, request: Request) -> None:
        self._shadows.by_id.pop(request.id, None)


def _after(tokenizer: Tokenizer, text: str, inside: bool) -> list[int]:
    """Tokens of `text`. `inside` a longer one, what a tokenizer does at the start of a text must not happen."""
    if inside:
        base, ids = tokenizer.encode(".", special=False), tokenizer.encode("." + text, special=False)
        if ids[: len(base)] == base:
            return ids[len(base) :]
    return tokenizer.encode(text, special=False)


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
