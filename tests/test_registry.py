"""Drafters by name: what a spec may say, and what is said when it cannot be read."""

from __future__ import annotations

import textwrap
import warnings
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from outrider import registry
from outrider.errors import BadInput, OutriderWarning
from outrider.protocols import Drafter
from outrider.types import Batch, Budget, Proposal


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    registry.names()
    table = dict(registry._table())
    monkeypatch.setattr(registry, "_table", lambda: table)


class Quiet(Drafter):
    @dataclass(frozen=True)
    class Config:
        path: str
        depth: int = 3
        share: float = 0.5
        eager: bool = False
        limit: int | None = None
        names: tuple[str, ...] = field(default_factory=tuple)

    def __init__(self, config: Config) -> None:
        self.config = config

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        return Proposal.empty(len(batch))


def test_the_built_in_names() -> None:
    assert {"none", "ngram", "draft_model", "self"} <= set(registry.names()) and registry.names() == sorted(registry.names())
    assert registry.parse("none").name == "none"
    made = registry.parse(" ngram : max = 5 , min=1,, depth=7, ")
    assert (made.config.max, made.config.min, made.config.depth, made.depth) == (5, 1, 7, 7)
    assert registry.parse("ngram:").config == registry.parse("ngram").config


def test_values_are_converted_by_type() -> None:
    registry.register("quiet")(Quiet)
    config = registry.parse("quiet:path=/a/b=c:d,depth=-4,share=1e-2,eager=Yes,limit=7").config
    assert config == Quiet.Config("/a/b=c:d", -4, 0.01, True, 7)
    assert registry.parse("quiet:path=x,eager=off").config.eager is False


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("quiet:path=x,depth=many", r"quiet: depth must be int, got 'many'"),
        ("quiet:path=x,depth=1.5", r"depth must be int, got '1.5'"),
        ("quiet:path=x,share=half", r"share must be float"),
        ("quiet:path=x,eager=maybe", r"eager must be true or false, got 'maybe'"),
        ("quiet:path=x,limit=low", r"limit must be int"),
        ("quiet:path=x,width=2,deep=1", r"'quiet' has no key deep, width; it takes path, depth, share, eager"),
        ("quiet", r"'quiet' needs path, as in quiet:path=\.\.\."),
        ("quiet:depth=2", r"'quiet' needs path"),
        ("quiet:path=x,depth=1,depth=2", r"depth is given twice in 'quiet:path=x,depth=1,depth=2'"),
        ("quiet:path", r"cannot read 'path' in 'quiet:path'; write NAME:key=value"),
        ("quiet:path=", r"cannot read 'path='"),
        ("quiet:=x", r"cannot read '=x'"),
        ("none:depth=3", r"'none' has no key depth; it takes no keys"),
        ("ngrm", r"unknown drafter 'ngrm'; did you mean 'ngram'\? known: .*ngram.*, or a path to a \.py file"),
        ("zzzz", r"unknown drafter 'zzzz'; known: "),
        ("", r"unknown drafter ''"),
        (":depth=3", r"unknown drafter ''"),
        ("ngram:min=5,max=2", r"1 <= min <= max, got min=5, max=2"),
        ("ngram:min=0", r"1 <= min"),
        ("ngram:depth=0", r"depth >= 1, got 0; use --draft none"),
        ("self:depth=0", r"depth >= 1"),
        ("draft_model", r"'draft_model' needs path, as in draft_model:path=\.\.\."),
        ("draft_model:path=x,width=0", r"draft_model needs width >= 1, got 0"),
        ("draft_model:path=x,layers=-1", r"layers >= 0"),
        ("draft_model:path=x,tokens=1", r"tokens >= 64"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    registry.register("quiet")(Quiet)
    with pytest.raises(BadInput, match=message):
        registry.parse(spec)


def test_two_classes_cannot_share_a_name_but_one_may_come_twice() -> None:
    registry.register("quiet")(Quiet)
    registry.register("quiet")(Quiet)
    with pytest.raises(BadInput, match=r"two drafters are called 'quiet': .*test_registry and .*test_registry; rename one"):

        @registry.register("quiet")
        class Loud(Drafter):
            pass

    assert registry.get("quiet") is Quiet


SOURCE = """
    from __future__ import annotations
    from dataclasses import dataclass
    from outrider import Drafter, Proposal, register

    @register("{name}")
    class Mine(Drafter):
        @dataclass(frozen=True, slots=True)
        class Config:
            depth: int = {depth}

        def __init__(self, config: Config) -> None:
            self.depth = self.nodes = config.depth

        def propose(self, batch, budget):
            return Proposal.empty(len(batch))
"""


def write(path: Path, text: str = SOURCE, **values: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text).format(**values))
    return path


def test_a_file(tmp_path: Path) -> None:
    """A Config with postponed annotations needs its module to be findable."""
    file = write(tmp_path / "mine.py", name="mine", depth=4)
    assert registry.parse(f"{file}:depth=9").depth == 9
    assert registry.parse(str(file)).name == "mine" and "mine" in registry.names()


def test_files_of_equal_name_do_not_answer_for_each_other(tmp_path: Path) -> None:
    one = write(tmp_path / "a" / "mine.py", name="one", depth=1)
    two = write(tmp_path / "b" / "mine.py", name="two", depth=2)
    empty = write(tmp_path / "c" / "mine.py", "x = 1")
    assert [registry.load_file(f) for f in (one, two, one)] == ["one", "two", "one"]
    with pytest.raises(BadInput, match="registers no drafter"):
        registry.load_file(empty)
    write(one, name="one", depth=7)
    assert registry.parse(f"{one}").depth == 7, "an edited file counts"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"mine\.py registers no drafter; decorate its class with @register\(NAME\)"),
        ("def broken(:", r"mine\.py cannot be imported: SyntaxError: "),
        ("import no_such_module_here", r"mine\.py cannot be imported: ModuleNotFoundError: .*no_such_module_here"),
        ("1 / 0", r"mine\.py cannot be imported: ZeroDivisionError"),
        (SOURCE.replace("{name}", "ngram").replace("{depth}", "3"), r"two drafters are called 'ngram'"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        registry.parse(str(write(tmp_path / "mine.py", text)))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no drafter file .*gone\.py; give a name \(.*ngram"):
        registry.parse(str(tmp_path / "gone.py"))
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(BadInput, match="no drafter file"):
        registry.parse(str(tmp_path / "folder.py"))


def discover(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> None:
    def found(*, group: str) -> list[EntryPoint]:
        assert group == "outrider.drafters"
        return list(entries)

    monkeypatch.setattr(registry, "entry_points", found)
    registry._discover.__wrapped__()


def test_installed_packages_bring_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "their_drafter.py", name="theirs", depth=2)
    monkeypatch.syspath_prepend(str(tmp_path))
    discover(monkeypatch, EntryPoint("theirs", "their_drafter", "outrider.drafters"))
    assert registry.parse("theirs:depth=5").depth == 5


def test_a_broken_package_does_not_take_ours_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(OutriderWarning, match=r"drafter 'theirs' \(no_such_package:X\) cannot be imported: ModuleNotFoundError"):
        discover(monkeypatch, EntryPoint("theirs", "no_such_package:X", "outrider.drafters"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.parse("ngram").name == "ngram"


def test_a_package_that_takes_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "thief_drafter.py", name="ngram", depth=2)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput, match=r"two drafters are called 'ngram': .*thief_drafter"):
        discover(monkeypatch, EntryPoint("ngram", "thief_drafter", "outrider.drafters"))
