"""OpenTelemetry: a span for each request that was asked for it; a clear word where it is not installed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli.app import app
from outrider.errors import OutriderError
from outrider.serve import traces

from .conftest import Running, running


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    tree = ast.parse(Path(traces.__file__).read_text())
    names = [getattr(n, "module", None) or n.names[0].name for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert names and not any(name.startswith("opentelemetry") for name in names)
    package = Path(traces.__file__).parents[1]
    users = [p.name for p in package.rglob("*.py") if "from opentelemetry" in p.read_text()]
    assert users == ["traces.py"]


def test_a_clear_word_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(OutriderError, match=r"pip install 'outrider\[otel\]'"):
        traces.Traces("m")
    found = CliRunner().invoke(app, ["serve", "--otel", "--model", "no-such-model"])
    assert found.exit_code == 2 and "outrider[otel]" in found.stderr and "no-such-model" not in found.stderr


def test_off_by_default(server: Running) -> None:
    assert server.server.house.traces is None


def test_a_span_for_every_request(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    kept = memory.InMemorySpanExporter()
    made = traces.Traces("tiny", kept)
    monkeypatch.setattr("outrider.serve.app.Traces", lambda model: made)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with running(load(), otel=True) as server:
        body = {"messages": [{"role": "user", "content": "hello hello"}], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        headers = {"traceparent": parent, "x-request-id": "mine"}
        assert server.client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        assert server.post("/v1/completions", {"prompt": "x", "model": "other"}).status_code == 404
        server.client.get("/health")
        made._provider.force_flush()
        chat, wrong = kept.get_finished_spans()
    said = chat.attributes
    assert chat.name == "chat tiny" and f"{chat.parent.trace_id:032x}" == parent[3:35]
    assert said["gen_ai.usage.output_tokens"] == 60 and said["gen_ai.response.finish_reasons"] == ("length",)
    assert said["outrider.draft.tokens"] >= said["outrider.draft.accepted"] > 0 and said["outrider.rounds"] < 60
    assert said["outrider.verify.ms"] > 0 and said["outrider.request.id"] == "mine" and said["outrider.lossless"] is True
    assert [event.name for event in chat.events] == ["first token"] and chat.start_time < chat.events[0].timestamp < chat.end_time
    assert wrong.attributes["http.response.status_code"] == 404 and wrong.attributes["error.type"] == "model_not_found"
    assert chat.resource.attributes["service.name"] == "outrider" and not any("hello" in str(v) for v in said.values())
