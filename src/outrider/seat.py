"""The drafter's place beside a loaded model: who takes it is started, and whoever comes back goes on with what it has.

On a GPU a drafter's guesses are captured as graphs, which takes longer than many answers. So the one that left last is kept, with
its memory under the KV pool's slots, while whoever follows takes none. Texts it forgets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from . import control as controllers
from .choice import Choice
from .control.probes import TRIED
from .control.shelf import title
from .control.streaks import previews
from .engine import Engine
from .guard import Guard
from .heap import collect
from .loading import Parts, make_scheduler, start_for
from .protocols import AcceptanceRule, Controller, Drafter, Needs, Start
from .rehearsal import MOST, TEXT, Drill, Rehearsal


@dataclass(frozen=True, slots=True)
class Started:
    """A drafter with what it was given. `title` says who it is, its files included."""

    guard: Guard
    start: Start
    needs: Needs
    title: str


class Seat:
    """Puts drafters beside a target. `shelf`: what controllers learned of them; `rehearses`: the largest batch that is rehearsed
    with a new one. `progress` hears of what takes long."""

    def __init__(
        self,
        parts: Parts,
        choice: Choice,
        prefix_cache: bool,
        rehearse: int = MOST,
        progress: Callable[[str], object] = lambda line: None,
    ) -> None:
        target = self.target = parts.target
        self.name, self.tokenizer = parts.name, parts.tokenizer
        self.choice, self.prefix_cache = choice, prefix_cache
        self.shelf, self.progress = controllers.Shelf(), progress
        self.rehearses = min(rehearse, MOST) if target.device.type == "cuda" else 0
        self._now: Started | None = None
        self._kept: Started | None = None
        if target.stage is not None:
            target.stage.machine.spare = self._clear

    def take(self, draft: str, drafter: Drafter, accept: AcceptanceRule, control: str) -> Engine:
        """An engine with `drafter`, or with one like it that was here before. If it cannot be started, all is as before; where
        `auto` picked it, the next best one is tried."""
        before = self.target.needs
        while True:
            started = None
            try:
                wanted = who(drafter)
                kept = self._kept_for(wanted)
                started = kept or self._begin(drafter, wanted)
                controller = self._controller(started.guard.drafter, control)
                if kept is None and not self._rehearse(started, accept, controller):  # another one, unrehearsed
                    self.target.cache.detach(started.start.pool)
                    started = self._begin(self.choice.drafter(draft), wanted)
                    controller = self._controller(started.guard.drafter, control)
                why = started.guard.reason
                if why is None or not self.choice.pass_over(draft, why):
                    self._settle(started)
                    return self._engine(started, accept, controller, self.prefix_cache)
            except BaseException as error:
                self._undo(before, started)
                if not isinstance(error, Exception) or not self.choice.pass_over(draft, error):
                    raise
            else:
                self._undo(before, started)
            started = None
            self._clear()
            drafter = self.choice.drafter(draft)

    def _kept_for(self, wanted: str) -> Started | None:
        """One of this title that was here before, as if just started."""
        found = next((s for s in (self._now, self._kept) if s is not None and s.title == wanted != ""), None)
        if found is None or not found.guard.renew():
            return None
        self.target.needs = found.needs
        self.target.cache.reattach(found.start.pool)
        return found

    def _begin(self, drafter: Drafter, wanted: str) -> Started:
        """Start one. Memory that it may need is not kept for another."""
        if self._now is not None and self._takes_memory(drafter):
            self._clear()
        start = start_for(self.target, drafter, self.name, self.tokenizer)
        guard = Guard(drafter, self.target.vocab_size, self._capture_nothing)
        try:
            guard.start(start)
        except BaseException:
            self.target.cache.detach(start.pool)
            raise
        return Started(guard, start, self.target.needs, wanted)

    def _engine(self, started: Started, accept: AcceptanceRule, controller: Controller, prefix_cache: bool) -> Engine:
        """The target with a drafter that has been started, and a rule."""
        scheduler = make_scheduler(self.target, started.guard.drafter, prefix_cache)
        return Engine(self.target, started.guard, scheduler, accept, controller)

    def _rehearse(self, started: Started, accept: AcceptanceRule, controller: Controller) -> bool:
        """What has to be captured for a drafter with passes of its own is captured before the first request, if the drafter can
        forget the texts of the rehearsal. False where that did it harm, as for want of memory."""
        guard, left = started.guard, self._now
        if not self.rehearses or not isinstance(controller, controllers.Goodput):
            return True
        self.target.prepare(self.rehearses, TRIED)
        if not started.title or _chains(guard.drafter):
            return True
        if left is not None:  # captured rounds move the memory that there is
            self.target.cache.detach(left.start.pool)
        again, drill = controller.costs.tried, Drill(guard.drafter, controller.known)
        learned = guard.learned()
        engine = self._engine(started, accept, drill, prefix_cache=False)
        rehearsal = Rehearsal(engine, drill, self.tokenizer.encode(TEXT), self.rehearses)
        if not again:
            self.progress(f"capturing and timing guesses of {guard.name} for batches of up to {self.rehearses}")
        rehearsal.again() if again else rehearsal.whole()
        guard.relearn(learned)  # what is rehearsed says nothing of traffic
        return rehearsal.sound and (guard.renew() or not guard.working)

    def _controller(self, drafter: Drafter, control: str) -> Controller:
        """One that knows what passes cost already, where it is cheap to find out."""
        made = controllers.make(control, drafter, self.shelf)
        if isinstance(made, controllers.Foresight) and _chains(drafter):
            made.known.stalls.ready = self.target.captured
        if self.target.device.type == "cuda":
            controllers.calibrate(self.target, made)
        return made

    def _settle(self, started: Started) -> None:
        """The one before leaves."""
        left, self._now = self._now, started
        if self._kept is started:
            self._kept = None
        if left is not None and left is not started:
            self.target.cache.detach(left.start.pool)
            if left.guard.working and left.title and not self._takes_memory(started.guard.drafter):
                self._kept = left

    def _clear(self) -> None:
        """Give back what is kept for nobody. Graphs and those who own them hold one another, so that it takes a collector."""
        self._kept = None
        if self.target.device.type == "cuda":
            collect()
            torch.cuda.empty_cache()

    def _takes_memory(self, drafter: Drafter) -> bool:
        try:
            return drafter.needs.kv is not None or any(drafter.memory(self.target.decoder.dtype))
        except Exception:  # it cannot tell, or will fail to start
            return True

    def _undo(self, needs: Needs, started: Started | None) -> None:
        """Take back what a drafter was given that is not to be."""
        self.target.needs = needs
        if started is not None and started is not self._now:
            self.target.cache.detach(started.start.pool)
            if self._now is not None:
                self.target.cache.reattach(self._now.start.pool)

    def _capture_nothing(self) -> None:
        """A drafter that is off has no needs."""
        self.target.needs = Needs()


def _chains(drafter: Drafter) -> bool:
    """Whether a drafter looks up chains by itself: then nothing has to be captured but the target's rounds."""
    return previews(drafter) and drafter.nodes == drafter.depth and not getattr(drafter, "members", ())


def who(drafter: Drafter) -> str:
    """Name, options, members and files of a drafter that can begin anew; empty for others."""
    members = [who(m.drafter) for m in getattr(drafter, "members", ())]
    if getattr(type(drafter), "renew", Drafter.renew) is Drafter.renew or not all(members):
        return ""
    path = getattr(drafter, "path", None)
    return f"{title(drafter)} {members} {_files(path) if isinstance(path, Path) else ''}"


def _files(path: Path) -> list[tuple[str, int, int]]:
    """What tells whether a file, or one in a directory, was written anew."""
    found = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    return [(p.name, s.st_mtime_ns, s.st_size) for p in found for s in [p.stat()]]
