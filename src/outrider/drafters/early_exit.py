"""The target's first layers draft, the rest verifies (Elhoushi et al. 2024, "LayerSkip", section 4.3; without training).

A guess is what the final norm and the vocabulary head make of the states after layer `exit`. The KV of those layers is the
target's own, so verification keeps it and starts from the exit states: the first layers run once per token, not twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import BadInput, DrafterMismatch
from ..protocols import Drafter, Knob, Needs, Start
from ..registry import register
from ..types import Batch, Budget, Proposal, Resume
from . import _tuned
from ._chain import Writer

_SHARE = 0.8
"""Of the layers, those that draft where nothing else is known."""
_DEPTH = 4
_FLOOR = 0.6


@register("early_exit")
class EarlyExit(Drafter):
    """Self-speculation: the target's first layers draft, and verification goes on from their states."""

    needs = Needs(target=True)

    @dataclass(frozen=True, slots=True)
    class Config:
        """`exit`: layers that draft (left open: as tuned, else four of five). `depth`: most tokens guessed (4). `floor`: a chain
        ends where the draft's best token is less likely than this (0.6; 0: never). `path`: a file of `outrider tune`."""

        exit: int | None = None
        depth: int | None = None
        floor: float | None = None
        path: str = ""

    def __init__(self, config: Config) -> None:
        small = any(number is not None and number < 1 for number in (config.exit, config.depth))
        if small or not 0 <= (config.floor or 0) < 1:
            raise BadInput(f"early_exit needs exit >= 1, depth >= 1 and 0 <= floor < 1, got {config}")
        self.config = config
        self.depth = self.nodes = config.depth or _DEPTH
        self._writer: Writer | None = None

    @classmethod
    def knobs(cls, layers: int) -> tuple[Knob, ...]:
        return Knob("exit", 1, layers - 1), Knob("depth", 1, 8), Knob("floor", 0.0, 0.95, whole=False)

    @classmethod
    def guesses(cls, layers: int) -> tuple[dict[str, float], ...]:
        return tuple({"exit": exit_at(s, layers), "depth": _DEPTH, "floor": _FLOOR} for s in (_SHARE, 0.5, 0.25))

    @classmethod
    def options(cls, values: Mapping[str, float]) -> dict[str, str]:
        return {"exit": str(int(values["exit"])), "depth": str(int(values["depth"])), "floor": f"{values['floor']:.3f}"}

    def start(self, start: Start) -> None:
        """Settle where to leave. Raises `DrafterMismatch` where the target has too few layers."""
        view, self._writer = start.view, None
        assert view is not None
        config = _tuned.settle(self.config, self.name, start, given=self.config.exit is not None)
        if config is None:
            return
        layers = config.exit
        if layers is None:
            layers = exit_at(_SHARE, view.num_layers)
            _tuned.say(f"exit={layers} is a guess for {start.name}; find a better one with: outrider tune early_exit")
        if not 0 < layers < view.num_layers:
            raise DrafterMismatch(f"early_exit cannot leave {start.name} after {layers} of its {view.num_layers} layers")
        self.depth = self.nodes = config.depth or _DEPTH
        floor = _FLOOR if config.floor is None else config.floor
        self._writer = Writer.of(view, range(layers), "shared", floor, self.name)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        if self._writer is None:
            return Proposal.empty(len(batch))
        nodes, parts = self._writer.write(batch, budget)
        return replace(nodes, resume=Resume(len(self._writer.layers), parts)) if parts else nodes


def exit_at(share: float, layers: int) -> int:
    """About a `share` of the layers, at least one of them left to verify."""
    return max(1, min(round(share * layers), layers - 1))
