"""Write docs/performance.md from the committed results, so that no figure is typed by hand.

python benchmarks/performance.py            # rewrite the page
python benchmarks/performance.py --check    # exit 1 if it is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
SHAPES = ("8B", "1.5B", "SmolLM2-135M")
WIDTHS = (1, 2, 4, 8, 16)


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "results" / "gpu" / f"{name}.json").read_text())
    return found


def head() -> list[str]:
    """What this page is."""
    return [
        "# Speed on a GPU",
        "",
        "Written by `python benchmarks/performance.py` from `benchmarks/results/gpu/`; every file there names card, versions, commit "
        "and command.",
        "",
        "All in bf16. 8B and 1.5B are shapes with random weights (32 layers of 4,096; 28 layers of 1,536) and have no text; "
        "SmolLM2-135M is the embedded model. A *pass* is a whole captured round: rows from lanes, the decoder, scores in fp32, the "
        "choice, the rule.",
        "",
    ]


def card(passes: dict[str, Any], others: Iterable[dict[str, Any]]) -> list[str]:
    """What was measured on what."""
    commits = dict.fromkeys(x.get("commit") for x in (passes, *others))
    return [
        f"# {passes['card']}",
        "",
        f"torch {passes['torch']}, transformers {passes['transformers']}, Python {passes['python']}; commits "
        f"{', '.join(str(c) for c in commits if c)}.",
        "",
    ]


def widths(passes: dict[str, Any]) -> list[str]:
    """Pass times by rows."""
    lines = [
        "## A pass, by rows",
        "",
        "Milliseconds (median of 20 replays), and in brackets the ratio to a graph of the pass's matrix products alone, same run.",
        "",
        "| shape, context | " + " | ".join(f"{n} rows" if n > 1 else "1 row" for n in WIDTHS) + " | bar |",
        "|---|" + "---|" * (len(WIDTHS) + 1),
    ]
    bars = {
        ("8B", 512): "ratio 1.15, 6.3 ms",
        ("8B", 8192): "ratio 1.35",
        ("1.5B", 512): "2.0 ms",
        ("SmolLM2-135M", 512): "1.1 ms",
    }
    for (name, context), bar in bars.items():
        shape = passes["shapes"][name]
        cells = [
            f"{shape[f'round/{context}/{n}']['median']:.2f} "
            f"({shape[f'round/{context}/{n}']['median'] / shape[f'products/{n}']['median']:.2f})"
            for n in WIDTHS
        ]
        lines.append(f"| {name}, {context:,} | " + " | ".join(cells) + f" | {bar} |")
    return [*lines, ""]


def tokens(singles: dict[str, Any]) -> list[str]:
    """One request, plain, and with an answer that is replayed."""
    lines = [
        "## One request",
        "",
        "Context 512, 256 tokens out, greedy. Plain: time of a pass over time per token (rounds are launched one ahead, so the host "
        "costs nothing). *Replay* knows the plain answer and spoils each guess with a given probability: not a real drafter, but a "
        "known acceptance; ideal = tau / (1 + drafting / plain pass).",
        "",
        "| shape | plain, ms per token | pass / token | bar | transformers eager `generate`, ms | times as fast | bar |",
        "|---|---|---|---|---|---|---|",
    ]
    bars = {"8B": ("0.95", "3x"), "1.5B": ("0.95", "8x"), "SmolLM2-135M": ("0.85", "15x")}
    for name in SHAPES:
        one = singles[name]
        lines.append(
            f"| {name} | {one['plain_ms']['median']:.3f} | {one['plain_x_pass']:.3f} | {bars[name][0]} | "
            f"{one['transformers_ms']:.1f} | {one['against_transformers']:.1f} | {bars[name][1]} |"
        )
    lines += ["", "| measured / ideal speed-up | " + " | ".join(f"{r}, {d} deep" for r in RATES for d in DEPTHS) + " | bar |"]
    lines.append("|---|" + "---|" * 10)
    for name, bar in (("8B", "0.93"), ("1.5B", "0.93"), ("SmolLM2-135M", "0.85")):
        cells = [singles[name][f"replay/{r}/{d}"] for r in RATES for d in DEPTHS]
        lines.append(
            f"| {name} | " + " | ".join(f"{c['share']['median']:.2f} ({c['speedup']:.2f}x)" for c in cells) + f" | {bar} |"
        )
    return [*lines, ""]


RATES, DEPTHS = (0.6, 0.8, 0.9), (3, 5, 8)


def many(crowd: dict[str, Any], texts: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """Many requests."""
    text = texts["texts"]

    cached = first["cached"]["median"] / first["fresh"]["median"]
    return [
        "## Many requests",
        "",
        "| what | tokens per second | bar |",
        "|---|---|---|",
        f"| 64 requests, 8B shape, 512 in, 256 out, plain | {_spread(crowd['crowd']['tokens_per_second'])} | 4,900 |",
        f"| 60 requests, SmolLM2, up to 256 out, plain | {_spread(text['60/plain'])} | 15,000 |",
        f"| the same with `ngram`, always 10 guesses | {_spread(text['60/ngram fixed'])} | |",
        f"| the same with `ngram`, `goodput` | {_spread(text['60/ngram']) if '60/ngram' in text else '-'} | not less than plain |",
        f"| 256 requests, SmolLM2, 256 out | {_spread(text['256/plain'])} | 30,000 |",
        f"| 1 request, SmolLM2, 256 out, plain | {_spread(text['1/plain'])} | |",
        f"| the same with `ngram` / `suffix` (a text that ends in a loop) | {_spread(text['1/ngram'])} / {_spread(text['1/suffix'])} | |",
        f"| the same with the model's own first 6 layers as draft model, 3 guesses | {_spread(text['1/draft_model of 6 layers'])} | |",
        "",
        f"First token of a prompt of 4,096 tokens, 8B shape: {first['fresh']['median'] * 1e3:.0f} ms; with its prefix cached "
        f"{first['cached']['median'] * 1e3:.0f} ms ({cached:.2f}x; bar 0.1x). SmolLM2 is ready {text['load_seconds']:.1f} s after the "
        "process asks for it (weights, checks of matrix products; graphs are captured when first needed).",
        "",
    ]


def more(small: dict[str, Any], assisted: dict[str, Any], quantized: dict[str, Any]) -> list[str]:
    """Against transformers' faster ways, and quantised weights."""
    one, other = small["single/SmolLM2-135M"], assisted["assisted"]
    lines = [
        "## Against transformers' own ways to be fast, SmolLM2",
        "",
        "| what | times as fast | bar |",
        "|---|---|---|",
        f"| compiled `generate` with a static cache (ready after {one['compile_seconds']:.0f} s; commit {small['commit']}) | "
        f"{one['against_compiled']:.2f} | 1.0 |",
        f"| assisted by the same n-gram lookup, a text that quotes its prompt (commit {assisted['commit']}) | "
        f"{other['ngram']['times_as_fast']:.1f} | 4 |",
        f"| not assisted, the same text | {other['plain']['times_as_fast']:.1f} | |",
        "",
        "## Weights of 8 and of 4 bits",
        "",
        "Plain decoding, against bf16 in the same run; bits equal at every width.",
        "",
        "| shape | int8: ms per token | times as fast | int4: ms per token | times as fast |",
        "|---|---|---|---|---|",
    ]
    for name in ("8B", "SmolLM2-135M"):
        ms = {k: quantized["shapes"][name][f"decoding/{k}"]["plain_ms"]["median"] for k in ("none", "int8", "int4")}
        cells = [f"{ms[k]:.2f} | {ms['none'] / ms[k]:.2f}" for k in ("int8", "int4")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _spread(found: dict[str, float]) -> str:
    return f"{found['median']:,.0f} ({found['min']:,.0f} to {found['max']:,.0f})"


CLOSING = """# Where it is short, and what would close it

- **8B, pass / products (1.15 at 512, 1.35 at 8,192).** On the H200 the products are faster (4.05 ms against 5.7), what stands beside
  them is not: 1.16 to 1.18. At 8,192 tokens and 4 rows or more the cause is attention: since all passes have tiles of 16 lines (see
  below), four tiles read the same keys for 16 rows, and write 17 MB of partial softmaxes per layer. Merging those of 1,024 positions before
  they are written, and tiles that share their loads, should close it. The kernel does both since 6fe79c2; all texts were equal with it
  on the card (97d1886), its times are predicted in [attention.md](attention.md) and not measured yet.
- **1.5B, replay (0.93).** 0.88 to 0.92: a drafter on the host sees a round's tokens before it guesses, so the device waits for 0.27 to
  0.38 ms of Python per round (propose, check, upload, launch) beside a pass of 1.8. **SmolLM2 (0.85)** likewise, 0.79 to 0.86. Drafters that
  live on the device need not wait.
- **1.5B, pass (2.0 ms, H100 only).** At 8 rows the products and the head take 1.53 ms; attention 0.24, norms 0.12, merging partial
  softmaxes 0.08, rotation 0.05 and the gate 0.04 (profile of the first version), the rest is the gap between some 250 graph nodes.
- **`ngram` with 60 requests.** Plain rounds are launched ahead of the host's work, rounds with guesses made on the host are not: 1.07 ms
  a round against 2.9. So `goodput` should leave it off, and round by round it does (steady runs of another script on the same card: 29,027 to
  30,430 of 28,614 to 35,779 tokens per second). In the figure above shapes of rounds were still being captured while the clock ran, 0.17 to
  0.3 s each, much of it compiling. Since then a roomier captured shape plays for one that is seldom wanted, the price of waiting is
  booked by the size of the batch, and an idle plan no longer keeps rounds from being launched ahead; not measured again yet.
- **256 requests.** Text of 256 streams is made by one Python thread, about 20 us per token (`detokenize=False` leaves it out).
  With more requests than places (4,096 in 256) prompts interrupted nearly every round: 10,400 tokens per second beside other work. Newcomers to a full house
  are now let in together: 28,000.
- **One shape of tile.** Attention once took tiles of 16 or of 64 lines by the number of rows, whose sums go in another order: after
  preemption 4 of 16 texts differed. With 16 lines everywhere they are equal: all of `tests/gpu/test_text.py` passed on
  an H200 (8b6cd80; and at 97d1886, with the trained drafters, untrained heads and rounded weights: 63 tests).
- **int4** is slower than bf16 on this card (0.65x for 8B): unpacking costs more than the bytes it saves. **int8** reads at half of the
  card's bandwidth.
- **A draft model** cut from the target's first layers loses here, as its guesses are seldom right (with ten layers, 2 % of them).
  It was run to show the cost of a captured chain, not as advice.
"""


def page() -> str:
    lines = head()
    for prefix in ("h200_", ""):
        names = ("passes", "single", "small" if prefix else "single_8b", "crowd", "texts")
        passes, single, rest, crowd, texts = (load(prefix + name) for name in names)
        found = single | rest
        singles = {n: found[f"single/{n}"] for n in SHAPES}
        lines += card(passes, (single, rest, crowd, texts))
        lines += [*widths(passes), *tokens(singles), *many(crowd, texts, crowd.get("first") or texts["first"])]
        if prefix:
            lines += more(rest, load("h200_assisted"), load("h200_quantize"))
    return "\n".join(lines) + "\n" + CLOSING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE.name} is out of date: run python benchmarks/performance.py")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
