"""What a card tells of a training, as settings to do it again: `ship/NAME` is what came with the package, a path that ends in
`card.json` anybody's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .. import trained
from ..errors import BadInput, BadWeights
from .data import Writing
from .evaluate import Exam
from .loop import Recipe

SHIPPED = "ship/"
KINDS: Mapping[str, Any] = {"writing": Writing, "recipe": Recipe, "exam": Exam}


def names() -> list[str]:
    """What came with the package."""
    return sorted(p.parent.name for p in trained.SHIPPED.glob(f"*/{trained.CARD}"))


def is_card(method: str) -> bool:
    """Whether this names a card, not a method."""
    return method.startswith(SHIPPED) or Path(method).name == trained.CARD


def read(method: str) -> dict[str, Any]:
    """The card. `BadInput` where there is none, `BadWeights` for a damaged one."""
    name = method.removeprefix(SHIPPED)
    path = trained.SHIPPED / name / trained.CARD if name != method else Path(method).expanduser()
    if name != method and name not in names():
        known = f"these did: {', '.join(names())}" if names() else "none did"
        raise BadInput(f"no drafter {name!r} came with the package; {known}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        spec(found), settings(found)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadWeights(f"{path} tells no training that could be done again ({type(error).__name__}: {error!s:.120})") from error
    return dict(found)


def spec(card: Mapping[str, Any]) -> str:
    """`NAME:key=value,...`, all training options but the empty ones."""
    options = ",".join(f"{k}={v}" for k, v in card["options"].items() if v != "")
    return f"{card['method']}:{options}" if options else str(card["method"])


def settings(card: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields of `Writing`, `Recipe` and `Exam` by part; prompts of the user's own, of which a card knows but the hashes, left
    out. Cards of before the exam was in them are examined as usual."""
    data = card["data"]
    found = {
        "writing": {**{k: v for k, v in data["settings"].items() if k != "files"}, "tokens": data["taught"]},
        "recipe": dict(card["training"]["recipe"]),
        "exam": dict(card.get("exam", {})),
    }
    for part, values in found.items():
        known = {f.name for f in fields(KINDS[part])}
        if values.keys() - known:
            raise ValueError(f"settings of another version: {', '.join(sorted(values.keys() - known))}")
    return {p: {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()} for p, values in found.items()}
