"""A trace: one JSON line for every round, from which `outrider replay` shows what was guessed, kept and spent.

The first line tells model, drafter and controller (`outrider_trace` is the version of the format). Each further one is a round:
`round` (number), `at` (seconds since the trace began), `draft`, `verify` and `other` (seconds), `batch`, `rows` (of the pass),
`prefill` (prompt tokens read), `drafter`, `control` (why the controller last changed its mind; only where that is news) and
`requests`: for each its `id`, `label`, `rule`, `depth` (levels it was allowed), `drafted`, `accepted`, `tokens` (committed),
`offered` (by depth: was there a guess?), `origins` (by token: which drafter, -1 for the model's own) and, at its end, `finish`.
Under `text` also the `prompt` and the text in `pieces`: `[text, "own" | "accepted" | "rejected"]`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import BadInput
from ..results import Chunk
from ..types import FINISH_NAMES, Committed, Finish, Request, StepEvent
from . import files
from .files import MIB, Rolling
from .pieces import Pieces

Decode = Callable[[Sequence[int]], str]
State = Callable[[], tuple[str, str]]
SIZE = 64.0
"""MiB after which a file is put aside."""
TIDY = 256
"""Rounds between looks for requests that ended unseen."""


class Trace:
    """A sink of the engine's. Nothing is written before `begin`. Without `text`, neither prompts nor answers are. Raises
    `BadInput` for a path that cannot be written; later, tracing stops with a warning rather than harm a request."""

    def __init__(self, path: str | Path, text: bool = False, mib: float = SIZE) -> None:
        self.path, self.text = Path(path).expanduser(), text
        if not 0.01 <= mib <= 1e6:
            raise BadInput(f"trace_mib must be between 0.01 and 1000000, got {mib}")
        self._limit = int(mib * MIB)
        files.check(self.path)
        self._out: Rolling | None = None
        self._pieces = dict[int, tuple[Request, Pieces]]()
        self._round, self._said = 0, ""
        self._started = self._last = 0.0

    def begin(self, about: Mapping[str, Any], state: State, decode: Decode) -> None:
        """Open the file. `about` goes to its first line; `state` gives the drafter's name and why the controller does what it
        does; `decode` turns token ids into text."""
        head = {"outrider_trace": files.VERSION, **about, "text": self.text, "started": time.time()}
        self._state, self._decode = state, decode
        self._started = self._last = time.perf_counter()
        self._out = Rolling(files.lines_of(self.path), _line(head), self._limit)

    def __call__(self, event: StepEvent) -> None:
        """Write a round. Raises nothing."""
        if self._out is None or self._out.ended:
            return
        try:
            self._out.write(self._written(event).encode())
        except Exception as error:  # whatever it is: the engine must not hear of it
            self._out.give_up(error)
        if self._round % TIDY == 0:
            self._pieces = {i: known for i, known in self._pieces.items() if known[0].finish is Finish.RUNNING}

    def _written(self, event: StepEvent) -> str:
        """A round's line."""
        now = time.perf_counter()
        seconds, self._last = min(event.seconds, now - self._last), now  # rounds may overlap
        self._round += 1
        drafter, control = self._state()
        news = f'"control":{json.dumps(control)},' if control != self._said else ""
        self._said = control
        depths = event.depths + (0,) * (len(event.committed) - len(event.depths))
        items = ",".join(self._item(item, depth) for item, depth in zip(event.committed, depths, strict=True) if not item.late)
        return (
            f'{{"round":{self._round},"at":{now - self._started:.6f},"draft":{event.draft_seconds:.6f},'
            f'"verify":{event.verify_seconds:.6f},"other":{max(0.0, seconds - event.draft_seconds - event.verify_seconds):.6f},'
            f'"batch":{len(event.committed)},"rows":{event.rows},"prefill":{event.prefill},"drafter":{json.dumps(drafter)},'
            f'{news}"requests":[{items}]}}\n'
        )

    def close(self) -> None:
        """End the trace; Parquet is made of it now, if that was asked for."""
        if self._out is None:
            return
        self._out.close()
        self._out = None
        if self.path.suffix == files.PARQUET:
            from .parquet import convert

            convert(self.path)

    def _item(self, item: Committed, depth: int) -> str:
        request = item.request
        label = "" if request.params.label is None else f'"label":{json.dumps(request.params.label)},'
        last = f',"finish":"{FINISH_NAMES[item.finish]}"' if item.finish is not Finish.RUNNING else ""
        first = f',"prompt_tokens":{request.prompt_len}' if item.tokens and request.stats.rounds == 1 else ""
        return (
            f'{{"id":{request.id},{label}"rule":"{request.rule}","depth":{depth},"drafted":{item.drafted},'
            f'"accepted":{item.accepted},"tokens":{len(item.tokens)},"offered":{_list(item.offered_at)},'
            f'"origins":{_list(item.origins)}{first}{last}{self._texts(item) if self.text else ""}}}'
        )

    def _texts(self, item: Committed) -> str:
        """The round's text in pieces; with the prompt where it is the request's first."""
        request, found = item.request, dict[str, Any]()
        if request.id not in self._pieces:
            self._pieces[request.id] = (request, Pieces(self._decode))
            found["prompt"] = self._decode(request.tokens[: request.prompt_len])
        pieces = self._pieces[request.id][1]
        chunk = Chunk(item.text, item.tokens, item.origins, item.rejected)
        found["pieces"] = [[text, mark.value] for text, mark in pieces.take(chunk)]
        if item.finish is not Finish.RUNNING:
            del self._pieces[request.id]
        return "," + json.dumps(found, ensure_ascii=False)[1:-1]


@lru_cache(4096)
def _list(values: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, values))}]"


def _line(found: Mapping[str, Any]) -> bytes:
    return (json.dumps(found) + "\n").encode()
