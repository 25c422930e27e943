"""The target drafts with some of its attention and MLP blocks left out (Zhang et al. 2024, "Draft & Verify", ACL), untrained.

What is left out comes from the user, from a file of `outrider tune layer_skip`, or is a guess. With `search`, better sets are
looked for while texts are written (Xia et al. 2025, "SWIFT"); see `_search.py`. Verification writes over all KV of the draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import BadInput, DrafterMismatch
from ..protocols import Drafter, Knob, Needs, Start
from ..registry import register
from ..types import Batch, Budget, Proposal
from . import _tuned
from ._chain import Writer
from ._search import Doses, Search, Skipped, parts

_DEPTH = 6
_FLOOR = 0.6


@register("layer_skip")
class LayerSkip(Drafter):
    """Self-speculation: the target drafts with some of its attention and MLP blocks left out."""

    needs = Needs(target=True)

    @dataclass(frozen=True, slots=True)
    class Config:
        """`attention`, `mlp`: layers whose half is left out, as in 3+7+12 (or `none`; left open: as tuned, else a guess).
        `depth`: most tokens guessed (6). `floor`: a chain ends where the draft's best token is less likely than this (0.6; 0:
        never). `path`: a file of `outrider tune layer_skip`. `search`: look for better sets while texts are written, on their
        last `window` tokens."""

        attention: str = ""
        mlp: str = ""
        depth: int | None = None
        floor: float | None = None
        path: str = ""
        search: bool = False
        window: int = 32

    def __init__(self, config: Config) -> None:
        if (config.depth is not None and config.depth < 1) or not 0 <= (config.floor or 0) < 1 or config.window < 2:
            raise BadInput(f"layer_skip needs depth >= 1, 0 <= floor < 1 and window >= 2, got {config}")
        self.config = config
        _numbers("attention", config.attention), _numbers("mlp", config.mlp)
        self.depth = self.nodes = config.depth or _DEPTH
        self._writer: Writer | None = None
        self._doses: Doses | None = None

    @classmethod
    def knobs(cls, layers: int) -> tuple[Knob, ...]:
        inner = [Knob(f"{half}.{i}", 0, 1) for half in ("attention", "mlp") for i in range(1, layers - 1)]
        return (*inner, Knob("depth", 1, 8), Knob("floor", 0.0, 0.95, whole=False))

    @classmethod
    def guesses(cls, layers: int) -> tuple[dict[str, float], ...]:
        return tuple(_values(skipped, layers) for skipped in (usual(layers), many(layers)))

    @classmethod
    def options(cls, values: Mapping[str, float]) -> dict[str, str]:
        out = [k.split(".") for k, v in values.items() if "." in k and v]
        chosen = {half: sorted(int(i) for h, i in out if h == half) for half in ("attention", "mlp")}
        sets = {half: "+".join(map(str, found)) or "none" for half, found in chosen.items()}
        return {**sets, "depth": str(int(values["depth"])), "floor": f"{values['floor']:.3f}"}

    def start(self, start: Start) -> None:
        """Settle what to leave out. Raises `DrafterMismatch` for layers that the target has not."""
        view, self._writer, self._doses = start.view, None, None
        assert view is not None
        config = _tuned.settle(self.config, self.name, start, given=bool(self.config.attention or self.config.mlp))
        if config is None:
            return
        skipped: Skipped = (_numbers("attention", config.attention), _numbers("mlp", config.mlp))
        if not config.attention and not config.mlp:
            skipped = usual(view.num_layers)
            _tuned.say(
                f"layer_skip leaves out a guess for {start.name}: {shown(skipped)}; find a better set with: "
                "outrider tune layer_skip"
            )
        wrong = sorted(i for half in skipped for i in half if not 0 <= i < view.num_layers)
        if wrong:
            raise DrafterMismatch(
                f"layer_skip cannot leave out layer {wrong[0]}: {start.name} has layers 0 to {view.num_layers - 1}"
            )
        self.depth = self.nodes = config.depth or _DEPTH
        floor = _FLOOR if config.floor is None else config.floor
        self._writer = Writer.of(view, parts(skipped, view.num_layers), "scratch", floor, self.name)
        if config.search:
            self._doses = Doses(Search(skipped, view.num_layers), view, config.window)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        if self._writer is None:
            return Proposal.empty(len(batch))
        reader = next((r for r, depth in zip(batch.requests, budget.depth, strict=True) if depth), None)
        if self._doses is not None and reader is not None and self._doses.due(reader) and self._doses.take(reader):
            view = self._writer.view
            self._writer = replace(self._writer, layers=parts(self._doses.search.best, view.num_layers))
        return self._writer.write(batch, budget)[0]


def usual(layers: int) -> Skipped:
    """What is left out where nothing is known: the attention of every third inner layer. Small models bear little more."""
    inner = range(1, layers - 1)
    return frozenset(inner[1::3] or inner), frozenset()


def many(layers: int) -> Skipped:
    """About 45 % of the inner halves, in turns (as SWIFT begins): what large models bear."""
    inner = range(1, layers - 1)
    return frozenset(i for i in inner if i % 2 == 1), frozenset(i for i in inner if i % 2 == 0 and i % 8)


def shown(skipped: Skipped) -> str:
    """As the options would say it."""
    named = zip(("attention", "mlp"), skipped, strict=True)
    return ",".join(f"{half}={'+'.join(map(str, sorted(s))) or 'none'}" for half, s in named)


def _values(skipped: Skipped, layers: int) -> dict[str, float]:
    halves = zip(("attention", "mlp"), skipped, strict=True)
    return {f"{half}.{i}": float(i in s) for half, s in halves for i in range(1, layers - 1)} | {"depth": _DEPTH, "floor": _FLOOR}


def _numbers(half: str, text: str) -> frozenset[int]:
    if text in ("", "none"):
        return frozenset()
    try:
        return frozenset(int(part) for part in text.split("+"))
    except ValueError:
        raise BadInput(f"layer_skip: {half}={text!r} is no list of layers; write {half}=3+7+12, or none") from None
