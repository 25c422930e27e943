"""How a server behaves, from flags, environment (`OUTRIDER_*`) and a TOML file, in this order of precedence."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import BadInput

PREFIX = "OUTRIDER_"
MIB = 2**20
BASE, PER_TOKEN = 2**18, 32
"""Bytes that a request may have by default: for its options, and for each token of the context."""
PLURALS = {"api_key": "api_keys", "cors_origin": "cors_origins"}
"""Flags that are given once for each value."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`max_running` answers are written at once, `max_queue` more may wait. `max_body` in MiB (None: as the model's context asks
    for, see `fitted`); `read_seconds` is how long a
    client may take to send a request; `drain_seconds` how long running answers may take to end at SIGTERM. `api_keys`: none
    means that anybody who can reach the port may ask. `max_tokens` bounds every answer. `otel`: send OpenTelemetry
    spans. `share`: requests under different keys share KV of prompts, and what drafters learned."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_running: int = 256
    max_queue: int = 256
    max_tokens: int | None = None
    max_body: float | None = None
    read_seconds: float = 30.0
    drain_seconds: float = 60.0
    log_prompts: bool = False
    page: bool = True
    otel: bool = False
    share: bool = False

    def __post_init__(self) -> None:
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise BadInput(f"{name} must be between {low:g} and {high:g}, got {value}")
        if any(not key or key != key.strip() or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise BadInput("an API key must be visible ASCII characters, with no blanks around it")

    @property
    def limit(self) -> int:
        """Answers in the house at once."""
        return self.max_running + self.max_queue

    @property
    def bytes(self) -> int:
        """Largest request."""
        return MIB if self.max_body is None else int(self.max_body * MIB)

    def fitted(self, context: int) -> Settings:
        """With a limit on requests that lets a full context in, several times over, and no text that takes a tokenizer seconds
        only to be found too long."""
        return self if self.max_body is not None else replace(self, max_body=(BASE + context * PER_TOKEN) / MIB)


_BOUNDS = (
    ("port", 0, 65535),
    ("max_running", 1, 65536),
    ("max_queue", 0, 1_000_000),
    ("max_tokens", 1, 2**31),
    ("max_body", 0.001, 1024.0),
    ("read_seconds", 0.1, 3600.0),
    ("drain_seconds", 0.0, 86400.0),
)


def from_file(path: str) -> dict[str, Any]:
    """A TOML file's top-level table, names written with - or _, as the flags or (lists) in the plural. Raises `BadInput`."""
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the configuration {path}: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"the configuration {path} is not valid TOML: {error}") from None
    return plural({name.replace("-", "_"): value for name, value in found.items()})


def from_environment(names: Mapping[str, type], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The values of `names` that stand in the environment, as their types. Lists are separated by commas, and may be named as
    their flags."""
    found = {}
    flags = {flag: names[name] for flag, name in PLURALS.items() if name in names}
    for name, kind in {**names, **flags}.items():
        text = environment.get(PREFIX + name.upper())
        if text is not None and text != "":
            found[name] = _read(PREFIX + name.upper(), text, kind)
    return plural(found)


def plural(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of flags by the names of the settings."""
    return {PLURALS.get(name, name): value for name, value in values.items()}


def merged(given: Mapping[str, Any], *below: Mapping[str, Any]) -> dict[str, Any]:
    """`given` where it was given (not None, no empty list), else the first of `below` that knows it."""
    values: dict[str, Any] = {}
    for source in reversed(below):
        values |= source
    return values | {name: value for name, value in given.items() if value not in (None, [], ())}


def settings(values: Mapping[str, Any]) -> Settings:
    """From values by name; those that are no settings are left alone. Raises `BadInput` for a wrong type."""
    chosen = {f.name: typed(f.name, values[f.name], KINDS[f.name]) for f in fields(Settings) if f.name in values}
    return Settings(**chosen)


KINDS: dict[str, type] = {
    "host": str,
    "port": int,
    "served_name": str,
    "api_keys": tuple,
    "cors_origins": tuple,
    "max_running": int,
    "max_queue": int,
    "max_tokens": int,
    "max_body": float,
    "read_seconds": float,
    "drain_seconds": float,
    "log_prompts": bool,
    "page": bool,
    "otel": bool,
    "share": bool,
}


def _read(name: str, text: str, kind: type) -> Any:
    if kind is tuple:
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if not parts:
            raise BadInput(f"{name} holds nothing, got {text!r}; leave it out, or give one or several, with commas between them")
        return parts
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false", "yes", "no"):
            raise BadInput(f"{name} must be 1 or 0, got {text!r}")
        return text.lower() in ("1", "true", "yes")
    try:
        return kind(text)
    except ValueError:
        raise BadInput(f"{name} must be a {kind.__name__}, got {text!r}") from None


def typed(name: str, value: Any, kind: type) -> Any:
    """`value` if it is of its kind. Raises `BadInput`."""
    if kind is tuple:
        items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else None
        if items is None or any(not isinstance(item, str) for item in items):
            raise BadInput(f"{name} must be a list of strings, got {value!r}")
        return items
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if value is not None and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
        raise BadInput(f"{name} must be a {kind.__name__}, got {value!r}")
    return value


def read_keys(path: str) -> tuple[str, ...]:
    """API keys from a file, one a line; blank lines and those that begin with # do not count."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read API keys from {path}: {getattr(error, 'strerror', None) or error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise BadInput(f"{path} holds no API key; write one a line")
    return keys
