"""The documents and pairs of parity runs: read, made up, or spoiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.config.data import DataConfig
from lockstep.data.preferences import Pair, PreferenceSet, load_preferences, load_scored_pairs
from lockstep.data.rows import reasoning_gym_dataset
from lockstep.models.architectures import text_config
from lockstep.models.load import load_tokenizer, meta_module
from lockstep.schema.batch import PreferenceSample, StateSample, TrainSample, UnpairedSample
from lockstep_lab.train_parity.job import InputsSpec

_ZIPF_IDS = 512


def generated_rows(source: str, *, size: int, seed: int) -> list[dict[str, str]]:
    """prompt and completion of `reasoning_gym:TASK`. Raises ConfigError."""
    dataset = reasoning_gym_dataset(source.partition(":")[2], {}, seed=seed, size=size)
    return [{"prompt": str(row["question"]), "completion": str(row["answer"])} for row in dataset]


def random_documents(count: int, *, vocab_size: int, longest: int, seed: int = 0) -> list[TrainSample]:
    """Ragged documents whose ids follow Zipf's law over the first of them, which a model learns in a few
    steps."""
    generator = np.random.default_rng([seed, 1])
    samples = []
    for index in range(count):
        length = int(np.clip(generator.lognormal(3.6, 0.7), 4, longest))
        mask = torch.ones(length, dtype=torch.bool)
        mask[-1] = False
        ids = _zipf(generator, length, vocab_size)
        samples.append(TrainSample(token_ids=ids, loss_mask=mask, sample_id=index))
    return samples


def _zipf(generator: np.random.Generator, length: int, vocab_size: int) -> Tensor:
    weights = 1.0 / np.arange(1, min(vocab_size, _ZIPF_IDS) + 1)
    return torch.from_numpy(generator.choice(len(weights), size=length, p=weights / weights.sum()))


def read_pairs(spec: InputsSpec, data: DataConfig, *, longest: int, vocab_size: int) -> PreferenceSet:
    """Load at most max_samples / 2 pairs of `data`. Raises ConfigError, DataError."""
    size = min(max(1, spec.max_samples // 2), data.size or spec.max_samples)
    config = data.model_copy(update={"size": size, "max_length": min(longest, data.max_length)})
    tokenizer = load_tokenizer(spec.model)
    if spec.algorithm != "rm":
        return load_preferences(config, tokenizer=tokenizer, vocab_size=vocab_size)
    pad_id = text_config(meta_module(spec.model, dtype=torch.bfloat16)).pad_token_id
    return load_scored_pairs(config, tokenizer=tokenizer, pad_id=pad_id, vocab_size=vocab_size)


def corrupted(samples: Sequence[TrainSample], *, vocab_size: int, seed: int) -> PreferenceSet:
    """Make pairs: each document is preferred to itself with random ids in its second half."""
    generator = np.random.default_rng([seed, 3])
    pairs: list[Pair] = []
    for sample in samples:
        ids = sample.token_ids.clone()
        half = len(ids) // 2
        ids[half:] = torch.from_numpy(generator.integers(0, vocab_size, len(ids) - half))
        if not ids.equal(sample.token_ids):
            pairs.append((sample, dataclasses.replace(sample, token_ids=ids)))
    return PreferenceSet.of(pairs, shuffle=True)


def scored(pairs: PreferenceSet) -> PreferenceSet:
    """Return the pairs for a reward model, which scores the last token; without a margin."""
    of_states: list[Pair] = [(_last_state(pairs[i][0]), _last_state(pairs[i][1])) for i in range(len(pairs))]
    return PreferenceSet.of(of_states, shuffle=True, margins=[0.0] * len(pairs))


def _last_state(sample: TrainSample) -> StateSample:
    mask = torch.zeros_like(sample.loss_mask)
    mask[-1] = True
    return StateSample(token_ids=sample.token_ids, loss_mask=mask, sample_id=sample.sample_id)


def unpaired(samples: Sequence[PreferenceSample]) -> list[UnpairedSample]:
    """Return each answer with a label of its own: the chosen one of a pair is desirable."""
    return [
        UnpairedSample(
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            sample_id=sample.sample_id,
            desirable=sample.sample_id % 2 == 0,
        )
        for sample in samples
    ]
