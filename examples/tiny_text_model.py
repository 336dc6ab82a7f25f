"""A tiny model that reads text: random weights and a tokenizer of single bytes, as a Hugging Face folder.

python examples/tiny_text_model.py FOLDER

It knows nothing; it stands in for a real model where the question is whether data, rewards and settings fit.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.models.shapes import random_model, shape_config

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


def save(folder: Path, *, shape: str = "tiny-llama", seed: int = 0) -> Path:
    """Write config, weights and tokenizer; returns the folder."""
    special = ["<|pad|>", "<|begin|>", "<|end|>"]  # ids 0, 1, 2, as the tiny shapes have them
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    config = shape_config(shape)
    config.vocab_size = len(vocabulary)
    model = random_model(config, seed=seed, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(save(Path(sys.argv[1])))
