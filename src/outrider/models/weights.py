"""From what a user names as `--model` to a loaded model and its tokenizer."""

from __future__ import annotations

import difflib
import hashlib
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import BadWeights, ModelNotFound, OutOfMemory, OutriderWarning, UnsupportedModel
from . import embedded
from .directory import check_directory, finite
from .embedded import EMBEDDED
from .gguf_file import is_gguf, read_header
from .quantize import quantize as rounded
from .tokenizer import TextTokenizer
from .weight_cache import CachedModel, cache_dir, entries, find, sampled_digest, store

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from .gguf_convert import Converted

__all__ = ["DEFAULT_MODEL", "EMBEDDED", "CachedModel", "Loaded", "Source", "cache_dir", "entries", "fetch", "load", "resolve"]

DEFAULT_MODEL = EMBEDDED
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_SKIPPED = ["*/*", "consolidated*"]

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from. `name` is what to call it; `path` is None for a hub id, which is `name`."""

    kind: Literal["embedded", "gguf", "directory", "hub"]
    name: str
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run: evaluation mode, no gradients, finite weights. `fingerprint` tells weights apart (a hash of
    samples of the files, of the whole file for the embedded model); `chat`: the tokenizer has a chat template."""

    model: PreTrainedModel
    tokenizer: TextTokenizer
    name: str
    fingerprint: str
    chat: bool


def resolve(name: str | Path) -> Source:
    """What `name` means: the embedded model, a directory, a GGUF file (by content), or a hub id ("org/name").

    Asks no network. Raises `ModelNotFound` with what was tried and what comes close, `BadWeights` for other files."""
    text = str(name)
    if text == EMBEDDED:
        return Source("embedded", EMBEDDED, embedded.find())
    try:
        path = Path(text).expanduser()
        if text and path.is_dir():
            return Source("directory", path.resolve().name, path)
        if path.is_file():
            return Source("gguf", path.name, _gguf_file(path))
    except (OSError, RuntimeError, ValueError) as error:  # no permission, no home directory, a NUL in the name
        raise ModelNotFound(f"{text!r} cannot be read: {error}") from error
    if _HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
        return Source("hub", text)
    tried = f"it is no directory, no file, no hub id (org/name) and not the embedded {EMBEDDED}"
    raise ModelNotFound(f"no model {text!r}: {tried}{_close(text, path)}")


def load(
    source: Source,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
    progress: Progress | None = None,
    quantize: str = "none",
) -> Loaded:
    """Loads model and tokenizer. `attn_implementation` is transformers' (None: its choice); `progress` hears a line
    before each slow step. GGUF files are dequantised once to fp32 and kept in `cache_dir()`. `quantize`: see `quantize.py`.

    Raises `ModelNotFound`, `BadWeights`, `UnsupportedModel` or `OutOfMemory`; warns (`OutriderWarning`) without a cache."""
    say = progress or (lambda line: None)
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        source = fetch(source, say)
        if source.kind == "directory":
            model, backend, fingerprint = _from_directory(_path(source), options)
        else:
            model, backend, fingerprint = _from_gguf(source, options, say)
    except OSError as error:
        raise ModelNotFound(f"{source.name} cannot be read: {error}") from error
    tokenizer = TextTokenizer(backend, model.generation_config)
    if quantize != "none":
        say(f"rounding weights to {quantize}")
        rounded(model, quantize, device)
        fingerprint = f"{fingerprint} {quantize}"
    return Loaded(_placed(model, device, source.name), tokenizer, source.name, fingerprint, tokenizer.has_chat)


def fetch(source: Source, progress: Progress | None = None) -> Source:
    """The same, on this disk: a hub's files are downloaded unless they are there already; other sources are as they were."""
    if source.kind != "hub":
        return source
    return Source("directory", source.name, _fetch(source.name, progress or (lambda line: None)))


def fingerprint(source: Source) -> str:
    """What `load` will call these weights, without loading them; a hub's files are fetched. Raises as `load` does."""
    source = fetch(source)
    path = _path(source)
    return sampled_digest(path / "config.json", *check_directory(path)) if source.kind == "directory" else sampled_digest(path)


def _gguf_file(path: Path) -> Path:
    if is_gguf(path):
        return path
    hint = "give its directory" if path.suffix == ".safetensors" else "it does not start with 'GGUF'"
    raise BadWeights(f"{path} is not a GGUF file ({path.stat().st_size:,} bytes): {hint}")


def _close(text: str, path: Path) -> str:
    """A sentence with similar names: the embedded model, files beside the missing one, models in the cache."""
    folder = path.parent
    beside = [p for p in folder.iterdir() if p.is_dir() or p.suffix == ".gguf"] if folder.is_dir() else []
    names = {EMBEDDED.lower(): EMBEDDED, **{p.name.lower(): str(p) for p in beside}}
    found = difflib.get_close_matches(path.name.lower() or text.lower(), list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(names[f] for f in found)}?" if found else f"; try {EMBEDDED}"


def _path(source: Source) -> Path:
    if source.path is None:
        raise ModelNotFound(f"{source.name} has no path")
    return source.path


def _fetch(name: str, say: Progress) -> Path:
    """The hub's files of `name`, from the network or an earlier download."""
    from huggingface_hub import snapshot_download

    say(f"fetching {name} from the Hugging Face hub, unless an earlier download is here")
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED))
    except Exception as error:  # a dozen kinds, from several network libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{name}: no such directory here, and the hub gave nothing ({type(error).__name__}: {reason:.200}). Check the "
            f"name and the network, log in (hf auth login) for gated models, or give a directory, a GGUF file or {EMBEDDED}"
        ) from error


def _from_directory(path: Path, options: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    files = check_directory(path)
    model, backend = _read_model(path, options), _read_tokenizer(path)
    return model, backend, sampled_digest(path / "config.json", *files)


def _from_gguf(source: Source, options: dict[str, Any], say: Progress) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    path = _path(source)
    known = source.kind == "embedded"
    fingerprint = sampled_digest(path)
    changed = path.stat().st_mtime_ns
    key = embedded.SHA256 if known else hashlib.sha256(f"{fingerprint} {changed}".encode()).hexdigest()
    kept = find(source.name, key)
    if kept is not None:
        model, backend, _ = _from_directory(kept, options)
        return model, backend, fingerprint
    if known:
        embedded.verify(path)
    header = read_header(path)
    say(f"dequantising {path.name} ({path.stat().st_size / 2**20:,.0f} MiB), once; the copy goes to {cache_dir()}")
    from .gguf_convert import convert

    converted = convert(header)
    needed = sum(t.numel() * t.element_size() for t in converted.state.values())
    store(source.name, key, needed, lambda directory: _write(converted, directory))
    return _assembled(converted, options), converted.tokenizer, fingerprint


def _write(converted: Converted, directory: Path) -> None:
    """The model as transformers saves it."""
    from safetensors.torch import save_file

    with quiet():
        save_file(converted.state, directory / "model.safetensors", metadata={"format": "pt"})
        converted.config.save_pretrained(directory)
        converted.generation.save_pretrained(directory)
        converted.tokenizer.save_pretrained(directory)


def _assembled(converted: Converted, options: dict[str, Any]) -> PreTrainedModel:
    """The model from weights in memory."""
    with quiet():
        kind = _model_class(converted.config, "the GGUF file")
        model: PreTrainedModel = kind.from_pretrained(None, config=converted.config, state_dict=converted.state, **options)
    model.generation_config = converted.generation
    return model


def _read_model(path: Path, options: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoConfig

    try:
        with quiet():
            config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise UnsupportedModel(f"{path}: transformers cannot read its config.json: {_first(error)}") from error
    kind = _model_class(config, str(path))
    extra = {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    try:
        with quiet():
            model, report = kind.from_pretrained(path, config=config, **extra, **options)
    except Exception as error:
        raise UnsupportedModel(f"{path}: transformers cannot load this model: {_first(error)}") from error
    wrong = sorted(report["missing_keys"]) + sorted(str(k[0]) for k in report["mismatched_keys"])
    if wrong:
        raise BadWeights(f"{path}: {len(wrong)} tensors are missing or of the wrong shape, first {wrong[0]}; download it again")
    if unused := sorted(report["unexpected_keys"]):
        text = f"{path}: {len(unused)} tensors are not used by {type(model).__name__}, first {unused[0]}"
        warnings.warn(text, OutriderWarning, stacklevel=2)
    _check_finite(model, path)
    return model  # type: ignore[no-any-return]


def _check_finite(model: PreTrainedModel, path: Path) -> None:
    """NaN in one weight turns every text to noise, so it is named here (15 ms for 135 M parameters)."""
    for name, values in model.named_parameters():
        if not finite(values):
            raise BadWeights(f"{path}: the tensor {name} holds NaN or infinity; download the model again")


def _read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ModelNotFound(
            f"{path}: its tokenizer cannot be loaded ({_first(error)}); copy tokenizer.json and tokenizer_config.json there"
        ) from error


def _model_class(config: PreTrainedConfig, where: str) -> Any:
    """The class that runs this configuration as a decoder-only language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{where}: {config.model_type!r} is not a decoder-only language model known to transformers")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _placed(model: PreTrainedModel, device: str | torch.device, name: str) -> PreTrainedModel:
    model.requires_grad_(False).eval()
    try:
        placed: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
        return placed
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{name} does not fit on {device}; use a smaller model or a smaller --dtype") from error


def _first(error: Exception) -> str:
    """The first line of an error, for people."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Progress bars, log lines and warnings of transformers off meanwhile."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
