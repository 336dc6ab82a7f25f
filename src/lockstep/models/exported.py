"""A model exported for an engine in another process: a plain Hugging Face folder, and its sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from lockstep.config.model import ModelConfig
from lockstep.errors import ModelError
from lockstep.models.adapter_files import ADAPTER, ADAPTER_PREFIX, copy_without_adapter
from lockstep.models.architectures import check_rope
from lockstep.models.dtypes import resolve_dtype
from lockstep.models.export import export_hf
from lockstep.models.load import (
    LoadedModel,
    keep_layers,
    load_model,
    load_tokenizer,
    model_folder,
    read_config,
)
from lockstep.models.shapes import PREFIX, shape_config
from lockstep.observe.files import read_json

# Pieces of each file, its ends included: reading all of a large model would take minutes.
_PIECES = 64
_PIECE_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The sizes that prompts must fit, known without the weights."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_positions: int
    """Longest prompt and completion together, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModel:
    """A folder with config, weights and, if there is one, tokenizer."""

    folder: Path
    dtype: str
    """Without "torch."."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None


def model_facts(config: ModelConfig) -> ModelFacts:
    """Read config and tokenizer of a model.

    Raises:
        ModelError: the model cannot be found, or its rotary embedding is not supported.
    """
    hf_config = (
        shape_config(config.name.removeprefix(PREFIX))
        if config.name.startswith(PREFIX)
        else read_config(model_folder(config), config)
    )
    if config.num_layers is not None:
        keep_layers(hf_config, config.num_layers)
    check_rope(hf_config)  # an engine of its own would serve it, with other numbers than transformers
    text = hf_config.get_text_config()
    return ModelFacts(
        tokenizer=load_tokenizer(config),
        vocab_size=int(text.vocab_size),
        max_positions=int(text.max_position_embeddings),
    )


def exported_folder(config: ModelConfig, *, device: torch.device, work_dir: Path) -> ExportedModel:
    """Return a model's folder: its own if an engine can load it unchanged, else `work_dir`/model: written for
    random weights (`shape:`) and models of which only some layers are kept, or without an adapter's files.

    Raises:
        ModelError: see lockstep.models.load.load_model.
    """
    if config.name.startswith(PREFIX) or config.num_layers is not None:
        return export_model(
            load_model(config, attention="sdpa", device=torch.device("cpu")), work_dir=work_dir
        )
    folder = model_folder(config)
    text = read_config(folder, config).get_text_config()
    tokenizer = load_tokenizer(config)
    file = folder / "generation_config.json"
    generation = read_json(file, ModelError) if file.is_file() else {}
    sources = (
        generation.get("eos_token_id"),
        getattr(text, "eos_token_id", None),
        None if tokenizer is None else tokenizer.eos_token_id,
    )
    if (folder / ADAPTER).exists():  # an engine may read every safetensors file of a folder
        folder = copy_without_adapter(folder, work_dir / "model")
    return ExportedModel(
        folder=folder,
        dtype=str(resolve_dtype(config.dtype, device)).removeprefix("torch."),
        vocab_size=int(text.vocab_size),
        eos_token_ids=tuple(sorted({i for source in sources for i in _ids(source)})),
        tokenizer=tokenizer,
    )


def export_model(model: LoadedModel, *, work_dir: Path) -> ExportedModel:
    """Write a loaded model to `work_dir`/model, LoRA merged in."""
    folder = work_dir / "model"
    export_hf(model.module, model.tokenizer, folder)
    text = read_config(folder, ModelConfig(name=str(folder))).get_text_config()
    return ExportedModel(
        folder=folder,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=int(text.vocab_size),
        eos_token_ids=model.eos_token_ids,
        tokenizer=model.tokenizer,
    )


def weights_fingerprint(config: ModelConfig, *, more: Path | None = None) -> str:
    """Hash a model's weights, to tell apart weights under the same name: the files' names and sizes, and 64
    pieces spread over each file. Trained weights differ everywhere, so pieces are enough.

    Args:
        more: a folder of weights that are loaded over the model's own.

    Raises:
        ModelError: the model cannot be found.
    """
    digest = hashlib.blake2b(digest_size=16)
    if config.name.startswith(PREFIX):
        digest.update(f"{config.name} {config.seed} {config.dtype}".encode())
    else:
        _add_folder(digest, model_folder(config))
    if more is not None:
        _add_folder(digest, more)
    return digest.hexdigest()


def _add_folder(digest: Any, folder: Path) -> None:
    for file in sorted(folder.rglob("*")):
        if file.name.startswith(ADAPTER_PREFIX):  # not loaded
            continue
        if file.is_file() and file.suffix in (".safetensors", ".json", ".jinja", ".model"):
            digest.update(f"{file.relative_to(folder)} {file.stat().st_size}".encode())
            for piece in _pieces(file):
                digest.update(piece)


def _pieces(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as data:
        for number in range(_PIECES):
            data.seek(number * max(size - _PIECE_BYTES, 0) // (_PIECES - 1))
            yield data.read(_PIECE_BYTES)


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else value
