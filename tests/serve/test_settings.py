"""Where settings come from, and which are refused."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import outrider
import outrider.serve.server
from outrider.cli.app import app
from outrider.cli.serve import MODEL_KINDS
from outrider.errors import BadInput
from outrider.serve.logs import Lines
from outrider.serve.server import bind
from outrider.serve.settings import KINDS, Settings, from_environment, from_file, merged, read_keys, settings


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nmax-queue = 1\nmax-running = 1\napi-keys = ["a", "b"]\nmodel = "m"\n')
    environment = from_environment(KINDS, {"OUTRIDER_PORT": "2", "OUTRIDER_MAX_QUEUE": "2", "OUTRIDER_LOG_PROMPTS": "yes"})
    flags = {"port": 3, "max_body": None, "cors_origins": []}
    chosen = settings(merged(flags, environment, from_file(str(file))))
    assert (chosen.port, chosen.max_queue, chosen.max_running) == (3, 2, 1)
    assert chosen.api_keys == ("a", "b") and chosen.log_prompts and chosen.cors_origins == ()
    assert chosen.limit == 3 and chosen.max_body is None and chosen.bytes == 2**20
    assert from_environment(KINDS, {"OUTRIDER_API_KEYS": "x, y,"}) == {"api_keys": ("x", "y")}
    assert from_environment(KINDS, {"OUTRIDER_API_KEY": "x"}) == {"api_keys": ("x",)}, "a key that is not read opens the door"


@pytest.mark.parametrize(
    "values",
    [{"port": "x"}, {"port": -1}, {"port": True}, {"max_running": 0}, {"api_keys": [5]}, {"api_keys": [" "]}, {"host": 5}]
    + [{"max_body": 0.0}, {"read_seconds": 1e9}, {"page": "on"}, {"api_keys": ["ü"]}, {"api_keys": [" a"]}],
)
def test_wrong_values(values: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        settings(values)


def test_a_file_may_name_options_as_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('api-key = "a"\ncors-origin = ["https://a.example"]\n')
    assert from_file(str(file)) == {"api_keys": "a", "cors_origins": ["https://a.example"]}
    file.write_text("api-key-file = 5\n")
    result = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert result.exit_code == 2 and "api_key_file must be a str" in result.stderr


@pytest.mark.parametrize("text", ["port = ", "[", b"\xff"])
def test_files_that_cannot_be_read(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "serve.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (from_file,):
        with pytest.raises(BadInput):
            read(str(file))
    with pytest.raises(BadInput):
        from_file(str(tmp_path / "none.toml"))


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-1\n\n sk-2 \n")
    assert read_keys(str(file)) == ("sk-1", "sk-2")
    file.write_text("# none\n")
    for path in (file, tmp_path / "missing"):
        with pytest.raises(BadInput):
            read_keys(str(path))


@pytest.mark.parametrize(
    ("name", "text"),
    [("OUTRIDER_PORT", "x"), ("OUTRIDER_PAGE", "perhaps"), ("OUTRIDER_MAX_BODY", "1 MB"), ("OUTRIDER_API_KEYS", ",")],
)
def test_a_wrong_environment(name: str, text: str) -> None:
    with pytest.raises(BadInput, match=name):
        from_environment(KINDS, {name: text})


def test_every_setting_has_a_kind() -> None:
    assert set(KINDS) == set(Settings.__dataclass_fields__) and not set(KINDS) & set(MODEL_KINDS)


def test_a_port_in_use_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--port", str(port), "--model", "nothing"])
        assert result.exit_code == 2 and f"port {port}" in result.stderr and "--port" in result.stderr
    with pytest.raises(BadInput, match="--host"):
        bind("nowhere.invalid", 0)


def test_unknown_options_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("prot = 1\n")
    result = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert result.exit_code == 2 and "prot" in result.stderr


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outrider, "serve", outrider.serve)  # puts it back
    for name in [name for name in sys.modules if name.startswith("outrider.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2 and "pip install 'outrider[serve]'" in result.stderr


@pytest.mark.parametrize("where", ["flag", "environment", "file", "key file"])
def test_keys_reach_the_server_from_wherever_they_are_given(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command itself: a key that gets lost on the way leaves the door open."""
    found = list[Settings]()
    monkeypatch.setattr("outrider.cli.serve.loaded", lambda options: nullcontext())
    monkeypatch.setattr("outrider.serve.server.serve", lambda llm, chosen, *_: found.append(chosen))
    monkeypatch.setattr("outrider.serve.logs.configure", lambda: None)
    (tmp_path / "keys").write_text("k\n")
    (tmp_path / "serve.toml").write_text('api-key = "k"\ncors-origins = ["https://a.example"]\n')
    words = {"flag": ["--api-key", "k"], "file": ["--config", str(tmp_path / "serve.toml")]}
    words["key file"] = ["--api-key-file", str(tmp_path / "keys")]
    environment = {"OUTRIDER_API_KEYS": "k"} if where == "environment" else {}
    result = CliRunner().invoke(app, ["serve", "--port", "0", *words.get(where, [])], env=environment)
    assert result.exit_code == 0, result.output
    assert found[0].api_keys == ("k",)
    assert found[0].cors_origins == (("https://a.example",) if where == "file" else ())


def test_help_shows_an_example(run_help: Callable[[], str]) -> None:
    assert "Example: outrider serve" in run_help()


@pytest.fixture
def run_help() -> Callable[[], str]:
    return lambda: CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "120"}).stdout


def test_log_lines() -> None:
    record = logging.LogRecord("outrider.serve", logging.INFO, "x", 1, "request", (), None)
    record.fields = {"status": 200, "path": Path("/v1")}
    line = json.loads(Lines().format(record))
    assert line["event"] == "request" and line["status"] == 200 and line["path"] == "/v1" and line["level"] == "info"
