"""Folders of multimodal models whose text part is trained: Qwen 3.5 is published with a vision tower.

folder ─► text part: config, weights ─► trained ─┐
   └───── the rest: tower, its config ───────────┴─► exported folder, of the same kind
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from lockstep.errors import ModelError
from lockstep.models.architectures import architecture_of, hf_config
from lockstep.models.folder import CONFIG, INDEX, WEIGHTS, tensor_files, weight_errors
from lockstep.models.heads import scalar_head
from lockstep.models.published import forget_quantisation
from lockstep.observe.files import read_json, write_json
from lockstep.observe.tensor_file import save_tensors

PREFIX = "model.language_model."
"""Begins the names of the decoder's weights in such files, where the text model says "model."."""
_DECODER = "model."
_HEAD = "lm_head.weight"
_FOLDER = "wrapped_in"
_TEXT, _TOWER = "model-text.safetensors", "model-tower.safetensors"
_OF_THE_TOWER = ("*preprocessor_config.json", "processor_config.json")


def text_part(config: PretrainedConfig, *, name: str) -> PretrainedConfig:
    """Return the config of the text model in a known wrapper, and any other config as it is.

    Args:
        name: ModelConfig.name, for errors.

    Raises:
        ModelError: the wrapper's weights are quantised.
    """
    record = architecture_of(config)
    if record is None or record.wrapper != config.model_type:
        return config
    forget_quantisation(config, name=name)
    text: PretrainedConfig = config.get_text_config()
    return text


def remember_folder(module: nn.Module, folder: Path | None) -> None:
    """Let exports of a causal LM keep the rest of its folder, if it has one and that is a wrapper's."""
    record = architecture_of(hf_config(module))
    if folder is None or record is None or not record.wrapper or scalar_head(module) is not None:
        return
    if _read(folder / CONFIG).get("model_type") == record.wrapper:
        setattr(module, _FOLDER, folder)


def published_name(module: nn.Module, name: str) -> str:
    """Return the name that a weight of `module` has in files: another one if `remember_folder` knows it."""
    if not hasattr(module, _FOLDER) or not name.startswith(_DECODER) or name.startswith(PREFIX):
        return name
    return PREFIX + name.removeprefix(_DECODER)


def wrap_export(module: nn.Module, directory: Path, *, name: Path) -> None:
    """Add to a folder that was just written, of a module that `remember_folder` knows, the rest of the
    wrapper: its config, and its other weights, untouched.

    Args:
        name: the folder's later name, for errors.

    Raises:
        ModelError: the model's own folder cannot be read any more.
    """
    folder: Path | None = getattr(module, _FOLDER, None)
    if folder is None:
        return
    text = _read(directory / CONFIG)
    written = {
        key: text.pop(key) for key in ("architectures", "transformers_version", "dtype") if key in text
    }
    whole = _read(folder / CONFIG) | {"text_config": text | {"dtype": written.get("dtype")}}
    whole |= {key: written[key] for key in ("dtype", "transformers_version") if key in written}
    write_json(directory / CONFIG, whole)
    for pattern in _OF_THE_TOWER:
        for file in folder.glob(pattern):
            shutil.copyfile(file, directory / file.name)
    with weight_errors(folder, str(name)):
        _add_weights(directory, _other_weights(folder))


def _other_weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for tensor, path in tensor_files(folder).items():
        if not tensor.startswith(PREFIX) and tensor != _HEAD:
            with safe_open(path, framework="pt") as file:
                found[tensor] = file.get_tensor(tensor)
    return found


def _add_weights(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Add a file with tensors, and name all files in an index."""
    if (directory / WEIGHTS).is_file():
        (directory / WEIGHTS).rename(directory / _TEXT)
        with safe_open(directory / _TEXT, framework="pt") as file:
            places = dict.fromkeys(file.keys(), _TEXT)
    else:
        places = {tensor: path.name for tensor, path in tensor_files(directory).items()}
    save_tensors(tensors, directory / _TOWER, metadata={"format": "pt"})
    places |= dict.fromkeys(tensors, _TOWER)
    total = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_json(directory / INDEX, index)


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_json(file, ModelError)
    return content
