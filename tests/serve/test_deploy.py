"""What is shipped for operations agrees with the server."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from outrider.cli.serve import MODEL_KINDS
from outrider.serve.settings import KINDS

from .conftest import Running

ROOT = Path(__file__).parents[2]


def test_the_dashboard_asks_for_metrics_that_there_are(server: Running) -> None:
    server.complete()
    served = server.client.get("/metrics").text
    names = set(re.findall(r"^# TYPE (\S+)", served, flags=re.MULTILINE)) | set(re.findall(r"^(\w+)", served, flags=re.MULTILINE))
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    asked = {name for panel in board["panels"] for t in panel["targets"] for name in re.findall(r"outrider_\w+", t["expr"])}
    missing = {name for name in asked - names if name != "outrider_spec_decode_num_accepted_tokens_per_pos_total"}
    assert len(asked) > 15 and not missing


def test_the_documented_file_has_options_that_there_are() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    [block] = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    names = {name.replace("-", "_") for name in tomllib.loads(block)}
    assert names <= set(KINDS) | set(MODEL_KINDS)
