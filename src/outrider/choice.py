"""Which drafter is meant: a spec as it stands, one whose files are to be found, or the best there is."""

from __future__ import annotations

from functools import cached_property

import torch

from . import registry, trained
from .drafters import members, pick
from .errors import BadInput, OutOfMemory, OutriderError
from .loading import pick_device
from .models import weights
from .protocols import Drafter
from .trained import Trained

AUTO = "auto"


class Choice:
    """Drafters for the model `source` on `device`. `notices` hears what was picked, and what was passed over."""

    def __init__(self, source: str, notices: list[str], device: str = "cpu") -> None:
        self.source, self.notices = source, notices
        self.card = pick_device(device).type == "cuda"
        self._picked: Trained | None = None
        self._unusable: list[Trained] = []

    def drafter(self, draft: str) -> Drafter:
        """The drafter that was asked for. One that needs a `path` but has none is the best that was trained for the model; one of
        several members, that names none, has the best that was trained among them."""
        if draft == AUTO:
            return self._best()
        if registry.opens(draft, "members"):
            _, found, _ = pick(registry.names(), self._at_hand())
            return registry.parse(draft, {} if found is None else {"members": members(registry.names(), found)}, self._found)
        return registry.parse(draft, self._found(draft), self._found)

    def _found(self, spec: str) -> dict[str, str]:
        """The path that a spec lacks. Raises `BadInput` where nothing was trained."""
        if not (registry.opens(spec, "path") and registry.lacks(spec, "path")):
            return {}
        name = registry.split(spec)[0]
        ours = [one for one in self._at_hand() if one.method == name]
        if not ours:
            raise BadInput(
                f"drafter {name!r} needs path, as in {name}:path=..., since none that was trained for {self.source} is at hand; "
                f"to train one: outrider train {name} --model {self.source}"
            )
        self.notices.append(f"draft={name} found {ours[0].path}")
        return {"path": str(ours[0].path)}

    def _at_hand(self) -> list[Trained]:
        return trained.find(self._fingerprint)

    def pass_over(self, draft: str, why: object) -> bool:
        """The drafter that was made last cannot be used. Whether `draft` leaves it open to try another: then it is noted. Where
        memory is short, one without weights comes next."""
        if draft != AUTO or self._picked is None:
            return False
        short = isinstance(why, OutOfMemory)
        self._unusable += self._at_hand() if short else [self._picked]
        self.notices.append(f"draft=auto passed over {self._picked.path}: {why}")
        return True

    def _best(self) -> Drafter:
        """The best one whose files can be read, as far as that can be told before the model is loaded."""
        try:
            found = self._at_hand()
        except OutriderError:  # who loads the model says what is wrong with it
            found = []
        while True:
            name, self._picked, why = pick(registry.names(), [x for x in found if x not in self._unusable], self.card)
            try:
                made = self._made(name, self._picked)
                made.memory(torch.float32)
            except Exception as error:
                if not self.pass_over(AUTO, error):
                    raise
            else:
                self.notices.append(f"draft=auto picked {name}: {why}")
                return made

    def _made(self, name: str, found: Trained | None) -> Drafter:
        """A drafter that is worth having only as a whole: alone, or with one that was trained among its members."""
        if found is None:
            return registry.parse(name)
        path = {"path": str(found.path)}
        if name == found.method:
            return registry.parse(name, path)
        joint = {"members": members(registry.names(), found), "whole": "yes"}
        return registry.parse(name, joint, lambda spec: path if registry.split(spec)[0] == found.method else {})

    @cached_property
    def _fingerprint(self) -> str:
        return weights.fingerprint(weights.resolve(self.source))
