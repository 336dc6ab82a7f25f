"""Weights that inputs need: stored beside a recording, or the checkpoints of the run that it is in.

A folder holds model.safetensors with every Parameter and persistent buffer under its name; of a module with
LoRA layers only the adapters, the rest being the base model that the recording names. A checkpoint of a run
holds a file of the same name and content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.common_errors import cannot_write, leads_out, other_shape, other_tensors
from lockstep.errors import RecordingError
from lockstep.observe.files import open_plain
from lockstep.observe.tensor_file import DTYPES
from lockstep.observe.text import printable
from lockstep.recording.files import TensorFile, fingerprint, module_tensors, write_tensors
from lockstep.schema.recording import InputMeta

FILE = "model.safetensors"
_FORMAT = "lockstep-weights"
_NAME = re.compile(r"(weights|\.\./checkpoints)/[A-Za-z0-9_-][A-Za-z0-9._-]*(/value)?", re.ASCII)
_ADAPTER = ".lora_"


def save_weights(module: nn.Module, directory: Path, *, known: str | None = None) -> str:
    """Store the module's weights in `directory`, safe on the disk; nothing is written when just these are
    there already.

    Args:
        known: their fingerprint, where it has been computed.

    Returns:
        The fingerprint of all of the module's tensors.

    Raises:
        RecordingError: no room on the disk, or the file cannot be written.
    """
    return save_tensors(module_tensors(module), directory, known=known)


def save_tensors(tensors: Mapping[str, Tensor], directory: Path, *, known: str | None = None) -> str:
    """Like `save_weights`, for the `module_tensors` of a whole module."""
    digest = known or fingerprint(tensors.items())
    path = directory / FILE
    if path.exists() and stored_fingerprint(directory) == digest:
        return digest
    stored = _adapters(tensors) or tensors
    of_file = digest if len(stored) == len(tensors) else fingerprint(stored.items())
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(
            RecordingError, directory, error, "weights are stored there", done="created"
        ) from error
    metadata = {"format": "pt", "lockstep": _FORMAT, "fingerprint": digest, "stored": of_file}
    write_tensors(path, stored, metadata, sync=True)
    return digest


def load_weights(module: nn.Module, directory: Path, *, cast: bool = False, partial: bool = False) -> str:
    """Copy stored weights into the module, in place.

    Args:
        directory: of `save_weights`, or a checkpoint of a run.
        cast: the module may have another dtype than the file.
        partial: the file may hold tensors that the module lacks (a module of fewer layers).

    Returns:
        The fingerprint of the weights as they are stored. Where only adapters are, it is that of the module
        with them; under `cast` the one that was computed when they were stored, if there is one.

    Raises:
        RecordingError: missing, damaged, or of another model; the module is as it was.
    """
    file = TensorFile(directory / FILE, directory)
    own = module_tensors(module)
    only_adapters = _only_adapters(file)
    targets = _adapters(own) if only_adapters else own
    _check(file, targets, only_adapters=only_adapters, cast=cast, partial=partial)
    of_file = _checked_fingerprint(file)
    with torch.no_grad():
        for name, tensor in _read(file, targets):
            targets[name].copy_(tensor)
    if not only_adapters:
        return of_file
    if cast and "fingerprint" in file.metadata:
        return file.metadata["fingerprint"]
    return fingerprint(own.items())


def verified(directory: Path, *, weights: str | None, known: dict[Path, str] | None = None) -> None:
    """Compare every tensor of the weights in `directory` with the known fingerprint.

    Args:
        weights: fingerprint of the module that they belong to; None: not known. One that was stored with
            adapters is of more tensors than the file has, and is compared with the file's own word only.
        known: fingerprints of files that were read before; this one is added.

    Raises:
        RecordingError: missing, a link that leads elsewhere, damaged, or other weights.
    """
    file = TensorFile(directory / FILE, directory)
    of_file = _checked_fingerprint(file, known)
    of_module = file.metadata.get("fingerprint", None if _only_adapters(file) else of_file)
    if weights is not None and of_module is not None and of_module != weights:
        raise RecordingError(
            f"hash-differs: {file.path} contains the weights {printable(of_module[:80])}, but the input was "
            f"recorded with {printable(weights[:80])}; the file is damaged or belongs to another run"
        )


def _only_adapters(file: TensorFile) -> bool:
    return bool(file.tensors) and all(_ADAPTER in name for name in file.tensors)


def _fingerprint_of(file: TensorFile, known: dict[Path, str] | None) -> str:
    known = {} if known is None else known
    if file.path not in known:
        known[file.path] = fingerprint(_read(file, file.tensors))
    return known[file.path]


def _checked_fingerprint(file: TensorFile, known: dict[Path, str] | None = None) -> str:
    """Of the file's tensors. Raises RecordingError: it is not the one that was stored with them."""
    of_file = _fingerprint_of(file, known)
    stored = file.metadata.get("stored", of_file)
    if stored != of_file:
        raise RecordingError(
            f"hash-differs: {file.path}: its tensors have the fingerprint {of_file}, but "
            f"{printable(stored[:80])} was stored; the file is damaged"
        )
    return of_file


def stored_fingerprint(directory: Path) -> str | None:
    """The fingerprint that the file in `directory` states; None: it states none (a checkpoint).

    Raises:
        RecordingError: the file is missing or damaged.
    """
    return TensorFile(directory / FILE, directory).metadata.get("fingerprint")


def find_weights(recording: Path, meta: InputMeta, *, known: dict[Path, str] | None = None) -> Path | None:
    """Find the folder with the weights that an input needs: the one that it names; else those that are stored
    for its step, or the run's checkpoint of that step, if their fingerprint is the input's. None: there is
    none.

    One optimizer step per batch: checkpoint N holds what the inputs of step N see, also when it was saved
    after they were recorded. Later optimizer steps of a batch have other weights, which no checkpoint holds.
    A checkpoint of adapters cannot be told apart before it is loaded: compare what `load_weights` returns.

    Args:
        known: fingerprints of files that were read before; more are added.

    Raises:
        RecordingError: `meta.checkpoint` leads out of the recording and the run's checkpoints; or a file is
            damaged.
    """
    of_run = f"../checkpoints/step-{meta.step:06d}"
    names = [f"weights/step-{meta.step:06d}", of_run, f"{of_run}/value"]
    if meta.checkpoint is not None:
        if not _NAME.fullmatch(meta.checkpoint):
            raise RecordingError(
                f"wrong-field: {recording}: field checkpoint of input {tuple(meta.key)} is "
                f"{meta.checkpoint[:80]!r}; it must be weights/NAME or ../checkpoints/NAME"
            )
        folder = _inside(recording, meta.checkpoint)
        if folder is not None:
            return folder
    for name in names:
        folder = None if name == meta.checkpoint else _inside(recording, name)
        if folder is not None and _may_be(folder, meta.weights, known):
            return folder
    return None


def _inside(recording: Path, name: str) -> Path | None:
    """The folder `name`, if it holds weights. Raises RecordingError: it or its file is a link that leads
    elsewhere, or the file is no plain one."""
    root = recording.resolve()
    folder = (root.parent if name.startswith("../") else root) / name.removeprefix("../")
    if not os.path.lexists(folder / FILE):
        return None
    if folder.resolve() != folder:
        raise leads_out(RecordingError, folder, root.parent if name.startswith("../") else "the recording")
    with open_plain(folder / FILE, RecordingError, root=folder):
        return folder


def _may_be(folder: Path, weights: str | None, known: dict[Path, str] | None) -> bool:
    """Whether the fingerprint of what lies in `folder` is `weights`, as far as the file alone tells."""
    file = TensorFile(folder / FILE, folder)
    stated = file.metadata.get("fingerprint")
    if weights is None or stated is not None:
        return weights is None or stated == weights
    if _only_adapters(file):
        return True
    return _fingerprint_of(file, known) == weights


def _adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if _ADAPTER in name}


def _read(file: TensorFile, names: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """One tensor at a time."""
    for name in names:
        yield name, file.read_tensor(name)


def _check(
    file: TensorFile, targets: Mapping[str, Tensor], *, only_adapters: bool, cast: bool, partial: bool
) -> None:
    """Names, shapes and dtypes. Raises RecordingError."""
    if only_adapters and not targets:
        raise RecordingError(
            f"other-model: {file.path} contains LoRA adapters, but the model has none; load it with the "
            "model.lora of the recording"
        )
    missing = sorted(targets.keys() - file.tensors.keys())
    extra = [] if partial else sorted(file.tensors.keys() - targets.keys())
    if missing or extra:
        raise other_tensors(RecordingError, str(file.path), missing, extra, code="other-model")
    for name, tensor in targets.items():
        span = file.tensors[name]
        if span.shape != tuple(tensor.shape):
            raise other_shape(RecordingError, f"{file.path}: tensor {name!r}", span.shape, tensor.shape)
        if DTYPES[span.dtype] != tensor.dtype and not cast:
            raise RecordingError(
                f"wrong-type: {file.path}: tensor {name!r} is {DTYPES[span.dtype]}, but the model has "
                f"{tensor.dtype}; load the model in the recorded dtype"
            )
