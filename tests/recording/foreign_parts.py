"""What tests of `lockstep.record` in other frameworks share: a tiny model on disk, and what must hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lockstep.algorithms.offline import SFTLoss
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.load import LoadedModel, load_model
from lockstep.recording import Recording
from lockstep.recording.weights import find_weights, load_weights
from lockstep.schema.recording import RecordedInput
from lockstep.train.local import LocalBackend

WORDS = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCAB = 64


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


def tiny_policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config())


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    names = [*WORDS, *(f"w{n}" for n in range(VOCAB - len(WORDS)))]
    inner = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, bos, eos, unk = WORDS
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk
    )


def save_tiny(folder: Path) -> Path:
    """A folder that `from_pretrained` and Lockstep load."""
    tiny_policy().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def words(count: int, seed: int) -> str:
    numbers = torch.randint(0, VOCAB - len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{int(n)}" for n in numbers)


def load_recorded(recording: Recording, name: str | None, index: int = 0) -> LoadedModel:
    """The policy with the weights that an input saw, as Lockstep has it."""
    name = name or recording.header.model["name"]
    loaded = load_model(ModelConfig(name=name, dtype="float32"), attention="sdpa", device=torch.device("cpu"))
    weights = find_weights(recording.path, recording.metas[index])
    assert weights is not None
    assert load_weights(loaded.module, weights) == recording.metas[index].weights
    return loaded


def recomputed(
    recording: Recording, inputs: Sequence[RecordedInput], *, name: str | None = None
) -> LocalBackend:
    """Runs the surrogate over inputs on their weights; checks their logprobs, and gives the gradients."""
    config = TrainConfig(attention="sdpa", device="cpu", grad_accum_dtype="float32")
    backend = LocalBackend(
        config,
        model=load_recorded(recording, name),
        total_steps=0,
        temperature=recording.header.temperature,
    )
    stats = backend.forward_backward([one.batch for one in inputs], SFTLoss())
    for one, logprobs in zip(inputs, stats.logprobs, strict=True):
        assert one.outputs is not None and one.outputs.logprobs is not None
        assert bool(one.batch.loss_mask.any())
        torch.testing.assert_close(one.outputs.logprobs, logprobs, rtol=0, atol=1e-5)
    return backend


def gradient_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Relative L2 over all Parameters; both must have the same ones."""
    assert found.keys() == wanted.keys()
    difference = sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in wanted)
    return float((difference / sum(float(wanted[n].double().square().sum()) for n in wanted)) ** 0.5)


def documents(one: RecordedInput) -> list[list[int]]:
    """Token ids of each real document."""
    bounds = one.batch.cu_seqlens.tolist()
    ids = one.batch.token_ids.tolist()
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The same of [B, L] ids under an attention mask."""
    return [row[keep != 0].tolist() for row, keep in zip(ids, mask, strict=True)]
