"""Load the policy: a folder, a hub model, the bundled one, or random weights of a named shape."""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.initialization import no_init_weights

from lockstep.config.model import ModelConfig
from lockstep.errors import ConfigError, ModelError
from lockstep.invariant import experts
from lockstep.models import delta_net, lora, shapes
from lockstep.models.architectures import (
    ARCHITECTURES,
    causal_lm,
    check_architecture,
    check_kernel,
    max_positions,
    silence_transformers,
    text_config,
)
from lockstep.models.dtypes import resolve_dtype
from lockstep.models.folder import (
    READ,
    check_fit,
    check_folder,
    check_score,
    check_sizes,
    tensor_files,
    weight_errors,
    without_adapter,
)
from lockstep.models.heads import SCORE_WEIGHT, HeadKind, auto_class, with_one_label
from lockstep.models.miniature import keep_layers
from lockstep.models.published import forget_quantisation, quant_method
from lockstep.models.source import (
    WeightSource,
    bundled_config,
    bundled_folder,
    fill_from,
    folder_source,
    kept_buffers,
    module_without_weights,
    random_source,
)
from lockstep.models.tensor_parallel import TensorParallel
from lockstep.models.wrapper import remember_folder, text_part
from lockstep.observe.text import printable

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
# Its checks are spread over dataclasses, property setters and constructors, which share no error class.
CONFIG_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""Errors that transformers raises for a config with impossible values."""
# Only files that Lockstep reads: a hub repository may hold several times the model's size.
_HUB_FILES = sorted(f"*{ending}" for ending in READ)
# The same weights once more, in other formats.
_HUB_IGNORED = ["original/*", "consolidated*", "onnx/*"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """The policy's module, tokenizer and sizes."""

    module: nn.Module
    """A transformers causal LM in eval mode, on its device, in `dtype`; with LoRA layers if configured. With
    a `source` its Parameters are on the meta device."""
    tokenizer: Tokenizer | None
    """None for models that come without one."""
    eos_token_ids: tuple[int, ...]
    """Ascending; every id that generation_config, config or tokenizer calls end of sequence; may be empty."""
    pad_token_id: int
    """An id that is in the vocabulary; the tokenizer's, the config's, the first eos id or 0."""
    dtype: torch.dtype
    """Compute dtype of parameters and activations."""
    name: str
    """ModelConfig.name."""
    max_positions: int
    """Longest document, in tokens, that the position encoding was made for."""
    source: WeightSource | None = None
    """The source of the weights, if the Parameters are on the meta device; None: the module has them."""
    execution: str = "eager"
    """The train backend's execution mode; an engine that must be bitwise equal runs its layers the same
    way."""
    tp: TensorParallel | None = None
    """The split of the module into ranks' parts; None: it is whole."""
    weights_follow: bool = False
    """The Parameters are allocated and have no values yet: weight updates bring them. An engine may free them
    while it sleeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedModel:
    """A model without its weights: what rows are read with, and what can be refused before weights are."""

    name: str
    """ModelConfig.name."""
    head: HeadKind
    """The head of the module that is to be built."""
    folder: Path | None
    """The folder with its files; None: the model is a shape."""
    tokenizer: Tokenizer | None
    """See LoadedModel."""
    config: PretrainedConfig
    """Checked, as the module is built from it."""
    quantised: str
    """How the folder's weights are; see lockstep.models.published.quant_method."""

    @property
    def text(self) -> PretrainedConfig:
        """The decoder's config."""
        return self.config.get_text_config()

    @property
    def max_positions(self) -> int:
        """See LoadedModel."""
        return max_positions(self.text)


def open_model(config: ModelConfig, head: HeadKind = "logits") -> OpenedModel:
    """Read config and tokenizer of `config.name`.

    Raises:
        ModelError, ConfigError: as `load_model`, except about weights.
    """
    if config.name.startswith(shapes.PREFIX):
        folder, tokenizer = None, None
        hf_config = shapes.shape_config(config.name.removeprefix(shapes.PREFIX))
    else:
        folder = model_folder(config)
        tokenizer, hf_config = _read_tokenizer(folder, config), read_config(folder, config)
    return OpenedModel(
        name=config.name,
        head=head,
        folder=folder,
        tokenizer=tokenizer,
        quantised=quant_method(hf_config),
        config=_prepared(hf_config, config, head),
    )


def load_model(
    config: ModelConfig,
    *,
    attention: str,
    device: torch.device,
    materialize: bool = True,
    head: HeadKind = "logits",
    opened: OpenedModel | None = None,
) -> LoadedModel:
    """Load `config.name` in its compute dtype on `device`.

    Args:
        attention: a kernel of lockstep.attention (sdpa, varlen, flex, hf:NAME); "auto" was resolved before.
        materialize: False leaves the Parameters on the meta device; `LoadedModel.source` reads them. Buffers
            are on `device` either way.
        head: scalar puts one number per token in the place of the logits (lockstep.models.heads): the
            folder's own head, or a fresh one, drawn from `config.seed`, where the folder is a causal LM's.
        opened: `open_model` of the same config, if it was called already; its head counts.

    Raises:
        ModelError: the model cannot be found or read, has weights missing, is not supported, or fails the
            proof of lockstep.models.admission.
        ConfigError: the kernel lacks what the model needs, peft is missing, or target_modules do not fit.
    """
    from lockstep.models.admission import admit  # lazy: `lockstep plan` and `doctor` need no kernels

    dtype = resolve_dtype(config.dtype, device)
    implementation = attention_implementation(attention)
    source: WeightSource | None = None
    opened = opened or open_model(config, head)
    head = opened.head
    folder, tokenizer, hf_config = opened.folder, opened.tokenizer, copy.deepcopy(opened.config)
    check_kernel(hf_config, attention)
    if folder is None:
        make = shapes.random_model if materialize else random_source
        model = make(
            hf_config, seed=config.seed, dtype=dtype, device=device, attention=implementation, head=head
        )
        module, source = (model, None) if isinstance(model, nn.Module) else model
    else:
        admit(hf_config, name=config.name)
        _check_generation(folder)
        if head == "scalar":
            check_score(folder, name=config.name)
        if materialize and not opened.quantised:
            module = _read_module(folder, hf_config, config, dtype=dtype, attention=implementation, head=head)
            module = module.to(device).eval()
            if head == "scalar" and SCORE_WEIGHT not in tensor_files(folder):
                shapes.fill_parameters(module, {SCORE_WEIGHT}, seed=config.seed, config=hf_config)
        else:
            # On the host whatever `device` is: RoPE's frequencies
            # must have the bits of from_pretrained's, made there.
            module = module_without_weights(
                hf_config, dtype=dtype, device=_CPU, attention=implementation, head=head
            )
            source = folder_source(folder, module, config=config, device=device)
            if materialize:
                module, source = fill_from(module, source, device=device), None
    experts.install(module)
    delta_net.install(module)
    remember_folder(module, folder)
    # Every rank reads all of a folder's routers, which are small; random weights are finite.
    read = None if source is None or folder is None else functools.partial(source.read, device=_CPU)
    experts.check_routers(module, read)
    if config.lora is not None:
        if source is None:
            lora.add_lora(module, config.lora, seed=config.seed)
        else:
            source = lora.add_lora_without_weights(module, config.lora, seed=config.seed, source=source)
    eos = _eos_token_ids(module, tokenizer)
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        eos_token_ids=eos,
        pad_token_id=_pad_token_id(hf_config, tokenizer, eos),
        dtype=dtype,
        name=config.name,
        max_positions=opened.max_positions,
        source=source,
    )


def allocated(model: LoadedModel, *, device: torch.device) -> LoadedModel:
    """Allocate the Parameters of a model without weights, in place, for weights that will be copied in."""
    with kept_buffers(model.module):
        model.module.to_empty(device=device)
    return replace(model, source=None, weights_follow=True)


def load_tokenizer(config: ModelConfig, *, local_only: bool = False) -> Tokenizer | None:
    """Load the tokenizer of `config.name` without the weights; None: the model comes without one.

    Args:
        local_only: never use the network.

    Raises:
        ModelError: the model cannot be found.
    """
    if config.name.startswith(shapes.PREFIX):
        return None
    return _read_tokenizer(model_folder(config, local_only=local_only), config)


def share_parameters(module: nn.Module, *, attention: str) -> nn.Module:
    """Build a second skeleton of `module` with another attention kernel, over the same Parameters and
    buffers.

    An in-place update of a weight is seen by both. LoRA layers are shared too. Hooks, compiled forwards,
    activation checkpointing and train/eval mode (it starts in eval mode) are the skeleton's own.

    Raises:
        ModelError: the skeleton and the module do not have the same Parameters.
    """
    twin = skeleton(module, attention_implementation(attention))
    experts.install(twin)
    delta_net.install(twin)
    with torch.device("meta"):
        lora.copy_structure(module, twin)
    targets = dict(twin.named_modules())
    for path, source in module.named_modules():
        if path not in targets:
            raise ModelError(
                f"wrong-weights: the second copy of {type(module).__name__} has no submodule {path!r}"
            )
        target = targets[path]
        for own, theirs in ((target._parameters, source._parameters), (target._buffers, source._buffers)):
            # The entries themselves are shared, so that an in-place
            # update needs no second copy; load_state_dict copies.
            own.clear()
            own.update(theirs)
        # Otherwise buffers of the source that no checkpoint holds would be in the twin's state dict.
        target._non_persistent_buffers_set = set(source._non_persistent_buffers_set)
    left = [name for name, p in twin.named_parameters() if p.is_meta]
    if left:
        raise ModelError(
            f"wrong-weights: the second copy of {type(module).__name__} has Parameters that the module "
            f"lacks: {left[:5]}"
        )
    return twin.eval()


def meta_module(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    head: HeadKind = "logits",
    opened: OpenedModel | None = None,
) -> nn.Module:
    """Build the module of `load_model` on the meta device: sizes and names, no weights, no network.

    Args:
        opened: `open_model` of the same config, if it was called already; its head counts.

    Raises:
        ModelError: the model's config is not on this machine, or not supported.
    """
    hf_config = prepared_config(config, head) if opened is None else copy.deepcopy(opened.config)
    head = head if opened is None else opened.head
    with torch.device("meta"), no_init_weights():
        module: nn.Module = auto_class(head).from_config(
            hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
        causal_lm(module).tie_weights()
        if config.lora is not None:
            lora.add_lora(module, config.lora, seed=config.seed)
    return module


def prepared_config(config: ModelConfig, head: HeadKind = "logits") -> PretrainedConfig:
    """Return the checked config that `load_model` would build a module of, without the network.

    Raises:
        ModelError: the model's config is not on this machine, or not supported.
    """
    if config.name.startswith(shapes.PREFIX):
        hf_config = shapes.shape_config(config.name.removeprefix(shapes.PREFIX))
    elif config.name.startswith("bundled:"):
        hf_config = bundled_config(config.name.removeprefix("bundled:"))
    else:
        hf_config = read_config(model_folder(config, local_only=True), config)
    return _prepared(hf_config, config, head)


def skeleton(module: nn.Module, implementation: str) -> nn.Module:
    """Build the bare module of the same config on the meta device: no weights, no LoRA, copies of both
    configs.

    Args:
        implementation: name in transformers' AttentionInterface.
    """
    with torch.device("meta"), no_init_weights():
        source = causal_lm(module)
        # _from_config is private. from_config of the Auto classes would choose a class by the config, and
        # this module may be a classifier.
        bare: PreTrainedModel = type(source)._from_config(
            copy.deepcopy(source.config), dtype=source.dtype, attn_implementation=implementation
        )
    bare.tie_weights()
    if hasattr(source, "generation_config"):  # a classifier generates nothing
        bare.generation_config = copy.deepcopy(source.generation_config)
    return bare


def attention_implementation(kernel: str) -> str:
    """Return the name of `kernel` in transformers' AttentionInterface, registered there unless it is
    transformers' own."""
    from lockstep import attention  # lazy: `lockstep plan` and `doctor` need no kernels

    return attention.implementation(kernel)


def model_folder(config: ModelConfig, *, local_only: bool = False) -> Path:
    """Return the folder of a bundled, local or hub model, downloaded or converted if needed.

    Args:
        local_only: never use the network.

    Raises:
        ModelError: there is no such folder or hub model, the hub cannot be reached, or a file leads out of
            the folder.
    """
    if config.name.startswith("bundled:"):
        return bundled_folder(config.name.removeprefix("bundled:"))
    path = Path(config.name).expanduser()
    if path.is_dir():
        return check_folder(path)
    if path.is_absolute() or config.name.startswith((".", "~")) or config.name.count("/") > 1:
        raise ModelError(
            f"no-such-file: model.name = {config.name!r} is not a folder; name a folder with config.json"
        )
    return check_folder(_hub_folder(config, local_only=local_only))


def read_config(folder: Path, config: ModelConfig) -> PretrainedConfig:
    """Read the transformers config of a model folder, unchanged.

    Raises:
        ModelError: there is none, it is damaged, its sizes are not those of the weight files, or it needs
            model.trust_remote_code.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"wrong-kind-of-file: model.name = {config.name!r}: {folder} contains no config.json, so it is "
            "not a model folder"
        )
    try:
        # Always offline: the folder has been fetched whole by now.
        hf_config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except CONFIG_ERRORS as error:
        hint = (
            "; set model.trust_remote_code = true to run the model's own code"
            if "trust_remote_code" in str(error)
            else ""
        )
        raise ModelError(
            f"cannot-read: model.name = {config.name!r}: cannot read its config ({type(error).__name__}: "
            f"{printable(str(error))}){hint}"
        ) from error
    text = text_part(hf_config, name=config.name)
    if text.model_type in ARCHITECTURES:
        check_sizes(folder, text, name=config.name)
    return hf_config


def _prepared(hf_config: PretrainedConfig, config: ModelConfig, head: HeadKind) -> PretrainedConfig:
    hf_config = text_part(hf_config, name=config.name)
    check_architecture(hf_config)
    forget_quantisation(hf_config, name=config.name)
    if config.num_layers is not None:
        keep_layers(hf_config, config.num_layers)
    return with_one_label(hf_config) if head == "scalar" else hf_config


def _check_generation(folder: Path) -> None:
    """Raise ModelError for a generation_config.json that transformers does not load."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    try:
        with silence_transformers():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (TypeError, ValueError) as error:  # values that contradict each other, or of another type
        raise ModelError(
            f"refused: transformers refuses {file}: {printable(str(error))[:300]}; correct or remove the "
            "file (a run samples with rollout.sampling instead)"
        ) from error


def _read_module(
    folder: Path,
    hf_config: PretrainedConfig,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    attention: str,
    head: HeadKind,
) -> nn.Module:
    """Load the module with real weights; every weight but a scalar head must come from the files."""
    # Where peft is installed, transformers would load an adapter of the folder over its weights.
    with weight_errors(folder, config.name), silence_transformers(), without_adapter(folder) as weights:
        loaded: Any = auto_class(head).from_pretrained(
            weights,
            config=hf_config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            # Pickled weights are programs.
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with the names
            local_files_only=True,
            output_loading_info=True,
        )
    module: nn.Module = loaded[0]
    info: dict[str, Any] = loaded[1]
    fresh, unused = ({SCORE_WEIGHT}, {"lm_head.weight"}) if head == "scalar" else (set(), set())
    missing = set(info["missing_keys"]) - fresh
    check_fit(f"model.name = {config.name!r}", missing_keys=missing, mismatched_keys=info["mismatched_keys"])
    if (more := set(info["unexpected_keys"]) - unused) and config.num_layers is None:
        log.warning("%s: the architecture does not use these weights: %s", folder, sorted(more)[:5])
    return module


def _hub_folder(config: ModelConfig, *, local_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_HUB_FILES, *(["*.py"] if config.trust_remote_code else [])]
    at = f"{config.name!r}" + (f" at revision {config.revision!r}" if config.revision else "")
    try:
        return Path(
            snapshot_download(
                config.name,
                revision=config.revision,
                allow_patterns=patterns,
                ignore_patterns=_HUB_IGNORED,
                local_files_only=local_only,
            )
        )
    except HFValidationError as error:
        raise ModelError(
            f"unknown-name: model.name = {at} is neither a folder nor a valid hub name ({error}); set a "
            "folder, OWNER/NAME, bundled:smollm2-135m or shape:NAME"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"unreachable: model.name = {at} is not a folder and not in the local hub cache, and the hub "
            f"cannot be reached ({error}). Check the name; or download the model elsewhere (`hf download`) "
            "and set model.name to its folder; or use bundled:smollm2-135m, which needs no network"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"refused: model.name = {at}: the hub refused the download ({error}). Check name and revision; "
            "for a gated model, accept its licence on the hub and set HF_TOKEN"
        ) from error


def _read_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        with silence_transformers():
            return AutoTokenizer.from_pretrained(
                folder, trust_remote_code=config.trust_remote_code, local_files_only=True
            )
    except Exception as error:  # the tokenizers package raises plain Exception over a damaged file
        raise ModelError(
            f"cannot-read: model.name = {config.name!r}: cannot read its tokenizer ({type(error).__name__}: "
            f"{printable(str(error))[:500]})"
        ) from error


def _eos_token_ids(module: nn.Module, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    text = text_config(module)
    # All three, because published models disagree: an id that one of them names ends completions in some
    # engine.
    sources = (
        getattr(getattr(module, "generation_config", None), "eos_token_id", None),
        getattr(text, "eos_token_id", None),
        tokenizer.eos_token_id if tokenizer is not None else None,
    )
    ids: set[int] = set()
    for source in sources:
        ids.update([source] if isinstance(source, int) else source or [])
    return tuple(sorted(ids))


def _pad_token_id(hf_config: PretrainedConfig, tokenizer: Tokenizer | None, eos: tuple[int, ...]) -> int:
    text = hf_config.get_text_config()
    candidates = (
        tokenizer.pad_token_id if tokenizer is not None else None,
        getattr(text, "pad_token_id", None),
        # Padding is masked everywhere, so that any valid id does.
        *eos[:1],
    )
    return next((i for i in candidates if i is not None and 0 <= i < text.vocab_size), 0)


# Whether documents fit a model's position encoding.


def check_positions(
    model: LoadedModel | OpenedModel, longest: int, *, setting: str, subject: str | None = None
) -> None:
    """Refuse documents of more tokens than the model has positions.

    Args:
        longest: tokens of the longest document that the run has or may have.
        setting: which settings make it that long.
        subject: the beginning of the message; None: the settings allow it.

    Raises:
        ConfigError: the numbers, and what to lower.
    """
    if longest > model.max_positions:
        subject = subject or f"{setting} allows documents of {longest} tokens"
        raise ConfigError(
            f"too-long: {subject}, which exceeds the {model.max_positions} positions of {model.name} "
            f"(max_position_embeddings or rope_parameters); lower {setting} to {model.max_positions}"
        )
