"""What all commands share: help with an example, a quick start, pipes that close, real exit statuses."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from outrider.cli.guard import TALKATIVE, guarded
from outrider.cli.options import DEFAULT_MODEL, TRACE_MIB

COMMANDS = ("generate", "chat", "demo", "audit", "doctor", "models", "version")


def outrider(*args: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "outrider", *args], text=True, timeout=60, **kwargs)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: outrider {command}" in result.stdout


def test_all_commands_are_listed(run):
    stdout = run("--help").stdout
    assert all(command in stdout for command in COMMANDS)


def test_help_loads_neither_torch_nor_transformers():
    code = (
        "import sys; sys.argv = ['outrider', 'generate', '--help']\n"
        "from outrider.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: status = e.code\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version_names_what_it_stands_on(run):
    result = run("version")
    assert result.exit_code == 0
    assert all(f"\n{name} " in "\n" + result.stdout for name in ("outrider", "torch", "transformers", "python"))


def test_bad_input_from_a_real_process():
    done = outrider("generate", "", capture_output=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the prompt is empty")


def test_a_reader_that_went_away_makes_no_noise():
    read, write = os.pipe()
    os.close(read)
    done = outrider("version", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == ""


def test_the_default_model_is_the_engines():
    from outrider.models.weights import DEFAULT_MODEL as engines
    from outrider.watch.trace import SIZE

    assert (engines, SIZE) == (DEFAULT_MODEL, TRACE_MIB)


@pytest.mark.parametrize(("debug", "said"), [(False, ""), (True, "an extension is missing")])
def test_remarks_of_libraries_are_for_debugging(debug, said, caplog):
    logger = logging.getLogger(TALKATIVE[0])
    guarded(lambda debug: logger.warning("an extension is missing"))(debug=debug)
    assert [record.message for record in caplog.records] == ([said] if said else [])
