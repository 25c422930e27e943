"""The tiny models live in the package, since the audit's self-test runs on them too."""

from __future__ import annotations

from outrider.bench.tiny import (
    EOS,
    FAMILIES,
    VOCAB,
    Decoder,
    World,
    decoder,
    decoder_first,
    draft_model,
    model,
    prompts,
    request,
)

__all__ = [
    "EOS",
    "FAMILIES",
    "VOCAB",
    "Decoder",
    "World",
    "decoder",
    "decoder_first",
    "draft_model",
    "model",
    "prompts",
    "request",
]
