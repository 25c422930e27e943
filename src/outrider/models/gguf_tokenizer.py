"""Builds a fast tokenizer from GGUF metadata.

How text is cut before byte-pair merging is only named in the file (`tokenizer.ggml.pre`), so the cuts are listed here.
A wrong cut gives valid but unusual tokens ("a  2" is one of the texts that show it), hence the warning for unknown names.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ..errors import BadWeights, OutriderWarning, UnsupportedModel
from .gguf_file import GGUF

_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a family cuts text: by `pattern` (None: GPT-2's own), after setting digits apart if `digits`; `nfc`: text is
    normalised first; `whole`: a piece that is in the vocabulary is never split; `bos`: starts texts with BOS unless told."""

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


def _cut(name: str) -> _Cut | None:
    """The cut of a family by its GGUF name; None if it is not known here."""
    words = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
    marks = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    if name in ("gpt-2", "phi-2", "olmo"):
        return _Cut()
    if name in ("smollm", "starcoder", "refact"):
        return _Cut(digits=True)
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return _Cut(_CONTRACTIONS + words + r"\p{N}{1,3}" + marks + _SPACES, whole=True, bos=True)
    if name in ("qwen2", "deepseek-r1-qwen"):
        return _Cut(_CONTRACTIONS + words + r"\p{N}" + marks + _SPACES, nfc=True)
    if name == "tekken":
        upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
        lead = r"[^\r\n\p{L}\p{N}]?"
        cased = f"{lead}{upper}*{lower}+|{lead}{upper}+{lower}*"
        return _Cut(cased + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES, whole=True, bos=True)
    return None


def build_tokenizer(file: GGUF) -> PreTrainedTokenizerFast:
    """The file's tokenizer, with its special tokens and chat template.

    Raises `UnsupportedModel` for kinds other than byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`), `BadWeights`
    for a vocabulary that is inconsistent."""
    kind = file.need("tokenizer.ggml.model", str)
    tokens = _vocabulary(file)
    if kind == "gpt2":
        core, bos = _byte_level(file, tokens)
    elif kind == "llama":
        core, bos = _sentencepiece(file, tokens), True
    else:
        raise UnsupportedModel(f"{file.path}: tokenizers of kind {kind!r} are not supported; use the model's safetensors")
    types = _types(file, len(tokens))
    special = [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
    user = [AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER]
    core.add_special_tokens(special)
    core.add_tokens(user)
    named = {role: _named(file, tokens, role) for role in ("bos", "eos", "unknown", "padding")}
    _ends(file, core, tokens, bos)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=named["bos"],
        eos_token=named["eos"],
        unk_token=named["unknown"],
        pad_token=named["padding"],
        chat_template=file.get("tokenizer.chat_template", str),
        clean_up_tokenization_spaces=False,
        model_max_length=int(1e9),
    )


def eos_ids(file: GGUF) -> list[int]:
    """Every token the file names as an end: of the text, of a turn, of a message."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return sorted({i for key in keys if (i := file.get(key, int)) is not None})


def _vocabulary(file: GGUF) -> list[str]:
    """The tokens, without the unused ones that pad the end of the vocabulary."""
    tokens: list[str] = file.need("tokenizer.ggml.tokens", list)
    types = _types(file, len(tokens))
    end = len(tokens)
    while end and types[end - 1] == _UNUSED:
        end -= 1
    if not end or not all(isinstance(t, str) for t in tokens) or len(set(tokens[:end])) != end:
        raise BadWeights(f"{file.path}: its vocabulary is empty or names a token twice; download or convert it again")
    return tokens[:end]


def _types(file: GGUF, n: int) -> Sequence[int]:
    """Token types of the first `n` tokens; all 1 (normal) where the file does not say."""
    types: list[int] = file.get("tokenizer.ggml.token_type", list) or [1] * n
    if len(types) < n:
        raise BadWeights(f"{file.path}: {len(types)} token types for {n} tokens; download or convert it again")
    return types[:n]


def _named(file: GGUF, tokens: Sequence[str], role: str) -> str | None:
    index = file.get(f"tokenizer.ggml.{role}_token_id", int)
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def _byte_level(file: GGUF, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = file.get("tokenizer.ggml.pre", str, "")
    cut = _cut(name)
    if cut is None:
        warnings.warn(
            f"{file.path}: the way its tokenizer cuts text ({name or 'not named'}) is not known; GPT-2's is used, "
            "so prompts may be cut into unusual tokens (the model's safetensors are safe)",
            OutriderWarning,
            stacklevel=2,
        )
        cut = _Cut()
    halves = [str(merge).partition(" ") for merge in file.need("tokenizer.ggml.merges", list)]
    core = _bpe(file, tokens, [(left, right) for left, _, right in halves], ignore_merges=cut.whole)
    split: list[pre_tokenizers.PreTokenizer] = []
    if cut.digits:
        split.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        split.append(pre_tokenizers.Split(Regex(cut.pattern), "isolated"))
    split.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    core.pre_tokenizer = pre_tokenizers.Sequence(split)
    core.decoder = decoders.ByteLevel()
    if cut.nfc:
        core.normalizer = normalizers.NFC()
    return core, cut.bos


def _sentencepiece(file: GGUF, tokens: Sequence[str]) -> Tokenizer:
    unknown = _named(file, tokens, "unknown") or tokens[0]
    core = _bpe(file, tokens, _merges(file, tokens), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    space = [normalizers.Replace(" ", "▁")]
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *space] if prefix else [*space])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else [*back])
    return core


def _bpe(file: GGUF, tokens: Sequence[str], merges: list[tuple[str, str]], **options: object) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        return Tokenizer(BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the tokenizers library raises bare Exception for merges outside the vocabulary
        raise BadWeights(f"{file.path}: its tokenizer is inconsistent ({error}); download or convert it again") from error


def _merges(file: GGUF, tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Byte-pair merges from SentencePiece scores: a piece of higher score is merged earlier, whatever its two halves."""
    scores = file.need("tokenizer.ggml.scores", list)
    if len(scores) < len(tokens):
        raise BadWeights(f"{file.path}: {len(scores)} scores for {len(tokens)} tokens; download or convert it again")
    rank = {token: (-scores[i], i) for i, token in enumerate(tokens)}
    found = [
        (rank[token], rank[token[:cut]][1], rank[token[cut:]][1], token[:cut], token[cut:])
        for token, kind in zip(tokens, _types(file, len(tokens)), strict=True)
        if kind not in (_UNKNOWN, _CONTROL)
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _ends(file: GGUF, core: Tokenizer, tokens: Sequence[str], bos_default: bool) -> None:
    """Which special tokens frame an encoded text."""
    bos, eos = _named(file, tokens, "bos"), _named(file, tokens, "eos")
    first = bos if file.get("tokenizer.ggml.add_bos_token", bool, bos_default) else None
    last = eos if file.get("tokenizer.ggml.add_eos_token", bool, False) else None
    single = [*([first] if first else []), "$A", *([last] if last else [])]
    framing = [(t, core.token_to_id(t)) for t in dict.fromkeys(x for x in (first, last) if x)]
    if framing:
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=framing)
