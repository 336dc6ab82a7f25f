"""Checks of a model folder before anything is built from it: it holds plain files that do not lead out, and
the sizes in config.json are those of its weights.

A folder is untrusted. With num_hidden_layers = 1,000,000,000 transformers would build for ever.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from lockstep.common_errors import leads_out
from lockstep.errors import ModelError
from lockstep.models.architectures import has_delta_nets, is_moe, kv_heads
from lockstep.observe.files import read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"

LIMITS: dict[str, int] = {
    "num_hidden_layers": 1024,
    "num_layers": 1024,
    "n_layer": 1024,
    "encoder_layers": 1024,
    "decoder_layers": 1024,
    "hidden_size": 2**17,
    "d_model": 2**17,
    "n_embd": 2**17,
    "intermediate_size": 2**20,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31,
    "num_labels": 2**16,
    "num_experts": 2**12,
    "num_local_experts": 2**12,
}
"""The largest sizes that a config may name: far above every published model, and built within seconds."""
READ = frozenset(
    {".json", ".safetensors", ".jinja", ".model", ".txt"}
    | {".tiktoken", ".bpe", ".codes", ".spm", ".tokenizer"}  # vocabularies of some tokenizers
)
"""Endings of the files that transformers reads from a model folder, besides the .py of trust_remote_code."""
_FOLDERS = ("", "additional_chat_templates")
_EMBEDDING, _HEAD, _SCORE = "embed_tokens.weight", "lm_head.weight", "score.weight"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_folder(folder: Path) -> Path:
    """Check a folder and return it: transformers' tokenizers and models alike begin with config.json.

    Raises:
        ModelError: see `check_files`, `check_adapter` and `check_limits`.
    """
    check_files(folder)
    check_adapter(folder)
    if (folder / CONFIG).is_file():
        check_limits(folder)
    generation = folder / "generation_config.json"
    if generation.is_file() and not isinstance(read_json(generation, ModelError), dict):
        raise ModelError(f"wrong-type: {generation} is not a JSON object; the file is damaged")
    return folder


def check_files(folder: Path) -> None:
    """Raise unless every file that is read from a model folder is a plain file inside it. The Hugging Face
    hub keeps links in snapshots/REVISION to blobs beside it: those count as inside.

    Raises:
        ModelError: names the file.
    """
    root = Path(os.path.realpath(folder))
    inside = [root]
    if root.parent.name == "snapshots":
        inside.append(Path(os.path.realpath(root.parent.parent / "blobs")))
    for part in _FOLDERS:
        place = folder / part
        for entry in sorted(place.iterdir()) if place.is_dir() else ():
            if entry.suffix not in READ | {".py"} or entry.is_dir():
                continue
            real = Path(os.path.realpath(entry))
            if not any(real.is_relative_to(known) for known in inside):
                raise leads_out(ModelError, entry, folder)
            if not real.is_file():
                raise ModelError(f"not-a-file: {entry} is not a regular file; replace it with one")


def check_limits(folder: Path) -> None:
    """Refuse sizes in config.json that no model has, before transformers makes lists of that length.

    Raises:
        ModelError: names the key, or config.json is no JSON object.
    """
    config = read_json(folder / CONFIG, ModelError, root=None)
    if not isinstance(config, dict):
        raise ModelError(f"wrong-type: {folder / CONFIG} is not a JSON object, so it is not a model's config")
    parts = [config]
    while parts:
        part = parts.pop()
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, limit in LIMITS.items():
            value = part.get(key)
            if isinstance(value, int | float) and not -1 <= value <= limit:
                raise ModelError(
                    f"out-of-range: {folder / CONFIG}: {key} = {str(value)[:24]} is not between -1 and "
                    f"{limit}; the file is damaged"
                )


def check_sizes(folder: Path, config: Any, *, name: str) -> None:
    """Compare the sizes of a supported config with the tensors in the folder's weight files; reads only their
    headers. Without weight files there is nothing to compare, and quantised ones have other names and shapes.

    Args:
        name: ModelConfig.name, for errors.

    Raises:
        ModelError: names the key in config.json and both numbers; or a weight file is damaged.
    """
    if not _has_weights(folder) or getattr(config, "quantization_config", None) is not None:
        return
    with weight_errors(folder, name):
        files = tensor_files(folder)
        layers = {int(match.group(1)) for file in files if (match := _LAYER.search(file))}
        wrong = f"model.name = {name!r}: the weight files do not fit the config: "
        if not 1 <= config.num_hidden_layers <= len(layers):
            raise ModelError(
                f"damaged-file: {wrong}config.json says num_hidden_layers = {config.num_hidden_layers}, but "
                f"the files have {len(layers)} layers"
            )
        for tensor, (keys, expected) in _expected(config).items():
            names = [
                f"model.{tensor}",
                f"model.language_model.{tensor}",
                tensor,
                *([_HEAD] if tensor == _EMBEDDING else ()),
            ]  # they may be tied
            stored = next((known for known in names if known in files), None)
            if stored is None:  # another name of some architectures; what is missing is found when they load
                continue
            with safe_open(files[stored], framework="pt") as file:
                shape = tuple(file.get_slice(stored).get_shape())
            if shape != expected:
                sizes = ", ".join(f"{key} = {getattr(config, key, None)}" for key in keys)
                raise ModelError(
                    f"wrong-shape: {wrong}mismatched_keys: config.json says {sizes}, which gives {stored} "
                    f"the shape {expected}, but its shape in the file is {shape}"
                )


def check_score(folder: Path, *, name: str) -> None:
    """Refuse a folder whose scalar head gives more than one number.

    Args:
        name: ModelConfig.name, for errors.

    Raises:
        ModelError: the head's shape; or a weight file is damaged.
    """
    with weight_errors(folder, name):
        files = tensor_files(folder)
        if _SCORE not in files:
            return
        with safe_open(files[_SCORE], framework="pt") as file:
            labels, *_ = file.get_slice(_SCORE).get_shape()
    if labels != 1:
        raise ModelError(
            f"wrong-shape: {name!r}: its head {_SCORE} computes {labels} numbers per token, but a value or "
            "reward is a single number; choose a sequence classifier with num_labels = 1, or a causal LM, "
            "which gets a fresh head"
        )


def _has_weights(folder: Path) -> bool:
    """Return whether there is a weight file, or an index with a name outside the folder; an index alone may
    have been fetched with the config."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return (folder / WEIGHTS).is_file()
    names = _weight_map(folder / INDEX).values()
    return any(Path(name).name != name or (folder / name).is_file() for name in names)


def check_fit(what: str, **misfits: Iterable[Any]) -> None:
    """Raise if weights of a module and of its files do not fit together.

    Args:
        what: the model, for the message.
        misfits: names, or what is said of each, as transformers calls them: missing_keys, mismatched_keys.

    Raises:
        ModelError: the first of each.
    """
    wrong = {kind: found for kind, names in misfits.items() if (found := sorted(names))}
    if wrong:
        listed = "; ".join(f"{kind} {found[:5]} ({len(found)} in all)" for kind, found in wrong.items())
        raise ModelError(f"wrong-shape: {what}: the weight files do not fit the config: {listed}")


def check_total(folder: Path, module: nn.Module, *, name: str) -> None:
    """Raise if a module of any architecture, on the meta device, has many more weights than the files.

    Raises:
        ModelError: both numbers; or a weight file is damaged or missing.
    """
    stored = 0
    with weight_errors(folder, name):
        for tensor, path in tensor_files(folder).items():
            with safe_open(path, framework="pt") as file:
                stored += math.prod(file.get_slice(tensor).get_shape())
    needed = sum(parameter.numel() for parameter in module.parameters())
    if needed > 2 * stored + _SMALL:
        raise ModelError(
            f"wrong-shape: model.name = {name!r}: the weight files do not fit the config: its sizes in "
            f"config.json require {needed:,} weights, but the files contain {stored:,}"
        )


_SMALL = 2**20


def _expected(config: Any) -> dict[str, tuple[tuple[str, ...], tuple[int, int]]]:
    """Tensor, as most architectures name it -> (keys of config.json that decide its shape, its shape)."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    head_keys = ("head_dim", "hidden_size")
    gated = (
        2 if has_delta_nets(config) else 1
    )  # attention beside delta nets has a gate as wide as its queries
    return {
        _EMBEDDING: (("vocab_size", "hidden_size"), (config.vocab_size, hidden)),
        "layers.0.self_attn.q_proj.weight": (
            ("num_attention_heads", *head_keys),
            (gated * heads * head_dim, hidden),
        ),
        "layers.0.self_attn.k_proj.weight": (
            ("num_key_value_heads", *head_keys),
            (kv_heads(config) * head_dim, hidden),
        ),
        **_expected_mlp(config),
    }


def _expected_mlp(config: Any) -> dict[str, tuple[tuple[str, ...], tuple[int, int]]]:
    """Experts come under several names, so of a model with experts nothing is expected."""
    if is_moe(config):
        return {}
    shape = (config.intermediate_size, config.hidden_size)
    return {"layers.0.mlp.gate_proj.weight": (("intermediate_size", "hidden_size"), shape)}


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return name of every stored tensor -> its file: one file, or several with an index, as transformers
    reads.

    Raises:
        FileNotFoundError, SafetensorError, ModelError: no weights, or damaged ones.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    if not index.is_file():
        raise FileNotFoundError(f"it has neither {single.name} nor {index.name}")
    files: dict[str, Path] = {}
    for name in dict.fromkeys(_weight_map(index).values()):
        if Path(name).name != name:
            raise FileNotFoundError(f"{index.name} names {name!r}, which is not a file in the folder")
        with safe_open(folder / name, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), folder / name)
    return files


def _weight_map(index: Path) -> Mapping[str, str]:
    content = read_json(index, ModelError)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"missing-field: {index} has no weight_map of names to files; download it again")
    if not isinstance(content.get("metadata"), dict):
        raise ModelError(
            f'missing-field: {index}: has no "metadata", which transformers reads; add "metadata": {{}}'
        )
    return names


@contextlib.contextmanager
def weight_errors(folder: Path, name: str) -> Iterator[None]:
    """Turn errors of weight files into ModelErrors; `name` is ModelConfig.name."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot-read: model.name = {name!r}: {folder} contains no readable safetensors weights "
            f"({error}); pickled weights are not read, so convert them with "
            "save_pretrained(safe_serialization=True)"
        ) from error
    except (SafetensorError, KeyError) as error:
        raise ModelError(
            f"damaged-file: model.name = {name!r}: a weight file in {folder} is damaged ({error}); download "
            "it again"
        ) from error


# Adapter files of peft in a model folder: they are never loaded.
#
# A folder of a whole model may hold them, as merging leaves it. transformers then loads the adapter over the
# weights where peft is installed, other readers do not, and some engines read every safetensors file that is
# there. Here the model is the folder's own weights, everywhere.


log = logging.getLogger(__name__)

ADAPTER = "adapter_config.json"
ADAPTER_PREFIX = "adapter_"
"""Begins the names of all files that peft writes."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def check_adapter(folder: Path) -> None:
    """Say once that an adapter in a model folder is not loaded.

    Raises:
        ModelError: the folder has an adapter and no weights of its own.
    """
    if not (folder / ADAPTER).exists():
        return
    if (folder / "config.json").is_file() and any((folder / name).is_file() for name in _WEIGHTS):
        _say(folder)
        return
    raise ModelError(
        f"wrong-kind-of-file: {folder} contains an adapter ({ADAPTER}) but no model weights, and adapters "
        "are not loaded. Merge it into the model that it was trained on, add the tokenizer, and name the "
        "merged folder: "
        f"peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(MERGED)"
    )


@functools.lru_cache(maxsize=64)
def _say(folder: Path) -> None:
    log.warning(
        "%s is not loaded: only the folder's model weights are used. If the adapter is not merged into "
        "them, merge it and name the merged folder; otherwise remove the file",
        folder / ADAPTER,
    )


@contextlib.contextmanager
def without_adapter(folder: Path) -> Iterator[Path]:
    """Give a folder to read, without an adapter's files: the folder itself if it has none."""
    if not (folder / ADAPTER).exists():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-model-") as place:
        for entry in _others(folder):
            (Path(place) / entry.name).symlink_to(entry.resolve())
        yield Path(place)


def copy_without_adapter(folder: Path, place: Path) -> Path:
    """Fill `place`, a folder of ours, with the files of a model folder, without an adapter's: links, where
    the file system can make them."""
    place.mkdir(parents=True, exist_ok=True)
    for entry in _others(folder):
        if entry.is_dir():
            shutil.copytree(entry, place / entry.name, dirs_exist_ok=True, copy_function=_link)
        else:
            _link(str(entry), str(place / entry.name))
    return place


def _link(file: str, copy: str) -> None:
    Path(copy).unlink(missing_ok=True)  # a link of an earlier start
    try:
        os.link(Path(file).resolve(), copy)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, copy)


def _others(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if not entry.name.startswith(ADAPTER_PREFIX)]
