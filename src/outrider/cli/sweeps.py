"""Options that take several values: `1,3,5`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import BadInput

Number = TypeVar("Number", int, float)


def values(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """`"1,3,5"` -> `(1, 3, 5)`, each once. Raises `BadInput`, naming the option, for anything else."""
    try:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))
    except ValueError:
        whole = "whole numbers" if kind is int else "numbers"
        raise BadInput(f"{option} {text!r}: expected {whole} with commas between them, like {_example(option)}") from None


def rate(text: str) -> float:
    """`"2"` and `"2/s"` are 2 requests per second."""
    return float(text.removesuffix("/s"))


def _example(option: str) -> str:
    return {"--depth": "1,3,5", "--temperature": "0,1", "--batch": "1,4"}.get(option, "0.5/s,2/s")
