"""Losses of answers from transformers' logits in float64: no data, mask or loss of what is under test.
The model is `tiny_folder`'s, which reads single bytes."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Turns = list[dict[str, str]]


def rendered(prompt: Turns) -> str:
    """The prompt as `examples/tiny_text_model.py` writes it, up to where the assistant begins."""
    return "".join(f"<|{turn['role']}|>{turn['content']}<|end|>" for turn in prompt) + "<|assistant|>"


def answer_logprobs(folder: Path, prompt: str, answer: str) -> list[float]:
    """The logprob of each token of the answer and of the end that follows it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    after = tokenizer(answer + "<|end|>", add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logprobs = model(torch.tensor([[*before, *after]])).logits[0].log_softmax(-1)
    return [float(logprobs[len(before) - 1 + i, token]) for i, token in enumerate(after)]


def simpo(chosen: list[float], rejected: list[float], *, beta: float = 2.0, margin: float = 1.0) -> float:
    """arXiv 2405.14734, equation 6."""
    difference = _mean(chosen) - _mean(rejected)
    return math.log1p(math.exp(-(beta * difference - margin)))


def orpo(chosen: list[float], rejected: list[float], *, weight: float = 0.1) -> float:
    """arXiv 2403.07691, equations 6 and 7."""
    one, other = (_mean(x) - math.log1p(-math.exp(_mean(x))) for x in (chosen, rejected))
    return -_mean(chosen) + weight * math.log1p(math.exp(-(one - other)))


def cross_entropy(answers: list[list[float]]) -> float:
    """The mean over all trained tokens."""
    every = [value for answer in answers for value in answer]
    return -_mean(every)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
