"""What became of guesses, told by how far a text went on: nothing has to be read from a device for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..types import NONE, Request


@dataclass(frozen=True, slots=True)
class Entry:
    """A round of one request: whose guess was verified (NONE: nobody's), and who was asked, with the tokens that each promised
    and levels."""

    member: int = NONE
    asked: Mapping[int, tuple[float, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Account:
    """Rounds that were not told yet, and how long the text was before the first of them."""

    length: int
    rounds: list[Entry] = field(default_factory=list)


class Ledger:
    """Rounds of requests in the order in which they were launched; each brings a token more than guesses were right. A request
    has an account from the first round in which somebody was asked until all is told."""

    def __init__(self) -> None:
        self._of: dict[int, Account] = {}
        self._idle: Sequence[Request] = ()  # whose last round nobody was asked in

    def note(self, requests: Sequence[Request], entries: Sequence[Entry], blind: bool) -> None:
        """A round that was launched, and is not in these requests' tokens yet; `blind`: nor is the one before."""
        before = {r.id for r in self._idle} if blind else ()
        for request, entry in zip(requests, entries, strict=True):
            account = self._of.get(request.id)
            if account is None:
                flying = [Entry()] if request.id in before else []
                account = self._of[request.id] = Account(len(request.tokens), flying)
            account.rounds.append(entry)
        self._idle = ()

    def pause(self, requests: Sequence[Request]) -> None:
        """A round in which nobody was asked."""
        for request in requests if self._of else ():
            if request.id in self._of:
                self._of[request.id].rounds.append(Entry())
        self._idle = requests

    def skip(self, requests: Sequence[Request]) -> None:
        """Beside those that were noted, whose round nobody wants to be told of."""
        for request in requests:
            self._of.pop(request.id, None)
        self._idle = requests

    def told(self, requests: Sequence[Request], blind: bool) -> Iterator[tuple[Request, Entry, int]]:
        """What is known by now: requests, their rounds, and how many guesses were right. `blind`: the last round of each is not
        in its tokens. Of several rounds at once nobody knows which brought what."""
        for request in requests if self._of else ():
            account = self._of.get(request.id)
            if account is None:
                continue
            known = len(account.rounds) - blind
            if known < 1:
                continue
            done, account.rounds = account.rounds[:known], account.rounds[known:]
            brought, account.length = len(request.tokens) - account.length, len(request.tokens)
            if not account.rounds or (self._idle and not any(entry.asked for entry in account.rounds)):
                del self._of[request.id]
            if known == 1 and brought > 0 and done[0].asked:
                yield request, done[0], brought - 1

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._of.pop(request.id, None)
