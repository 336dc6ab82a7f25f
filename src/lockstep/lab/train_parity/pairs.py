"""Preference pairs for a parity run of a preference loss or a reward model: read, or made of documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from lockstep.algorithms.kto import with_baseline
from lockstep.config.data import DataConfig
from lockstep.data.preferences import Pair, PreferenceSet, load_preferences, load_scored_pairs
from lockstep.lab.train_parity.job import InputsSpec
from lockstep.lab.train_parity.start import starting_backend
from lockstep.models.causal_lm import text_config
from lockstep.models.load import load_tokenizer, meta_module
from lockstep.schema.batch import (
    PackedBatch,
    PreferenceBatch,
    PreferenceSample,
    StateSample,
    TrainSample,
    UnpairedBatch,
    UnpairedSample,
)


def read_pairs(spec: InputsSpec, data: DataConfig, *, longest: int) -> PreferenceSet:
    """Load at most max_samples / 2 pairs of `data`. Raises ConfigError, DataError."""
    size = min(max(1, spec.max_samples // 2), data.size or spec.max_samples)
    config = data.model_copy(update={"size": size, "max_length": min(longest, data.max_length)})
    tokenizer = load_tokenizer(spec.model)
    if spec.algorithm != "rm":
        return load_preferences(config, tokenizer=tokenizer)
    pad_id = text_config(meta_module(spec.model, dtype=torch.bfloat16)).pad_token_id
    return load_scored_pairs(config, tokenizer=tokenizer, pad_id=pad_id)


def spoiled(samples: Sequence[TrainSample], *, vocab_size: int, seed: int) -> PreferenceSet:
    """Make pairs: each document is preferred to itself with random ids in its second half."""
    generator = np.random.default_rng([seed, 3])
    pairs: list[Pair] = []
    for sample in samples:
        ids = sample.token_ids.clone()
        half = len(ids) // 2
        ids[half:] = torch.from_numpy(generator.integers(0, vocab_size, len(ids) - half))
        if not ids.equal(sample.token_ids):
            pairs.append((sample, dataclasses.replace(sample, token_ids=ids)))
    return PreferenceSet(pairs, shuffle=True, report={})


def scored(pairs: PreferenceSet) -> PreferenceSet:
    """Return the pairs for a reward model, which scores the last token; without a margin."""
    of_states: list[Pair] = [(_last_state(pairs[i][0]), _last_state(pairs[i][1])) for i in range(len(pairs))]
    return PreferenceSet(of_states, shuffle=True, report={}, margins=[0.0] * len(pairs))


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


def with_reference(plan: Sequence[Sequence[PackedBatch]], spec: InputsSpec) -> list[list[PackedBatch]]:
    """Return the batches with ref_logprobs of the starting weights, computed by `local`, and KTO's baseline,
    which is 0 there: policy and reference are the same."""
    updates: list[list[PackedBatch]] = []
    with starting_backend(spec) as backend:
        for batches in plan:
            updates.append(
                [
                    dataclasses.replace(
                        with_baseline(batch, 0.0) if isinstance(batch, UnpairedBatch) else batch,
                        ref_logprobs=values.cpu(),
                    )
                    for batch, values in zip(batches, backend.logprobs(batches), strict=True)
                    if isinstance(batch, PreferenceBatch | UnpairedBatch)
                ]
            )
    return updates
