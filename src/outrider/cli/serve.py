"""`outrider serve`: an OpenAI-compatible server."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInput, OutriderError
from . import options as o
from .answer import loaded
from .drafters import HELP, describe_drafters
from .guard import say

if TYPE_CHECKING:
    from ..llm import LLM
    from ..serve.settings import Settings

_SERVER = "Server"
MODEL_KINDS: dict[str, type] = {
    "model": str,
    "draft": str,
    "accept": str,
    "control": str,
    "device": str,
    "dtype": str,
    "quantize": str,
    "max_model_len": int,
    "kv_tokens": int,
    "threads": int,
    "trace": str,
    "trace_text": bool,
    "trace_mib": float,
}
"""What `ModelOptions` takes from the environment and the configuration file."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _option(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=_SERVER, **more)


def serve(
    ctx: typer.Context,
    config: Annotated[str | None, _option("A TOML file of these options.", metavar="PATH")] = None,
    model: Annotated[str | None, typer.Option(help="Directory, GGUF file, hub id or the embedded default's name.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="NAME[:key=value,...]", help="Who guesses; 'help' lists them.")] = None,
    accept: Annotated[str | None, typer.Option(help="The acceptance rule of requests that name none.")] = None,
    control: Annotated[str | None, typer.Option(help="How far to look ahead: goodput, adaptive, fixed.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    quantize: Annotated[str | None, typer.Option(help="Round the layers' weights to fewer bits: none, int8, int4.")] = None,
    max_model_len: o.MaxModelLen = None,
    kv_tokens: Annotated[int | None, typer.Option(min=1, help="KV memory, in tokens over all running answers.")] = None,
    threads: o.Threads = None,
    host: Annotated[str | None, _option("Where to listen (127.0.0.1).")] = None,
    port: Annotated[int | None, _option("Which port (8000); 0 for any that is free.")] = None,
    served_name: Annotated[str | None, _option("What the model is called in the API.")] = None,
    api_key: Annotated[list[str] | None, _option("A key that clients must send (repeatable); better in a file.")] = None,
    api_key_file: Annotated[str | None, _option("A file of keys, one a line.", metavar="PATH")] = None,
    cors_origin: Annotated[list[str] | None, _option("A web origin that may call (repeatable; off).")] = None,
    max_running: Annotated[int | None, _option("Answers written at once (256).")] = None,
    max_queue: Annotated[int | None, _option("Answers that may wait (256); beyond that clients get 429.")] = None,
    max_tokens: Annotated[int | None, _option("Longest answer (as long as the context allows).")] = None,
    max_body: Annotated[
        float | None, _option("Largest request, in MiB (0.25, and 32 bytes for each token of the context).")
    ] = None,
    read_seconds: Annotated[float | None, _option("How long a request may take to arrive (30).")] = None,
    drain_seconds: Annotated[float | None, _option("How long answers may take to end at SIGTERM (60).")] = None,
    log_prompts: Annotated[bool | None, _option("Write prompts to the log.")] = None,
    trace: Annotated[str | None, _option("Write a line for every round, for `outrider replay`; no text.", metavar="PATH")] = None,
    trace_text: Annotated[bool | None, _option("With --trace: prompts and answers, too.")] = None,
    trace_mib: Annotated[float | None, _option("With --trace: put a file aside when it is larger (64).", metavar="MIB")] = None,
    page: Annotated[bool | None, _option("Show a chat page at / (on).")] = None,
    share: Annotated[bool | None, _option("Let keys share KV of prompts and what drafters learned (off).")] = None,
    otel: Annotated[bool | None, _option("Send OpenTelemetry spans to OTEL_EXPORTER_OTLP_ENDPOINT (off).")] = None,
    debug: o.Debug = False,
) -> None:
    """Serve the model through OpenAI's API, with speculation visible and controllable, and a page at /.

    Every option may stand in a TOML file (--config) or in the environment (OUTRIDER_PORT, OUTRIDER_API_KEYS, ...); flags come
    first, then the environment, then the file. At SIGTERM running answers are finished, new ones get 503."""
    if draft == HELP:
        typer.echo(describe_drafters())
        return
    _run(ctx.params)


def _run(given: Mapping[str, Any]) -> None:
    """Listen first, so that a port in use is found out before a model is loaded for it."""
    try:
        from ..serve import server, settings, traces
    except ImportError as error:
        raise OutriderError(f"the server needs {error.name or error}: pip install 'outrider[serve]'") from None
    from ..serve.logs import configure

    values = _values(given)
    chosen = settings.settings(values)
    options = o.ModelOptions.of(
        {name: settings.typed(name, values[name], MODEL_KINDS[name]) for name in MODEL_KINDS.keys() & values.keys()}
    )
    unknown = set(values) - set(settings.KINDS) - set(MODEL_KINDS)
    if unknown:
        raise BadInput(f"unknown option in {given['config']}: {', '.join(sorted(unknown))}")
    if chosen.otel:
        traces.library()  # found out before a model is loaded for it
    sock = server.bind(chosen.host, chosen.port)
    configure()
    with sock, loaded(options) as llm:
        _warn(chosen)
        failed = server.serve(llm, chosen, lambda url: _greet(llm, chosen, url), sock)
    if failed is not None:
        raise RuntimeError(f"the engine gave up: {failed}")


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """All options by the names they have in a file: flags, environment, file."""
    from ..serve.settings import KINDS, from_environment, from_file, merged, plural, read_keys, typed

    flags = plural({name: value for name, value in given.items() if name not in ("config", "debug")})
    environment = from_environment(KINDS | MODEL_KINDS | {"api_key_file": str})
    below = from_file(given["config"]) if given["config"] else {}
    values = merged(flags, environment, below)
    path: str | None = typed("api_key_file", values.pop("api_key_file", None), str)
    if path:
        values["api_keys"] = (*values.get("api_keys", ()), *read_keys(path))
    return values


def _warn(settings: Settings) -> None:
    if settings.host not in LOOPBACK and not settings.api_keys:
        say("note: anybody who can reach this port may use the model; --api-key-file asks for a key")


def _greet(llm: LLM, settings: Settings, url: str) -> None:
    """What a person wants to know when the server is ready, and one command to try."""
    import json

    drafter = llm.engine.drafter
    typer.echo(f"ready     {url}{'  (a page to watch it work, and /docs)' if settings.page else '  (see /docs)'}")
    typer.echo(f"model     {settings.served_name or llm.name}")
    typer.echo(f"drafter   {llm.drafter_name}" + (f" ({drafter.reason})" if drafter.reason else ""))
    asked: dict[str, Any] = {"max_tokens": 64}
    path = "completions"
    if llm.tokenizer.has_chat:
        path, asked["messages"] = "chat/completions", [{"role": "user", "content": "Name three rivers."}]
    else:
        asked["prompt"] = "The three largest rivers are"
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    typer.echo(f"try       curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(asked))}")
