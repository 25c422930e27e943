"""The `--draft` option: a check before anything is loaded, and the list that `--draft help` shows."""

from __future__ import annotations

import dataclasses
import inspect

AUTO = "auto"
HELP = "help"


def check_draft(spec: str) -> None:
    """Raises `BadInput` for a name nobody registered, before a model is loaded for it. Keys are checked with the model."""
    from ..registry import get

    name = spec.partition(":")[0].strip()
    if name != AUTO:
        get(name)


def describe_drafters() -> str:
    """Every drafter with its options and their defaults, from the registry."""
    from ..registry import get, names

    lines = [f"{AUTO}: picks a drafter that suits the model"]
    for name in names():
        drafter = get(name)
        lines.append(f"{name}: {first_line(drafter)}")
        config = getattr(drafter, "Config", None)
        if config is not None:
            lines.extend(f"    {option}" for option in options(config))
    return "\n".join(lines)


def first_line(drafter: type) -> str:
    return (inspect.getdoc(drafter) or "").partition("\n")[0]


def options(config: type) -> list[str]:
    shown = []
    for field in dataclasses.fields(config):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        shown.append(f"{field.name}={'REQUIRED' if required else field.default}  ({_type_name(field.type)})")
    return shown


def _type_name(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
