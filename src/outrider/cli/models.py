"""`outrider models`: what is embedded, cached and found, how big, and where."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from dataclasses import dataclass

import typer

from ..errors import OutriderError
from . import options as o


@dataclass(frozen=True, slots=True)
class Found:
    """A model on this machine. `kind`: embedded, cached (a dequantised copy) or hub; `use`: what to give `--model`, if anything;
    `problem`: why it cannot be used."""

    kind: str
    name: str
    bytes: int
    path: str
    use: str
    problem: str | None = None


def models(json: o.Json = False, debug: o.Debug = False) -> None:
    """List the models on this machine: the embedded one, dequantised copies, and what the Hugging Face cache holds."""
    found = [embedded_model(), *cached_models(), *hub_models()]
    if json:
        from ..models.weights import cache_dir

        typer.echo(jsonlib.dumps({"models": [dataclasses.asdict(f) for f in found], "cache": str(cache_dir())}))
        return
    from rich.table import Table

    from .painter import Paper

    table = Table(box=None, pad_edge=False)
    for name in ("kind", "model", "size", "where"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for f in found:
        size = f"{f.bytes / 2**20:,.0f} MiB" if f.bytes else ""
        table.add_row(f.kind, f.name, size, f.problem or f.path)
    Paper().print(table)
    if any(f.kind == "cached" for f in found):
        typer.echo(
            "cached: dequantised copies of GGUF files, safe to delete (they are made again); --model takes their path, too"
        )


def embedded_model() -> Found:
    """The embedded default, or what is wrong with it."""
    from ..models import embedded

    name = embedded.EMBEDDED
    try:
        path = embedded.find()
    except OutriderError as error:
        return Found("embedded", name, 0, "", name, str(error))
    return Found("embedded", name, embedded.SIZE, str(path), name)


def cached_models() -> list[Found]:
    """Dequantised copies of GGUF files; they are found again by the file they were made from."""
    from ..models.weights import entries

    return [Found("cached", e.name, e.bytes, str(e.path), str(e.path)) for e in entries()]


def hub_models() -> list[Found]:
    """Models in the Hugging Face cache that have weights; none where there is no cache. Asks no network."""
    from huggingface_hub import scan_cache_dir

    try:
        cache = scan_cache_dir()
    except Exception:  # no cache, or one that cannot be read: either way nothing is found
        return []
    listed = []
    for repo in sorted(cache.repos, key=lambda r: r.repo_id):
        files = {f.file_name for revision in repo.revisions for f in revision.files}
        if repo.repo_type != "model" or "config.json" not in files:
            continue
        whole = any(name.endswith(".safetensors") for name in files)
        problem = None if whole else "no safetensors weights in the cache; it will be fetched on use"
        listed.append(Found("hub", repo.repo_id, repo.size_on_disk, str(repo.repo_path), repo.repo_id, problem))
    return listed
