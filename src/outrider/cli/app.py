"""All commands under one name."""

from __future__ import annotations

import typer

from .audit import audit
from .bench import bench
from .chat import chat
from .compare import compare
from .demo import demo
from .doctor import doctor
from .export import export
from .generate import generate
from .guard import guarded
from .models import models
from .plan import plan
from .replay import replay
from .serve import serve
from .train import train
from .tune import tune
from .version import version

app = typer.Typer(
    name="outrider",
    help="Large language models that answer faster, without changing a word.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command(epilog='Example: outrider generate "Name three rivers." --draft ngram:max=5 --show-draft')(guarded(generate))
app.command(epilog="Example: outrider chat --draft auto --seed 7")(guarded(chat))
app.command(epilog="Example: outrider demo --max-tokens 200")(guarded(demo))
app.command(epilog="Example: outrider audit --draft ngram --prompts 8")(guarded(audit))
app.command(epilog="Example: outrider bench --draft ngram --workload code --workload repetitive --limit 3")(guarded(bench))
app.command(epilog="Example: outrider compare before.json after.json --fail-on-slower --tolerance 0.03")(guarded(compare))
app.command(epilog="Example: outrider tune layer_skip --workload code --trials 100")(guarded(tune))
app.command(epilog="Example: outrider doctor --model ./my-model --draft ngram")(guarded(doctor))
app.command(epilog="Example: outrider models --json")(guarded(models))
app.command(epilog="Example: outrider plan --model ./config.json --task code --card H100 --load 50e6 --price 2.5")(guarded(plan))
app.command(epilog="Example: outrider serve --draft auto --port 8000")(guarded(serve))
app.command(epilog="Example: outrider replay trace.jsonl --plot trace.html")(guarded(replay))
app.command(epilog="Example: outrider export ./my-eagle --out ./for-vllm --layout speculators")(guarded(export))
app.command(epilog="Example: outrider train draft_model:layers=1 --model tiny --minutes 2")(guarded(train))
app.command(epilog="Example: outrider version")(guarded(version))
