"""What is asked: conversations that wait for an answer, and named lists of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import BadInput
from ..models.tokenizer import TextTokenizer

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation that waits for an answer; a plain prompt is one message of the user. `later`: what the user says next,
    turn by turn, once the model has answered. `raw`: text to be continued as it is, without a chat template. `question`: prompts
    that are turns of the same conversation share it (None: a conversation of its own)."""

    messages: tuple[Message, ...]
    later: tuple[str, ...] = ()
    raw: bool = False
    question: int | None = None

    @property
    def sha256(self) -> str:
        """Tells prompts apart, whatever file they came from: the hash of what is asked as canonical JSON."""
        said: Any = [dict(m) for m in self.messages]
        if self.later or self.raw:
            said = {"messages": said, "later": list(self.later), "raw": self.raw}
        text = json.dumps(said, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, tokenizer: TextTokenizer) -> list[int]:
        """Token ids of what is asked first, through the model's chat template if it has one, else of the messages as paragraphs.
        Where a template knows no system role, that message opens the user's first one."""
        if self.raw or not tokenizer.has_chat:
            return tokenizer.encode("\n\n".join(m["content"] for m in self.messages))
        try:
            return tokenizer.chat(self.messages)
        except BadInput:
            if self.messages[0]["role"] != "system" or len(self.messages) < 2:
                raise
            system, first, *rest = self.messages
            opening = {"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}
            return tokenizer.chat([opening, *rest])


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of prompts; `source` is `built-in`, the file's path, or `spec_bench:` and a path. `reader`: how a file was
    understood."""

    name: str
    source: str
    prompts: tuple[Prompt, ...]
    reader: str = ""

    @property
    def questions(self) -> tuple[int, ...]:
        """For each prompt the number of its conversation; one that says none is a conversation of its own (below 0)."""
        return tuple(-1 - i if p.question is None else p.question for i, p in enumerate(self.prompts))

    @property
    def sha256(self) -> str:
        """Tells lists of prompts apart: the hash of the prompts' hashes, in their order."""
        return hashlib.sha256("".join(p.sha256 for p in self.prompts).encode()).hexdigest()

    def first(self, limit: int | None) -> Workload:
        """The same with at most `limit` prompts."""
        return replace(self, prompts=self.prompts[:limit])

    def spread(self, count: int | None) -> Workload:
        """The same with at most `count` prompts at even distances from the first on: always the same ones."""
        total = len(self.prompts)
        if count is None or count >= total:
            return self
        return replace(self, prompts=tuple(self.prompts[i * total // count] for i in range(count)))
