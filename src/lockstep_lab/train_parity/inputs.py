"""The inputs of a parity run: one recording that every stack is fed, whatever the data came from.

    python -m lockstep_lab.train_parity.inputs SPEC.json

reads the data, packs it once, and writes OUT/inputs (a recording: `lockstep recording list OUT/inputs`) and
OUT/inputs.json. GRPO's old_logprobs are those of the starting weights, by the `local` backend: a parity run
is several passes over the same rollouts, and its loss is what PPO's clipped objective gains on them. PPO's
value model has OUT/inputs-value, the same packs with returns.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.offline import DPO, KTO, SFT, RewardModel, with_baseline
from lockstep.algorithms.ppo import WHITENING_EPS, ValueLoss
from lockstep.config.algorithm import DPOConfig, GRPOConfig, RewardModelLossConfig, SFTConfig
from lockstep.config.base import Record
from lockstep.config.data import DataConfig
from lockstep.config.model import ModelConfig
from lockstep.config.ppo import PPOConfig, ValueConfig
from lockstep.config.train import TrainConfig
from lockstep.data.lazy import LazyItems
from lockstep.data.sft import SFTSet, load_sft
from lockstep.errors import ConfigError, DataError
from lockstep.models.architectures import max_positions, silence_transformers, text_config
from lockstep.models.load import load_model, load_tokenizer, meta_module
from lockstep.observe.files import json_lines, write_atomic, write_json
from lockstep.observe.text import echo
from lockstep.ops.advantages import batch_mean_std, gae
from lockstep.ops.losses import loss_weights
from lockstep.packing import Bucket, PackLimits, plan_micro_batches
from lockstep.packing.packs import repack
from lockstep.recording import Recording, RecordingWriter
from lockstep.recording.reader import VALUE_LOSS
from lockstep.schema.batch import (
    PackedBatch,
    PolicyBatch,
    PolicySample,
    PreferenceBatch,
    TrainSample,
    UnpairedBatch,
    ValueBatch,
)
from lockstep.schema.recording import VALUE, InputMeta, RecordedInput, RecordingHeader
from lockstep.train.local import LocalBackend
from lockstep_lab.replay.losses import token_loss
from lockstep_lab.suite.job_files import read_job_file
from lockstep_lab.suite.machine import versions
from lockstep_lab.suite.worker import leave_with
from lockstep_lab.train_parity.documents import (
    _ZIPF_IDS,
    _zipf,
    corrupted,
    generated_rows,
    random_documents,
    read_pairs,
    scored,
    unpaired,
)
from lockstep_lab.train_parity.job import INPUTS, REPORT, VALUE_INPUTS, InputsReport, InputsSpec, Role


@contextmanager
def starting_backend(spec: InputsSpec, role: Role = "policy", **options: Any) -> Iterator[LocalBackend]:
    """Load the starting weights of a model; in float32 on a CPU, whatever the stacks compute in.

    Args:
        options: of LocalBackend, such as the temperature.
    """
    config = spec.model if role == "policy" else ValueConfig().model(spec.model)
    if spec.device == "cpu":
        config = config.model_copy(update={"dtype": "float32"})
    head: Any = "logits" if role == "policy" else "scalar"
    model = load_model(config, attention="sdpa", device=torch.device(spec.device), head=head)
    train = TrainConfig(token_budget=spec.token_budget, device=spec.device, attention="sdpa")
    backend = LocalBackend(train, model=model, total_steps=0, **options)
    try:
        yield backend
    finally:
        backend.close()


DEFAULT_TASK = "reasoning_gym:gsm_symbolic"
GROUP = 4
"""Completions generated per prompt."""


class Sizes(Record):
    """The model's limits that inputs must fit."""

    heads: int
    kv_heads: int
    vocab_size: int
    max_positions: int


def model_sizes(config: ModelConfig) -> Sizes:
    """Read the model's limits without its weights. Raises ModelError."""
    text = text_config(meta_module(config, dtype=torch.bfloat16))
    heads = int(text.num_attention_heads)
    return Sizes(
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        vocab_size=int(text.vocab_size),
        max_positions=max_positions(text),
    )


def make_inputs(spec: InputsSpec) -> InputsReport:
    """Write OUT/inputs and OUT/inputs.json.

    Raises:
        ConfigError, DataError, ModelError, RecordingError: the data or the model cannot be had, or do not fit
            each other.
    """
    with silence_transformers():
        sizes = model_sizes(spec.model)
        report = {"sft": _sft, "grpo": _rollouts, "ppo": _rollouts}.get(spec.algorithm, _pairs)(spec, sizes)
    write_json(spec.out / REPORT, report.model_dump())
    return report


# --- SFT -------------------------------------------------------------------------------------------------


def _sft(spec: InputsSpec, sizes: Sizes) -> InputsReport:
    documents, source, notes = _documents(spec, sizes)
    size = min(spec.batch_size, len(documents))
    steps = spec.steps or -(-len(documents) // size)
    algorithm, limits = SFT(SFTConfig()), _limits(spec, documents=size)
    plan = []
    for step in range(steps):
        samples = documents.batch(step, size, spec.seed)
        plan.append(plan_micro_batches(samples, algorithm.loss_weights(samples), limits))
    header = inputs_header(spec, sizes, algorithm=SFTConfig().model_dump(mode="json"))
    indices = write_inputs(spec.out / INPUTS, header, plan)
    return InputsReport(
        steps=indices, source=source, notes=notes, documents=len(documents), **_sums(plan), **_kept(sizes)
    )


def _documents(spec: InputsSpec, sizes: Sizes) -> tuple[SFTSet, str, tuple[str, ...]]:
    """Load (documents, where they come from, notes)."""
    longest = min(spec.max_length, sizes.max_positions, spec.token_budget)
    tokenizer = load_tokenizer(spec.model)
    if tokenizer is None:
        if spec.data is not None and spec.data.source != "ids":
            raise ConfigError(
                f"no-tokenizer: {spec.model.name} has no tokenizer, so {spec.data.source!r} cannot be read "
                "with it; leave --dataset (DATASET) out to use documents of random ids, or choose a model "
                "with a tokenizer"
            )
        samples = random_documents(spec.max_samples, vocab_size=sizes.vocab_size, longest=longest)
        note = f"{spec.model.name} has no tokenizer: documents are ids drawn from a skewed distribution"
        return SFTSet(LazyItems.of(samples, shuffle=True)), "random ids", (note,)
    data, notes = spec.data, []
    if data is None or data.source.startswith("reasoning_gym:"):
        source = DEFAULT_TASK if data is None else data.source
        path = spec.out / "documents.jsonl"
        rows = generated_rows(source, size=spec.max_samples, seed=spec.seed)
        write_atomic(path, json_lines(rows))
        # Every token is trained on: the answers alone are a few digits.
        data = DataConfig(source=str(path), train_on="all")
        notes.append(
            f"documents are questions and answers of {source}, all tokens trained on; they need no network"
        )
    else:
        source = data.source
    size = min(spec.max_samples, data.size or spec.max_samples)
    data = data.model_copy(update={"size": size, "max_length": min(longest, data.max_length)})
    documents = load_sft(data, tokenizer=tokenizer, vocab_size=sizes.vocab_size)
    return documents, source, tuple(notes)


# --- preferences -----------------------------------------------------------------------------------------


def _pairs(spec: InputsSpec, sizes: Sizes) -> InputsReport:
    notes: tuple[str, ...]
    if spec.data is not None and not spec.data.generated:
        longest = min(spec.max_length, sizes.max_positions, spec.token_budget // 2)
        pairs = read_pairs(spec, spec.data, longest=longest, vocab_size=sizes.vocab_size)
        source, notes = spec.data.source, ()
    else:
        half = spec.model_copy(update={"max_length": min(spec.max_length, spec.token_budget // 2)})
        documents, source, notes = _documents(half, sizes)
        every = [documents[i] for i in range(len(documents))]
        pairs = corrupted(every, vocab_size=sizes.vocab_size, seed=spec.seed)
        if spec.algorithm == "rm":
            pairs = scored(pairs)
        notes += ("each document is preferred to itself with random ids in its second half",)
    size = max(1, min(spec.batch_size // 2, len(pairs)))
    steps = spec.steps or -(-len(pairs) // size)
    algorithm, needs_ref = _preference(spec.algorithm)
    limits = _limits(spec, documents=2 * size)
    limits = dataclasses.replace(limits, min_packs=min(spec.min_packs, size))
    plan = []
    for step in range(steps):
        samples = pairs.batch(step, size, spec.seed)
        answers: Sequence[TrainSample] = unpaired(samples) if isinstance(algorithm, KTO) else samples
        plan.append(plan_micro_batches(answers, algorithm.loss_weights(answers), limits))
    if needs_ref:
        plan = with_reference(plan, spec)
        notes += ("the reference is the policy before the first step, by `local`",)
    header = inputs_header(spec, sizes, algorithm=algorithm.config.model_dump(mode="json"))
    indices = write_inputs(spec.out / INPUTS, header, plan)
    return InputsReport(
        steps=indices, source=source, notes=notes, documents=2 * len(pairs), **_sums(plan), **_kept(sizes)
    )


def _preference(name: str) -> tuple[DPO | KTO | RewardModel, bool]:
    """The algorithm with its published values, and whether its loss has a reference."""
    if name == "rm":
        return RewardModel(RewardModelLossConfig()), False
    options = DPOConfig.model_validate({"name": name}).resolved()
    return (DPO if options.paired else KTO)(options), options.needs_ref


# --- GRPO and PPO ----------------------------------------------------------------------------------------


def _rollouts(spec: InputsSpec, sizes: Sizes) -> InputsReport:
    recording = Recording.open(spec.recording)
    fits, notes = recording.header.vocab_size <= sizes.vocab_size, []
    if fits:
        plan, algorithm = _recorded(recording, spec, sizes), dict(recording.header.algorithm)
        source = "the shipped corpus" if spec.recording is None else str(spec.recording)
        temperature = recording.header.temperature
    elif spec.recording is not None:
        raise ConfigError(
            f"other-model: --recording {spec.recording} uses a vocabulary of {recording.header.vocab_size} "
            f"ids, but {spec.model.name} has {sizes.vocab_size}; give a recording of that model, or leave "
            "--recording out to use made-up rollouts"
        )
    else:
        plan, algorithm = _made_up(spec, sizes), GRPOConfig().resolved().model_dump(mode="json")
        source, temperature = "made-up rollouts", 1.0
        notes.append(
            f"the shipped corpus has ids up to {recording.header.vocab_size}, {spec.model.name} up to "
            f"{sizes.vocab_size}: rollouts are random ids in groups of {GROUP}, rewarded by their share in "
            "the lower eighth of the ids"
        )
    steps = spec.steps or 20
    cycle = [step % len(plan) for step in range(steps)]
    of_value: dict[str, Any] = {}
    if spec.algorithm == "ppo":
        plan, values, starts = with_values(plan, spec)
        header = inputs_header(spec, sizes, algorithm=value_algorithm())
        write_inputs(spec.out / VALUE_INPUTS, header, values)
        of_value = {"value_baselines": tuple(starts[i] for i in cycle)}
        algorithm = PPOConfig().resolved().model_dump(mode="json")
        notes.append(
            "a rollout's reward is its advantage in its group; old values are those of the value model as it "
            "starts, by `local`"
        )
    header = dataclasses.replace(inputs_header(spec, sizes, algorithm=algorithm), temperature=temperature)
    plan, baselines = _at_the_start(plan, spec, header)
    notes.append("old_logprobs are those of the starting weights, by `local`")
    indices = write_inputs(spec.out / INPUTS, header, plan)
    return InputsReport(
        steps=tuple(indices[i] for i in cycle),
        source=source,
        notes=tuple(notes),
        documents=sum(len(batch.sample_ids) for batches in plan for batch in batches),
        baselines=tuple(baselines[i] for i in cycle),
        **of_value,
        **_sums([plan[i] for i in cycle]),
        **_kept(sizes),
    )


def _recorded(recording: Recording, spec: InputsSpec, sizes: Sizes) -> list[list[PackedBatch]]:
    """Inputs with an advantage that is not 0, by recorded optimizer step, up to max_samples documents."""
    longest = min(spec.max_length, sizes.max_positions)
    updates: dict[int, list[PackedBatch]] = {}
    documents = 0
    for index, (meta, lengths) in enumerate(zip(recording.metas, recording.lengths, strict=True)):
        if max(lengths) > longest:
            continue
        batch = recording[index].batch
        if not isinstance(batch, PolicyBatch):
            raise ConfigError(
                f"missing-values: {recording.path}: input {index} has no advantages; give one of an RL run"
            )
        if not bool(batch.advantages.any()):
            continue
        if documents + len(batch.sample_ids) > spec.max_samples and documents:
            break
        documents += len(batch.sample_ids)
        updates.setdefault(meta.update, []).append(repack(batch, None))
    if not updates:
        raise DataError(
            f"nothing-left: {recording.path} has no input with advantages and documents of at most {longest} "
            "tokens; raise --max-length, or give another recording"
        )
    return _padded(list(updates.values()), spec)


def _padded(plan: list[list[PackedBatch]], spec: InputsSpec) -> list[list[PackedBatch]]:
    """Pad to one static capacity if graphs need it."""
    if not spec.static_capacity:
        return plan
    every = [batch for batches in plan for batch in batches]
    longest = max(max(batch.lengths) for batch in every)
    tokens = -(-max(batch.num_tokens for batch in every) // 64) * 64
    documents = max(len(batch.sample_ids) for batch in every) + -(-tokens // longest)
    bucket = Bucket(tokens=tokens, documents=documents, max_seqlen=longest)
    return [[repack(batch, bucket) for batch in batches] for batches in plan]


def _made_up(spec: InputsSpec, sizes: Sizes) -> list[list[PackedBatch]]:
    """Make groups of random completions; an update has batch_size documents, in whole groups."""
    generator = np.random.default_rng([spec.seed, 2])
    groups = max(1, min(spec.max_samples, 4 * spec.batch_size) // GROUP)
    per_update = max(1, spec.batch_size // GROUP)
    longest = min(spec.max_length, sizes.max_positions, spec.token_budget)
    plan = []
    for first in range(0, groups, per_update):
        samples: list[PolicySample] = []
        for _ in range(first, min(groups, first + per_update)):
            samples += _group(generator, sizes.vocab_size, longest=longest, first_id=len(samples))
        weights = loss_weights([sample.loss_mask for sample in samples], aggregation="sequence_mean")
        plan.append(plan_micro_batches(samples, weights, _limits(spec, documents=len(samples))))
    return plan


def _group(
    generator: np.random.Generator, vocab_size: int, *, longest: int, first_id: int
) -> list[PolicySample]:
    prompt = _zipf(generator, int(generator.integers(3, 9)), vocab_size)
    completions = [
        _zipf(generator, int(np.clip(generator.lognormal(3.4, 0.6), 4, max(4, longest - 9))), vocab_size)
        for _ in range(GROUP)
    ]
    half = min(vocab_size, _ZIPF_IDS) // 8  # about two thirds of the ids that are drawn
    rewards = np.array([float((ids < half).float().mean()) for ids in completions])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    samples = []
    for number, (ids, advantage) in enumerate(zip(completions, advantages, strict=True)):
        whole = torch.cat([prompt, ids])
        mask = torch.zeros(len(whole), dtype=torch.bool)
        mask[len(prompt) - 1 : -1] = True
        samples.append(
            PolicySample(
                token_ids=whole,
                loss_mask=mask,
                sample_id=first_id + number,
                rollout_logprobs=torch.zeros(len(whole)),
                advantages=mask * float(advantage),
            )
        )
    return samples


def _at_the_start(
    plan: Sequence[Sequence[PackedBatch]], spec: InputsSpec, header: RecordingHeader
) -> tuple[list[list[PackedBatch]], list[float]]:
    """Return the batches with old_logprobs of the starting weights, and each update's loss at these."""
    loss = token_loss(header, "recorded")
    updates, baselines = [], []
    with starting_backend(spec, temperature=header.temperature) as backend:
        scored_plan = [[values.cpu() for values in backend.logprobs(batches)] for batches in plan]
    for batches, logprobs in zip(plan, scored_plan, strict=True):
        known = [
            dataclasses.replace(batch, old_logprobs=values, rollout_logprobs=_rollout(batch, values))
            for batch, values in zip(batches, logprobs, strict=True)
            if isinstance(batch, PolicyBatch)
        ]
        updates.append(known)
        shares = [
            loss(values, torch.zeros_like(values), batch, slice(0, batch.num_slots)).loss
            for batch, values in zip(known, logprobs, strict=True)
        ]
        baselines.append(float(sum(float(share) for share in shares)))
    return [list(batches) for batches in updates], baselines


def _rollout(batch: PolicyBatch, logprobs: Tensor) -> Tensor:
    """Fill in the policy's own logprobs as rollout logprobs: generated rollouts were never sampled."""
    return batch.rollout_logprobs if bool(batch.rollout_logprobs.any()) else logprobs


# --- writing ---------------------------------------------------------------------------------------------


def _limits(spec: InputsSpec, *, documents: int) -> PackLimits:
    static = spec.static_capacity
    return PackLimits(
        token_budget=spec.token_budget,
        static_capacity=static,
        max_seqlen=min(spec.max_length, spec.token_budget) if static else None,
        max_documents=documents if static else None,
        min_packs=min(spec.min_packs, documents),
    )


def inputs_header(spec: InputsSpec, sizes: Sizes, *, algorithm: Mapping[str, Any]) -> RecordingHeader:
    return RecordingHeader(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        framework="lockstep",
        versions=versions(),
        model=spec.model.model_copy(update={"dtype": "float32"}).model_dump(mode="json"),
        vocab_size=sizes.vocab_size,
        algorithm=algorithm,
        temperature=1.0,
        max_tokens=None,
        axes={"backend": "local", "attention": "sdpa", "execution": "eager", "layout": "packed"}
        | {"padding_side": "right", "device": "cpu", "dtype": "float32"}
        | {"static_capacity": spec.static_capacity, "activation_checkpointing": False, "engine": None},
        capacity={
            "token_budget": spec.token_budget,
            "max_seqlen": spec.max_length,
            "max_documents": spec.batch_size,
        },
        notes={"made": "inputs of a parity run"},
    )


def write_inputs(
    folder: Path, header: RecordingHeader, plan: Sequence[Sequence[PackedBatch]]
) -> tuple[tuple[int, ...], ...]:
    """Write the recording; return the indices of each update's inputs."""
    with RecordingWriter(folder, header) as writer:
        for update, batches in enumerate(plan):
            writer.add([_recorded_input(update, i, batches) for i in range(len(batches))])
    indices, first = [], 0
    for batches in plan:
        indices.append(tuple(range(first, first + len(batches))))
        first += len(batches)
    return tuple(indices)


def _recorded_input(update: int, number: int, batches: Sequence[PackedBatch]) -> RecordedInput:
    meta = InputMeta(step=update, update=update, micro_batch=number, num_micro_batches=len(batches))
    return RecordedInput(meta=meta, batch=batches[number], outputs=None)


def _sums(plan: Iterable[Sequence[PackedBatch]]) -> dict[str, int]:
    every = [batch for batches in plan for batch in batches]
    return {
        "tokens": sum(batch.num_tokens for batch in every),
        "trained_tokens": sum(int(batch.loss_mask.sum()) for batch in every),
    }


def _kept(sizes: Sizes) -> dict[str, int]:
    return {"heads": sizes.heads, "kv_heads": sizes.kv_heads, "vocab_size": sizes.vocab_size}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the inputs; return 0."""
    path = Path((sys.argv[1:] if argv is None else argv)[0])
    report = make_inputs(read_job_file(path, InputsSpec))
    echo(json.dumps({"documents": report.documents, "tokens": report.tokens, "source": report.source}))
    return 0


# --- preference pairs -------------------------------------------------------------------------------------


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


# --- PPO's value model ------------------------------------------------------------------------------------


def value_algorithm() -> dict[str, Any]:
    """The value loss, with the default settings, as a recording's header has it."""
    return {"name": VALUE} | ValueConfig().model_dump(mode="json", include=set(VALUE_LOSS))


def with_values(
    plan: Sequence[Sequence[PackedBatch]], spec: InputsSpec
) -> tuple[list[list[PackedBatch]], list[list[PackedBatch]], list[float]]:
    """Score every pack with the untrained value model, by `local`, and estimate advantages and returns with
    PPO's default settings. The reward of a document, earned by its last trained token, is the advantage that
    this token has in `plan`.

    Args:
        plan: PolicyBatches, by optimizer step.

    Returns:
        The packs with PPO's advantages, whitened over each step; the same as ValueBatches; and the value
        loss of each step before its first update.
    """
    loss = ValueLoss(ValueConfig())
    with starting_backend(spec, "value") as backend:
        scored = [[each.cpu() for each in backend.logprobs(batches)] for batches in plan]
    of_policy: list[list[PackedBatch]] = []
    of_value: list[list[PackedBatch]] = []
    starts: list[float] = []
    for batches, values in zip(plan, scored, strict=True):
        raw = [_estimates(batch, each) for batch, each in zip(batches, values, strict=True)]
        mask = torch.cat([batch.loss_mask for batch in batches])
        white = batch_mean_std(torch.cat(raw), mask, eps=WHITENING_EPS).float()
        sizes = [batch.num_slots for batch in batches]
        of_policy.append(
            [
                dataclasses.replace(batch, advantages=part)  # type: ignore[call-arg]
                for batch, part in zip(batches, white.split(sizes), strict=True)
            ]
        )
        of_value.append([_value_batch(*each) for each in zip(batches, values, raw, strict=True)])
        starts.append(
            sum(
                float(loss(each, torch.zeros_like(each), batch, slice(0, batch.num_slots)).loss)
                for batch, each in zip(of_value[-1], values, strict=True)
            )
        )
    return of_policy, of_value, starts


def _estimates(batch: PackedBatch, values: Tensor) -> Tensor:
    """[T] float64: the advantages before they are whitened, 0 where nothing is trained."""
    assert isinstance(batch, PolicyBatch)
    mask, options = batch.loss_mask, PPOConfig()
    counts = [int(part.sum()) for part in batch.split(mask)]
    ends = torch.tensor([0, *counts]).cumsum(0)
    earned = batch.advantages[mask].double()
    rewards = torch.zeros_like(earned)
    last = ends[1:][torch.tensor(counts) > 0] - 1
    rewards[last] = earned[last]
    found = torch.zeros(batch.num_slots, dtype=torch.float64)
    found[mask] = gae(rewards, values[mask].double(), ends, gamma=options.gamma, lam=options.lam)
    return found


def _value_batch(batch: PackedBatch, values: Tensor, advantages: Tensor) -> ValueBatch:
    shared = {field.name: getattr(batch, field.name) for field in dataclasses.fields(PackedBatch)}
    old = torch.where(batch.loss_mask, values, 0.0)
    returns = torch.where(batch.loss_mask, (advantages + old.double()).float(), 0.0)
    return ValueBatch(**shared, returns=returns, old_values=old)


if __name__ == "__main__":
    leave_with(main, "parity inputs")
