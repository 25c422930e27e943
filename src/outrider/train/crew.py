"""Several processes that write texts at once: helper i of n writes rounds i, i + n, ... and leaves them in a directory, from
which the process that was started takes them in their order and puts them away. So what comes out is what one process alone
would have written, and how many there were is nobody's business."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from .corpus import Text, read_manifest, read_texts, write_texts

if TYPE_CHECKING:
    from .data import Writer
    from .run import Plan

ROUNDS = "rounds"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_PAUSE, _GRACE = 0.05, 10.0
"""Seconds between looks, and from asking a helper to end until it is ended."""
_AHEAD = 4
"""Rounds that a helper may be ahead of what was put away, in rounds of all."""


def gpus() -> list[str]:
    """This process's GPUs, by the names that `CUDA_VISIBLE_DEVICES` knows; the first is the one in use."""
    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    return named or [str(i) for i in range(torch.cuda.device_count())]


class Crew:
    """Writers of one plan's texts, on `cards` in turn (none: on the CPU), who leave rounds in `place`. They work within the
    context; `until` as `time.monotonic`. One that fails is done without."""

    def __init__(self, plan: Plan, place: Place, cards: Sequence[str], until: float) -> None:
        self.place, self.count, self.until = place, plan.writers, until
        made = multiprocessing.get_context("spawn")
        self.helpers: dict[int, SpawnProcess] = {}
        for index in range(self.count if self.count > 1 else 0):
            card = cards[index % len(cards)] if cards else None
            own = replace(plan, texts=place.directory, writers=1)
            self.helpers[index] = made.Process(target=_work, args=(own, index, self.count, card), daemon=True)

    def __enter__(self) -> Crew:
        for helper in self.helpers.values():
            helper.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        for helper in self.helpers.values():
            helper.terminate()
        for helper in self.helpers.values():
            helper.join(_GRACE)
            if helper.is_alive():
                helper.kill()
                helper.join()

    def source(self, first: Writer, number: int) -> list[Text] | None:
        """The texts of a round, from whoever writes it; `first`: who writes what no helper does. None when time is up and
        they are not there."""
        path, helper = self.place.path(number), self.helpers.get(number % self.count)
        while helper is not None and helper.is_alive() and not path.is_file() and not self.late:
            time.sleep(_PAUSE)
        found = _delivered(path)
        return first.round(number) if found is None and not self.late else found

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until


class Place:
    """Where helpers leave rounds. `identity`: what the texts are made of, so that nobody takes those that were made otherwise."""

    def __init__(self, directory: Path, identity: dict[str, Any]) -> None:
        what = json.dumps(identity, sort_keys=True).encode()
        self.directory, self.key = directory, hashlib.sha256(what).hexdigest()[:12]

    def path(self, number: int) -> Path:
        return self.directory / ROUNDS / f"{self.key}-{number:05}.safetensors"


def _delivered(path: Path) -> list[Text] | None:
    """A round that lies there, which is taken away."""
    with suppress(OSError, SafetensorError, KeyError):
        found = read_texts(path)
        path.unlink()
        return found
    return None


def assist(writer: Writer, index: int, count: int, wanted: Callable[[], bool]) -> None:
    """Write every `count`-th round from `index` on as long as they are `wanted`."""
    directory = writer.store.directory
    place, number = Place(directory, writer.identity), index
    while wanted():
        done = int((read_manifest(directory) or {"rounds": 0})["rounds"])
        if number < done or place.path(number).is_file():
            number += count
        elif number >= done + _AHEAD * count:
            time.sleep(_PAUSE)
        else:
            write_texts(place.path(number), writer.round(number))


def _work(plan: Plan, index: int, count: int, card: str | None) -> None:
    """A helper's life: until its parent ends it, or is gone."""
    if card is not None:
        os.environ[VISIBLE] = card
    from .run import Training

    parent = multiprocessing.parent_process()
    with suppress(KeyboardInterrupt):
        Training(plan, lambda what, share: None, lambda sign: None).assist(
            index, count, lambda: parent is None or parent.is_alive()
        )
