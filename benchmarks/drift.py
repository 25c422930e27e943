"""What the default controller does in a real run when the work changes: code, then poetry, then code, and so on.

    python benchmarks/drift.py [--draft SPEC] [--cycles 3] [--rounds 70] [--out FILE.json] [--image FILE.svg] [--trace FILE.jsonl]

The embedded model goes on with texts of one kind after the other under `goodput`, one at a time (code at temperature 0, poetry at
1); the run is traced, and all is read from the trace. After each change: how many rounds until looking ahead is turned down (at
most one level, for five rounds in a row), or up again (at least three). The bars: down within 20, up within 40, where a trial
costs under 0.4 of a plain round. Exit status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.bench.provenance import provenance
from outrider.watch.digest import Digest
from outrider.watch.plots import Picture, picture, svg
from outrider.watch.reader import Round, read

HERE = Path(__file__).parent
KINDS = ("code", "poetry")
DOWN, UP, CHEAP = 20, 40, 0.4
TEMPERATURES = {"code": 0.0, "poetry": 1.0}
LONGEST = {"code": 256, "poetry": 384}
FIELDS = ("id", "name", "email", "age", "city", "country", "phone", "created", "updated", "status", "role", "notes")
CLASSES = ("Person", "Customer")
SUBJECTS = ("a river at night", "an old clock", "rain on a tin roof", "the last train", "salt", "a door that nobody opens")
POEM = """The lamp on the hill and the lamp in the bay
are awake, and the road between them is grey.
The wind has the voice of a man who was here
and who left in the spring of a different year.
It asks at the door and it asks at the sill,
and the house does not answer, the house is as still
as the stone in the field and the boat on the sand
and the glove that was dropped by the warmth of a hand.
But the kettle is on, and the cup is not cold,
and the story of all this has never been told.

You may sit by the fire, if a fire is what you need,
you may turn all the pages of a book you will not read,
you may ask for the name of the bird on the wall,
or for where it will go at the end of the fall.
I have more in the house than I ever could say:
there is bread for the night, there is oil for the day,
there are coats on the hooks that will fit you, I know,
and a map, if you want it, of how it was so.
And when you have had all the rest that you can,
you will see that the road is as long as it ran,
but that it has a lamp now, and so have the trees,
and so does the boat, and the man, and the seas.
"""


@dataclass(frozen=True, slots=True)
class Change:
    """The work became `kind` at the round `at`; the depth followed after so many rounds (None: it never did)."""

    kind: str
    at: int
    after: int | None

    @property
    def bar(self) -> int:
        return DOWN if self.kind == "poetry" else UP

    @property
    def ok(self) -> bool:
        return self.after is not None and self.after <= self.bar


def prompts(kind: str) -> list[str]:
    """Texts of a kind to go on with. Both may take up what stands there: code does so to the letter, poetry hardly ever."""
    if kind == "poetry":
        return [f"{POEM}\n\nA long poem about {subject}, in the same manner:\n\n" for subject in SUBJECTS]
    fields = "\n".join(f"        self.{name} = {name}" for name in FIELDS)
    getters = "\n\n".join(f"    def get_{name}(self):\n        return self.{name}" for name in FIELDS)
    given = [f"class {name}:\n    def __init__(self, {', '.join(FIELDS)}):\n{fields}\n\n{getters}\n" for name in CLASSES]
    return [f"# person.py\n\n{code}\n\n# person.py, the same file once more\n\n{code[:60]}" for code in given]


def play(llm: LLM, kind: str, rounds: int) -> None:
    """Answer prompts of a kind until so many rounds have passed; the last answer is cut short."""
    left = rounds
    for number, prompt in enumerate(cycle(prompts(kind))):
        params = SamplingParams(
            temperature=TEMPERATURES[kind], max_tokens=LONGEST[kind], seed=number, ignore_eos=True, label=kind
        )
        with closing(llm.stream(prompt, params)) as stream:
            for _ in stream:
                left -= 1
                if left <= 0:
                    return


def settled(depths: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """Rounds until something holds for five in a row."""
    return next((i for i in range(len(depths) - 4) if all(map(holds, depths[i : i + 5]))), None)


def changes(rounds: Sequence[Round]) -> list[Change]:
    """What each change of the work did to the depth, by the labels."""
    labels, depths = [r.requests[0].label for r in rounds], [r.requests[0].depth for r in rounds]
    starts = [i for i in range(1, len(rounds)) if labels[i] != labels[i - 1]]
    found = []
    for start, end in zip(starts, [*starts[1:], len(rounds)], strict=True):
        down = labels[start] == "poetry"
        after = settled(depths[start:end], (lambda d: d <= 1) if down else (lambda d: d >= 3))
        found.append(Change(labels[start] or "", start, after))
    return found


def trial_cost(rounds: Sequence[Round]) -> float | None:
    """What a single guess between plain rounds takes, in plain rounds; None if there was none."""
    depths = [r.requests[0].depth for r in rounds]
    inside = range(1, len(rounds) - 1)
    trials = [rounds[i].seconds for i in inside if depths[i] == 1 and not depths[i - 1] and not depths[i + 1]]
    plain = [rounds[i].seconds for i in inside if not depths[i - 1] and not depths[i]]
    return statistics.median(trials) / statistics.median(plain) - 1 if trials and plain else None


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """What is reported."""
    found, cost = changes(rounds), trial_cost(rounds)
    kinds = {}
    for kind in KINDS:
        digest = Digest()
        for one in rounds:
            if one.requests[0].label == kind:
                digest.add(one)
        kinds[kind] = digest.as_json()
    return {
        "changes": [{"to": c.kind, "round": c.at + 1, "followed_after": c.after, "bar": c.bar, "met": c.ok} for c in found],
        "met": sum(c.ok for c in found),
        "of": len(found),
        "trial_cost": cost,
        "trials_are_cheap": cost is None or cost < CHEAP,
        "kinds": {kind: {k: v for k, v in values.items() if k not in ("labels", "over_time")} for kind, values in kinds.items()},
    }


def draw(rounds: Sequence[Round], title: str) -> str:
    """The run with a mark where the work changes."""
    digest = Digest()
    for one in rounds:
        digest.add(one)
    marks = [(c.at + 1, f"{c.kind}: {'never' if c.after is None else f'after {c.after}'}") for c in changes(rounds)]
    plain = picture(digest, title)
    return svg(Picture(plain.title, plain.panels, plain.rounds, marks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="ngram:min=1")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=70, help="of each part")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "drift_cpu.json")
    parser.add_argument("--image", type=Path, default=HERE.parent / "docs" / "img" / "drift.svg")
    parser.add_argument("--trace", type=Path, help="keep the trace here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = given.trace or Path(folder) / "drift.jsonl"
        llm = LLM(draft=given.draft, trace=trace)
        for kind in (*KINDS * given.cycles, KINDS[0]):
            play(llm, kind, given.rounds)
        llm.close()
        facts = provenance(llm, "default")
        rounds = [one for one in read(trace).rounds if one.requests and one.requests[0].tokens and not one.prefill]
    report = {"provenance": facts, "draft": given.draft, **figures(rounds)}
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    given.image.write_text(draw(rounds, f"{llm.name}, {given.draft}, goodput: code and poetry in turn"))
    print(json.dumps(report["changes"]), report["trial_cost"])
    for kind, values in report["kinds"].items():
        print(kind, {k: round(values[k], 2) for k in ("tokens_per_round", "acceptance_rate", "mean_depth", "tokens_per_second")})
    sys.exit(report["met"] < report["of"] or not report["trials_are_cheap"])


if __name__ == "__main__":
    main()
