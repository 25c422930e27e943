"""Spec-Bench (Xia et al. 2024, arXiv 2401.07851): its question file as six workloads, and its numbers.

Its protocol: six tasks, of which `mt_bench` joins eight categories and has two turns; one prompt at a time; mean accepted tokens
are tokens per pass of the model over all passes of a task; speeds are means over questions, and the speed-up is their ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadInput
from . import readers
from .conversation import Prompt, Workload

if TYPE_CHECKING:
    from .report import Report, Row

PREFIX = "spec_bench:"
MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True, slots=True)
class Line:
    """A drafter on a task, or on all of them together (`overall`). `speedup` is None for plain decoding itself; `conditions`:
    where a sweep has several."""

    task: str
    draft: str
    questions: int
    mean_accepted_tokens: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float | None
    conditions: str = ""


def read(path: Path) -> tuple[Workload, ...]:
    """The tasks that the file has questions of, in Spec-Bench's order. Raises `BadInput`, naming the line, for what is not such a
    question."""
    if not path.name:
        raise BadInput(f"{PREFIX} needs Spec-Bench's question file: --workload {PREFIX}question.jsonl")
    prompts: dict[str, list[Prompt]] = {task: [] for task in TASKS}
    for where, entry in readers.entries(path):
        missing = next((key for key in ("question_id", "category", "turns") if key not in entry), None)
        if missing is not None:
            raise BadInput(f"{where}: no Spec-Bench question, it has no {missing}; give other files without {PREFIX}")
        category = entry["category"]
        task = "mt_bench" if isinstance(category, str) and category in MT_BENCH else category
        if task not in TASKS:
            raise BadInput(
                f"{where}: Spec-Bench has no category {category!r}; there are {', '.join((*TASKS, *sorted(MT_BENCH)))}"
            )
        prompts[task] += readers.prompts_of({"turns": entry["turns"]}, where)
    if not any(prompts.values()):
        raise BadInput(f"{path} has no questions")
    source = f"{PREFIX}{path}"
    return tuple(Workload(task, source, tuple(found), "Spec-Bench questions") for task, found in prompts.items() if found)


def summary(report: Report) -> tuple[Line, ...]:
    """Spec-Bench's table: a line per task and drafter, then `overall`; empty if the report has none of its workloads."""
    ours = {w.name for w in report.workloads if w.source.startswith(PREFIX)}
    rows = [row for row in report.rows if row.workload in ours]
    cells = dict.fromkeys(_cell(row) for row in rows)
    every = [("overall", [row for row in rows if _cell(row) == cell]) for cell in cells]
    several = len({row.point for row in rows}) > 1
    return tuple(_line(task, group, several) for task, group in ([(row.workload, [row]) for row in rows] + every))


def _cell(row: Row) -> tuple[object, ...]:
    return row.draft, row.temperature, row.batch, row.rate, row.depth


def _line(task: str, rows: Sequence[Row], several: bool) -> Line:
    questions, rounds = sum(r.questions for r in rows), sum(r.rounds for r in rows)
    speed = sum(r.questions * r.question_speed for r in rows) / questions
    plain = sum(r.questions * r.plain_question_speed for r in rows) / questions
    ratio = None if rows[0].speedup is None or not plain else speed / plain
    tokens = sum(r.tokens for r in rows) / rounds if rounds else 0.0
    name, conditions = rows[0].label if rows[0].depth is not None else rows[0].draft, str(rows[0].point) if several else ""
    return Line(task, name, questions, tokens, speed, plain, ratio, conditions)
