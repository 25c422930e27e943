"""What to do when the device runs out of memory in the middle of traffic.

Nothing of a round counts before the host has booked it, and what it wrote lies past what is known, so a round that failed can be
dropped and tried again: without guesses, for the older half of its requests, for half of those, down to one. The others keep
their memory and their place, and passes stay that narrow for a while. A request that cannot run even alone ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from .errors import out_of_memory
from .scheduler import Scheduler
from .types import Batch, Committed, Finish, Request, StepEvent

T = TypeVar("T")
PATIENCE = 64
"""Rounds of full width that must go well before passes may be twice as wide again."""


class Recovery:
    """Runs rounds for an engine; `release` forgets a request that cannot run. `retries` counts rounds that were tried again."""

    def __init__(self, scheduler: Scheduler, release: Callable[[Request], None]) -> None:
        self._scheduler, self._release = scheduler, release
        self._good = 0
        self._failed: list[Request] = []
        self.retries = 0

    def run(self, launch: Callable[[Batch, bool], T], batch: Batch, optional: bool = False) -> T | None:
        """`launch(batch, guess)`, or as much of it as memory allows. None if not even one request could run (it has ended,
        see `ended`), or if the round is `optional`: one ahead, which can wait."""
        guess = True
        while True:
            try:
                launched = launch(batch, guess)
            except Exception as error:
                if not out_of_memory(error):
                    raise
            else:
                self._widen(len(batch))
                return launched
            # Past the handler, so that the failed round's tensors, which its traceback holds, are gone.
            _give_back()
            self.retries += 1
            if optional:
                return None
            if len(batch) > 1:
                batch = half(batch)
                self._scheduler.most, self._good = len(batch), 0
            elif not guess:
                self._fail(batch.requests[0])
                return None
            guess = False

    def ended(self) -> tuple[Committed, ...]:
        """Requests that could not run since this was last asked, for the round's event."""
        failed, self._failed = self._failed, []
        return tuple(Committed(r, (), (), 0, 0, (), (), _rest(r), r.finish) for r in failed)

    def report(self) -> StepEvent | None:
        """The same as an event of its own; None if there are none."""
        ended = self.ended()
        return StepEvent(ended, draft_seconds=0.0, verify_seconds=0.0, seconds=0.0, prefill=0, rows=0) if ended else None

    def _fail(self, request: Request) -> None:
        request.error = (
            f"the device has too little memory for a pass over this request ({len(request.tokens)} tokens) even alone; lower "
            "kv_tokens or max_model_len, which leaves more memory for passes, or use a smaller model or draft"
        )
        request.finish = Finish.ERROR
        self._release(request)
        self._failed.append(request)

    def _widen(self, served: int) -> None:
        scheduler = self._scheduler
        self._good += served == scheduler.most < scheduler.max_requests
        if self._good >= PATIENCE:
            scheduler.most, self._good = min(2 * scheduler.most, scheduler.max_requests), 0


def _rest(request: Request) -> str:
    """The text that was held back so far."""
    if request.text is None:
        return ""
    request.text.push([], last=True)
    return request.text.pop(True)


def half(batch: Batch) -> Batch:
    """The older half of a batch."""
    n = len(batch) // 2
    return replace(batch, requests=batch.requests[:n], pending=batch.pending[:n], ready=batch.ready[:n], room=batch.room[:n])


def _give_back() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
