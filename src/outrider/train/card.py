"""The card of a trained drafter: what it learned from, how, and what it reached. `card.json` for programs, `README.md` and a plot
for people."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..trained import CARD, write_bytes, write_json

PLOT = "curve.svg"


def write(directory: Path, card: Mapping[str, Any]) -> bool:
    """Write all three; False where there is no plot, since matplotlib is not installed."""
    plotted = plot(card["curve"], directory / PLOT)
    write_bytes(directory / "README.md", readme(card, plotted).encode())
    write_json(directory / CARD, card)
    return plotted


def readme(card: Mapping[str, Any], plotted: bool) -> str:
    """The card as a page."""
    data, run, spec = card["data"], card["training"], card["method"]
    options = ", ".join(f"{k} {v}" for k, v in card["options"].items())
    parts = [
        f"# {card['method']} for {card['model']}",
        f"A drafter for speculative decoding by Outrider. It guesses for `{card['model']}` (weights {card['fingerprint'][:12]}…) "
        "and changes nothing that the model writes.",
        *_changed(card),
        f"    outrider generate PROMPT --model MODEL --draft {spec}:path=DIRECTORY",
        "## Results",
        _table(card["results"]),
        "Tau: tokens per pass of the model (1 is plain decoding), on prompts that were never trained on, with the standard error "
        "over prompts. Acceptance: the share of guesses that were kept, in all and by depth. Equal: answers that were token for "
        "token those of plain decoding.",
        "## Data",
        f"{data['texts']:,} texts ({data['taught']:,} tokens written by the model, {data['held']:,} texts held out, "
        f"{data['copies']:,} copies dropped). Settings: {_listed(data['settings'])}.",
        "## Training",
        f"{run['step']:,} of {run['total']:,} steps, {run['tokens']:,} tokens, {run['seconds'] / 60:.1f} minutes on "
        f"{card['provenance'].get('device', 'cpu')}; the weights are those of step {run['best_step']:,}. Drafter: {options}. "
        f"Recipe: {_listed(run['recipe'])}.",
        *([f"![loss and acceptance on held-out texts]({PLOT})"] if plotted else []),
        "## Command",
        f"    {card['command']}",
        f"Outrider {card['provenance'].get('outrider')}, torch {card['provenance'].get('torch')}, transformers "
        f"{card['provenance'].get('transformers')}, commit {card['provenance'].get('commit')}, {card['provenance'].get('date')}.",
    ]
    return "\n\n".join(parts) + "\n"


def _changed(card: Mapping[str, Any]) -> list[str]:
    """Said loudly where the target is not the one that somebody knows."""
    was = card.get("target_changed_from")
    if not was:
        return []
    return [
        f"**`{card['model']}` is a changed model**, trained along with the drafter: its texts are not those of `{was['model']}` "
        f"(weights {was['fingerprint'][:12]}…), from which it was made, and the drafter does not fit that one. `target_kl` and "
        "`target_overlap` in `card.json` tell how far apart the two are on held-out texts."
    ]


def reduced(value: Any) -> Any:
    """The same without directories, which are nobody's business: of every path its last part."""
    if isinstance(value, Mapping):
        return {k: reduced(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [reduced(v) for v in value]
    return value if not isinstance(value, str) or not is_path(value) else Path(value).expanduser().name or value


def is_path(word: str) -> bool:
    """Whether this names a place on this machine; `org/model` and `ship/name` do not, unless there is such a place."""
    return word.startswith(("/", "./", "../", "~")) or (os.sep in word and Path(word).exists())


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in settings.items())


def table(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Head and rows."""
    rows: list[tuple[str, ...]] = [("T", "tau", "acceptance", "by depth", "equal")]
    for r in results:
        depths = " ".join(f"{x:.2f}" for x in r["acceptance_by_position"])
        tau = f"{r['tau']:.2f} ± {r['spread']:.2f}"
        rows.append((f"{r['temperature']:g}", tau, f"{r['acceptance_rate']:.2f}", depths, f"{r['equal']} of {r['prompts']}"))
    return rows


def _table(results: Sequence[Mapping[str, Any]]) -> str:
    head, *rows = ["| " + " | ".join(cells) + " |" for cells in table(results)]
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def plot(curve: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Loss and acceptance by position over the steps, on held-out texts; False without matplotlib or without a curve."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not curve:
        return False
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [point["step"] for point in curve]
    left.plot(steps, [point["loss"] for point in curve], color="#2b6cb0")
    rows = [p["acceptance"] if isinstance(p["acceptance"], list) else [p["acceptance"]] for p in curve]
    for depth in range(len(rows[0])):
        right.plot(steps, [row[depth] for row in rows], label=f"depth {depth + 1}")
    for axes, title in ((left, "loss"), (right, "acceptance")):
        axes.set_title(f"{title}, held-out texts", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    right.set_ylim(0, 1)
    if len(rows[0]) > 1:
        right.legend(fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    write_bytes(path, drawn.getvalue())
    return True
