"""Models without weights, and the sources that their weights are read from, tensor by tensor or part by part.

A rank that keeps a share of a model builds it with Parameters on the meta device and copies its share in; no
process ever holds a whole model:

    loaded = load_model(config, attention="sdpa", device=device, materialize=False)
    part = loaded.source.read_part("model.norm.weight", dim=0, start=0, stop=32, device=device)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import GenerationConfig, PretrainedConfig
from transformers.initialization import no_init_weights

from lockstep.config.model import ModelConfig
from lockstep.errors import ModelError
from lockstep.models import shapes
from lockstep.models.architectures import causal_lm, hf_config
from lockstep.models.folder import check_fit, tensor_files, weight_errors
from lockstep.models.heads import SCORE_WEIGHT, HeadKind, auto_class, scalar_head

log = logging.getLogger(__name__)

_COMPARED_ROWS = 4096  # of two embeddings that should be equal, at a time


class WeightSource(Protocol):
    """Gives the weights of a model whose Parameters are on the meta device."""

    @property
    def device(self) -> torch.device:
        """The device of the model's buffers."""
        ...

    def read(self, name: str, *, device: torch.device) -> Tensor:
        """Read the whole Parameter `name` in the compute dtype, into new memory.

        Raises:
            ModelError: it cannot be read.
        """
        ...

    def read_part(self, name: str, *, dim: int, start: int, stop: int, device: torch.device) -> Tensor:
        """Read entries start:stop along `dim`, bitwise equal to that part of `read`, into new memory.

        Raises:
            ModelError: it cannot be read.
        """
        ...


def module_without_weights(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    head: HeadKind = "logits",
) -> nn.Module:
    """Build a model in eval mode with Parameters on the meta device and real buffers, computed on `device`.

    Args:
        attention: name of the implementation in transformers' AttentionInterface.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # as it is: a tied one stays tied
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    # torch annotates the hook as returning None, and documents that it may return a new Parameter.
    # A global hook of torch, for every module of the process: it must be gone again when this one is built.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        # Buffers depend on no weight and are in no file, so they are made here; of the Parameters only one at
        # a time exists, and nothing is written to it.
        with torch.device(device), no_init_weights():
            module: nn.Module = auto_class(head).from_config(
                config, dtype=dtype, attn_implementation=attention
            )
        causal_lm(module).tie_weights()
    finally:
        hook.remove()
    return module.eval()


def random_source(
    config: PretrainedConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    head: HeadKind = "logits",
) -> tuple[nn.Module, WeightSource]:
    """Build `shapes.random_model` without the weights; returns the module and the source of its weights."""
    module = module_without_weights(config, dtype=dtype, device=device, attention=attention, head=head)
    shapes.set_eos(causal_lm(module), config)
    return module, ShapeSource(module, seed=seed, config=config, device=device)


def folder_source(
    folder: Path, module: nn.Module, *, config: ModelConfig, device: torch.device
) -> WeightSource:
    """Return the source of the weights of `from_pretrained(folder)`; moves the module's buffers to `device`.

    Args:
        module: `module_without_weights` of the folder's config, made on the host as transformers does:
            other devices compute buffers with other last bits.

    Raises:
        ModelError: no or damaged files, or weights that are missing or have another shape.
    """
    source = FolderSource(folder, module, config=config, device=device)
    generates = hasattr(module, "generation_config")
    if generates and (folder / "generation_config.json").is_file():
        causal_lm(module).generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return source


@contextlib.contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Wrap `to_empty`: keep the values of buffers, which to_empty leaves uninitialised, and the ties of
    Parameters, of which it makes one for each name."""
    before = {path: dict(part._buffers) for path, part in module.named_modules()}
    tied = {alias: name for alias, name in aliases(module).items() if alias != name}
    yield
    with torch.no_grad():
        for path, part in module.named_modules():
            for name, old in before[path].items():
                new = part._buffers[name]
                if old is not None and new is not None and new is not old:
                    new.copy_(old)
    for alias, name in tied.items():
        path, _, kind = alias.rpartition(".")
        module.get_submodule(path)._parameters[kind] = module.get_parameter(name)


def aliases(module: nn.Module) -> dict[str, str]:
    """Map every name of every Parameter to the one that `named_parameters` gives it; tied ones have
    several."""
    # Parameters hash by identity, which is what a tie is.
    first = {parameter: name for name, parameter in module.named_parameters()}
    return {name: first[p] for name, p in module.named_parameters(remove_duplicate=False)}


class ShapeSource:
    """Random weights of a `shape:` model, the same that `random_model` draws on the same device."""

    def __init__(
        self, module: nn.Module, *, seed: int, config: PretrainedConfig, device: torch.device
    ) -> None:
        self._seed, self._config, self.device = seed, config, device
        self._names = aliases(module)
        self._like = dict(module.named_parameters())

    def read(self, name: str, *, device: torch.device) -> Tensor:
        """See WeightSource."""
        own = self._names[name]
        parameter = torch.empty_like(self._like[own], device=device, requires_grad=False)
        shapes.fill(own, parameter, seed=self._seed, config=self._config)
        return parameter

    def read_part(self, name: str, *, dim: int, start: int, stop: int, device: torch.device) -> Tensor:
        """See WeightSource. Draws the whole Parameter first: a generator cannot start in the middle."""
        return self.read(name, device=device).narrow(dim, start, stop - start).clone()


class FolderSource:
    """The safetensors files of a model folder; reads no more of them than what is asked for.

    Args:
        config: its name, for errors; unless it cuts layers off, weights that the module does not have are
            worth a warning.

    Raises:
        ModelError: no or damaged files, or weights that are missing or have another shape.
    """

    def __init__(self, folder: Path, module: nn.Module, *, config: ModelConfig, device: torch.device) -> None:
        self._folder, self._model_name, self.device = folder, config.name, device
        self._dtype = next(module.parameters()).dtype
        with self._errors():
            files = tensor_files(folder)
            self._place = _names_in_files(module, files)
        self._fresh: ShapeSource | None = None
        unused: set[str] = set()
        if scalar_head(module) is not None:
            unused = {"lm_head.weight"}
            if SCORE_WEIGHT not in self._place:
                self._fresh = ShapeSource(module, seed=config.seed, config=hf_config(module), device=device)
        self._check(module)
        more = set(files) - {name for name, _ in self._place.values()} - {*aliases(module)} - unused
        if more and config.num_layers is None:
            log.warning("%s: weights that the architecture does not use: %s", folder, sorted(more)[:5])

    def read(self, name: str, *, device: torch.device) -> Tensor:
        """See WeightSource."""
        if self._fresh is not None and name == SCORE_WEIGHT:
            return self._fresh.read(name, device=device)
        return self._read(name, (), device)

    def read_part(self, name: str, *, dim: int, start: int, stop: int, device: torch.device) -> Tensor:
        """See WeightSource."""
        if self._fresh is not None and name == SCORE_WEIGHT:
            return self._fresh.read_part(name, dim=dim, start=start, stop=stop, device=device)
        return self._read(name, (*[slice(None)] * dim, slice(start, stop)), device)

    def _read(self, name: str, part: tuple[slice, ...], device: torch.device) -> Tensor:
        stored, path = self._place[name]
        # Opened for each read: pages of a mapped file that stays open count as this process's memory.
        with self._errors(), safe_open(path, framework="pt") as file:
            values: Tensor = file.get_slice(stored)[part or (...,)]
            # Not `values.to(...)`, which returns the mapped memory
            # itself where dtype and device are already right.
            return torch.empty(values.shape, dtype=self._dtype, device=device).copy_(values)

    def _check(self, module: nn.Module) -> None:
        """Raise ModelError unless every Parameter is in the files with its shape, and tied ones that are
        stored twice are equal."""
        missing: list[str] = []
        mismatched: list[tuple[Any, ...]] = []
        for name, parameter in module.named_parameters():
            if name not in self._place:
                if self._fresh is None or name != SCORE_WEIGHT:
                    missing.append(name)
            elif (shape := self._shape(name)) != tuple(parameter.shape):
                mismatched.append((name, shape, tuple(parameter.shape)))
        check_fit(f"model.name = {self._model_name!r}", missing_keys=missing, mismatched_keys=mismatched)
        for name, own in aliases(module).items():
            if name != own and self._place[name] != self._place[own] and not self._equal(name, own):
                raise ModelError(
                    f"values-differ: model.name = {self._model_name!r}: its config.json ties {name} to "
                    f"{own}, but its files hold other values for each; set tie_word_embeddings = false in "
                    "config.json"
                )

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return weight_errors(self._folder, self._model_name)

    def _shape(self, name: str) -> tuple[int, ...]:
        stored, path = self._place[name]
        with self._errors(), safe_open(path, framework="pt") as file:
            return tuple(file.get_slice(stored).get_shape())

    def _equal(self, left: str, right: str) -> bool:
        shape = self._shape(left)
        if shape != self._shape(right):
            return False
        cpu = torch.device("cpu")
        # In parts: two whole embeddings on the host may be more than a rank's share of memory.
        for start in range(0, shape[0], _COMPARED_ROWS):
            part = (slice(start, min(start + _COMPARED_ROWS, shape[0])),)
            if not torch.equal(self._read(left, part, cpu), self._read(right, part, cpu)):
                return False
        return True


def _names_in_files(module: nn.Module, files: Mapping[str, Path]) -> dict[str, tuple[str, Path]]:
    """Parameter name -> (name in its file, file), for those that are there.

    A checkpoint of the bare decoder has no "model." in front. A tied Parameter may be stored under any of
    its names.
    """
    base = causal_lm(module).base_model_prefix + "."
    with_base = any(name.startswith(base) for name in files)
    known = aliases(module)

    def stored(name: str) -> tuple[str, Path] | None:
        stored = name if with_base else name.removeprefix(base)
        return (stored, files[stored]) if stored in files else None

    own: dict[str, Any] = {name: stored(name) for name in known}
    groups: dict[str, tuple[str, Path]] = {}
    for name, first in known.items():
        if own[name] is not None:
            groups.setdefault(first, own[name])
    return {name: own[name] or groups[first] for name, first in known.items() if first in groups}
