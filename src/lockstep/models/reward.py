"""Reward models: transformers' sequence classifiers with one label, whose logit is the reward.

The model itself decides which token's logit counts: decoders of transformers take the last one that is
not the config's pad_token_id. Pads are added on the right, with that id, so a document scores the same alone
and in a batch, but for rounding. A model without a pad id takes the last token; it is given an id that no
document of the batch has.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.initialization import no_init_weights

from lockstep.config.batch import RewardModelConfig
from lockstep.config.model import ModelConfig
from lockstep.errors import DataError, ModelError
from lockstep.models.architectures import check_rope, silence_transformers, text_config
from lockstep.models.dtypes import resolve_dtype
from lockstep.models.folder import INDEX, WEIGHTS, check_fit, check_total, without_adapter
from lockstep.models.load import CONFIG_ERRORS, load_tokenizer, model_folder
from lockstep.models.offload import OffloadedTensors
from lockstep.observe.chat_template import ChatTemplate, check_known, kept_at_end, row_variables
from lockstep.observe.special_text import special_text
from lockstep.observe.template_renderer import render_chat

_LENGTHS = (5, 9, 20, 70)
"""Tokens of the documents that are scored at load."""

ChatPrompt = str | Sequence[Mapping[str, Any]]
"""A prompt: plain text, or messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A prompt and its completion, as the reward model reads them."""

    ids: tuple[int, ...]
    truncated: bool


class RewardModel:
    """Scores (prompt, completion) pairs.

    Raises:
        ModelError: the model cannot be found or read, is no classifier with one label, has weights missing,
            comes with code of its own, or gives a document another score in a batch than alone.
    """

    def __init__(self, config: RewardModelConfig, *, device: torch.device) -> None:
        self.config = config
        self._device = device
        folder = model_folder(ModelConfig(name=config.name, revision=config.revision))
        tokenizer = load_tokenizer(ModelConfig(name=config.name, revision=config.revision))
        if tokenizer is None:
            raise ModelError(
                f"no-tokenizer: reward model {config.name!r} has no tokenizer; add the tokenizer's files to "
                "the model's folder"
            )
        self.tokenizer: Tokenizer = tokenizer
        module: nn.Module = _load(folder, config, dtype=resolve_dtype(config.dtype, device))
        self._module = module.to(device).eval()
        self._text_config: Any = text_config(module)
        text = self._text_config
        self._pad_id: int | None = text.pad_token_id
        self._vocab_size = int(text.vocab_size)
        positions = int(getattr(text, "max_position_embeddings", 0)) or None
        max_length = config.max_length or positions
        if max_length is None:
            raise ModelError(
                f"missing-setting: reward model {config.name!r} has no maximum length; set max_length",
                setting="reward_model.max_length",
            )
        if positions is not None and max_length > positions:
            raise ModelError(
                f"out-of-range: reward_model.max_length = {max_length} exceeds the {positions} positions of "
                f"{config.name!r}"
            )
        self.max_length = max_length
        self.template = _template(config, tokenizer)
        self._chat_template = ChatTemplate(tokenizer, self.template or "")
        self._check_neighbours()
        self._offloaded: OffloadedTensors | None = None

    def offload(self) -> None:
        """From now on keep the weights in host memory, except during `score`."""
        self._offloaded = OffloadedTensors(self._module.parameters())

    def _check_neighbours(self) -> None:
        """Score documents alone and in a batch. Raises ModelError where a score depends on others."""
        lengths = sorted({min(length, self.max_length) for length in _LENGTHS})
        rows = _random_rows(lengths, vocab_size=self._vocab_size, avoid=self._pad_id)
        alone = [float(self._forward([row])) for row in rows]
        batched = self._forward(rows).tolist()
        exact = next(self._module.parameters()).dtype == torch.float32
        # Rounding differs between shapes; scores that depend on neighbours are off by far more than this.
        allowed = (1e-3 if exact else 5e-2) * max(1.0, *map(abs, alone))
        for row, one, other in zip(rows, alone, batched, strict=True):
            if not math.isfinite(one):
                raise ModelError(
                    f"not-finite: reward model {self.config.name!r}: the score of a document of {len(row)} "
                    f"tokens is {one} in {self.config.dtype}; set dtype = 'float32' in case of an overflow, "
                    "or choose another model"
                )
            if not abs(one - other) <= allowed:
                raise ModelError(
                    f"batch-dependent: reward model {self.config.name!r}: a document of {len(row)} tokens "
                    f"scores {one:.6f} alone, but {other:.6f} in a batch with a document of {max(lengths)} "
                    f"tokens (allowed difference: {allowed:g}), so its scores depend on neighbours; choose "
                    "another model, or fix its config.json"
                )

    def document(
        self, prompt: ChatPrompt, completion: str, where: str, *, row: Mapping[str, Any] | None = None
    ) -> Document:
        """Tokenise prompt and completion: in the chat template, else the texts one after the other.

        Args:
            row: of the data; its `tools` and `chat_template_kwargs` are for the template.

        Raises:
            DataError: it is too long under overlong = "error", empty, or messages that nothing can render.
        """
        if self.template is None:
            text = _plain_text(prompt, where) + completion
            ids: list[int] = self.tokenizer(text)["input_ids"]
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
            whole = [*messages, {"role": "assistant", "content": completion}]
            options, _ = row_variables(row or {}, self._chat_template, where)
            job = self._chat_template.job(whole, options=options, where=where)
            rendered = render_chat(self.tokenizer, job)
            ids = special_text(self.tokenizer).encode(rendered.text, rendered.plain)
        if not ids:
            raise DataError(f"empty: {where}: prompt and completion are empty; leave the row out")
        name = f"reward model {self.config.name!r}"
        check_known(ids, self._vocab_size, tokenizer=self.tokenizer, model=name, where=where)
        if len(ids) <= self.max_length:
            return Document(ids=tuple(ids), truncated=False)
        if self.config.overlong == "error":
            raise DataError(
                f"too-long: {where}: prompt and completion have {len(ids)} tokens, but the reward model "
                f"accepts {self.max_length}; leave the row out, or set reward_model.overlong = "
                "'truncate_left'"
            )
        first, rest = kept_at_end(ids, self.max_length, tokenizer=self.tokenizer, template=self.template)
        return Document(ids=(*ids[:first], *ids[rest:]), truncated=True)

    def score(self, documents: Sequence[Document]) -> list[float]:
        """Return the logit of each document, in float32; batched by length under `token_budget`."""
        scores = [0.0] * len(documents)
        with contextlib.nullcontext() if self._offloaded is None else self._offloaded.on_device():
            for batch in length_batches([len(d.ids) for d in documents], budget=self.config.token_budget):
                logits = self._forward([documents[i].ids for i in batch])
                for i, value in zip(batch, logits.tolist(), strict=True):
                    scores[i] = value
        return scores

    def _forward(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """[B] float32."""
        pad = self._pad_id if self._pad_id is not None else _absent(rows, self._vocab_size)
        longest = max(map(len, rows))
        ids_BL = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
        mask_BL = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        text = self._text_config
        # The classifier itself finds a document's last token as the last one that is not this id: there is no
        # argument for it (transformers 5.17 to 5.23).
        text.pad_token_id = pad
        try:
            with torch.inference_mode():
                logits_BC = self._module(
                    input_ids=ids_BL.to(self._device), attention_mask=mask_BL.to(self._device)
                ).logits
        finally:
            text.pad_token_id = self._pad_id
        scores_B: Tensor = logits_BC[:, 0].float().cpu()
        return scores_B


def length_batches(lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Group documents into batches of similar length: longest first, at most `budget` tokens with pads, at
    least one document. Returns the documents' positions.

    Example:
        >>> length_batches([2, 5, 3, 2], budget=6)
        [[1], [2, 0], [3]]
    """
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > budget:
            batches.append([])
        batches[-1].append(position)
    return batches


def _load(folder: Path, config: RewardModelConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Load the module with every weight from the files: a fresh head would score at random."""
    name = config.name
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        check_rope(hf_config, bounded=False)
        if hf_config.num_labels != 1:
            raise ModelError(
                f"wrong-shape: reward model {name!r} has {hf_config.num_labels} labels instead of 1, so it "
                "cannot give a score (a causal LM has no score head); choose a classifier with num_labels "
                "= 1"
            )
        _check_size(folder, hf_config, name=name)
        with silence_transformers(), without_adapter(folder) as weights:
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                weights,
                config=hf_config,
                dtype=dtype,
                trust_remote_code=False,
                # Pickled weights are programs.
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, with the names
                local_files_only=True,
                output_loading_info=True,
            )
    except ModelError:
        raise
    except (*CONFIG_ERRORS, SafetensorError) as error:
        raise ModelError(
            f"cannot-read: reward model {name!r} cannot be read: {error}. It must have safetensors weights "
            "and an architecture that transformers has as a sequence classifier (the model's own code is "
            "not run)"
        ) from error
    info: dict[str, Any] = loaded[1]
    missing, mismatched = info["missing_keys"], info["mismatched_keys"]
    check_fit(f"reward model {name!r}", missing_keys=missing, mismatched_keys=mismatched)
    module: PreTrainedModel = loaded[0]
    return module


def reward_model_parameters(name: str, revision: str | None) -> int:
    """Count the parameters of a reward model that is not loaded, tied ones once.

    Raises:
        ModelError: its config is not on this machine (the hub is not asked), or cannot be read.
    """
    folder = model_folder(ModelConfig(name=name, revision=revision), local_only=True)
    try:
        module = _meta(AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
    except CONFIG_ERRORS as error:
        raise ModelError(f"cannot-read: reward model {name!r} cannot be read: {error}") from error
    return sum(parameter.numel() for parameter in module.parameters())


def _meta(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"), no_init_weights():
        module: nn.Module = AutoModelForSequenceClassification.from_config(copy.deepcopy(config))
    return module


def _check_size(folder: Path, config: PretrainedConfig, *, name: str) -> None:
    """Raises ModelError for sizes in config.json that the weights do not have."""
    if any((folder / file).is_file() for file in (WEIGHTS, INDEX)):
        check_total(folder, _meta(config), name=name)


def _random_rows(lengths: Sequence[int], *, vocab_size: int, avoid: int | None) -> list[tuple[int, ...]]:
    """Token ids of documents of these lengths, without the pad id."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [tuple((i + 1) % vocab_size if i == avoid else i for i in row) for row in rows]


def _template(config: RewardModelConfig, tokenizer: Tokenizer) -> str | None:
    if config.chat_template == "none":
        return None
    if config.chat_template == "auto":
        return None if tokenizer.chat_template is None else str(tokenizer.get_chat_template())
    return config.chat_template


def _plain_text(prompt: ChatPrompt, where: str) -> str:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0].get("role") == "user":
        return str(prompt[0]["content"])
    raise DataError(
        f"no-chat-template: {where}: a conversation of {len(prompt)} messages needs a chat template, but "
        "the reward model has none; set reward_model.chat_template to a Jinja template"
    )


def _absent(rows: Sequence[tuple[int, ...]], vocab_size: int) -> int:
    """Return an id that is in no row."""
    present = {i for row in rows for i in row}
    return next((i for i in range(vocab_size) if i not in present), 0)
