"""Write the policy as a Hugging Face folder: from one module, or from whole tensors that come one by one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, modeling_utils
from transformers import PreTrainedTokenizerBase as Tokenizer

from lockstep.common_errors import other_tensors
from lockstep.config.model import ModelConfig
from lockstep.errors import ModelError
from lockstep.models.architectures import (
    causal_lm,
    check_rope,
    hf_config,
    max_positions,
    silence_transformers,
)
from lockstep.models.dtypes import resolve_dtype
from lockstep.models.folder import ADAPTER, ADAPTER_PREFIX, copy_without_adapter
from lockstep.models.load import (
    LoadedModel,
    load_model,
    load_tokenizer,
    model_folder,
    read_config,
    skeleton,
)
from lockstep.models.lora import merged_state_dict
from lockstep.models.miniature import keep_layers
from lockstep.models.published import as_published, quant_method
from lockstep.models.shapes import PREFIX, shape_config
from lockstep.models.source import aliases
from lockstep.models.wrapper import published_name, wrap_export
from lockstep.observe.files import naming, read_json, write_atomic
from lockstep.observe.tensor_file import save_tensors
from lockstep.ranks.process_group import broadcast_object

FILE_BYTES = 2 * 1024**3
"""Size of one weight file; writing it needs as much host memory."""


def export_hf(module: nn.Module, tokenizer: Tokenizer | None, directory: Path) -> None:
    """Write config, generation config, safetensors in the module's dtype and tokenizer, LoRA merged in.

    `from_pretrained` loads the folder with all keys matched. It is written to a temporary folder and renamed:
    a reader sees the old folder, none, or the whole new one. The module itself is not changed.

    Raises:
        ModelError: `directory` is there and is neither empty nor a model folder, so it is not replaced; or a
            file cannot be written, as on a full disk. An older export in its place stays.
    """
    directory = Path(directory)
    temporary: Path | None = None
    try:
        temporary = _folder_beside(directory)
        # A bare skeleton is saved in the module's place: save_pretrained writes into what it saves' config.
        bare = causal_lm(skeleton(module, hf_config(module)._attn_implementation))
        with naming(temporary), silence_transformers(), _never_wrapped():
            _write_as_read(bare)
            bare.save_pretrained(temporary, state_dict=_in_files(module, merged_state_dict(module)))
            wrap_export(module, temporary, name=directory)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
        _replace(temporary, directory)
    except OSError as error:
        raise _not_exported(directory, _reason(error, temporary, directory)) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _in_files(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of files; of tied ones save_pretrained drops all but one by their own names."""
    named = {published_name(module, name): name for name in tensors}
    if all(name == published for published, name in named.items()):
        return dict(tensors)
    first = aliases(module)
    return {published: tensors[name] for published, name in named.items() if first.get(name, name) == name}


class _AsRead(GenerationConfig):
    """Written without being judged: transformers 5.17 refuses to save some that it has loaded, such as a
    temperature without do_sample; 5.23 refuses only what was changed. Remove with a lower bound of 5.23."""

    def validate(self, *_: Any, **__: Any) -> None:
        """See GenerationConfig."""


def _write_as_read(bare: nn.Module) -> None:
    generation = getattr(bare, "generation_config", None)  # a classifier has none
    if generation is not None:
        generation.__class__ = _AsRead


def export_tensors(
    module: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    tokenizer: Tokenizer | None,
    directory: Path,
    dtype: torch.dtype,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Export, as `export_hf`, a module whose weights are sharded over ranks; collective, rank 0 of the
    default group writes.

    Args:
        module: a causal LM of the right class and config; its own weights are not read and may have any
            shape and dtype.
        tensors: Hugging Face name -> whole tensor. Making the next one may be collective: every rank goes
            through all of them, whatever happens to the files. Tied weights may come under every name.
        dtype: of the written tensors.
        file_bytes: a new file is begun when one has this size.

    Raises:
        ModelError: on every rank: it could not be written (the reason is named), `directory` must not be
            replaced, or the names are not those of the model. An older export in its place stays.
    """
    writer = _Writer(module, Path(directory), dtype=dtype, file_bytes=file_bytes) if _is_first() else None
    # Also after a failure: making the next tensor may be collective, and the other ranks wait in it.
    for name, tensor in tensors:
        if writer is not None:
            writer.add(name, tensor)
    failure = None if writer is None else writer.finish(tokenizer)
    if (message := _from_first(failure)) is not None:
        raise _not_exported(directory, message)


def _not_exported(directory: Path, reason: str) -> ModelError:
    return ModelError(f"cannot-write: the model was not exported to {directory}: {reason}")


def _reason(error: OSError, temporary: Path | None, directory: Path) -> str:
    """Return which file cannot be written, by its final name, and why."""
    file = Path(error.filename or directory)
    if temporary is not None and file.is_relative_to(temporary):
        file = directory / file.relative_to(temporary)
    return (
        f"{file} cannot be written ({error.strerror or error}); free some space, or make the folder writable"
    )


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _from_first(value: str | None) -> str | None:
    """Rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    return broadcast_object(value, str | None)


class _Writer:
    """Writes tensors into files as they come. Keeps the first failure and does nothing after it."""

    def __init__(self, module: nn.Module, directory: Path, *, dtype: torch.dtype, file_bytes: int) -> None:
        self._module, self._directory = module, directory
        self._dtype, self._file_bytes = dtype, file_bytes
        self._temporary: Path | None = None
        self._failure: str | None = None
        self._waiting: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._total = 0
        # On meta, but of the written dtype: save_pretrained puts the model's dtype into config.json.
        self._bare = causal_lm(skeleton(module, hf_config(module)._attn_implementation).to(dtype))
        self._names = aliases(self._bare)
        # Not named_parameters: persistent buffers belong into the files as well.
        self._missing = {self._names.get(name, name) for name in self._bare.state_dict()}
        self._try(self._begin)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one whole tensor, which is copied."""
        self._try(lambda: self._add(name, tensor))

    def finish(self, tokenizer: Tokenizer | None) -> str | None:
        """Move the folder into place; returns the failure's message, or None."""
        self._try(lambda: self._end(tokenizer))
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        return self._failure

    def _try(self, action: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            action()
        except OSError as error:
            self._failure = _reason(error, self._temporary, self._directory)
            self._waiting.clear()
        except ModelError as error:
            self._failure = str(error)
            self._waiting.clear()

    def _begin(self) -> None:
        self._temporary = _folder_beside(self._directory)

    def _add(self, name: str, tensor: Tensor) -> None:
        if self._names.get(name, name) != name:
            return  # a tied one: it comes under its first name too
        if name not in self._missing:
            raise ModelError(
                f"wrong-weights: {type(self._bare).__name__} has no weight {name!r}, or it came twice"
            )
        self._missing.remove(name)
        wide = tensor.detach().is_floating_point()
        # copy=True even for a CPU tensor: the next gather may write into the same memory.
        copy = tensor.detach().to("cpu", self._dtype if wide else tensor.dtype, copy=True).contiguous()
        self._waiting[name] = copy
        self._bytes += copy.numel() * copy.element_size()
        if self._bytes >= self._file_bytes:
            self._write()

    def _write(self) -> None:
        assert self._temporary is not None
        part = self._temporary / f"part-{len(self._files)}.safetensors"
        tensors = _in_files(self._module, as_published(self._bare, self._waiting))
        save_tensors(tensors, part, metadata={"format": "pt"})
        self._files.append([*tensors])
        self._waiting, self._total, self._bytes = {}, self._total + self._bytes, 0

    def _end(self, tokenizer: Tokenizer | None) -> None:
        assert self._temporary is not None
        if self._missing:
            raise other_tensors(ModelError, "the export ended", self._missing)
        if self._waiting:
            self._write()
        with naming(self._temporary), silence_transformers(), _never_wrapped():
            _write_as_read(self._bare)
            self._bare.save_pretrained(self._temporary, state_dict={})  # configs, and nothing else
            if tokenizer is not None:
                tokenizer.save_pretrained(self._temporary)
        self._name_files(self._temporary)
        wrap_export(self._module, self._temporary, name=self._directory)
        _replace(self._temporary, self._directory)

    def _name_files(self, folder: Path) -> None:
        """Give the files the names that transformers expects: one file, or several with an index."""
        count = len(self._files)
        places: dict[str, str] = {}
        for index, names in enumerate(self._files):
            final = "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"
            # Renamed at the end because the name holds the number of files, which is known only now.
            (folder / f"part-{index}.safetensors").rename(folder / final)
            places |= dict.fromkeys(names, final)
        if count > 1:
            content = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(places.items()))}
            write_atomic(folder / "model.safetensors.index.json", json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def _never_wrapped() -> Iterator[None]:
    """Stop save_pretrained from unwrapping the model: it looks inside containers such as DeepSpeed's engine
    and imports deepspeed for that where it is installed, which takes seconds, or fails. A skeleton is in no
    container."""
    unwrap = modeling_utils.unwrap_model
    # A module's function, so it is replaced for as long as save_pretrained runs. transformers 5.17 to 5.23
    # have no argument for it; a save_pretrained that does not ask accelerate would let us drop this.
    modeling_utils.unwrap_model = lambda model, *args, **kwargs: model
    try:
        yield
    finally:
        modeling_utils.unwrap_model = unwrap


def _folder_beside(directory: Path) -> Path:
    """Make a hidden temporary folder beside `directory`, to be renamed.

    Raises:
        ModelError: what is at `directory` must not be replaced.
    """
    if directory.exists() and (
        not directory.is_dir() or (any(directory.iterdir()) and not (directory / "config.json").is_file())
    ):
        raise ModelError(f"already-exists: {directory} exists but is not a model folder; choose a new folder")
    directory.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{directory.name}.tmp-", dir=directory.parent))


def _replace(new: Path, place: Path) -> None:
    # mkdtemp made it readable for its owner only; an export is read by servers of other users.
    new.chmod(0o755)
    if not place.exists():
        new.rename(place)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{place.name}.old-", dir=place.parent))
    # A folder that is not empty cannot be renamed over, so for a moment there is none: a reader finds nothing
    # rather than a mixture.
    place.rename(old)  # an empty folder may be renamed over
    new.rename(place)
    shutil.rmtree(old)


# A model exported for an engine in another process: a plain Hugging Face folder, and its sizes.


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
        max_positions=max_positions(text),
    )


def exported_folder(config: ModelConfig, *, device: torch.device, work_dir: Path) -> ExportedModel:
    """Return a model's folder: its own if an engine can load it unchanged, else `work_dir`/model: written for
    random weights (`shape:`), quantised ones and models of which only some layers are kept, or without an
    adapter's files.

    Raises:
        ModelError: see lockstep.models.load.load_model.
    """
    if config.name.startswith(PREFIX) or config.num_layers is not None:
        return export_model(
            load_model(config, attention="sdpa", device=torch.device("cpu")), work_dir=work_dir
        )
    folder = model_folder(config)
    whole = read_config(folder, config)
    if quant_method(whole):  # it is trained dequantised
        return export_model(
            load_model(config, attention="sdpa", device=torch.device("cpu")), work_dir=work_dir
        )
    text = whole.get_text_config()
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
