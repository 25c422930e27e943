"""Which drafter is meant: a spec as it stands, one whose files are to be found, or the best there is."""

from __future__ import annotations

import torch

from . import registry, trained
from .drafters import pick
from .errors import BadInput
from .models import weights
from .protocols import Drafter
from .trained import Trained

AUTO = "auto"


class Choice:
    """Drafters for the model `source`. `notices` hears what was picked, and what was passed over."""

    def __init__(self, source: str, notices: list[str]) -> None:
        self.source, self.notices = source, notices
        self._picked: Trained | None = None
        self._unusable: list[Trained] = []

    def drafter(self, draft: str) -> Drafter:
        """The drafter that was asked for. One that needs a `path` but has none is the best that was trained for the model."""
        if draft == AUTO:
            return self._best()
        if not registry.lacks(draft, "path"):
            return registry.parse(draft)
        name = registry.split(draft)[0]
        ours = trained.find(self._fingerprint(), name)
        if not ours:
            raise BadInput(
                f"drafter {name!r} needs path, as in {name}:path=..., since none that was trained for {self.source} is at hand; "
                f"to train one: outrider train {name} --model {self.source}"
            )
        self.notices.append(f"draft={name} found {ours[0].path}")
        return registry.parse(draft, {"path": str(ours[0].path)})

    def pass_over(self, draft: str, why: object) -> bool:
        """The drafter that was made last cannot be used. Whether `draft` leaves it open to try another: then it is noted."""
        if draft != AUTO or self._picked is None:
            return False
        self._unusable.append(self._picked)
        self.notices.append(f"draft=auto passed over {self._picked.path}: {why}")
        return True

    def _best(self) -> Drafter:
        """The best one whose files can be read, as far as that can be told before the model is loaded."""
        found = trained.find(self._fingerprint()) if trained.entries() else []
        while True:
            name, self._picked, why = pick(registry.names(), [one for one in found if one not in self._unusable])
            try:
                made = registry.parse(name, {} if self._picked is None else {"path": str(self._picked.path)})
                made.memory(torch.float32)
            except Exception as error:
                if not self.pass_over(AUTO, error):
                    raise
            else:
                self.notices.append(f"draft=auto picked {name}: {why}")
                return made

    def _fingerprint(self) -> str:
        return weights.fingerprint(weights.resolve(self.source))
