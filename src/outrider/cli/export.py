"""`outrider export`: a trained drafter in the layout that another engine loads, and how to serve it there."""

from __future__ import annotations

import json as jsonlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInput
from . import options as o

if TYPE_CHECKING:
    from ..drafters._export import Target

STEPS, BRANCHES, NODES = 5, 4, 16


def export(
    drafter: Annotated[str, typer.Argument(help="Directory of an EAGLE drafter or of Medusa heads.")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Where to write; must be new or empty.")],
    layout: Annotated[
        str, typer.Option(help="EAGLE: safeail (also SGLang's and vLLM's) or speculators; Medusa: medusa or vllm.")
    ] = "",
    model: o.Model = o.DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="Of the weights written: bfloat16, float16, float32.")] = "bfloat16",
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Write a trained drafter for vLLM or SGLang, and print the commands that serve it there."""
    from safetensors import SafetensorError

    from ..drafters import _export
    from ..loading import DTYPES
    from ..models.checkpoint import config_of, folder

    if dtype not in DTYPES:
        raise BadInput(f"unknown dtype {dtype!r}; use bfloat16, float16 or float32")
    path, to = folder("export", drafter), Path(out).expanduser()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise BadInput(f"{to} exists and is not empty; give a new directory")
    heads = "medusa_num_heads" in config_of(path)
    layout = layout or ("vllm" if heads else "safeail")
    target = _target(model)
    try:
        (_export.export_medusa if heads else _export.export_eagle)(path, to, layout, target, DTYPES[dtype])
    except (OSError, SafetensorError) as error:
        raise BadInput(f"cannot write to {to}: {getattr(error, 'strerror', None) or error}") from error
    commands = served("medusa" if heads else _method(to), model, str(to), layout)
    if json:
        typer.echo(jsonlib.dumps({"out": str(to), "layout": layout, "commands": commands}))
        return
    typer.echo(f"wrote {to} ({layout} layout)")
    for engine, command in commands.items():
        typer.echo(f"{engine}: {command}")


def _target(model: str) -> Target:
    """The target's rows. Loading a whole model for them is the price of borrowing."""
    import torch

    from ..drafters._export import Target
    from ..models import weights

    loaded: Any = weights.load(weights.resolve(model), dtype=torch.float32)
    ends = (loaded.model.get_input_embeddings().weight.detach(), loaded.model.get_output_embeddings().weight.detach())
    config = loaded.model.config.get_text_config()
    return Target(model, *ends, int(config.num_hidden_layers), tuple(loaded.model.config.architectures or ()))


def _method(path: Path) -> str:
    from ..models.checkpoint import config_of
    from ..models.eagle_files import describe

    return "eagle3" if describe(path, config_of(path)).plan.version == 3 else "eagle"


def served(method: str, model: str, path: str, layout: str) -> dict[str, str]:
    """How vLLM and SGLang serve `model` with the drafter, each as a command line (for Medusa only vLLM knows how)."""
    speculative = jsonlib.dumps({"method": method, "model": path, "num_speculative_tokens": STEPS})
    vllm = f"vllm serve {shlex.quote(model)} --speculative-config {shlex.quote(speculative)}"
    if method == "medusa":
        return {"vllm": vllm} if layout == "vllm" else {}
    if layout == "speculators":
        return {"vllm": vllm}
    sglang = (
        f"python -m sglang.launch_server --model-path {shlex.quote(model)} --speculative-algorithm {method.upper()} "
        f"--speculative-draft-model-path {shlex.quote(path)} --speculative-num-steps {STEPS} "
        f"--speculative-eagle-topk {BRANCHES} --speculative-num-draft-tokens {NODES}"
    )
    return {"vllm": vllm, "sglang": sglang}
