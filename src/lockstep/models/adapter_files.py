"""Adapter files of peft in a model folder: they are never loaded.

A folder of a whole model may hold them, as merging leaves it. transformers then loads the adapter over the
weights where peft is installed, other readers do not, and some engines read every safetensors file that is
there. Here the model is the folder's own weights, everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import ModelError

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
        f"wrong-kind-of-file: {folder}: holds an adapter ({ADAPTER}) and no weights of a model; adapters "
        "are not loaded. Merge it into the model that it was trained on, add the tokenizer, and name the "
        "merged folder: "
        f"peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(MERGED)",
        path=folder / ADAPTER,
    )


@functools.lru_cache(maxsize=64)
def _say(folder: Path) -> None:
    log.warning(
        "%s is not loaded: the model is the folder's own weights. If the adapter is not merged into them, "
        "merge it and name the merged folder; else remove the file",
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
