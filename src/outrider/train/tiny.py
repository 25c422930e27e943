"""A tiny random model with a tokenizer, on disk: to try out in a minute what takes an evening for a real one."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..bench import tiny
from ..models.weights import cache_dir, quiet

NAME = "tiny"
_VERSION = 1
_CALM = 0.03


def directory() -> Path:
    """Where the tiny model lies; it is made on first use."""
    place = cache_dir() / f"{NAME}-{_VERSION}" / NAME
    if (place / "tokenizer_config.json").is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        make(temporary)
        temporary.replace(place)
    except OSError:
        if not place.is_dir():  # another process may have been faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place


def make(path: Path) -> None:
    """Write the model, and a tokenizer of one letter per token."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRST"
    vocab = {"<s>": 0, "</s>": tiny.EOS} | {c: i + 2 for i, c in enumerate(letters)}
    made = Tokenizer(WordLevel(vocab, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)
    with quiet():
        calm(tiny.model(dtype=torch.float32)).save_pretrained(path)
        fast.save_pretrained(path)


def calm(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with layers that say less, so that the next token depends on the last few most of all, as it does in real
    text, and can be learned."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(_CALM)
    return model
