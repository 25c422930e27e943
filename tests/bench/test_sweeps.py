"""Sweeps, arrivals, waits, memory and energy of the benchmark."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.bench import traffic
from outrider.bench.latency import Latency, Percentiles, Times, latency
from outrider.bench.numbers import Run
from outrider.bench.plan import PLAIN, Plan, Point
from outrider.bench.report import CELL
from outrider.bench.runner import Runner
from outrider.bench.usage import RESET, Gauge, Usage, peak_memory
from outrider.errors import BadInput
from outrider.llm import LLM
from outrider.types import Finish
from tests.bench.reports import workload
from tests.bench.test_runner import plan


def test_every_value_with_every_other() -> None:
    made = Plan(("a", PLAIN, "b", "a"), (workload("x"),), temperatures=(0.0, 1.0), batches=(1, 4), rates=(2.0,), depths=(1, 3))
    assert [str(p) for p in made.points] == [
        "T = 0, batch 1", "T = 0, batch 4", "T = 0, 2 requests/s", "T = 1, batch 1", "T = 1, batch 4", "T = 1, 2 requests/s",
    ]  # fmt: skip
    assert made.arms == (("a", 1), ("a", 3), ("b", 1), ("b", 3)) and made.runs == 6 * 8 * 4
    params = made.params(Point(1.0), 3)
    assert (params.temperature, params.depth, made.params(Point()).depth) == (1.0, 3, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperatures": ()}, {"depths": ()}, {"depths": (0,)}, {"batches": (0,)}, {"batches": ()}, {"rates": (0.0,)},
        {"rates": (float("inf"),)}, {"depths": tuple(range(1, 2000))},
    ],
)  # fmt: skip
def test_sweeps_that_cannot_be(changes) -> None:
    with pytest.raises(BadInput):
        Plan(("a",), (workload("x"),), **changes)


def test_a_row_per_cell_and_a_baseline_per_condition(llm: LLM) -> None:
    made = plan("self", repeats=1, max_tokens=8, depths=(1, 2), temperatures=(0.0, 1.0), batches=(1, 3), limit=2)
    report = Runner(llm, made).run()
    cells = [tuple(getattr(r, name) for name in CELL[1:]) for r in report.rows]
    conditions, arms = itertools.product((0.0, 1.0), (1, 3)), (("none", None), ("self", 1), ("self", 2))
    assert cells == [(draft, t, b, None, depth) for t, b in conditions for draft, depth in arms]
    assert report.ok and all(r.equal == r.compared for r in report.rows)
    for r in report.rows:
        assert len(r.acceptance_by_position) == (r.depth or 0) and r.alpha == (1.0 if r.depth else 0.0)
    assert [r.runs for r in report.rows[:3]] == [2, 1, 1] and report.rows[1].label == "self, depth 1"
    assert report.provenance["prompts"]["mine"] == made.workloads[0].first(2).sha256
    assert report.provenance["energy"].startswith("not measured")


# Arrivals


def test_arrivals_are_a_poisson_process_of_the_seed() -> None:
    at = traffic.arrivals(4000, 2.0, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert at[0] == 0 and at == traffic.arrivals(4000, 2.0, seed=1) != traffic.arrivals(4000, 2.0, seed=2)
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.5, rel=0.05)  # three standard errors
    assert sum(g > mean for g in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # memoryless: 1 / e


def test_requests_that_come_by_themselves(llm: LLM) -> None:
    """The same texts as one by one; waits count from the arrival, and the pace is that of the answers, not of the arrivals."""
    alone = Runner(llm, plan("ngram", repeats=1)).run()
    report = Runner(llm, plan("ngram", repeats=1, batches=(), rates=(200.0,))).run()
    plain, drafted = report.rows
    assert report.ok and (plain.rate, plain.batch, drafted.rate) == (200.0, None, 200.0)
    assert [r.tokens for r in report.rows] == [r.tokens for r in alone.rows]
    assert plain.latency.first_token is not None and plain.latency.first_token.count == 3
    assert plain.latency.answer is not None and plain.latency.answer.count == 3
    assert drafted.speedup is not None and drafted.speedup.pairs == (drafted.paces[0] / plain.paces[0],)
    assert plain.paces[0] != pytest.approx(plain.tokens_per_second) and not llm.engine.sinks and llm.engine.scheduler.idle


def test_nobody_is_asked_before_it_comes(llm: LLM) -> None:
    times, params = Times(), plan("none").params(Point())
    prompts = [p.encode(llm.tokenizer) for p in workload("ab").prompts]
    begin = time.perf_counter()
    results = traffic.play(llm, prompts, replace(params, max_tokens=2), [0.0, 0.1, 0.2], times)
    assert time.perf_counter() - begin >= 0.2 and [len(r.token_ids) for r in results] == [2, 2, 2]
    assert results[2].prompt_token_ids == tuple(prompts[2])
    starts = list(times.arrived.values())
    assert [round(s - starts[0], 3) for s in starts] == [0.0, 0.1, 0.2]


def test_ctrl_c_leaves_no_request_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(llm.engine), "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        traffic.play(llm, [[5, 6], [7, 8]], plan("none").params(Point()), [0.0, 9.0], Times())
    assert llm.engine.scheduler.idle


# Waits


def event(*shares: tuple[int, int, bool]) -> SimpleNamespace:
    """A round: `(request, tokens, whether it ended)` each."""
    items = [
        SimpleNamespace(
            request=SimpleNamespace(id=i, started=10.0),
            tokens=(0,) * n,
            finish=Finish.STOP if ended else Finish.RUNNING,
            late=False,
        )
        for i, n, ended in shares
    ]
    return SimpleNamespace(committed=items)


def test_waits_by_hand() -> None:
    times = Times(arrived={2: 9.0})
    times.hear(event((1, 0, False)), 10.5)  # still reading
    times.hear(event((1, 1, False), (2, 1, False)), 11.0)
    times.hear(event((1, 4, False)), 13.0)
    times.hear(event((1, 1, True), (2, 2, True)), 14.0)
    assert times.first == [1.0, 2.0] and times.pauses == [2.0, 1.0, 3.0] and times.answers == [4.0, 5.0]
    assert times.tokens == [0.5] * 4 + [1.0] + [1.5] * 2
    found = latency([times, times])
    assert found.first_token == Percentiles.of([1.0, 2.0] * 2) and found.inter_token is not None and found.inter_token.count == 14
    assert latency([Times()]) == Latency(None, None, None, None)


def test_silence_is_not_priced_as_plain_decoding() -> None:
    """A round that was asked for guesses and had none costs drafting, and waits for the host; a plain one does neither."""
    run = Run()
    for depths, offered, drafting in (((0,), (), 0.0), ((0,), (), 0.0), ((3,), (), 0.5), ((3,), (1, 1), 0.25)):
        item = SimpleNamespace(tokens=(1,), offered_at=offered)
        rows = 1 + len(offered)
        made = SimpleNamespace(committed=[item], depths=depths, prefill=0, rows=rows, draft_seconds=drafting, verify_seconds=1.0)
        run._price(made, 2.0 * (run._last or 0.0) + 1.0)
    parts = run.costs.parts
    assert dict(parts["draft"]) == {(1, 0): [0.5], (1, 2): [0.25]}
    assert set(parts["other"]) == {(1, 0), (1, 2)} and len(parts["other"][1, 0]) == 1
    assert {key: len(found) for key, found in parts["verify"].items()} == {(1, 1): 2, (1, 3): 1}


def test_percentiles() -> None:
    found = Percentiles.of([i / 100 for i in range(101)])
    assert found is not None and (found.p50, found.p90, found.p99) == pytest.approx((0.5, 0.9, 0.99))


def test_waits_of_an_engine_add_up(llm: LLM) -> None:
    """First wait and pauses of one request are all the time there was."""
    times = Times()
    llm.engine.sinks.append(lambda event: times.hear(event, time.perf_counter()))
    [result] = llm.generate("ab ab", plan("none").params(Point()))
    assert len(times.first) == 1 and len(times.tokens) == len(result.token_ids) - 1
    assert times.first[0] + sum(times.pauses) == pytest.approx(times.answers[0])
    assert times.answers[0] == pytest.approx(result.stats.seconds, abs=0.01)


# Memory and energy


def test_the_peak_of_memory_is_that_of_the_run() -> None:
    """A block of 200 MB shows, and is forgotten once a new run starts."""
    if not os.access(RESET, os.W_OK):
        pytest.skip("the system does not let a process forget its peak")
    gauge = Gauge.on(torch.device("cpu"))
    gauge.start()
    before = gauge.stop().memory
    gauge.start()
    with mmap.mmap(-1, 200_000_000) as block:  # new pages, whatever this process has let go of before
        block.write(b"x" * len(block))
        during = gauge.stop().memory
    gauge.start()
    after = gauge.stop().memory
    assert before is not None and during is not None and after is not None
    assert during - before > 150e6 and during - after > 150e6


def fails() -> float:
    raise RuntimeError("nvmlDeviceGetTotalEnergyConsumption says 15")


def test_energy_is_the_difference_of_a_counter_or_not_known() -> None:
    counter = iter((1000.0, 1042.5))
    gauge = Gauge(torch.device("cpu"), lambda: next(counter), "a counter")
    gauge.start()
    assert gauge.stop().joules == 42.5
    none = Gauge.on(torch.device("cpu"))
    none.start()
    assert none.stop().joules is None and none.energy_note == "not measured (no GPU)"
    broken = Gauge(torch.device("cpu"), fails, "broken")
    broken.start()
    assert broken.stop().joules is None
    assert Usage.over([Usage(5, None, 1.0), Usage(7, None, 2.0)]) == Usage(7, None, 3.0)
    assert Usage.over([Usage(5, 3, 1.0), Usage(7)]) == Usage(7, None, None)


class Nvml:
    """A driver's library that counts 1.5 joules at every look, for one card."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.total, self.asked = refuses, 0, b""

    def __getattr__(self, name: str):
        return lambda *arguments: 3 if name == self.refuses else self.answer(name, arguments)

    def answer(self, name: str, arguments: tuple) -> int:
        if name == "nvmlDeviceGetHandleByUUID":
            self.asked = arguments[0]
        if name == "nvmlDeviceGetTotalEnergyConsumption":
            self.total += 1500
            arguments[1]._obj.value = self.total
        return 0


def test_the_card_is_asked_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="12-ab"))
    library = Nvml()
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    gauge = Gauge.on(torch.device("cuda"))
    assert gauge.energy is not None and library.asked == b"GPU-12-ab" and gauge.energy_note == "NVML, the whole card"
    assert gauge.energy() - gauge.energy() == -1.5
    monkeypatch.setattr("ctypes.CDLL", lambda name: Nvml("nvmlDeviceGetTotalEnergyConsumption"))
    gauge = Gauge.on(torch.device("cuda"))
    assert gauge.energy is None and "nvmlDeviceGetTotalEnergyConsumption says 3" in gauge.energy_note


def test_memory_where_the_system_has_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr("outrider.bench.usage.STATUS", tmp_path / "nowhere")
    found = peak_memory()
    assert found is not None and found > 2**20
