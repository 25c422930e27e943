"""Log-probabilities under the classical rules: those of plain decoding at T = 0; at T > 0 those of the text that was written."""

from __future__ import annotations

import pytest
import torch

from .. import tiny
from .drafters import every
from .test_logprobs import known, made, numbers, plain

RULES = ("rejection", "block", "traversal")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", every())
def test_equal_with_speculation_on_and_off(name: str, rule: str) -> None:
    requests = made("greedy")
    for request in requests:
        request.rule = rule
    tiny.World().run(every()[name](known("greedy")), requests, accept=rule)
    assert [numbers(r) for r in requests] == plain("greedy")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["draft_model", "ngram", "self", "bushy"])
def test_those_of_the_text_that_was_written(name: str, rule: str) -> None:
    requests = made("sampled")[:3]
    for request in requests:
        request.rule = rule
    tiny.World().run(every()[name](known("sampled")), requests, accept=rule)
    for request in requests:
        laws = tiny.model()(torch.tensor([request.tokens])).logits[0].log_softmax(-1)
        for i, (token, entry) in enumerate(zip(request.output, request.logprobs, strict=True)):
            assert entry[0].token_id == token
            assert abs(entry[0].logprob - float(laws[request.prompt_len + i - 1, token])) < 1e-6
