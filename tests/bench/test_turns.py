"""Conversations turn by turn on a tiny model, and the numbers of Spec-Bench over them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.bench import spec_bench, workloads
from outrider.bench.conversation import Prompt, Workload
from outrider.bench.numbers import Run, by_question
from outrider.bench.plan import Point
from outrider.bench.report import Asked, Report
from outrider.bench.runner import Plan, Runner
from outrider.bench.turns import expand
from outrider.config import SamplingParams
from outrider.errors import BadInput
from outrider.llm import LLM
from tests.bench.reports import FAST, report, rows

NAME = Path("shared/data/spec_bench.jsonl")
SHARED = next((p / NAME for p in Path(__file__).parents[3:] if (p / NAME).is_file()), None)
"""Somebody else's file, which is not ours to hand on: beside the checkout, if it is there at all."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, seed=0)


def asked(*turns: str) -> Prompt:
    return Prompt(({"role": "user", "content": turns[0]},), turns[1:])


TALK = Workload("talk", "test", (asked("ab ab", "and?", "so?"), asked("x y"), asked("hello", "go on")))


def test_one_turn_needs_no_model() -> None:
    plain = Workload("one", "test", (asked("a"), asked("b")))
    assert expand(None, plain, PARAMS) is plain  # type: ignore[arg-type]


def test_the_models_own_answers_stand_between(llm: LLM) -> None:
    found = expand(llm, TALK, PARAMS)
    assert [p.question for p in found.prompts] == [0, 0, 0, 1, 2, 2] and found.questions == (0, 0, 0, 1, 2, 2)
    assert [len(p.messages) for p in found.prompts] == [1, 3, 5, 1, 1, 3] and not any(p.later for p in found.prompts)
    first, second, third = (p.messages for p in found.prompts[:3])
    assert second[:1] == first and third[:3] == second
    assert [m["content"] for m in third if m["role"] == "user"] == ["ab ab", "and?", "so?"]
    for shorter, longer in ((0, 1), (1, 2), (4, 5)):
        answer = llm.generate([found.prompts[shorter].encode(llm.tokenizer)], PARAMS)[0].text
        assert found.prompts[longer].messages[-2] == {"role": "assistant", "content": answer}
    assert expand(llm, TALK, PARAMS) == found


def test_in_batches_turns_go_together(llm: LLM) -> None:
    found = expand(llm, TALK, PARAMS, batch=2)
    assert [(p.question, len(p.messages)) for p in found.prompts] == [(0, 1), (1, 1), (0, 3), (0, 5), (2, 1), (2, 3)]


def test_a_conversation_ends_where_the_context_does(llm: LLM) -> None:
    long = Workload("long", "test", (asked("a", "b", "ab " * llm.max_model_len, "more"), asked("c", "d")))
    assert [(p.question, len(p.messages)) for p in expand(llm, long, PARAMS).prompts] == [(0, 1), (0, 3), (1, 1), (1, 3)]


def test_a_report_names_conversations_by_what_the_user_says(llm: LLM) -> None:
    report = Runner(llm, Plan(("none",), (TALK,), max_tokens=6, repeats=1, control="fixed")).run()
    row = report.rows[0]
    assert [w.sha256 for w in report.workloads] == [tuple(p.sha256 for p in TALK.prompts)]
    assert (row.prompts, row.questions, row.compared) == (6, 3, 6)


def questions(path: Path) -> Path:
    lines = [
        {"question_id": 1, "category": "writing", "turns": ["ab ab ab", "more"]},
        {"question_id": 2, "category": "rag", "turns": ["hello hello"]},
        {"question_id": 3, "category": "coding", "turns": ["x y x y", "and?"]},
    ]
    path.write_text("\n".join(json.dumps(x) for x in lines))
    return path


def test_spec_bench(llm: LLM, tmp_path: Path) -> None:
    file = questions(tmp_path / "q.jsonl")
    tasks = workloads.gather([f"spec_bench:{file}"])
    assert [(w.name, len(w.prompts)) for w in tasks] == [("mt_bench", 2), ("rag", 1)]
    runner = Runner(llm, Plan(("none", "ngram"), tasks, max_tokens=8, repeats=1, control="fixed"))
    report = runner.run()
    assert report.ok and [r.questions for r in report.rows] == [2, 2, 1, 1]
    lines = {(e.task, e.draft): e for e in spec_bench.summary(report)}
    assert list(lines) == [(t, d) for t in ("mt_bench", "rag") for d in ("none", "ngram")] + [
        ("overall", d) for d in ("none", "ngram")
    ]
    mt, rag, overall = (lines[task, "ngram"] for task in ("mt_bench", "rag", "overall"))
    assert overall.questions == 3 and overall.tokens_per_second == pytest.approx(
        (2 * mt.tokens_per_second + rag.tokens_per_second) / 3
    )
    assert overall.speedup == pytest.approx(overall.tokens_per_second / overall.plain_tokens_per_second)
    drafted = [r for r in report.rows if r.draft == "ngram"]
    assert overall.mean_accepted_tokens == pytest.approx(sum(r.tokens for r in drafted) / sum(r.rounds for r in drafted))
    assert lines["overall", "none"].speedup is None and lines["overall", "none"].mean_accepted_tokens == 1.0


def test_speed_is_a_mean_over_questions() -> None:
    def run(*stats: tuple[int, float]) -> Run:
        return Run(results=[SimpleNamespace(stats=SimpleNamespace(tokens=t, seconds=s)) for t, s in stats])  # type: ignore[misc]

    first, second = run((10, 1.0), (30, 1.0), (5, 0.5)), run((10, 2.0), (30, 2.0), (0, 0.0))
    assert by_question([first], (0, 0, 1)) == pytest.approx((40 / 2 + 5 / 0.5) / 2)
    assert by_question([first, second], (0, 0, 1)) == pytest.approx((15 + (40 / 4 + 0) / 2) / 2)
    assert by_question([first], (-1, -2, -3)) == pytest.approx((10 + 30 + 10) / 3)


def test_reports_without_its_questions_have_no_table() -> None:
    assert spec_bench.summary(Report((), (), (TALK,), {}, {})) == ()


def test_lines_of_a_sweep_are_told_apart() -> None:
    made = rows("qa", "guess", FAST, Point(0.0)), rows("qa", "guess", FAST, Point(1.0))
    told = (Asked("qa", "spec_bench:question.jsonl", ("a", "b", "c")),)
    lines = [(e.task, e.draft, e.conditions) for e in spec_bench.summary(report(*made, workloads=told)) if e.draft == "guess"]
    assert lines == [(task, "guess", f"T = {t}, batch 1") for task in ("qa", "overall") for t in (0, 1)]
    alone = spec_bench.summary(report(made[0], workloads=told))
    assert {e.conditions for e in alone} == {""}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"question_id": 1, "turns": ["a"]}', "line 1: no Spec-Bench question, it has no category"),
        ('{"question_id": 1, "category": "cooking", "turns": ["a"]}', "line 1: .*no category 'cooking'"),
        ('{"question_id": 1, "category": ["rag"], "turns": ["a"]}', "line 1: .*no category"),
        ('{"question_id": 1, "category": "rag", "turns": []}', "line 1: expected"),
        ("[]", "no questions"),
    ],
)
def test_files_without_its_questions(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(BadInput, match=words):
        workloads.gather([f"spec_bench:{tmp_path / 'q.jsonl'}"])
    with pytest.raises(BadInput, match="needs Spec-Bench's question file"):
        workloads.gather(["spec_bench:"])
    with pytest.raises(BadInput, match="cannot read"):
        workloads.gather(["spec_bench:no/such/file"])


@pytest.mark.skipif(SHARED is None, reason="Spec-Bench's question file is not here")
def test_the_file_of_spec_bench_itself() -> None:
    tasks = workloads.gather([f"spec_bench:{SHARED}"])
    assert [(w.name, len(w.prompts)) for w in tasks] == [(task, 80) for task in spec_bench.TASKS]
    assert {len(p.later) for p in tasks[0].prompts} == {1} and not any(p.later for w in tasks[1:] for p in w.prompts)
