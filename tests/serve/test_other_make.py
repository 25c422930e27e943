"""Against a second independent server, `transformers serve`, on the same weights (it needs accelerate)."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider import LLM
from outrider.bench.endpoint import Endpoint
from outrider.bench.parity import Plan as Parity
from outrider.bench.parity import audit
from outrider.bench.remote import Plan, measure
from outrider.bench.workloads import Prompt, Workload

from ..models.tiny_gguf import TEMPLATE, Tiny
from .conftest import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a directory that both can load."""
    path, tiny = tmp_path_factory.mktemp("both"), Tiny()
    tiny.reference().save_pretrained(path)
    tokens, _, merges = tiny.vocabulary()
    rules = [(left, right) for left, right in (m.split(" ") for m in merges)]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=rules))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "[PAD]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **specials)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def other(folder: Path) -> Iterator[str]:
    pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    entry = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"
    command = [sys.executable, "-c", entry, "serve", str(folder), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 180
        while time.monotonic() < end and process.poll() is None:
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        assert process.poll() is None, "transformers serve did not start"
        yield url
    finally:
        process.terminate()
        process.wait(30)


def test_greedy_texts_are_the_same(folder: Path, other: str) -> None:
    with running(LLM(str(folder), draft="ngram:min=1,depth=4", control="fixed", dtype="float32")) as ours:
        report = audit(Endpoint.find(other), Endpoint.find(ours.url), Parity(8, 20))
    lines = {line.kind: line for line in report.lines}
    assert report.ok and not report.errors
    assert lines["greedy"].compared == 8 and lines["greedy"].differ == lines["greedy"].near_ties
    assert lines["seeded"].verdict == "differ" and lines["logprobs"].verdict == "not compared"


def test_it_is_measured(other: str) -> None:
    words = Workload("words", "here", (Prompt(({"role": "user", "content": "hello"},)),))
    [row] = measure(Endpoint.find(other), Plan((words,), max_tokens=12, repeats=2)).rows
    assert row.tokens == 24 and row.counted and row.acceptance is None and row.first["p50"] > 0
