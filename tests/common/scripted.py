"""A model that writes what it is told to: its next token depends on its last one alone."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

THINKING = ("<think>", "a", "</think>", "<answer>", "7", "</answer>", "<|end|>")
"""What a model writes whose tags are tokens of its own."""

SCRIPTED = """
kind = "grpo"
steps = 1
[model]
name = "{model}"
dtype = "float32"
[data]
source = "{data}"
max_prompt_tokens = 64
[rollout]
prompts_per_step = 2
group_size = 2
[rollout.sampling]
max_tokens = 20
[[rewards]]
name = "format"
kwargs = {{ pattern = "^<think>.*</think><answer>.*</answer>$" }}
[[rewards]]
name = "math"
answer = "tags"
[eval]
num_prompts = 2
[log]
tensorboard = false
"""
"""An RL run of a scripted model; a greedy evaluation and the first step sample the script."""


def save_scripted(
    tiny_folder: Path, folder: Path, script: Sequence[str] = THINKING, *, special: bool = True
) -> Path:
    """Save a model with the tiny one's tokenizer, which answers every prompt with `script`, when greedy.

    Entries with angle brackets become tokens of the tokenizer, special ones unless `special` is false. No
    token may occur twice. The generation prompt of the chat template is what the script follows.
    """
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tiny_folder)
    tags = [token for token in script if token.startswith("<") and token not in tokenizer.get_vocab()]
    tokenizer.add_tokens(tags, special_tokens=special)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    script_ids = tokenizer.convert_tokens_to_ids(list(script))
    last_of_prompt = tokenizer.encode("<|assistant|>", add_special_tokens=False)[-1]
    width = model.config.hidden_size
    chain = [last_of_prompt, *script_ids]
    assert len(set(chain)) == len(chain) <= width and None not in chain
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # what a block adds to its input
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert embedding.data_ptr() != head.data_ptr()
        embedding.zero_()
        head.zero_()
        for axis, (token, following) in enumerate(itertools.pairwise(chain)):
            embedding[token, axis] = 1.0
            head[following, axis] = 10.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompts(folder: Path, rows: int = 24) -> Path:
    """Write prompts whose answer is 7."""
    path = folder / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{n} + {7 - n}?", "answer": "7"}) + "\n" for n in range(rows))
    )
    return path
