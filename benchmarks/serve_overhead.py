"""What the server costs over the library: the same answers through `LLM.generate` and through HTTP, in turns, on one machine.

    python benchmarks/serve_overhead.py                                                   # the embedded model, one stream
    PYTHONPATH=src:. python benchmarks/serve_overhead.py --shape 8B --streams 64 --repeat 5 --output overhead_64.json

Both run in this process, which holds one model and one server; the client is another process (`stream_client.py`), so that its
work is not counted against the server. `--shape` takes random weights of a shape that `gpu/shapes.py` knows, with the embedded
model's tokenizer. Rounds that warm up (graphs, kernels) are left out, and every second pair begins with the server.

`overhead` is the median of the pairs' ratios of seconds, less 1, from the first request to the last answer's end, connections and
HTTP included; `writing` is the same for the rounds in which all streams write, beginning and end left out. `edge_us` is the
processor time of the event loop's thread per event, requests and connections included, `engine_us` of the engine's per round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from stream_client import PROMPT

from outrider import LLM, SamplingParams
from outrider.loading import Parts, Setup, make_cache, make_decoder, make_target, pick_device, pick_dtype, pick_length
from outrider.models import weights
from outrider.protocols import Drafter
from outrider.sampling import TextSampler
from outrider.serve.server import Server, open_house
from outrider.serve.settings import Settings
from outrider.types import StepEvent

EMBEDDED = os.environ.get("OUTRIDER_MODEL", weights.EMBEDDED)
WARM = 2
SETTLE = 0.1
"""Seconds after which the engine's thread waits for requests again, and the library may run rounds of its own."""


class Shaped(LLM):
    """Random weights of a named shape behind the embedded model's tokenizer."""

    def __init__(self, shape: str, **options: Any) -> None:
        self._shape = shape
        super().__init__(EMBEDDED, **options)

    def _assemble(self, setup: Setup, draft: str, progress: Callable[[str], None]) -> tuple[Parts, Drafter]:
        from benchmarks.gpu import shapes

        drafter, device = self._choice.drafter(draft), pick_device(setup.device)
        tokenizer = weights.load(weights.resolve(EMBEDDED)).tokenizer
        made = shapes.model(self._shape, pick_dtype(setup.dtype, device), str(device))
        decoder = make_decoder(made, self._shape, setup.invariant, progress)
        length = pick_length(setup.max_model_len, decoder)
        cache = make_cache(setup, decoder, length, drafter)
        sampler = TextSampler(decoder.vocab_size, tokenizer.vocab_size)
        return Parts(make_target(decoder, cache, sampler, length, setup.invariant), tokenizer, self._shape), drafter


class Pace:
    """A sink that notes when rounds ended in which `streams` requests wrote."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.rounds = 0
        self.full: list[tuple[float, int]] = []

    def __call__(self, event: StepEvent) -> None:
        self.rounds += 1
        written = [len(item.tokens) for item in event.committed if item.tokens]
        if len(written) == self.streams:
            self.full.append((time.perf_counter(), sum(written)))

    @property
    def per_token(self) -> float:
        """Seconds, over rounds in which all wrote; 0 if there were too few."""
        tokens = sum(n for _, n in self.full[1:])
        return (self.full[-1][0] - self.full[0][0]) / tokens if tokens else 0.0


@contextmanager
def paced(llm: LLM, streams: int) -> Iterator[Pace]:
    pace = Pace(streams)
    llm.engine.sinks.append(pace)
    try:
        yield pace
    finally:
        llm.engine.sinks.remove(pace)


class Bench:
    """One model, its server in a thread, and a client in another process."""

    def __init__(self, llm: LLM, streams: int, tokens: int) -> None:
        self.llm, self.streams, self.tokens = llm, streams, tokens
        self.house, self.meters = open_house(llm, Settings(port=0, max_running=max(256, streams)))
        told, found = threading.Event(), list[str]()
        self.server = Server(self.house, self.meters, lambda url: (found.append(url), told.set()))  # type: ignore[func-returns-value]
        self.edge = threading.Thread(target=self.server.run)
        self.edge.start()
        if not told.wait(60):
            raise RuntimeError("the server did not start")
        host, port = found[0].removeprefix("http://").rsplit(":", 1)
        self.asked = json.dumps({"host": host, "port": int(port), "streams": streams, "tokens": tokens})
        command = [sys.executable, str(Path(__file__).with_name("stream_client.py"))]
        self.client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def library(self) -> dict[str, float]:
        """All answers in one batch, without the server's meters."""
        params = SamplingParams(temperature=0.0, max_tokens=self.tokens, ignore_eos=True)
        self.llm.engine.sinks.remove(self.meters.observe)
        try:
            with paced(self.llm, self.streams) as pace:
                started = time.perf_counter()
                self.llm.generate([PROMPT.format(n) for n in range(self.streams)], params)
                seconds = time.perf_counter() - started
        finally:
            self.llm.engine.sinks.append(self.meters.observe)
        return {"seconds": seconds, "writing": pace.per_token}

    def served(self) -> dict[str, float]:
        """The same through HTTP."""
        assert self.client.stdin is not None and self.client.stdout is not None
        clocks = [time.pthread_getcpuclockid(t.ident or 0) for t in (self.edge, self.house.worker._thread)]
        with paced(self.llm, self.streams) as pace:
            before = [time.clock_gettime(clock) for clock in clocks]
            self.client.stdin.write(self.asked + "\n")
            self.client.stdin.flush()
            line = self.client.stdout.readline()
            edge, engine = (time.clock_gettime(clock) - then for clock, then in zip(clocks, before, strict=True))
        if not line:
            raise RuntimeError("the client failed")
        time.sleep(SETTLE)
        found = json.loads(line)
        costs = {"edge_us": 1e6 * edge / found["events"], "engine_us": 1e6 * engine / pace.rounds}
        return {**found, "writing": pace.per_token, **costs}

    def close(self) -> None:
        assert self.client.stdin is not None
        self.client.stdin.close()
        self.client.wait(10)
        self.server.should_exit = True
        self.edge.join()
        self.house.worker.close()
        self.house.close()


def measure(bench: Bench, repeat: int) -> dict[str, Any]:
    """Pairs of both ways, and what they come to."""
    for _ in range(WARM):
        bench.library()
        bench.served()
    pairs = []
    for turn in range(repeat):
        first = bench.served() if turn % 2 else None
        alone = bench.library()
        pairs.append((alone, first or bench.served()))
    count = bench.streams * bench.tokens
    ratios = {key: sorted(s[key] / a[key] - 1 for a, s in pairs if a[key]) for key in ("seconds", "writing")}
    median = {key: statistics.median(s[key] for _, s in pairs) for key in ("first", "events", "edge_us", "engine_us")}
    return {
        "library_tokens_per_second": count / statistics.median(a["seconds"] for a, _ in pairs),
        "server_tokens_per_second": count / statistics.median(s["seconds"] for _, s in pairs),
        "overhead": statistics.median(ratios["seconds"]),
        "writing": statistics.median(ratios["writing"]) if ratios["writing"] else None,
        "first_ms": 1e3 * median["first"],
        "events_per_token": median["events"] / count,
        "edge_us": median["edge_us"],
        "engine_us": median["engine_us"],
        "overheads": ratios["seconds"],
        "writings": ratios["writing"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--shape", help="random weights of this shape instead of a model")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--control", default="fixed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--kv-tokens", type=int)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the figures to a file as well")
    a = parser.parse_args()
    began = time.perf_counter()
    options = {"draft": a.draft, "control": a.control, "device": a.device}
    options |= {"max_model_len": a.max_model_len, "kv_tokens": a.kv_tokens}
    llm = Shaped(a.shape, **options) if a.shape else LLM(a.model, **options)
    card = torch.cuda.get_device_name() if llm._target.device.type == "cuda" else "CPU"
    about = {"date": time.strftime("%Y-%m-%d"), "card": card, "torch": torch.__version__, "python": sys.version.split()[0]}
    about |= {"model": llm.name, "draft": llm.drafter_name, "streams": a.streams, "tokens": a.tokens, "repeat": a.repeat}
    bench = Bench(llm, a.streams, a.tokens)
    try:
        figures = about | {"ready_seconds": time.perf_counter() - began} | measure(bench, a.repeat)
    finally:
        bench.close()
    text = json.dumps(figures | {"all_seconds": time.perf_counter() - began}, indent=1)
    if a.output is not None:
        a.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
