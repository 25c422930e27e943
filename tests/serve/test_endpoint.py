"""Our server, as `bench --endpoint` and `audit --endpoint` see it."""

from __future__ import annotations

import json
from collections.abc import Callable

from outrider import LLM
from outrider.bench.endpoint import Endpoint
from outrider.bench.parity import Plan as Parity
from outrider.bench.parity import audit
from outrider.bench.remote import Plan, measure
from outrider.bench.workloads import Prompt, Workload

from .conftest import KEY, running

WORDS = Workload("words", "here", tuple(Prompt(({"role": "user", "content": f"hello {n}"},)) for n in range(4)))


def test_ours_beside_its_plain_self(load: Callable[..., LLM]) -> None:
    with running(load(), api_keys=(KEY,)) as server:
        endpoint = Endpoint.find(server.url, key=KEY)
        assert endpoint.native and endpoint.model == "tiny"
        found = measure(endpoint, Plan((WORDS,), max_tokens=20, repeats=2, batch=2))
    [row] = found.rows
    assert found.ok and row.equal == row.compared == 8 and row.speedup is not None and len(row.speedup.pairs) == 2
    assert row.acceptance is not None and row.acceptance.source == "timings" and row.acceptance.drafted
    assert row.acceptance.length is not None and row.acceptance.length >= 1
    json.dumps(found.as_json())


def test_ours_against_ours(load: Callable[..., LLM]) -> None:
    """Speculation on one side, none on the other: everything is the same, seeded texts and log-probabilities too."""
    with running(load()) as one, running(load(draft="none")) as other:
        report = audit(Endpoint.find(one.url), Endpoint.find(other.url), Parity(6, 16, 1))
    assert report.ok and not report.differences and not report.errors
    assert {line.verdict for line in report.lines} <= {"equal", "rounding"}
    assert next(line for line in report.lines if line.kind == "logprobs").compared > 40
