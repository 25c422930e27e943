"""`/metrics`: Prometheus counters under vLLM's names with our prefix, and what speculation costs and brings."""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..types import NONE, Committed, StepEvent
from ..watch.gain import Gain
from ..watch.labels import Labels
from .worker import Worker

FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Seconds to the first token, as histogram bounds."""


class Meters:
    """One registry of its own. `observe` is a sink of the engine's; gauges are read when asked for."""

    def __init__(self, worker: Worker, baseline: float = 0.0) -> None:
        self.registry = CollectorRegistry()
        self.gain = worker.engine.watch.gain
        self.gain.assume(1 / baseline if baseline > 0 else 0.0)
        counter = self._counter
        self._drafts = counter("spec_decode_num_drafts", "Requests' rounds that had guesses.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Guesses made.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Guesses kept.")
        text = "Guesses kept, by depth (0 is the first)."
        self._by_depth = Counter("outrider_spec_decode_num_accepted_tokens_per_pos", text, ["position"], registry=self.registry)
        self._draft_seconds = counter("spec_decode_draft_seconds", "Seconds spent on guessing.")
        self._verify_seconds = counter("spec_decode_verify_seconds", "Seconds the model spent on passes.")
        self._rounds = counter("rounds", "Passes over the model.")
        self._generated = counter("generation_tokens", "Tokens written.")
        self._prompt = counter("prompt_tokens", "Prompt tokens read (those taken over from earlier requests do not count).")
        self._finished = Counter("outrider_requests", "Answers by how they ended.", ["finish_reason"], registry=self.registry)
        text = "Seconds from queueing to the first token."
        self._first = Histogram("outrider_time_to_first_token_seconds", text, buckets=FIRST, registry=self.registry)
        self.registry.register(Gauges(worker, self.gain))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"outrider_{name}", text, registry=self.registry)

    def observe(self, event: StepEvent) -> None:
        """Count a round."""
        self._rounds.inc()
        self._draft_seconds.inc(event.draft_seconds)
        self._verify_seconds.inc(event.verify_seconds)
        self._prompt.inc(event.prefill)
        items = [item for item in event.committed if not item.late]
        self._generated.inc(sum(len(item.tokens) for item in items))
        self._count([item for item in items if item.drafted])
        for item in items:
            stats = item.request.stats
            if stats.rounds == 1 and item.tokens:
                self._first.observe(stats.first_token_seconds)
            if item.finish:
                self._finished.labels(item.finish.name.lower()).inc()

    def _count(self, guessed: Sequence[Committed]) -> None:
        """Guesses of a round: counted together, since every count takes a lock."""
        if not guessed:
            return
        self._drafts.inc(len(guessed))
        self._drafted.inc(sum(item.drafted for item in guessed))
        self._accepted.inc(sum(item.accepted for item in guessed))
        kept = Counted(d for item in guessed for d, origin in enumerate(item.origins) if origin != NONE)
        for depth, count in kept.items():
            self._by_depth.labels(str(depth)).inc(count)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class Gauges:
    """What is true now, read when it is asked for."""

    def __init__(self, worker: Worker, gain: Gain) -> None:
        self._worker, self._gain = worker, gain

    def collect(self) -> Iterator[Metric]:
        engine = self._worker.engine
        scheduler, cache = engine.scheduler, engine.target.cache
        values: dict[str, tuple[str, Callable[[], float]]] = {
            "num_requests_running": ("Answers being written.", lambda: len(scheduler.running)),
            "num_requests_waiting": ("Answers that wait.", lambda: max(0, self._worker.open - len(scheduler.running))),
            "kv_cache_usage_perc": ("Share of KV memory in use (1 is all).", lambda: 1 - cache.free() / max(cache.capacity, 1)),
            "prefix_cache_hits": ("Requests that took over the beginning of an earlier one.", lambda: scheduler.hits),
            "prefix_cache_saved_tokens": ("Prompt tokens taken over.", lambda: scheduler.saved),
            "num_preemptions": ("Requests that had to give way for want of memory.", lambda: scheduler.preempted),
            "plain_tokens_per_second": ("Plain decoding of one request, as last measured.", lambda: self._gain.plain_rate),
            "spec_decode_speedup": ("Estimated speed-up over plain decoding, of late.", lambda: self._gain.speedup),
            "spec_decode_losing": ("1 while guessing costs more than it brings.", lambda: float(self._gain.losing)),
            "spec_decode_enabled": ("0 once a drafter was switched off for misbehaving.", lambda: float(engine.drafter.working)),
            "engine_crashes": ("Rounds in a row that failed.", lambda: self._worker.crashes),
        }
        for name, (text, read) in values.items():
            yield GaugeMetricFamily(f"outrider_{name}", text, value=read())
        yield from _by_label(engine.watch.labels)


def _by_label(labels: Labels) -> Iterator[Metric]:
    """What is counted for each kind of work."""
    sums = {"generation_tokens": "tokens", "draft_tokens": "drafted", "accepted_tokens": "accepted"}
    for name, field in sums.items():
        counter = CounterMetricFamily(
            f"outrider_label_{name}", f"{name.capitalize()} by label.".replace("_", " "), labels=["label"]
        )
        for label in labels.values():
            counter.add_metric([label.name], getattr(label.history.total, field))
        yield counter
    recent = GaugeMetricFamily("outrider_label_acceptance", "First guesses kept of late, by label.", labels=["label"])
    alarms = CounterMetricFamily("outrider_label_drift_alarms", "Changes of acceptance beyond noise, by label.", labels=["label"])
    for label in labels.values():
        recent.add_metric([label.name], label.recent)
        alarms.add_metric([label.name], label.drift.alarms)
    yield from (recent, alarms)
