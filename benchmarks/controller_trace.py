"""What the default controller does when the text changes: a simulated request writes code, then poetry, then code again.

    python benchmarks/controller_trace.py [--out docs/img/controller.svg]

No model is run: chances and costs are given (`outrider.bench.simulate`), so the figure is the same on every machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.bench.simulate import Asks, Clock, Round, Simulation, code_then_poetry, speed
from outrider.control import Fixed, Goodput

HERE = Path(__file__).parent
EACH = 150
WINDOW = 10
WIDTH, PANEL, LEFT, TOP, GAP = 760, 150, 64, 34, 46
BLUE, GREY, INK, PALE = "#2563eb", "#9ca3af", "#374151", "#f3f4f6"


def play(control: str) -> list[Round]:
    """One run of all three parts, under `goodput` or under `fixed` at the drafter's own depth."""
    clock = Clock()
    asks = Asks(8, 8)
    controller = Goodput(asks, clock) if control == "goodput" else Fixed(asks)  # type: ignore[arg-type]
    return Simulation(code_then_poetry(EACH), controller, clock, seed=3).run(3 * EACH)


def rates(rounds: list[Round]) -> list[float]:
    """Tokens per second, averaged over the last few rounds."""
    return [speed(rounds[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rounds))]


def polyline(values: list[float], most: float, top: int, colour: str) -> str:
    """A line through a panel, whose height stands for `most`."""
    step = (WIDTH - LEFT - 16) / (len(values) - 1)
    points = " ".join(f"{LEFT + i * step:.1f},{top + PANEL * (1 - v / most):.1f}" for i, v in enumerate(values))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def panel(top: int, title: str, most: float, ticks: list[float]) -> list[str]:
    """Frame, title and grid of one panel."""
    parts = [text(LEFT, top - 8, title)]
    for tick in ticks:
        y = top + PANEL * (1 - tick / most)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick:g}", "end"))
    return parts


def draw() -> str:
    """The figure as SVG."""
    ours, fixed = play("goodput"), play("fixed")
    plain = 1.0 / ours[0].plain_seconds
    span = (WIDTH - LEFT - 16) / 3
    below = TOP + PANEL + GAP
    height = below + PANEL + 40
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    for top in (TOP, below):
        parts.append(f'<rect x="{LEFT + span:.1f}" y="{top}" width="{span:.1f}" height="{PANEL}" fill="{PALE}"/>')
    parts += panel(TOP, "guesses asked for (drafter likes 8)", 9.0, [0, 2, 4, 6, 8])
    parts.append(polyline([r.depth for r in ours], 9.0, TOP, BLUE))
    parts += panel(below, f"tokens per second, mean of {WINDOW} rounds", 140.0, [0, 40, 80, 120])
    parts.append(polyline([plain] * len(ours), 140.0, below, "#111827"))
    parts.append(polyline(rates(fixed), 140.0, below, GREY))
    parts.append(polyline(rates(ours), 140.0, below, BLUE))
    for i, part in enumerate(("code", "poetry", "code")):
        parts.append(text(LEFT + span * (i + 0.5), height - 22, part, "middle"))
    legend = (("goodput", BLUE), ("fixed", GREY), ("no guesses", "#111827"))
    for i, (name, colour) in enumerate(legend):
        parts.append(text(WIDTH - 250 + 80 * i, height - 5, name, "start", colour))
    parts.append(text(LEFT, height - 5, f"{3 * EACH} rounds"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "img" / "controller.svg")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(draw())
    ours, fixed = play("goodput"), play("fixed")
    for i, name in enumerate(("code", "poetry", "code again")):
        part = slice(i * EACH, (i + 1) * EACH)
        plain = 1.0 / ours[0].plain_seconds
        print(f"{name}: goodput {speed(ours[part]) / plain:.2f}, fixed {speed(fixed[part]) / plain:.2f} times plain speed")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
