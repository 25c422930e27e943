"""The log: one JSON object a line on stderr, with the request's id; no text of prompts or answers unless asked for."""

from __future__ import annotations

import json
import logging
import time
from typing import Any


class Lines(logging.Formatter):
    """A record as JSON; what stands in `extra={"fields": {...}}` becomes fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: int = logging.INFO) -> None:
    """Send this package's log to stderr. The chatter of uvicorn and OpenTelemetry stays out, their errors do not."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    for name, least in (("outrider", level), ("uvicorn", logging.WARNING), ("opentelemetry", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)
