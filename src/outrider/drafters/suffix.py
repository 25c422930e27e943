"""Suffix decoding (Oliaro et al. 2024): what followed the longest endings of this text where they occurred before, in the text
itself and in texts that are finished.

Every earlier place whose preceding tokens match the end of the text is a *match*; its length is how many tokens match. Matches
vote with their length on the next token, on the one after that among those that agree, and so on: the share of the votes that is
left is the estimated chance of the path, and below `floor` guessing stops. A match of length m vouches for `factor * m` tokens,
so that little evidence costs little.

Matches are found through hash chains as in LZ77 compressors (Deutsch 1996, RFC 1951, section 4), for the last four tokens and the
last one: a table of the latest place per hash, and per place the distance to the one before. All of it is arrays, an update costs
the same whatever the length, and a ring of them forgets the oldest text. A match found in one round is followed in the next, so
its length is known without comparing again. At most eight are kept (fewer in a large batch), the longest first, then the latest:
counts are of those. Finished texts are asked only while the text itself has no long match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..errors import BadInput
from ..protocols import Drafter
from ..registry import register
from ..types import Batch, Budget, Proposal, Request
from ._blank import blank
from ._votes import Nodes, Voices, chain, tree

_MANY = 4
"""Matches are looked up by this many tokens, then by one. More tables find hardly more."""
_SPREAD = 0x9E3779B97F4A7C15
"""Spreads token ids over buckets (Fibonacci hashing)."""
_LONG = 8
"""No more matches are looked for while one of this length can be followed."""
_MATCHES, _FEW, _CROWD = 8, 1, 64
"""Matches kept per request and store: most of them, fewest of them, and how many in a whole batch."""
_LONGEST = 64
"""Lengths of matches are counted up to here."""
_END = -1
"""Stands between finished texts."""


class Places:
    """Hash chains over a ring of `size` places. Places are numbered from 0 and go on for ever; those older than `size` are gone.
    `long` and `short` are the chains after the last `_MANY` tokens and after the last one: heads (place + 1) by hash, and by
    place the distance to the one before (0: none). Zeroed memory is not taken up before it is written to."""

    def __init__(self, size: int) -> None:
        buckets = 1 << max(size - 1, 1).bit_length()
        self.size, self.mask = size, buckets - 1
        self.long, self.short = [(blank(buckets, "q"), blank(size, "i")) for _ in range(2)]
        self.bytes = sum(part.nbytes for part in (*self.long, *self.short))

    def put(self, tokens: list[int], first: int, at: int, salt: int = 0) -> None:
        """Note places `at`, `at + 1`, ...: where `tokens[first]` and those after it stand. O(1) each."""
        mask, size = self.mask, self.size
        (heads, links), (ones, backs) = self.long, self.short
        for i in range(first, len(tokens)):
            slot, here = at % size, at + 1
            bucket = (tokens[i - 1] * _SPREAD ^ salt) & mask
            back = here - ones[bucket]
            backs[slot] = back if back < size and back < here and i else 0
            if i:
                ones[bucket] = here
            if i >= _MANY:
                bucket = (hash(tuple(tokens[i - _MANY : i])) ^ salt) & mask
                back = here - heads[bucket]
                links[slot] = back if back < size and back < here else 0
                heads[bucket] = here
            else:
                links[slot] = 0
            at = here

    def latest(self, ending: list[int], salt: int) -> list[tuple[int, int, memoryview]]:
        """Chains to walk for a text that ends like this: shortest match, latest place (or -1), distances."""
        (heads, links), (ones, backs) = self.long, self.short
        one = (1, ones[(ending[-1] * _SPREAD ^ salt) & self.mask] - 1, backs)
        if len(ending) < _MANY:
            return [one]
        return [(_MANY, heads[(hash(tuple(ending[-_MANY:])) ^ salt) & self.mask] - 1, links), one]


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
        self.places.put(tokens, self.end, self.end)
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
        self.tokens, self.owner = blank(size, "i"), blank(size, "q")
        self.bytes = self.places.bytes + self.tokens.nbytes + self.owner.nbytes

    def add(self, text: list[int], salt: int) -> None:
        """Take in a finished text (its last `size` tokens), forgetting the oldest ones."""
        text = [*text[-(self.size - 1) :], _END]
        for i, token in enumerate(text):
            slot = (self.end + i) % self.size
            self.tokens[slot], self.owner[slot] = token, salt
        self.places.put(text, 0, self.end, salt)
        self.end += len(text)

    def read(self, at: int, count: int) -> list[int]:
        """Up to `count` tokens from a place on that are still there."""
        count = max(0, min(count, self.end - at))
        slot = at % self.size
        found = self.tokens[slot : slot + count].tolist()
        if len(found) < count:
            found += self.tokens[: count - len(found)].tolist()
        return found

    def belongs(self, at: int, salt: int) -> bool:
        slot = at % self.size
        return self.owner[slot] == salt and self.tokens[slot] != _END


@dataclass(slots=True)
class Matches:
    """Where the end of a text occurs in a store: `found[place of the next token]` is how many tokens match."""

    store: Own | Shared
    salt: int = 0
    found: dict[int, int] = field(default_factory=dict)
    longest: int = 0

    def advance(self, tokens: list[int], fresh: int, most: int) -> None:
        """Follow the text, of which the last `fresh` tokens are new, and look for more matches, `most` in all, unless one is long
        already."""
        if self.found and fresh:
            store, kept, tail = self.store, dict[int, int](), tokens[-fresh:]
            end, oldest = store.end, store.end - store.places.size
            for at, length in self.found.items():
                if at + fresh < end and at - length >= oldest and store.read(at, fresh) == tail:
                    kept[at + fresh] = length + fresh if length + fresh < _LONGEST else _LONGEST
            self.found = kept
        self.longest = max(self.found.values()) if self.found else 0
        if self.longest < _LONG:
            self._search(tokens, most)

    def _search(self, tokens: list[int], most: int) -> None:
        places, found, salt = self.store.places, self.found, self.salt
        oldest, tail = max(0, self.store.end - places.size), tokens[-_LONGEST:]
        for least, at, links in places.latest(tail, salt):
            for _ in range(most):
                if at < oldest:
                    break
                if at not in found and self.store.belongs(at, salt):
                    length = self._common(at, tail, oldest)
                    if length >= least:
                        found[at] = length
                        if length > self.longest:
                            self.longest = length
                back = links[at % places.size]
                if not back:
                    break
                at -= back
            if len(found) >= most:
                break

    def _common(self, at: int, tail: list[int], oldest: int) -> int:
        """How many tokens before a place are those of `tail`, from its end."""
        few = min(_MANY, len(tail), at - oldest)
        before = self.store.read(at - few, few)
        for i in range(1, few + 1):
            if before[-i] != tail[-i]:
                return i - 1
        most = min(len(tail), at - oldest)
        before = self.store.read(at - most, most)
        return next((i for i in range(few, most) if before[-1 - i] != tail[-1 - i]), most)

    def best(self, most: int) -> list[tuple[int, int]]:
        """`(length, place)`, longest first, then latest; what exceeds `most` is dropped for good."""
        ranked = [(length, at) for at, length in self.found.items()]
        if len(ranked) > 1:
            ranked.sort(reverse=True)
        if len(ranked) > most:
            ranked = ranked[:most]
            self.found = {at: length for length, at in ranked}
        return ranked


def voices(matches: Matches, depth: int, factor: float, most: int) -> Voices:
    """What each match vouches for: up to `depth` tokens, at most `factor` times its length, at least one. A match near the end of
    its own text repeats its period."""
    store, out = matches.store, Voices()
    ring, read = isinstance(store, Shared), store.read
    for length, at in matches.best(most):
        count = int(factor * length)
        count = depth if count > depth else count or 1
        tokens = read(at, count)
        if ring and _END in tokens:
            del tokens[tokens.index(_END) :]
        elif not ring and len(tokens) < count:
            tokens = (tokens * (count // len(tokens) + 1))[:count]
        if tokens:
            out.append((length, tokens))
    return out


@dataclass(slots=True)
class Reader:
    """One request: its own text, matches in it and in the shared store (at most `most` of each), what the last guess was expected
    to bring. `path`: what was guessed of the same text at most `reach` tokens ahead; None since it went on."""

    own: Own
    near: Matches
    far: Matches | None
    length: int = 0
    most: int = 0
    hope: float = 0.0
    path: list[int] | None = None
    reach: int = 0


@register("suffix")
class Suffix(Drafter):
    """Suffix decoding: chains, or trees where several continuations have support."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`depth`: most tokens guessed; `factor`: tokens guessed per matching token; `floor`: estimated chance of a path below
        which guessing stops; `width`: guesses kept under one node (1: a chain). `global_tokens`: tokens of finished texts kept,
        the oldest go first (0: none); `prompts`: keep their prompts, too; `isolate`: a text drafts only for its own group."""

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
        self.finished = Shared(config.global_tokens) if config.global_tokens else None
        self._readers: dict[int, Reader] = {}

    def renew(self) -> bool:
        """Forget finished texts."""
        self.finished = Shared(self.config.global_tokens) if self.config.global_tokens else None
        return True

    def isolate(self) -> None:
        """Keep groups apart from now on."""
        self.config = replace(self.config, isolate=True)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        most = self._most(batch.requests)
        limits = zip(batch.requests, budget.depth, budget.nodes, strict=True)
        if self.config.width == 1:
            return Proposal.chains([self._chain(r, depth, most) if depth else [] for r, depth, _ in limits])
        return Proposal.trees([self._tree(r, depth, n, most) if depth else [] for r, depth, n in limits])

    def preview(self, request: Request, most: int) -> list[int] | None:
        """See `protocols.Drafter`. Trees are no chains."""
        if self.config.width > 1:
            return None
        return self._chain(request, most, self._most((request,)))

    def expected(self, request: Request) -> float:
        """How many tokens of the last guess for `request` were expected to be accepted."""
        reader = self._readers.get(request.id)
        return reader.hope if reader is not None else 0.0

    def release(self, request: Request) -> None:
        """Forget a request; its text joins the finished ones."""
        if self._readers.pop(request.id, None) is None or self.finished is None:
            return
        self.finished.add(request.tokens if self.config.prompts else request.output, self._group(request))

    def _most(self, requests: Sequence[Request]) -> int:
        """Matches that are kept of each request: the fewer, the more are known, so that what is previewed is what is made."""
        return max(_FEW, min(_MATCHES, _CROWD // max(1, len(requests), len(self._readers))))

    def _chain(self, request: Request, depth: int, most: int) -> list[int]:
        reader = self._read(request, most)
        path = reader.path
        if path is None or not len(path) <= depth <= reader.reach:
            path, reader.hope = chain(self._voices(reader, depth, most), self.config.floor)
            reader.path, reader.reach = path, depth
        return path

    def _tree(self, request: Request, depth: int, nodes: int, most: int) -> Nodes:
        reader = self._read(request, most)
        found, reader.hope = tree(self._voices(reader, depth, most), self.config.width, nodes, self.config.floor)
        return found

    def _voices(self, reader: Reader, depth: int, most: int) -> Voices:
        heard = voices(reader.near, depth, self.config.factor, most) if reader.near.found else []
        if reader.far is not None and reader.far.found:
            heard += voices(reader.far, depth, self.config.factor, most)
            heard.sort(key=lambda v: -v[0])  # stable: the request's own text first
        return heard

    def _read(self, request: Request, most: int) -> Reader:
        """What is known of a request, brought up to its last token."""
        reader, tokens = self._readers.get(request.id), request.tokens
        if reader is None or len(tokens) < reader.length:
            own = Own(tokens)
            far = None if self.finished is None else Matches(self.finished, self._group(request))
            reader = self._readers[request.id] = Reader(own, Matches(own), far)
        fresh = len(tokens) - reader.length
        if not fresh and most == reader.most:
            return reader
        reader.path, reader.most = None, most
        reader.own.extend(tokens)
        reader.near.advance(tokens, fresh, most)
        if reader.far is not None and reader.far.store.end:
            if reader.near.longest < (_LONG if most > 1 else _MANY):
                reader.far.advance(tokens, fresh, most)
            else:
                reader.far.found = {}
        reader.length = len(tokens)
        return reader

    def _group(self, request: Request) -> int:
        """A number for the isolation group of a request, by its `group`; 0 where everybody shares."""
        if not self.config.isolate:
            return 0
        name = repr(request.group).encode()
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
