"""`outrider doctor`: machine, versions, model and drafter; what fits, what is wrong, and what to do about it."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInput, OutriderError
from ..version import VERSION
from . import options as o
from .drafters import AUTO, check_draft

if TYPE_CHECKING:
    from ..llm import LLM
    from ..plan.diagnose import Symptom

MIB, GIB = 2**20, 2**30

From = Annotated[str | None, typer.Option("--from", metavar="RESULT.json", help="Explain what outrider bench --output measured.")]
Workloads = Annotated[
    list[str], typer.Option("--workload", metavar="NAME|FILE", help="Guess along texts of this kind and explain it (repeatable).")
]
Limit = Annotated[int, typer.Option(min=1, help="Prompts per workload.")]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `remedy` is None where all is well; `note` where it is worth knowing but need not be mended."""

    topic: str
    name: str
    value: str
    remedy: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A short run: prompts per workload, tokens per answer, temperature. No workload: none."""

    workloads: tuple[str, ...]
    limit: int
    max_tokens: int
    temperature: float


def doctor(
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = "auto",
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    quantize: o.Quantize = "none",
    max_model_len: o.MaxModelLen = None,
    threads: o.Threads = None,
    source: From = None,
    workload: Workloads = [],  # noqa: B006 - typer copies the default
    limit: Limit = 2,
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 0.0,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Look at machine, versions, model and drafter, and say what to mend. Exit status 1 if something needs it.

    Few guesses are right? --from RESULT.json explains what outrider bench measured, --workload explains a short run."""
    check_draft(draft)
    if source is not None:
        _finish(_explained(source, None if draft == AUTO else draft), json)
        return
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if workload:
        from ..bench.workloads import find

        for name in workload:
            find(name)  # a name that is wrong is found before a model is loaded
    trial = Trial(tuple(workload), limit, max_tokens, temperature)
    findings = [*machine(), *versions(), *_model(model, draft, (device, dtype, max_model_len, quantize), trial)]
    _finish(findings, json)


def _finish(findings: list[Finding], json: bool) -> None:
    """Print all of it; exit status 1 if something is to be mended."""
    wrong = [f for f in findings if f.remedy]
    if json:
        typer.echo(jsonlib.dumps({"ok": not wrong, "findings": [dataclasses.asdict(f) for f in findings]}))
    else:
        _show(findings)
    if wrong:
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    topic = ""
    for f in findings:
        if f.topic != topic:
            typer.echo(f"{f.topic}:")
            topic = f.topic
        typer.echo(f"  {'!!' if f.remedy else 'ok'} {f.name}: {f.value}" + (f" ({f.note})" if f.note else ""))
        if f.remedy:
            typer.echo(f"     to do: {f.remedy}")
    count = sum(f.remedy is not None for f in findings)
    typer.echo(f"{count} thing(s) to mend" if count else "nothing to mend")


def machine() -> Iterator[Finding]:
    """Cores, memory, GPU, and room for dequantised models."""
    import torch

    from ..loading import free_memory
    from ..models.weights import cache_dir

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("machine", "cpu", f"{cores} cores, {torch.get_num_threads()} threads in use; {platform.platform()}")
    free = free_memory(torch.device("cpu"))
    remedy = "close other programs, or use a machine with more memory" if free < GIB else None
    yield Finding("machine", "memory", f"{free / GIB:.1f} GiB available", remedy)
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            left, total = torch.cuda.mem_get_info(i)
            value = f"{torch.cuda.get_device_name(i)}, {left / GIB:.1f} of {total / GIB:.1f} GiB free"
            yield Finding("machine", f"gpu {i}", value)
    else:
        yield Finding("machine", "gpu", "none that torch can use", note="models run on the CPU in float32")
    place = cache_dir()
    there = next(p for p in (place, *place.parents) if p.exists())
    room, usable = shutil.disk_usage(there).free, os.access(there, os.W_OK)
    remedy = None if usable and room > GIB else "set OUTRIDER_CACHE to a directory with room that can be written"
    yield Finding("machine", "cache", f"{place}, {room / GIB:.1f} GiB free{'' if usable else ', not writable'}", remedy)


def versions() -> Iterator[Finding]:
    """What is installed, against what outrider asks for."""
    from packaging.requirements import Requirement

    yield Finding("versions", "python", platform.python_version())
    try:
        asked = [Requirement(r) for r in metadata.requires("outrider") or ()]
    except metadata.PackageNotFoundError:
        yield Finding("versions", "outrider", "not installed as a package", note="versions of its dependencies are not checked")
        return
    yield Finding("versions", "outrider", VERSION)
    for need in sorted((r for r in asked if r.marker is None), key=lambda r: r.name):
        try:
            have = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            yield Finding("versions", need.name, "not installed", f'pip install "{need}"')
            continue
        fits = need.specifier.contains(have, prereleases=True)
        yield Finding("versions", need.name, have, None if fits else f'it must be {need.specifier}: pip install "{need}"')


def _explained(source: str, draft: str | None) -> list[Finding]:
    """A benchmark's result, read for what keeps guesses from being right."""
    from ..plan import diagnose
    from ..plan.read import read

    report = read(source)
    if draft is not None and draft not in {row.draft for row in report.rows}:
        raise BadInput(f"{source} has no drafter {draft}; it has {', '.join(dict.fromkeys(r.draft for r in report.rows))}")
    return [_told(symptom) for symptom in diagnose.of_report(report, draft)]


def _told(symptom: Symptom) -> Finding:
    return Finding("acceptance", symptom.name, symptom.value, symptom.remedy, symptom.note)


def _model(model: str, draft: str, how: tuple[str, str, int | None, str], trial: Trial) -> Iterator[Finding]:
    """The model as it runs here, and the drafter on it."""
    from ..llm import LLM

    device, dtype, length, quantize = how
    try:
        llm = LLM(model, draft="none", device=device, dtype=dtype, max_model_len=length, quantize=quantize)
    except BadInput:
        raise
    except OutriderError as error:
        yield Finding("model", model, "cannot be used", str(error))
        return
    try:
        yield from model_findings(llm)
        works = True
        for finding in drafter_findings(llm, draft):
            works = works and finding.remedy is None
            yield finding
        if works:
            yield from map(_told, pair_symptoms(llm, model))
            yield from map(_told, trial_symptoms(llm, draft, trial))
    finally:
        llm.close()


def model_findings(llm: LLM) -> Iterator[Finding]:
    """Size, context, KV memory, and how products are computed."""
    import torch

    from ..models import products, quantize

    target: Any = llm.engine.target
    decoder, cache = target.decoder, target.cache
    count = parameters(decoder.model)
    size = torch.empty(0, dtype=decoder.dtype).element_size()
    dtype = str(decoder.dtype).removeprefix("torch.")
    rounded = quantize.layers_of(decoder.model)
    held = (count - numbers(rounded)) * size + sum(layer.values.nbytes + layer.scale.nbytes for layer in rounded)
    form = dtype if not rounded else f"{dtype} and {quantize.scheme_of(decoder.model)}"
    yield Finding("model", llm.name, f"{count / 1e6:.0f} M parameters, {held / MIB:,.0f} MiB in {form} on {target.device}")
    yield Finding(
        "model", "context", f"{llm.max_model_len:,} tokens, {decoder.num_layers} layers, vocabulary {decoder.vocab_size:,}"
    )
    per_token = 2 * size * sum(h * d for h, d in decoder.layers)
    tokens = cache.capacity
    note = None if tokens >= llm.max_model_len else "less than one full context; longer requests are refused: raise kv_tokens"
    value = f"{per_token / 1024:.1f} KiB per token; the pool holds {tokens:,} tokens ({tokens * per_token / MIB:,.0f} MiB)"
    yield Finding("model", "KV memory", value, note=note)
    if decoder.packed:
        yield Finding("model", "products", f"{decoder.packed} matrices packed for oneDNN")
    else:
        yield Finding("model", "products", "torch's own", note=products.packable(decoder.model))
    if target.device.type == "cpu" and torch.cuda.is_available():
        yield Finding("model", "device", "cpu although there is a GPU", note="--device cuda is faster")
    chat = "yes" if llm.tokenizer.has_chat else "no: prompts are continued as they are"
    yield Finding("model", "chat template", chat)


def drafter_findings(llm: LLM, draft: str) -> Iterator[Finding]:
    """Whether the drafter starts on this model (vocabularies are compared then), what it needs, and its size."""
    try:
        llm.switch(draft)
    except BadInput:
        raise
    except OutriderError as error:
        yield Finding("drafter", draft, "does not fit this model", str(error))
        return
    guard = llm.engine.drafter
    if guard.reason is not None:
        yield Finding("drafter", draft, "failed to start", f"{guard.reason}; use --draft none, or report it")
        return
    drafter = guard.drafter
    needs = [*drafter.needs.features, *(["raw logits"] if drafter.needs.logits else [])]
    needs += ["KV memory"] if drafter.needs.kv is not None else []
    needs += ["the target's layers"] if drafter.needs.target else []
    yield Finding("drafter", guard.name, f"looks {drafter.depth} tokens ahead; needs {', '.join(needs) or 'nothing'}")
    own, target = getattr(drafter, "decoder", None), getattr(llm.engine.target, "decoder", None)
    if own is not None and target is not None:
        share = parameters(own.model) / max(1, parameters(target.model))
        note = "a draft should be a fraction of the model, or drafting takes as long as writing" if share > 0.5 else None
        yield Finding("drafter", "size", f"{share:.0%} of the model", note=note)
        how = "matches the model's" if getattr(drafter, "bridge", None) is None else "is translated to the model's"
        yield Finding("drafter", "vocabulary", f"{how} ({own.vocab_size:,} and {target.vocab_size:,} ids)")


def pair_symptoms(llm: LLM, model: str) -> Iterator[Symptom]:
    """What can be told of a draft model beside its target, without a run."""
    from ..models.quantize import scheme_of
    from ..plan import diagnose

    drafter: Any = llm.engine.drafter.drafter
    own, target = getattr(drafter, "decoder", None), getattr(llm.engine.target, "decoder", None)
    path = getattr(getattr(drafter, "config", None), "path", None)
    if own is None or target is None or not path:
        return
    templates = (llm.tokenizer.template, diagnose.template_of(str(path)))
    dtypes = tuple(str(d.dtype).removeprefix("torch.") for d in (target, own))
    scheme, kept = scheme_of(target.model) or "none", diagnose.dtype_of(str(path))
    translated = getattr(drafter, "bridge", None) is not None
    lengths = (llm.max_model_len, own.max_len)
    yield from diagnose.of_pair(diagnose.Pair(translated, templates, (dtypes[0], dtypes[1]), kept, scheme, lengths))


def trial_symptoms(llm: LLM, draft: str, trial: Trial) -> Iterator[Symptom]:
    """A short run on the workloads that were named, judged place by place."""
    from ..bench import workloads
    from ..config import SamplingParams
    from ..plan import diagnose
    from ..plan.measure import Measurer

    if not trial.workloads or llm.engine.drafter.name == "none":
        return
    chosen = {name: workloads.find(name).first(trial.limit) for name in trial.workloads}
    temperatures = dict.fromkeys((trial.temperature, 0.0))
    found = []
    for temperature in temperatures:
        params = SamplingParams(max_tokens=trial.max_tokens, temperature=temperature, seed=0)
        records = {}
        for name, workload in chosen.items():
            measurer = Measurer(llm, [p.encode(llm.tokenizer) for p in workload.prompts], params)
            if measurer.probes(draft):
                note = "it learns from what the model says to its guesses, so only outrider bench can tell"
                yield Symptom("guesses", "not judged place by place", note=note)
                return
            records[name] = measurer.guesses(draft)
        found.append(records)
    yield from diagnose.of_records(found[0], found[1] if len(found) > 1 else None)


def parameters(model: Any) -> int:
    """Weights of a model, packed and quantised ones included (their own tensors are no parameters any more)."""
    from ..models import quantize

    loose: int = sum(p.numel() for p in model.parameters()) + numbers(quantize.layers_of(model))
    packed = [m for m in model.modules() if hasattr(m, "packed") and hasattr(m, "out_features")]
    tied = {id(m) for m in packed if m is model.get_output_embeddings() and getattr(model.config, "tie_word_embeddings", False)}
    return loose + numbers([m for m in packed if id(m) not in tied])


def numbers(layers: Sequence[Any]) -> int:
    """Weights of some linear layers."""
    return sum(int(layer.out_features * layer.in_features) for layer in layers)
