"""Options that were found by measuring on a model, kept in a file so that the drafter finds them again.

JSON: `method`, `options` (as after `NAME:`), `enabled` (whether they won against plain decoding on prompts they were not chosen
by), `speedup` (median on those prompts, None if never measured) and whatever else whoever measured wants to be known.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import BadInput, OutriderWarning
from ..models.weight_cache import cache_dir
from ..protocols import Start
from ..registry import configure, get
from ..trained import write_json

FORMAT = 1
C = TypeVar("C", bound=Any)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a file says."""

    method: str
    fingerprint: str
    options: Mapping[str, str]
    enabled: bool
    speedup: float | None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> str:
        """As the `--draft` option takes it."""
        return spec_of(self.method, self.options)

    @property
    def figure(self) -> str:
        """The speed-up in words."""
        return "never measured to the end" if self.speedup is None else f"{self.speedup:.2f} times the speed of plain decoding"


def spec_of(method: str, options: Mapping[str, str]) -> str:
    """`NAME:key=value,...`."""
    return f"{method}:" + ",".join(f"{k}={v}" for k, v in options.items()) if options else method


def place(method: str, fingerprint: str) -> Path:
    """Where a drafter looks for what was found on the model of this `TargetView.fingerprint`."""
    return cache_dir() / "tuned" / f"{method}-{fingerprint}.json"


def read(path: Path, method: str) -> Tuned:
    """A file's content. Raises `BadInput` for one that is missing, damaged, or another method's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        options = {str(k): str(v) for k, v in content["options"].items()}
        speedup = None if content["speedup"] is None else float(content["speedup"])
        found = Tuned(str(content["method"]), str(content["fingerprint"]), options, bool(content["enabled"]), speedup, content)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
    except OSError as error:
        raise BadInput(f"cannot read the tuned options {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is no file of tuned options ({error}); make one with: outrider tune {method}") from None
    if found.method != method:
        raise BadInput(f"{path} has options of {found.method}, not of {method}")
    return found


def settle(config: C, method: str, start: Start, given: bool) -> C | None:
    """`config` with the fields that were left open (None or empty) taken from the file it names in `path`, or from the usual
    place, unless the user has `given` what matters. None, with a warning, where what was found loses. Raises `BadInput`."""
    assert start.view is not None
    named: str = getattr(config, "path")  # noqa: B009
    file = Path(named) if named else place(method, start.view.signature)
    if given or not (named or file.is_file()):
        return config
    tuned = read(file, method)
    if tuned.fingerprint != start.view.signature:
        say(f"{file} was tuned on another model than {start.name}, or other weights, dtypes or kind of device: it may be slow")
    if not tuned.enabled:
        say(f"{method} gives no guesses: the best that tuning found on {start.name} is {tuned.figure} ({file})")
        return None
    made = configure(get(method), dict(tuned.options))
    open_ = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) in (None, "")} - {"path"}
    return dataclasses.replace(config, **{name: getattr(made, name) for name in open_})


def say(what: str) -> None:
    """Tell the user, who sees it as a warning."""
    warnings.warn(what, OutriderWarning, stacklevel=3)


def write(path: Path, tuned: Tuned) -> None:
    """The whole file or none of it; directories are made. Raises `BadInput` where that cannot be written."""
    names = ("method", "fingerprint", "options", "enabled", "speedup")
    own = {name: getattr(tuned, name) for name in names}
    content = {"format": FORMAT, **own, **{k: v for k, v in tuned.more.items() if k not in own}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}; give another with --output") from None
