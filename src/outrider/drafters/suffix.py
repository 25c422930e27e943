"""Suffix decoding (Oliaro et al. 2024): what followed the longest endings of this text where they occurred before, in the text
itself and in texts that are finished.

Every earlier place whose preceding tokens match the end of the text is a *match*; its length is how many tokens match. Matches vote
with their length on the next token, on the one after that among those that agree, and so on: the share of the votes that is left is
the estimated chance of the path, and below `floor` guessing stops. A match of length m vouches for `factor * m` tokens, so that
little evidence costs little.

Matches are found through hash chains as in LZ77 compressors (Deutsch 1996, RFC 1951, section 4), for the last 8, 4 and 2 tokens: one
table of the latest place per hash, and per place the distance to the one before. All of it is arrays, an update costs the same
whatever the length, and a ring of them forgets the oldest text. A match found in one round is followed in the next, so its length
is known without comparing again. At most `_MATCHES` are kept, the longest first, then the latest: counts are of those.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from ..errors import BadInput
from ..protocols import Drafter, Start
from ..registry import register
from ..types import ROOT, Batch, Budget, Proposal, Request

_ORDERS = (8, 4, 2)
"""Endings looked up, longest first. A match is at least as long as the last of them."""
_MATCHES = 8
_LONGEST = 64
"""Lengths of matches are counted up to here."""
_END = -1
"""Stands between finished texts."""

Nodes = list[tuple[int, int]]
Voices = list[tuple[int, list[int]]]
"""Matches as voters: length, and the tokens it vouches for."""


class Places:
    """Hash chains over a ring of `size` places. Places are numbered from 0 and go on for ever; those older than `size` are gone."""

    def __init__(self, size: int) -> None:
        buckets = 1 << max(size - 1, 1).bit_length()
        self.size, self.mask = size, buckets - 1
        # Zeroed memory is not taken up before it is written to.
        self.tables = [
            (n, memoryview(np.zeros(buckets, np.int64)), memoryview(np.zeros(size, np.int32)))  # type: ignore[arg-type]
            for n in _ORDERS
        ]

    @property
    def bytes(self) -> int:
        return sum(heads.nbytes + links.nbytes for _, heads, links in self.tables)

    def put(self, at: int, before: tuple[int, ...], salt: int = 0) -> None:
        """Note that `before`, the up to 8 tokens in front, stand before place `at`. O(1)."""
        mask, slot = self.mask, at % self.size
        for n, heads, links in self.tables:
            if len(before) < n:
                links[slot] = 0
                continue
            bucket = (hash(before[-n:]) ^ salt) & mask
            back = at + 1 - heads[bucket]
            links[slot] = back if back < self.size and back <= at else 0
            heads[bucket] = at + 1


class Own:
    """The text of one request. Its tokens are the request's own list."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.end = tokens, 0
        self.places = Places(max(64, 2 * len(tokens)))

    def extend(self, tokens: list[int]) -> None:
        """Take in the tokens not seen yet. The last place, which nothing follows, is left out until something does."""
        self.tokens = tokens
        if len(tokens) > self.places.size:
            self.places, self.end = Places(2 * len(tokens)), 0
        put, longest = self.places.put, _ORDERS[0]
        for at in range(max(self.end, 1), len(tokens)):
            put(at, tuple(tokens[max(0, at - longest) : at]))
        self.end = len(tokens)

    def read(self, at: int, count: int) -> list[int]:
        """Up to `count` tokens from a place on."""
        return self.tokens[at : at + count]

    def belongs(self, at: int, salt: int) -> bool:
        """Whether a match may start at a place."""
        return True


class Shared:
    """The last `size` tokens of finished texts, of whatever groups (`salt` tells them apart)."""

    def __init__(self, size: int) -> None:
        self.places, self.end, self.size = Places(size), 0, size
        self.tokens = memoryview(np.zeros(size, np.int32))  # type: ignore[arg-type]
        self.owner = memoryview(np.zeros(size, np.int64))  # type: ignore[arg-type]

    @property
    def bytes(self) -> int:
        return self.places.bytes + self.tokens.nbytes + self.owner.nbytes

    def add(self, text: list[int], salt: int) -> None:
        """Take in a finished text (its last `size` tokens), forgetting the oldest ones."""
        text = text[-(self.size - 1) :]
        at, size, longest = self.end, self.size, _ORDERS[0]
        for i, token in enumerate([*text, _END]):
            slot = (at + i) % size
            self.tokens[slot], self.owner[slot] = token, salt
            self.places.put(at + i, tuple(text[max(0, i - longest) : i]) if token != _END else (), salt)
        self.end = at + len(text) + 1

    def read(self, at: int, count: int) -> list[int]:
        """Up to `count` tokens from a place on that are still there."""
        count = max(0, min(count, self.end - at))
        slot = at % self.size
        found = self.tokens[slot : slot + count].tolist()
        if len(found) < count:
            found += self.tokens[: count - len(found)].tolist()
        return found

    def belongs(self, at: int, salt: int) -> bool:
        return at >= 0 and self.owner[at % self.size] == salt


@dataclass(slots=True)
class Matches:
    """Where the end of a text occurs in a store: `found[place of the next token]` is how many tokens match."""

    store: Own | Shared
    salt: int = 0
    found: dict[int, int] = field(default_factory=dict)

    def advance(self, tokens: list[int], fresh: int) -> None:
        """Follow the text, of which the last `fresh` tokens are new, and look for more matches unless one is long already."""
        store, kept = self.store, dict[int, int]()
        if self.found:
            tail = tokens[-fresh:] if fresh else []
            oldest = store.end - store.places.size
            for at, length in self.found.items():
                if at + fresh < store.end and at - length >= oldest and (not fresh or store.read(at, fresh) == tail):
                    kept[at + fresh] = min(length + fresh, _LONGEST)
        self.found = kept
        if not kept or max(kept.values()) < _ORDERS[0]:
            self._search(tokens)

    def _search(self, tokens: list[int]) -> None:
        places, found = self.store.places, self.found
        oldest, ending = self.store.end - places.size, tuple(tokens[-_ORDERS[0] :])
        for n, heads, links in places.tables:
            if len(ending) < n:
                continue
            at = heads[(hash(ending[-n:]) ^ self.salt) & places.mask] - 1
            for _ in range(_MATCHES):
                if at < 0 or at < oldest:
                    break
                if at not in found and self.store.belongs(at, self.salt):
                    length = self._common(at, tokens, oldest)
                    if length >= n:
                        found[at] = length
                back = links[at % places.size]
                at = at - back if back else -1
            if len(found) >= _MATCHES:
                break

    def _common(self, at: int, tokens: list[int], oldest: int) -> int:
        """How many tokens before a place are those at the end of the text."""
        most = min(_LONGEST, len(tokens), at - max(oldest, 0))
        before, tail = self.store.read(at - most, most), tokens[-most:] if most else []
        if before == tail:
            return most
        for i in range(1, most + 1):
            if before[-i] != tail[-i]:
                return i - 1
        return most

    def best(self) -> list[tuple[int, int]]:
        """`(length, place)`, longest first, then latest; what exceeds `_MATCHES` is dropped for good."""
        ranked = sorted(((length, at) for at, length in self.found.items()), reverse=True)
        if len(ranked) > _MATCHES:
            ranked = ranked[:_MATCHES]
            self.found = {at: length for length, at in ranked}
        return ranked


def voices(matches: Matches, depth: int, factor: float) -> Voices:
    """What each match vouches for: up to `depth` tokens, at most `factor` times its length, at least one. A match near the end of
    its own text repeats its period."""
    store, out = matches.store, Voices()
    for length, at in matches.best():
        count = max(1, min(depth, int(factor * length)))
        tokens = store.read(at, count)
        if isinstance(store, Own):
            period = len(tokens)
            while len(tokens) < count:
                tokens.append(tokens[len(tokens) - period])
        elif _END in tokens:
            tokens = tokens[: tokens.index(_END)]
        if tokens:
            out.append((length, tokens))
    return out


def chain(speakers: Voices, depth: int, floor: float) -> tuple[list[int], float]:
    """The path that has most votes at each step, and how many of its tokens are expected to be right."""
    total = sum(length for length, _ in speakers)
    path, hope = list[int](), 0.0
    while len(path) < depth and speakers:
        i = len(path)
        if len(speakers) == 1:
            length, tokens = speakers[0]
            if length >= floor * total:
                rest = tokens[i:depth]
                path += rest
                hope += len(rest) * length / total
            break
        votes = dict[int, int]()
        for length, tokens in speakers:
            if i < len(tokens):
                votes[tokens[i]] = votes.get(tokens[i], 0) + length
        if not votes:
            break
        token = max(votes, key=votes.__getitem__)
        if votes[token] < floor * total:
            break
        path.append(token)
        hope += votes[token] / total
        speakers = [(w, t) for w, t in speakers if i < len(t) and t[i] == token]
    return path, hope


def tree(speakers: Voices, width: int, nodes: int, floor: float) -> tuple[Nodes, float]:
    """The likeliest `nodes` nodes, at most `width` under one parent, parents first; and how many tokens of them are expected to be
    right."""
    total = sum(length for length, _ in speakers)
    index, votes = dict[tuple[int, int], int](), list[int]()
    for length, tokens in speakers:
        at = ROOT
        for token in tokens:
            at = index.setdefault((token, at), len(votes))
            if at == len(votes):
                votes.append(0)
            votes[at] += length
    names = list(index)
    order = sorted((v for v in range(len(votes)) if votes[v] >= floor * total), key=lambda v: -votes[v])
    kept, children, hope = {ROOT: ROOT}, dict[int, int](), 0.0
    for v in order:  # a parent has no fewer votes than its child, and came first
        parent = names[v][1]
        if len(kept) > nodes or parent not in kept or children.get(parent, 0) >= width:
            continue
        children[parent] = children.get(parent, 0) + 1
        kept[v] = len(kept) - 1
        hope += votes[v] / total
    return [(names[v][0], kept[names[v][1]]) for v in kept if v != ROOT], hope


@dataclass(slots=True)
class Reader:
    """One request: its own text, matches in it and in the shared store, and what the last guess was expected to bring."""

    own: Own
    near: Matches
    far: Matches | None
    length: int = 0
    hope: float = 0.0


@register("suffix")
class Suffix(Drafter):
    """Suffix decoding: chains, or trees where several continuations have support."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`depth`: most tokens guessed; `factor`: tokens guessed per matching token; `floor`: estimated chance of a path below
        which guessing stops; `width`: guesses kept under one node (1: a chain). `global_tokens`: tokens of finished texts kept, the
        oldest go first (0: none); `prompts`: keep their prompts, too; `isolate`: a text drafts only for its own group."""

        depth: int = 16
        factor: float = 1.5
        floor: float = 0.1
        width: int = 1
        global_tokens: int = 1_000_000
        prompts: bool = False
        isolate: bool = False

    def __init__(self, config: Config) -> None:
        _check(config)
        self.config, self.depth, self.nodes = config, config.depth, config.depth * config.width
        self.shared = Shared(config.global_tokens) if config.global_tokens else None
        self._readers: dict[int, Reader] = {}

    def start(self, start: Start) -> None:
        self._device = start.device

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        if self.config.width == 1:
            chains = [self._chain(r, depth) if depth else [] for r, depth in zip(batch.requests, budget.depth, strict=True)]
            return Proposal.chains(chains, self._device)
        limits = zip(batch.requests, budget.depth, budget.nodes, strict=True)
        return Proposal.trees([self._tree(r, depth, nodes) if depth else [] for r, depth, nodes in limits], self._device)

    def expected(self, request: Request) -> float:
        """How many tokens of the last guess for `request` were expected to be accepted."""
        reader = self._readers.get(request.id)
        return reader.hope if reader is not None else 0.0

    def release(self, request: Request) -> None:
        """Forget a request; its text joins the finished ones."""
        if self._readers.pop(request.id, None) is None or self.shared is None:
            return
        self.shared.add(request.tokens if self.config.prompts else request.output, self._group(request))

    def _chain(self, request: Request, depth: int) -> list[int]:
        reader = self._read(request)
        path, reader.hope = chain(self._voices(reader, depth), depth, self.config.floor)
        return path

    def _tree(self, request: Request, depth: int, nodes: int) -> Nodes:
        reader = self._read(request)
        found, reader.hope = tree(self._voices(reader, depth), self.config.width, nodes, self.config.floor)
        return found

    def _voices(self, reader: Reader, depth: int) -> Voices:
        heard = voices(reader.near, depth, self.config.factor) if reader.near.found else []
        if reader.far is not None and reader.far.found:
            heard += voices(reader.far, depth, self.config.factor)
        return heard

    def _read(self, request: Request) -> Reader:
        """What is known of a request, brought up to its last token."""
        reader, tokens = self._readers.get(request.id), request.tokens
        if reader is None:
            own = Own(tokens)
            far = None if self.shared is None else Matches(self.shared, self._group(request))
            reader = self._readers[request.id] = Reader(own, Matches(own), far)
        fresh = len(tokens) - reader.length
        reader.own.extend(tokens)
        reader.near.advance(tokens, fresh)
        if reader.far is not None and reader.far.store.end:
            reader.far.advance(tokens, fresh)
        reader.length = len(tokens)
        return reader

    def _group(self, request: Request) -> int:
        """A number for the isolation group of a request, by its `group` attribute; 0 where everybody shares."""
        if not self.config.isolate:
            return 0
        name = repr(getattr(request, "group", None)).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def _check(config: Suffix.Config) -> None:
    for name, low in (("depth", 1), ("width", 1), ("global_tokens", 0)):
        if getattr(config, name) < low:
            raise BadInput(f"suffix needs {name} >= {low}, got {getattr(config, name)}")
    if not config.factor > 0:
        raise BadInput(f"suffix needs factor > 0, got {config.factor}")
    if not 0 <= config.floor <= 1:
        raise BadInput(f"suffix needs floor between 0 and 1, got {config.floor}")
    if 0 < config.global_tokens < 64:
        raise BadInput(f"suffix needs global_tokens = 0 or >= 64, got {config.global_tokens}")
