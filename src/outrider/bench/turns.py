"""Conversations of several turns as the benchmark runs them: one prompt per turn, with the model's own answers between."""

from __future__ import annotations

from dataclasses import replace

from ..config import SamplingParams
from ..errors import OutriderError
from ..llm import LLM
from .conversation import Prompt, Workload


def expand(llm: LLM, workload: Workload, params: SamplingParams, batch: int = 1) -> Workload:
    """The workload with a prompt for every turn. What stands between the turns is the plain answer under `params`, written once,
    so that every drafter is asked the same. Conversations stay in order, turn by turn; in batches, so many of them go together.
    A conversation ends where the context cannot hold its next turn and a token of the answer."""
    if not any(p.later for p in workload.prompts):
        return workload
    llm.switch("none")
    asked = []
    for i, prompt in enumerate(workload.prompts):
        turn = replace(prompt, later=(), question=i)
        asked.append((i // batch, 0, turn))
        for number, words in enumerate(prompt.later, 1):
            turn = _next(llm, turn, words, params, f"workload {workload.name}, prompt {i + 1}, turn {number}")
            if len(turn.encode(llm.tokenizer)) >= llm.max_model_len:
                break
            asked.append((i // batch, number, turn))
    return replace(workload, prompts=tuple(turn for *_, turn in sorted(asked, key=lambda a: a[:2])))


def _next(llm: LLM, turn: Prompt, words: str, params: SamplingParams, where: str) -> Prompt:
    """The conversation with the model's answer and the user's next words."""
    result = llm.generate([turn.encode(llm.tokenizer)], params)[0]
    if result.finish_reason == "error":
        raise OutriderError(f"{where}: {result.error or 'the model gave no valid scores; try another --dtype or --device'}")
    said = {"role": "assistant", "content": result.text}, {"role": "user", "content": words}
    return replace(turn, messages=(*turn.messages, *said))
