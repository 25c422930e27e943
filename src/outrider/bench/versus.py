"""Two results of the benchmark, cell by cell: is the second one faster, slower, neither, or not to be compared at all?

The ratio of two cells is that of the geometric means of their runs' speeds. Its 95 % interval is Welch's, over the logarithms of
the speeds (Welch 1947), since the runs of two results are not pairs; speed-ups, each a pair of runs already, go the same way.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import BadInput
from .numbers import interval, student
from .report import CELL, Report, Row

FASTER, SLOWER, SAME, APART = "faster", "slower", "no difference beyond noise", "not comparable"
MACHINE = ("device", "cpu", "cores", "threads")
SOFTWARE = ("torch", "transformers")
MODEL = ("model", "dtype", "quantize")
SETTINGS = ("max_tokens", "seed", "control")
MUST_AGREE = (*MACHINE, *SOFTWARE, *MODEL, *SETTINGS, "prompts")
"""What makes two results comparable, by the names under which a user may ask to ignore it."""
WIDEST = 700.0
"""Logarithm of the largest ratio that is still a number."""
BY: dict[str, Callable[[Row], Sequence[float]]] = {
    "speed": lambda row: row.paces,
    "speedup": lambda row: row.speedup.pairs if row.speedup is not None else (),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of both results. `ratio` is the second's speed over the first's, from `low` to `high` with 95 % confidence; what is
    not known is None, and `why` tells why two rows are not comparable. `key`: values of `report.CELL`."""

    name: str
    label: str
    key: tuple[Any, ...]
    verdict: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All cells; `ratio`, `low` and `high` of the geometric mean over those that are comparable; `notes` on what differs and is
    no obstacle."""

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def slower(self) -> tuple[Cell, ...]:
        """Where the second result is slower beyond noise."""
        return tuple(c for c in self.cells if c.verdict == SLOWER)

    @property
    def comparable(self) -> tuple[Cell, ...]:
        """Cells that have a verdict on their speed."""
        return tuple(c for c in self.cells if c.verdict != APART)


def compare(a: Report, b: Report, by: str = "speed", tolerance: float = 0.0, ignore: Collection[str] = ()) -> Comparison:
    """The second result against the first. `by`: `speed` (tokens per second) or `speedup` (over the plain decoding beside it,
    which a slower machine does not change). A cell is slower when its whole interval lies below 1 - `tolerance`, faster above 1 +
    `tolerance`. `ignore` names differences (of `MUST_AGREE`) that are no obstacle. Raises `BadInput` for unknown names."""
    if by not in BY:
        raise BadInput(f"unknown measure {by!r}; compare by {' or '.join(BY)}")
    unknown = sorted(set(ignore) - set(MUST_AGREE))
    if unknown:
        raise BadInput(f"cannot ignore {unknown[0]!r}; use {', '.join(MUST_AGREE)}")
    if not 0 <= tolerance < 1:
        raise BadInput(f"tolerance must be from 0 to below 1, got {tolerance:g}")
    apart = obstacles(a, b, ignore)
    rows = {key(r): r for r in b.rows}
    cells = [_cell(r, rows.get(key(r)), apart(r.workload), BY[by], tolerance) for r in a.rows]
    known = {key(r) for r in a.rows}
    cells += [Cell(str(r.point), r.label, key(r), APART, why="only in the second result") for r in b.rows if key(r) not in known]
    cells = [c for c in cells if by == "speed" or c.key[1] != "none"]
    ratios = [c.ratio for c in cells if c.verdict != APART and c.ratio is not None]
    mean = statistics.geometric_mean(ratios) if ratios else None
    return Comparison(tuple(cells), notes(a, b, ignore), mean, *(interval(ratios) if ratios else (None, None)))


def key(row: Row) -> tuple[Any, ...]:
    """What tells cells apart."""
    return tuple(getattr(row, name) for name in CELL)


def obstacles(a: Report, b: Report, ignore: Collection[str]) -> Callable[[str], str]:
    """Gives for a workload why its cells cannot be compared, or an empty text."""
    general = [_difference(name, *found) for name in MUST_AGREE if name not in ignore and (found := _values(name, a, b))]

    def why(workload: str) -> str:
        ours, theirs = (r.provenance.get("prompts", {}).get(workload) for r in (a, b))
        other = ["other prompts"] if ours != theirs and theirs is not None and "prompts" not in ignore else []
        return "; ".join(general + other)

    return why


def _values(name: str, a: Report, b: Report) -> tuple[Any, Any] | None:
    """Both values of what must agree, if they do not. Prompts are looked at workload by workload."""
    if name == "prompts":
        return None
    ours, theirs = ((r.settings if name in SETTINGS else r.provenance).get(name) for r in (a, b))
    return None if ours == theirs else (ours, theirs)


def _difference(name: str, ours: Any, theirs: Any) -> str:
    """`other torch (2.12.0, 2.13.0)`."""
    if name == "model":
        ours, theirs = (m.get("name") if isinstance(m, dict) else m for m in (ours, theirs))
        return f"other model ({ours}, {theirs})" if ours != theirs else f"other weights of {ours}"
    card = name == "device" and not str(ours).startswith("cpu") and not str(theirs).startswith("cpu")
    return f"other {'card' if card else name} ({ours}, {theirs})"


def notes(a: Report, b: Report, ignore: Collection[str]) -> tuple[str, ...]:
    """Differences that do not forbid a comparison: what was ignored, and what is usually being compared."""
    said = [f"ignored: {_difference(n, *found)}" for n in MUST_AGREE if n in ignore and (found := _values(n, a, b))]
    for name in ("outrider", "commit"):
        ours, theirs = (r.provenance.get(name) for r in (a, b))
        if ours != theirs:
            said.append(f"{name}: {ours}, then {theirs}")
    ours, theirs = (r.provenance.get("drafters") or {} for r in (a, b))
    said += [f"other weights of the drafter {d}" for d in ours if d in theirs and _weights(ours[d]) != _weights(theirs[d])]
    said += [f"the {which} result has answers that differ from plain decoding" for which, r in _both(a, b) if not r.ok]
    return tuple(said + [f"the {which} result was interrupted" for which, r in _both(a, b) if r.interrupted])


def _weights(found: Any) -> Any:
    return found.get("sampled_sha256") if isinstance(found, dict) else found


def _both(a: Report, b: Report) -> tuple[tuple[str, Report], ...]:
    return ("first", a), ("second", b)


def _cell(a: Row, b: Row | None, apart: str, of: Callable[[Row], Sequence[float]], tolerance: float) -> Cell:
    name = (f"{a.workload} ({a.point})", a.label, key(a))
    if b is None:
        return Cell(*name, APART, why="only in the first result")
    if a.drafter != b.drafter:
        apart = "; ".join(filter(None, (apart, f"other drafter behind {a.draft} ({a.drafter}, {b.drafter})")))
    ours, theirs = of(a), of(b)
    if apart or not ours or not theirs or min(*ours, *theirs) <= 0:
        return Cell(*name, APART, why=apart or "nothing was measured")
    ratio, low, high = welch(ours, theirs)
    if low is None or high is None:
        return Cell(*name, APART, ratio, why="a single run has no interval; use --repeats 3 or more")
    verdict = SLOWER if high < 1 - tolerance else FASTER if low > 1 + tolerance else SAME
    return Cell(*name, verdict, ratio, low, high)


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Ratio of the geometric means of b and a (all above 0), and its 95 % interval (None twice where one has a single value)."""
    x, y = ([math.log(v) for v in values] for values in (a, b))
    middle = statistics.fmean(y) - statistics.fmean(x)
    if len(x) < 2 or len(y) < 2:
        return math.exp(min(middle, WIDEST)), None, None
    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in (x, y)]
    total = sum(v for v, _ in parts)
    freedom = total**2 / sum(v**2 / n for v, n in parts) if total > 0 else math.inf
    half = student(max(1, int(min(freedom, 1e6)))) * math.sqrt(total)
    middle, low, high = (math.exp(min(v, WIDEST)) for v in (middle, middle - half, middle + half))
    return middle, low, high
