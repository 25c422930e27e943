"""Keeps a drafter from doing harm: whatever it does, the text is unchanged and the run goes on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter, is_
from typing import Any, cast

import torch

from . import tree
from .control.streaks import previews
from .errors import OutriderError, OutriderWarning, out_of_memory
from .forced import Forced
from .protocols import Drafter, Learning, Sharing, Start
from .trust import own
from .types import PROBE, ROOT, Batch, Budget, Proposal, Request, Resume, Scores, Verdict

_PATIENCE = 3
"""Unsound proposals (bad tokens, bad tree) before a drafter is switched off; an exception does it at once."""
_FIXED = tuple(f.name for f in fields(Request) if f.name not in ("tokens", "failures"))
"""What a drafter must leave alone in a request, beside its tokens."""
_values = attrgetter(*_FIXED)


class Guard:
    """Wraps a drafter. An exception, or repeated unsound proposals, switches it off for good, with a warning that says so; Ctrl-C
    passes through, and so does want of memory, once (the engine then tries with fewer requests). `reason` tells why it is off
    (None while it runs); `on_stop` is called when that happens. `admits` tells whether the target itself puts right what could
    not be in guesses on its device."""

    def __init__(self, drafter: Drafter, vocab_size: int, on_stop: Callable[[], None] | None = None) -> None:
        self.drafter, self._vocab, self.on_stop = drafter, vocab_size, on_stop
        self.reason: str | None = None
        self._strikes = 0
        self._starved: set[str] = set()
        keeps_kv = isinstance(drafter, Sharing) and drafter.needs.kv is not None
        self._sharing: Sharing | None = cast(Sharing, drafter) if keeps_kv else None
        self.observes = type(drafter).observe is not Drafter.observe
        self.previews = previews(drafter)
        self._forced = Forced(vocab_size)
        self._trusted = own(drafter)
        self._keeps: Callable[[Sequence[Request]], AbstractContextManager[object]] = nullcontext if self._trusted else _kept
        self.admits: Callable[[Batch, Proposal], bool] = lambda batch, proposal: False

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def working(self) -> bool:
        return self.reason is None

    def follows(self, requests: Sequence[Request], guessing: bool = True) -> bool:
        """Whether neither guesses for these requests nor what the drafter notes of their rounds needs anything that only the host
        learns when a round is read. Without `guessing`, only the notes count."""
        if not self.working:
            return True
        try:
            inherited = partial(Drafter.follows, self.drafter)
            return bool(getattr(self.drafter, "follows", inherited)(requests, guessing))
        except (Exception, SystemExit) as error:
            self._stop(f"it failed with {type(error).__name__}: {error}")
            return True

    def start(self, start: Start) -> None:
        """Start the drafter; what is the user's to mend (a mismatch, a missing model) is raised."""
        try:
            self.drafter.start(start)
        except OutriderError:
            raise
        except (Exception, SystemExit) as error:
            self._stop(f"it failed to start with {type(error).__name__}: {error}")

    def renew(self) -> bool:
        """Let the drafter begin anew, if it can; see `Drafter.renew`."""
        try:
            done = self.working and bool(self.drafter.renew())
        except (Exception, SystemExit):
            return False
        self._strikes, self._forced = 0, Forced(self._vocab)
        self._starved.clear()
        return done

    def learned(self) -> Any:
        """What it knows of how often its guesses come true (`protocols.Learning`); None where it tells nothing."""
        if not self.working or not isinstance(self.drafter, Learning):
            return None
        try:
            return self.drafter.learned()
        except (Exception, SystemExit) as error:
            self._stop(f"it failed with {type(error).__name__}: {error}")
            return None

    def relearn(self, learned: Any) -> None:
        """Put back what it told, if it told anything."""
        if learned is None or not self.working or not isinstance(self.drafter, Learning):
            return
        try:
            self.drafter.relearn(learned)
        except (Exception, SystemExit) as error:
            self._stop(f"it failed with {type(error).__name__}: {error}")

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        """The drafter's guesses if they are sound, else none; and what requests' own processors know ahead of it."""
        proposal = self._guesses(batch, budget) if self.working and budget.any else None
        return self._forced.lead(batch, budget, Proposal.empty(len(batch)) if proposal is None else proposal)

    def preview(self, request: Request, most: int) -> list[int] | None:
        """What the drafter would guess for a request, if it can tell without a pass."""
        if not self.working or not self.previews:
            return None
        try:
            with self._keeps((request,)):
                found = self.drafter.preview(request, most)
            if found is None:
                return None
            own = found[:most] if self._trusted else [int(token) for token in found[:most]]
            return self._forced.ahead(request, own, most)
        except (Exception, SystemExit) as error:
            self._stop(f"it failed with {type(error).__name__}: {error}")
            return None

    def _guesses(self, batch: Batch, budget: Budget) -> Proposal | None:
        try:
            with self._keeps(batch.requests):
                proposal = self.drafter.propose(batch, budget)
            sound = self._sound(proposal, batch, budget)
        except (Exception, SystemExit) as error:
            if out_of_memory(error) and self._again("propose", batch.requests):
                raise
            self._stop(f"it failed with {type(error).__name__}: {error}")
            return None
        self._starved.discard("propose")
        if sound and proposal.unseen:
            return proposal if self.admits(batch, proposal) else self._put_right(proposal)
        if sound:
            return _tidy(self._own(proposal)) if any(proposal.widths) or proposal.resume is not None else None
        self._strikes += 1
        if self._strikes >= _PATIENCE:
            self._stop(
                f"it made {_PATIENCE} unsound proposals (tokens outside the vocabulary, a malformed tree, or more than asked for)"
            )
        return None

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        """Let the drafter see the round: copies of what was decided, unless it goes on without them."""
        if not self.working or not self.observes:
            return
        goes_on = bool(self.drafter.needs.features) and self.follows(batch.requests, guessing=False)
        seen = verdict if scores.answer is not None and goes_on else _copied(verdict)
        try:
            with self._keeps(batch.requests):
                self.drafter.observe(batch, *self._forced.apart(proposal, seen, scores))
        except (Exception, SystemExit) as error:
            if out_of_memory(error) and self._again("observe", batch.requests):
                return
            self._stop(f"it failed while observing with {type(error).__name__}: {error}")
        else:
            self._starved.discard("observe")

    def _again(self, where: str, requests: Sequence[Request]) -> bool:
        """The drafter ran out of memory in the middle of its work: what it keeps of these requests may be half-written, so it
        forgets them. True the first time; False if it did no better the next time."""
        for request in requests:
            self.release(request)
        again = self.working and where not in self._starved
        self._starved.add(where)
        return again

    def release(self, request: Request) -> None:
        """Let the drafter forget a request."""
        try:
            self.drafter.release(request)
        except (Exception, SystemExit) as error:
            self._stop(f"it failed while releasing a request with {type(error).__name__}: {error}")

    @property
    def sharing(self) -> bool:
        """Whether the drafter has KV of its own in the pool that others take over with the target's."""
        return self._sharing is not None

    def shared(self, request: Request) -> int:
        """How many of a request's first tokens others may take over, as far as the drafter is concerned."""
        if self._sharing is not None and self.working:
            try:
                found = int(self._sharing.shared(request))
                self._starved.discard("share")
                return found
            except (Exception, SystemExit) as error:
                if out_of_memory(error) and self._again("share", (request,)):
                    return 0
                self._stop(f"it failed while sharing with {type(error).__name__}: {error}")
        return len(request.tokens)

    def _own(self, proposal: Proposal) -> Proposal:
        """A drafter that observes may still hold the tensors it proposed: what the round is judged by is a copy, but for this
        package's own, which leave them alone."""
        if not self.observes or self._trusted:
            return proposal
        tokens, parents, sizes, source = (t.clone() for t in (proposal.tokens, proposal.parents, proposal.sizes, proposal.source))
        return replace(proposal, tokens=tokens, parents=parents, sizes=sizes, source=source)

    def _put_right(self, proposal: Proposal) -> Proposal:
        """Guesses on a device: nobody waits to see whether they are possible. Chains are made so; a tree that is not is cut down
        to nothing."""
        most = torch.tensor(proposal.widths).to(proposal.sizes.device, non_blocking=True)
        sizes = torch.minimum(proposal.sizes.clamp(min=0), most)
        if not proposal.linear:
            sound = replace(proposal, sizes=sizes)
            return _tidy(replace(sound, sizes=sizes.where(tree.validate(sound, self._vocab), 0)))
        columns = torch.arange(-1, proposal.columns - 1, device=proposal.sizes.device).expand_as(proposal.parents)
        tokens, source = proposal.tokens.clamp(0, self._vocab - 1), proposal.source.clamp(min=PROBE)
        return replace(proposal, tokens=tokens, parents=columns, source=source, sizes=sizes)

    def _sound(self, proposal: object, batch: Batch, budget: Budget) -> bool:
        if not isinstance(proposal, Proposal) or not isinstance(proposal.resume, Resume | None):
            return False
        if len(proposal.widths) != len(batch) or not all(isinstance(w, int) for w in proposal.widths):
            return False
        limits = zip(proposal.widths, batch.room, budget.nodes, strict=True)
        if proposal.tokens.dim() == 2 and proposal.columns > max(budget.nodes):
            return False
        fits = all(w <= min(room, nodes) for w, room, nodes in limits)
        if proposal.unseen:
            return fits and tree.well_formed(proposal)  # the rest is put right without waiting for the device
        return fits and (not any(proposal.widths) or bool(tree.validate(proposal, self._vocab).all()))

    def _stop(self, why: str) -> None:
        if not self.working:
            return
        self.reason = f"drafter {self.name!r} was switched off: {why}"
        if self.on_stop is not None:
            self.on_stop()
        with contextlib.suppress(OutriderWarning):  # a caller may have turned warnings into errors; the run goes on all the same
            warnings.warn(f"{self.reason}; the text is unaffected, the rest is decoded without it", OutriderWarning, stacklevel=2)


def _copied(verdict: Verdict) -> Verdict:
    return Verdict(*(getattr(verdict, f.name).clone() for f in fields(Verdict)))


@contextlib.contextmanager
def _kept(requests: Sequence[Request]) -> Iterator[None]:
    """Requests as they were before the drafter had them, whatever it did. Raises `RuntimeError` if it changed one."""
    before = [(r, r.tokens, list(r.tokens), _values(r)) for r in requests]
    changed = False
    try:
        yield
    finally:
        for request, tokens, copy, values in before:
            if request.tokens is not tokens or tokens != copy:
                tokens[:] = copy
                request.tokens, changed = tokens, True
            if all(map(is_, _values(request), values)):
                continue
            changed = True
            for name, value in zip(_FIXED, values, strict=True):
                setattr(request, name, value)
    if changed:
        raise RuntimeError("it changed a request of the batch, which belongs to the engine (what it changed was put back)")


def _tidy(proposal: Proposal) -> Proposal:
    """Columns not in use may hold anything, but where `widths` is only a bound they enter the pass: give them a token that
    exists."""
    if proposal.sizes.device.type == "cpu" and tuple(proposal.sizes.tolist()) == proposal.widths:
        return proposal
    live = tree.used(proposal.sizes, proposal.columns)
    return replace(proposal, tokens=proposal.tokens.where(live, 0), parents=proposal.parents.where(live, ROOT))
