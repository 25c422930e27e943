"""The rules of the house, held by reading the source: import direction, names, sizes, state, the public surface.

Every rule is a function from source text to complaints, and is itself tested on planted violations.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import outrider

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "outrider"
FILES = sorted(SOURCE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef

LAYERS = (
    {"types", "results", "errors", "version", "heap"},
    {"config"},
    {"protocols"},
    {
        "registry",
        "trust",
        "trained",
        "sampling",
        "logprobs",
        "noise",
        "processors",
        "draws",
        "oracle",
        "tree",
        "cache",
        "kernels",
        "text",
    },
    {"models"},
    {"accept", "drafters", "control", "metrics", "watch"},
    {"guard", "forced", "outcome", "steady", "scheduler", "recovery", "engine"},
    {"rehearsal"},
    {"loading", "choice", "seat", "llm"},
    {"serve", "bench", "train", "plan", "cli"},
    {"__init__", "__main__"},
)
"""From the bottom up. A module imports from its own layer and from those below."""
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
DISCOVERY = {("registry", "drafters")}
"""The registry walks the drafters' package to let every file register itself; it names none of them."""

MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 50, 6
GENERIC_NAMES = {"none", "self"}
"""Drafters whose names are words that mean other things, too."""
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear", "sort"}
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "deque", "Counter", "WeakValueDictionary"}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def unit(path: Path) -> str:
    """The part of the package that a file belongs to: `models` for `models/hf.py`, `engine` for `engine.py`."""
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(tree: ast.Module, path: Path) -> Iterator[tuple[str, int]]:
    """Units of the package that a file imports, at whatever depth. In `types.py`, imports for type checkers do not count:
    the nouns mention what is built upon them, and nothing runs."""
    skipped = {id(n) for node in ast.walk(tree) if path == SOURCE / "types.py" and is_type_checking(node) for n in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            yield from ((name, node.lineno) for name in from_units(node, path))
        elif isinstance(node, ast.Import):
            yield from ((a.name.split(".")[1], node.lineno) for a in node.names if a.name.startswith("outrider."))


def from_units(node: ast.ImportFrom, path: Path) -> list[str]:
    """`from ..x.y import z` -> `[x]`; `from .. import x, y` -> `[x, y]`; nothing for other packages."""
    if node.level == 0:
        if not node.module or node.module.split(".")[0] != "outrider":
            return []
        parts = node.module.split(".")[1:]
    else:
        package = list(path.relative_to(SOURCE).parent.parts)
        parts = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
    return parts[:1] or [alias.name for alias in node.names]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def wrong_imports(source: str, path: Path) -> list[str]:
    here = unit(path)
    complaints = [] if here in RANK else [f"{here} has no layer; give it one in LAYERS"]
    for there, line in imports(parsed(source), path):
        known = there if there in RANK else "__init__"  # `from outrider import LLM` is the public surface, above all
        if (here, there) not in DISCOVERY and RANK[known] > RANK.get(here, 0):
            complaints.append(f"line {line}: {here} must not import {there}")
    return complaints


def oversized(source: str, path: Path) -> list[str]:
    """Files, functions and parameter lists beyond the limits. Two kinds of functions may take more parameters: `LLM.__init__`,
    whose keywords are the product's surface, and typer commands, whose parameters are command-line options. Device code
    (`@triton.jit`) takes pointers, strides and sizes one by one and is inlined by its compiler: no limit but the file's."""
    complaints = [f"{n} lines"] if (n := len(source.splitlines())) > MAX_LINES else []
    for node in ast.walk(parsed(source)):
        if not isinstance(node, Function) or device_code(node):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            complaints.append(f"{node.name} has {lines} lines")
        if len(parameters(node)) > MAX_PARAMETERS and not may_take_many(node, path):
            complaints.append(f"{node.name} has {len(parameters(node))} parameters")
    return complaints


def parameters(node: Function) -> list[str]:
    a = node.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def device_code(node: Function) -> bool:
    """Whether Triton compiles the function: it is decorated with just `@triton.jit`, or with that and its options."""
    marks = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(ast.unparse(mark) == "triton.jit" for mark in marks)


def may_take_many(node: Function, path: Path) -> bool:
    command = path.parent == SOURCE / "cli" and node.name == path.stem
    return command or (path == SOURCE / "llm.py" and node.name == "__init__" and len(node.args.args) <= 2)


def prints(source: str, path: Path) -> list[str]:
    if unit(path) == "cli":
        return []
    return [f"line {n.lineno}: print" for n in ast.walk(parsed(source)) if isinstance(n, ast.Call) and name_of(n.func) == "print"]


def module_state(source: str, path: Path) -> list[str]:
    """Mutable values bound at module level. Tables named in capitals are constants, as long as nothing in the file changes them;
    `global` is state in any case."""
    tree = parsed(source)
    complaints, constants = [], set()
    for node in tree.body:
        for target, value in assignments(node):
            if not is_mutable(value) or target == "__all__":
                continue
            if target.isupper():
                constants.add(target)
            else:
                complaints.append(f"line {node.lineno}: {target} is mutable")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            complaints.append(f"line {node.lineno}: global {', '.join(node.names)}")
        complaints += [f"line {node.lineno}: {name} is changed" for name in changed(node) if name in constants]  # type: ignore[attr-defined]
    return complaints


def assignments(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        return [(t.id, node.value) for t in node.targets if isinstance(t, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return [(node.target.id, node.value)]
    return []


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return name_of(value.func) in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def changed(node: ast.AST) -> list[str]:
    """Names whose value this node changes in place: `X[i] = ...`, `del X[i]`, `X += ...`, `X.append(...)`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return [name_of(node.value)]
    if isinstance(node, ast.AugAssign):
        return [name_of(node.target)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return [name_of(node.func.value)]
    return []


def name_of(node: ast.expr) -> str:
    """`x` for `x`, `y` for `x.y`, nothing for the rest."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@cache
def drafter_names() -> set[str]:
    """What the files in `drafters/` register, plus the files' own names."""
    names = set()
    for path in (SOURCE / "drafters").glob("[!_]*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and name_of(n.func) == "register"]
        names |= {path.stem} | {c.args[0].value for c in calls if c.args and isinstance(c.args[0], ast.Constant)}
    return names


def named_drafters(source: str, path: Path) -> list[str]:
    """String literals that are a drafter's name or spec. Docstrings may mention drafters, and so may the command line's help."""
    if unit(path) in ("drafters", "cli"):
        return []
    tree = parsed(source)
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    literals = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs]
    names = drafter_names() - GENERIC_NAMES
    return [f"line {n.lineno}: {n.value!r}" for n in literals if str(n.value).partition(":")[0] in names]


RULES = (wrong_imports, oversized, prints, module_state, named_drafters)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule):
    found = {str(p.relative_to(ROOT)): c for p in FILES if (c := rule(p.read_text(), p))}
    assert not found


PLANTED = [
    (wrong_imports, "types.py", "from .engine import Engine"),
    (wrong_imports, "tree.py", "from . import models"),
    (wrong_imports, "tree.py", "def f():\n    from .models.hf import x"),
    (wrong_imports, "engine.py", "import outrider.llm"),
    (wrong_imports, "engine.py", "from outrider import LLM"),
    (wrong_imports, "drafters/x.py", "from ..engine import Engine"),
    (wrong_imports, "cache/paged.py", "from ..models.hf import Decoder"),
    (wrong_imports, "models/hf.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..llm import LLM"),
    (wrong_imports, "novelty.py", "x = 1"),
    (oversized, "tree.py", "x = 1\n" * 401),
    (oversized, "tree.py", "def f():\n" + "    x = 1\n" * 50),
    (oversized, "tree.py", "def f(a, b, c, d, *, e, g, h): ..."),
    (oversized, "cli/chat.py", "def helper(a, b, c, d, e, f, g): ..."),
    (oversized, "llm.py", "class LLM:\n    def __init__(self, a, b, c, d, e, f, g): ..."),
    (oversized, "kernels/x.py", "def launch(a, b, c, d, e, f, g): ..."),
    (oversized, "kernels/x.py", "@functools.cache\ndef launch(a, b, c, d, e, f, g): ..."),
    (oversized, "kernels/x.py", "def launch():\n    @triton.jit\n    def f(): ...\n" + "    x = 1\n" * 50),
    (oversized, "kernels/x.py", "@triton.jit\ndef f(a, b, c, d, e, f, g):\n" + "    x = 1\n" * 400),
    (oversized, "kernels/x.py", "@wrapped(triton.jit)\ndef f(a, b, c, d, e, f, g): ..."),
    (prints, "engine.py", "def f():\n    print(1)"),
    (module_state, "engine.py", "seen = {}"),
    (module_state, "engine.py", "seen: dict[str, int] = dict()"),
    (module_state, "engine.py", "import collections\nseen = collections.defaultdict(list)"),
    (module_state, "engine.py", "SEEN = {}\ndef f(x):\n    SEEN[x] = 1"),
    (module_state, "engine.py", "SEEN = []\ndef f(x):\n    SEEN.append(x)"),
    (module_state, "engine.py", "count = 0\ndef f():\n    global count\n    count += 1"),
    (named_drafters, "llm.py", "x = 'ngram'"),
    (named_drafters, "llm.py", "x = 'ngram:max=3'"),
]


@pytest.mark.parametrize(("rule", "file", "source"), PLANTED)
def test_planted_violations_are_caught(rule, file, source):
    assert rule(source, SOURCE / file)


ALLOWED = [
    (wrong_imports, "types.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .text import TextStream"),
    (wrong_imports, "drafters/x.py", "from ..models.hf import Decoder\nfrom . import y\nimport torch"),
    (wrong_imports, "cli/x.py", "from outrider.llm import LLM\nfrom ..engine import Engine"),
    (oversized, "cli/chat.py", "def chat(a, b, c, d, e, f, g): ..."),
    (oversized, "llm.py", "class LLM:\n    def __init__(self, model, *, a, b, c, d, e, f): ..."),
    (oversized, "kernels/x.py", "@triton.jit\ndef f(a, b, c, d, e, f, g):\n" + "    x = 1\n" * 60),
    (oversized, "kernels/x.py", "@triton.jit(do_not_specialize=['a'])\ndef f(a, b, c, d, e, f, g): ..."),
    (prints, "cli/x.py", "print(1)"),
    (module_state, "engine.py", "TABLE = {1: 2}\n__all__ = ['x']\ndef f():\n    seen = []\n    seen.append(TABLE[1])"),
    (named_drafters, "llm.py", '"""Like ngram."""\ndef f():\n    """ngram"""\n    return "engram"'),
    (named_drafters, "drafters/x.py", "x = 'ngram'"),
]


@pytest.mark.parametrize(("rule", "file", "source"), ALLOWED)
def test_what_the_rules_allow(rule, file, source):
    assert not rule(source, SOURCE / file)


def test_the_rules_read_the_whole_package():
    assert {"engine.py", "types.py", "ngram.py", "generate.py"} <= {p.name for p in FILES}
    assert "ngram" in drafter_names()


def test_public_surface():
    assert sorted(outrider.__all__) == ["Drafter", "LLM", "Proposal", "SamplingParams", "Verdict", "register"]
    assert all(getattr(outrider, name).__module__.startswith("outrider.") for name in outrider.__all__)


def test_make_test_runs_what_the_readme_says():
    [command] = re.findall(r"make test +# runs `([^`]+)`", (ROOT / "README.md").read_text())
    recipe = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert recipe.splitlines()[-1].endswith(command)


def test_links_in_the_documents_lead_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert links
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]


def test_the_index_leads_to_every_page():
    linked = set(re.findall(r"\]\((\w[^)#:/]*\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_readme_examples_are_python():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        ast.parse(block)


def test_readme_shows_the_example_drafter_as_it_is():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    [shown] = [block for block in blocks if "@register" in block]
    assert shown in (ROOT / "examples" / "copycat.py").read_text()


def test_constraints_pin_every_dependency():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    names = {name.lower().replace("_", "-") for name in pinned}
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r'^  "([a-z-]+)[>=]', project.split("dependencies = [")[1].split("]")[0], flags=re.MULTILINE)
    assert len(needed) == 7
    assert not set(needed) - names
