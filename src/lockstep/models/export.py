"""Write the policy as a Hugging Face folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from lockstep.errors import ModelError
from lockstep.models.causal_lm import causal_lm, hf_config
from lockstep.models.load import skeleton
from lockstep.models.lora import merged_state_dict
from lockstep.models.quiet import quiet_transformers


def export_hf(module: nn.Module, tokenizer: Tokenizer | None, directory: Path) -> None:
    """Config, generation config, safetensors in the module's dtype and tokenizer, LoRA merged in.

    `from_pretrained` loads the folder with all keys matched. It is written beside its place and renamed:
    whoever looks sees the old folder, none, or the whole new one. The module itself is not touched.

    Raises:
        ModelError: `directory` is there and is neither empty nor a model folder, so it is not replaced.
    """
    directory = Path(directory)
    _check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.tmp-", dir=directory.parent))
    try:
        # A bare skeleton is saved in the module's place: save_pretrained writes into what it saves' config.
        bare = causal_lm(skeleton(module, hf_config(module)._attn_implementation))
        with quiet_transformers():
            bare.save_pretrained(temporary, state_dict=merged_state_dict(module))
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)
        _replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_replaceable(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir() or (any(directory.iterdir()) and not (directory / "config.json").is_file()):
        raise ModelError(f"{directory} is there and is not a model folder; export to a new folder")


def _replace(new: Path, place: Path) -> None:
    if not place.exists():
        new.rename(place)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{place.name}.old-", dir=place.parent))
    place.rename(old)  # an empty folder may be renamed over
    new.rename(place)
    shutil.rmtree(old)
