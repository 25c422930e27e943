"""OpenTelemetry, for who asks for it: one span per request under /v1, with what was drafted, kept and spent.

Attributes are named as OpenTelemetry's conventions for generative AI name them, and `outrider.*` beyond. Where spans go, how many
are kept and what the service is called, the usual variables say (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER,
OTEL_SERVICE_NAME). Nothing of OpenTelemetry is imported before `library` is called.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ..errors import OutriderError

NAMES = {
    "choices": "gen_ai.request.choice.count",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
    "finish": "gen_ai.response.finish_reasons",
    "rounds": "outrider.rounds",
    "drafted": "outrider.draft.tokens",
    "accepted": "outrider.draft.accepted",
    "draft_ms": "outrider.draft.ms",
    "verify_ms": "outrider.verify.ms",
    "first_ms": "outrider.first_token.ms",
    "lossless": "outrider.lossless",
    "error": "error.type",
    "request": "outrider.request.id",
    "status": "http.response.status_code",
    "path": "url.path",
    "method": "http.request.method",
}
"""What is noted of a request, and what it is called in a span."""


def library() -> SimpleNamespace:
    """What is needed of OpenTelemetry. Raises `OutriderError` where it is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
    except ImportError as error:
        raise OutriderError(f"--otel needs {error.name or 'OpenTelemetry'}: pip install 'outrider[otel]'") from None
    return SimpleNamespace(
        exporter=OTLPSpanExporter,
        extract=extract,
        resource=Resource,
        provider=TracerProvider,
        processor=BatchSpanProcessor,
        server=SpanKind.SERVER,
        failed=lambda why: Status(StatusCode.ERROR, why),
    )


class Traces:
    """Sends spans in the background. `exporter` stands in for the one that the environment asks for. Raises like `library`."""

    def __init__(self, model: str, exporter: Any = None) -> None:
        self._otel, self._model = library(), model
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "outrider"}
        self._provider = self._otel.provider(resource=self._otel.resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(self._otel.processor(exporter or self._otel.exporter()))
        self._tracer = self._provider.get_tracer("outrider")

    def note(self, headers: Mapping[str, str], fields: Mapping[str, Any], seconds: float) -> None:
        """A request that has just ended after so many seconds, as a span under the client's own if it names one."""
        end = time.time_ns()
        start = end - int(1e9 * seconds)
        found = {name: fields[known] for known, name in NAMES.items() if fields.get(known) is not None}
        found |= {"gen_ai.operation.name": _operation(str(fields["path"])), "gen_ai.request.model": self._model}
        parent = self._otel.extract(dict(headers))
        title = f"{found['gen_ai.operation.name']} {self._model}"
        span = self._tracer.start_span(title, parent, self._otel.server, attributes=found, start_time=start)
        if fields.get("first_ms"):
            span.add_event("first token", timestamp=start + int(1e6 * fields["first_ms"]))
        if int(fields.get("status") or 500) >= 500:
            span.set_status(self._otel.failed(str(fields.get("error", ""))))
        span.end(end)

    def close(self) -> None:
        """Send what is left; waits no longer than the exporter's own time limit."""
        self._provider.shutdown()


def _operation(path: str) -> str:
    return {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}.get(path, path)
