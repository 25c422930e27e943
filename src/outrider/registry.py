"""Drafters by name, and the specs that name them: `NAME[:key=value,...]`.

A drafting method is one file that registers a class with a nested frozen `Config` dataclass; its fields are the spec's keys.
Names come from the files in `drafters/`, from installed packages (entry point group `outrider.drafters`), or from a path to a
`.py` file.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import pkgutil
import sys
import typing
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from .errors import BadInput, OutriderError, OutriderWarning
from .protocols import Drafter

GROUP = "outrider.drafters"
T = TypeVar("T", bound=type)
Finder = Callable[[str], Mapping[str, str]]
"""From a spec to values of the keys that it leaves out."""


@cache
def _table() -> dict[str, type]:
    return {}


def register(name: str) -> Callable[[T], T]:
    """Class decorator: make a drafter known as `name`. The class is built with one argument, its `Config`.

    Raises `BadInput` if another class has that name already.
    """

    def put(cls: T) -> T:
        old = _table().get(name)
        if old is not None and (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
            raise BadInput(f"two drafters are called {name!r}: {old.__module__} and {cls.__module__}; rename one")
        setattr(cls, "name", name)  # noqa: B010
        _table()[name] = cls
        return cls

    return put


@cache
def _discover() -> None:
    from . import drafters

    for module in pkgutil.iter_modules(drafters.__path__):
        importlib.import_module(f"{drafters.__name__}.{module.name}")
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except OutriderError:
            raise
        except Exception as error:  # someone else's package must not take ours down
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"drafter {entry.name!r} ({entry.value}) cannot be imported: {why}", OutriderWarning, stacklevel=2)


def names() -> list[str]:
    """All known drafters, sorted."""
    _discover()
    return sorted(_table())


def load_file(path: str | Path) -> str:
    """Import a drafter from a Python file and return the name it registered."""
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"no drafter file {file}; give a name ({', '.join(names())}) or a path to a .py file")
    spec = importlib.util.spec_from_file_location(f"outrider_drafter_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and type hints look their module up there
    try:
        spec.loader.exec_module(module)
    except OutriderError:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"drafter file {file} cannot be imported: {type(error).__name__}: {error}") from error
    found = [n for n, cls in _table().items() if cls in vars(module).values()]
    if not found:
        raise BadInput(f"{file} registers no drafter; decorate its class with @register(NAME)")
    return found[-1]


def get(name: str) -> type:
    """The class called `name`; `BadInput` lists the known names and the closest."""
    if name.endswith(".py"):
        name = load_file(name)
    _discover()
    if name not in _table():
        close = difflib.get_close_matches(name, names(), 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise BadInput(f"unknown drafter {name!r}; {hint}known: {', '.join(names())}, or a path to a .py file")
    return _table()[name]


def parse(spec: str, known: Mapping[str, str] | None = None, find: Finder | None = None) -> Drafter:
    """A drafter from `NAME[:key=value,...]`; keys that it leaves out may be `known` otherwise, and those its members leave out
    are what `find` has for them. Raises `BadInput` for unknown names, unknown keys and bad values."""
    name, values = split(spec)
    cls: Any = get(name)
    config = configure(cls, {**(known or {}), **values})
    composed = getattr(cls, "composed", None)
    try:
        return typing.cast(Drafter, cls(config) if find is None or composed is None else composed(config, find))
    except OutriderError:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"drafter {_name(cls)!r} cannot be made: {type(error).__name__}: {error}") from error


def split(spec: str) -> tuple[str, dict[str, str]]:
    """Name and values of `NAME[:key=value,...]`. Raises `BadInput` for what is no such thing."""
    name, _, rest = spec.partition(":")
    pairs = [p for p in rest.split(",") if p.strip()] if rest else []
    values: dict[str, str] = {}
    for key, value in (_pair(spec, p) for p in pairs):
        if key in values:
            raise BadInput(f"{key} is given twice in {spec!r}")
        values[key] = value
    return name.strip(), values


def lacks(spec: str, key: str) -> bool:
    """Whether the drafter named in `spec`, or a member of it, needs `key`, which is not given there."""
    name, values = split(spec)
    cls = get(name)
    if (within := getattr(cls, "within", None)) is not None:
        return any(lacks(member, key) for member in within(values))
    fields = _fields(cls)
    return key in fields and key not in values and fields[key].default is fields[key].default_factory is dataclasses.MISSING


def opens(spec: str, key: str) -> bool:
    """Whether the drafter named in `spec` takes `key`, which is not given there."""
    name, values = split(spec)
    return key in _fields(get(name)) and key not in values


def _fields(cls: type) -> dict[str, Any]:
    config: Any = getattr(cls, "Config", None)
    return {f.name: f for f in dataclasses.fields(config)} if config is not None else {}


def configure(cls: type, values: dict[str, str], kind: str = "Config") -> Any:
    """`cls.Config`, or another nested dataclass, from strings, converted by field type."""
    config: Any = getattr(cls, kind, None)
    fields = {f.name: f for f in dataclasses.fields(config)} if config is not None else {}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        takes = ", ".join(fields) or "no keys"
        raise BadInput(f"drafter {_name(cls)!r} has no key {', '.join(unknown)}; it takes {takes}")
    needed = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING and n not in values]
    if needed:
        raise BadInput(f"drafter {_name(cls)!r} needs {', '.join(needed)}, as in {_name(cls)}:{needed[0]}=...")
    if config is None:
        return None
    hints = typing.get_type_hints(config)
    typed = {k: _convert(_name(cls), k, v, hints[k]) for k, v in values.items()}
    try:
        return config(**typed)
    except (TypeError, ValueError) as error:
        raise BadInput(f"drafter {_name(cls)!r} does not accept {typed}: {error}") from error


def _name(cls: type) -> str:
    return str(getattr(cls, "name", cls.__name__))


def _pair(spec: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise BadInput(f"cannot read {text!r} in {spec!r}; write NAME:key=value,key=value")
    return key.strip(), value.strip()


def _convert(name: str, key: str, value: str, kind: Any) -> Any:
    if kind is bool:
        if value.lower() in ("1", "true", "yes", "on"):
            return True
        if value.lower() in ("0", "false", "no", "off"):
            return False
        raise BadInput(f"{name}: {key} must be true or false, got {value!r}")
    plain = next((t for t in typing.get_args(kind) if t is not type(None)), kind)
    try:
        return plain(value)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name}: {key} must be {getattr(plain, '__name__', plain)}, got {value!r}") from error
