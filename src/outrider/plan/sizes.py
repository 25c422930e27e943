"""How big a model is, from its weights' headers, or from `config.json` alone where the weights are not there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import BadWeights, ModelNotFound, UnsupportedModel
from ..models import weights
from ..models.directory import read_json
from ..models.footprint import Footprint, footprint, of_shapes
from ..models.gguf_file import read_header
from ..models.weights import Source

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Size:
    """`read`: numbers that a pass reads, without an input embedding that is not the head. `family` and `vocab`: what must agree
    for a draft to be understood without translation. `experts`: how many a layer has (0: it is dense). `context`: tokens it was
    trained for (0: unknown)."""

    name: str
    footprint: Footprint
    read: int
    family: str
    vocab: int
    experts: int = 0
    context: int = 0

    @property
    def parameters(self) -> int:
        return self.footprint.parameters

    @property
    def layers(self) -> int:
        return self.footprint.layers

    @property
    def kv(self) -> int:
        """Numbers of one token's keys and values."""
        return self.footprint.kv

    def read_bytes(self, dtype: torch.dtype, quantize: str = "none") -> int:
        """Bytes that a pass reads."""
        return self.footprint.bytes(dtype, quantize) - (self.parameters - self.read) * dtype.itemsize


def size(name: str) -> Size:
    """Of a directory (weights or `config.json` alone), a `config.json`, a GGUF file, the embedded model, or a hub id, of which
    only the configuration is fetched. Raises `OutriderError`s for what is none of these."""
    path = Path(name).expanduser()
    if path.name == CONFIG and path.is_file():
        return _configured(path.parent.name or name, path)
    source = weights.resolve(name)
    if source.kind == "hub":
        return _configured(name, _fetch(name))
    if source.kind == "directory" and source.path is not None:
        return _directory(source, source.path)
    return _gguf(source)


def _directory(source: Source, path: Path) -> Size:
    if not any(path.glob("*.safetensors")):
        if not (path / CONFIG).is_file():
            raise ModelNotFound(f"{path} has no {CONFIG}; give a model's directory, or its {CONFIG}")
        return _configured(source.name, path / CONFIG)
    return _measured(source.name, read_json(path / CONFIG), footprint(source))


def _configured(name: str, config: Path) -> Size:
    """All shapes, from a model that is made of them without any numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = read_json(config)
    try:
        made = AutoConfig.from_pretrained(str(config))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
    except Exception as error:  # transformers raises anything for a configuration it does not like
        raise UnsupportedModel(f"{config} does not describe a language model that transformers knows ({error!r:.120})") from None
    shapes = {key: tuple(value.shape) for key, value in model.named_parameters()}
    return _measured(name, values, of_shapes(shapes, values.get("text_config") or values))


def _measured(name: str, values: dict[str, Any], found: Footprint) -> Size:
    inner = values.get("text_config") or values
    vocab, hidden = int(inner.get("vocab_size") or 0), int(inner.get("hidden_size") or 0)
    tied = bool(values.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)))
    experts = int(inner.get("num_local_experts") or inner.get("num_experts") or inner.get("n_routed_experts") or 0)
    read = found.parameters - (0 if tied else vocab * hidden)
    if read <= 0 or not found.layers:
        raise BadWeights(f"the {CONFIG} of {name} lacks sizes (vocab_size, hidden_size, num_hidden_layers); get it again")
    family = str(inner.get("model_type") or "")
    return Size(name, found, read, family, vocab, experts, int(inner.get("max_position_embeddings") or 0))


def _gguf(source: Source) -> Size:
    if source.path is None:
        raise ModelNotFound(f"{source.name} has no path")
    header, found = read_header(source.path), footprint(source)
    family = header.get("general.architecture", str, "")
    embedding = header.tensors["token_embd.weight"].shape
    tied = "output.weight" not in header.tensors
    read = found.parameters - (0 if tied else embedding[0] * embedding[1])
    context = int(header.meta.get(f"{family}.context_length", 0))
    return Size(source.name, found, read, family, embedding[0], context=context)


def _fetch(name: str) -> Path:
    """A hub model's configuration."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, CONFIG))
    except Exception as error:  # no network, no such model, no permission
        raise ModelNotFound(
            f"the configuration of {name} cannot be had ({error!r:.120}); give a directory with its {CONFIG}"
        ) from None
