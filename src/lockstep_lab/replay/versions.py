"""Check the logprobs that an engine reported, each under the version of the policy that sampled the token.

    spans of the recording   version 3: tokens 0-6 of document 2, ...      version 4: tokens 7-15, ...
    weights of version 3     stored, or made from an earlier version by the updates that were recorded
    logprobs under them      compared with `rollout_logprobs`

Version v is the policy before step v. An update repeated from an exact state (the model of the first step,
or a checkpoint with the optimizer's state) gives the recorded weights, which every input has the fingerprint
of; it is compared before each update and before a version is used.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.config.load import saved_run
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError, RecordingError
from lockstep.observe.metrics import Spans
from lockstep.recording.files import fingerprint, module_tensors
from lockstep.recording.weights import find_weights
from lockstep.schema.batch import PolicyBatch
from lockstep.schema.contract import KernelContract
from lockstep.schema.recording import InputMeta, RecordedInput
from lockstep.train import BACKENDS
from lockstep_lab.replay.buckets import plan_buckets, select_inputs
from lockstep_lab.replay.cell import ReplayOptions, check_cell
from lockstep_lab.replay.losses import token_loss
from lockstep_lab.replay.policy import (
    Policy,
    ReplayBackend,
    check_usable,
    model_config,
    model_head,
    model_size,
)
from lockstep_lab.suite.machine import versions

if TYPE_CHECKING:
    from lockstep.recording import Recording

_CHECKPOINT = re.compile(r"step-(\d{6,12})", re.ASCII)
_STATES = ("optimizer.safetensors", "state.json", "complete.json")
"""Files of a checkpoint without which updates cannot go on from it."""
_SHOWN = 5
"""Differences that are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanOfVersion:
    """Tokens of one document that one version sampled."""

    index: int
    """Of the input."""
    document: int
    """Its number among the input's documents."""
    tokens: Tensor
    """[n] int64, slots of the input whose logprobs are these tokens'."""


@dataclass(kw_only=True, slots=True)
class VersionsResult:
    """What a check of versions found."""

    samples: int
    spans: int
    tokens: int
    versions: tuple[int, ...]
    recomputed: tuple[int, ...]
    """Versions whose weights were not stored."""
    exact: bool
    """Whether engine and replay must agree bit for bit: native, and the same batch-invariant kernels."""
    max_difference: float = 0.0
    """Nats."""
    num_differences: int = 0
    """Tokens whose logprob is not the reported one, bit for bit."""
    differences: list[str] = field(default_factory=list)
    """The first of them, in words."""

    @property
    def ok(self) -> bool:
        """Whether nothing differs that must not."""
        return not (self.exact and self.num_differences)

    @property
    def verdict(self) -> str:
        """The last line of the command."""
        text = (
            f"versions: {self.samples} samples, {self.spans} spans of {len(self.versions)} versions: "
            f"logprobs within {self.max_difference:.3g} nats of what the engine reported"
        )
        if not self.num_differences:
            return f"{text}, bit for bit"
        return f"{text}; {self.num_differences} of {self.tokens} tokens differ" + (
            ", and none should" if self.exact else ""
        )

    def summary(self) -> dict[str, Any]:
        """As summary.json has it."""
        facts = {"ok": self.ok, "verdict": self.verdict, "packages": versions()}
        return dataclasses.asdict(self) | facts


def check_versions(
    recording: Recording, options: ReplayOptions, *, say: Callable[[str], None] = lambda line: None
) -> VersionsResult:
    """Compare every logprob of the selected inputs with what the version that sampled the token gives.

    Args:
        say: called with a line about each version.

    Raises:
        ConfigError: options that change the weights or the inputs.
        RecordingError: the spans are not known; a version can neither be loaded nor be made again; or its
            weights are not the recorded ones.
    """
    _check_options(recording, options)
    spans = spans_by_version(recording, select_inputs(recording, options))
    weights = VersionWeights(recording, options, sorted(spans))
    try:
        every = [span for of_version in spans.values() for span in of_version]
        result = VersionsResult(
            samples=len({(span.index, span.document) for span in every}),
            spans=len(every),
            tokens=sum(len(span.tokens) for span in every),
            versions=tuple(sorted(spans)),
            recomputed=tuple(weights.missing),
            exact=weights.exact,
        )
        for version, source in weights.each():
            before = result.num_differences
            for index, of_input in _by_input(spans[version]).items():
                _compare(recording[index], of_input, version, weights.logprobs, result)
            found = result.num_differences - before
            say(
                f"version {version}: {len(spans[version])} spans, weights {source}: "
                + (f"{found} tokens differ" if found else "equal, bit for bit")
            )
    finally:
        weights.close()
    for line in result.differences:
        say(line)
    return result


def spans_by_version(recording: Recording, order: Sequence[int]) -> dict[int, list[SpanOfVersion]]:
    """Version -> the spans that it sampled. Documents that are trained on nowhere have no logprobs, and are
    left out.

    Raises:
        RecordingError: a document has no spans, or others than its tokens.
    """
    spans: dict[int, list[SpanOfVersion]] = defaultdict(list)
    seen: set[tuple[int, int]] = set()
    for index in order:
        recorded = recording[index]
        check_usable(recorded.meta, index=index)
        batch, start = recorded.batch, 0
        facts = recorded.meta.documents or ({},) * len(batch.sample_ids)
        for number, length in enumerate(batch.lengths[: len(batch.sample_ids)]):
            slots = start + batch.loss_mask[start : start + length].nonzero().flatten()
            start += length
            sample = recorded.meta.step, batch.sample_ids[number]
            if not len(slots) or sample in seen:  # a later epoch has the same samples
                continue
            seen.add(sample)
            written = _written(facts[number].get("spans"), index, number, tokens=len(slots))
            for (version, _), tokens in zip(written, slots.split([n for _, n in written]), strict=True):
                if len(tokens):
                    spans[version].append(SpanOfVersion(index=index, document=number, tokens=tokens))
    if not spans:
        raise RecordingError("nothing-left: the selected inputs have no token that a policy sampled")
    return spans


def _written(value: Any, index: int, number: int, *, tokens: int) -> list[tuple[int, int]]:
    """The recorded spans of a document, checked."""
    where = f"input {index}, document {number}"
    if value is None:
        raise RecordingError(
            f"missing-field: {where}: it is not recorded which version of the policy wrote which token; "
            "record the run with this version of Lockstep, with rollouts of its own"
        )
    good = isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)
        for pair in value
    )
    if not good or sum(pair[1] for pair in value) != tokens:
        raise RecordingError(
            f"wrong-field: {where}: field 'spans' is {str(value)[:200]}; it must be [version, tokens] pairs "
            f"that come to its {tokens} sampled tokens"
        )
    return [(version, count) for version, count in value]


def updates_per_step(metas: Iterable[InputMeta]) -> int:
    """Return the least n with which every update is one of n of its step: InputMeta.update // n."""
    return max((meta.update // (meta.step + 1) + 1 for meta in metas), default=1)


def _by_input(spans: Sequence[SpanOfVersion]) -> dict[int, list[SpanOfVersion]]:
    grouped: dict[int, list[SpanOfVersion]] = defaultdict(list)
    for span in spans:
        grouped[span.index].append(span)
    return grouped


def _compare(
    recorded: RecordedInput,
    spans: Sequence[SpanOfVersion],
    version: int,
    logprobs_of: Callable[[PolicyBatch], Tensor],
    result: VersionsResult,
) -> None:
    batch = PolicyBatch.of(recorded.batch)
    logprobs = logprobs_of(batch)
    for span in spans:
        here, reported = logprobs[span.tokens], batch.rollout_logprobs[span.tokens]
        differs = here.view(torch.int32) != reported.view(torch.int32)
        if not bool(differs.any()):
            continue
        result.num_differences += int(differs.sum())
        gap = (here - reported).abs()
        largest = float(gap.max())
        result.max_difference = largest if largest != largest else max(result.max_difference, largest)
        if len(result.differences) < _SHOWN:
            at = int(differs.nonzero()[0])
            result.differences.append(
                f"step {recorded.meta.step}, input {span.index}, document {span.document}: token "
                f"{int(span.tokens[at])} has logprob {float(here[at]):.9g} under version {version}, but the "
                f"engine reported {float(reported[at]):.9g}"
            )


def _check_options(recording: Recording, options: ReplayOptions) -> None:
    """Raises ConfigError, RecordingError."""
    check_cell(options.cell)
    several = options.cell.ranks > 1 or options.simulate or options.shuffle
    changes = {
        "--ranks, --simulate and --shuffle-inputs": several,
        "--optimizer-step": options.optimizer_step,
        "--model": options.cell.model is not None,
        "--num-layers": options.cell.num_layers is not None,
        "--zero-stage and --deepcompile": options.cell.deepspeed,
    }
    for flags, given in changes.items():
        if given:
            raise ConfigError(
                f"contradiction: --versions needs the weights of the run, in one process; leave {flags} out"
            )
    if recording.header.role != "policy" or recording.header.has_scores:
        raise RecordingError(
            "wrong-kind-of-file: --versions needs a recording of a policy's inputs; this one is of a model "
            "that gives values"
        )


class _Trainer(Policy):
    """A policy that can repeat the updates of the run."""

    def __init__(
        self, recording: Recording, options: ReplayOptions, *, train: TrainConfig, total_steps: int
    ) -> None:
        self._train, self._total_steps = train, total_steps
        order = range(len(recording))
        bucketing = plan_buckets(recording, order, options, max_positions=2**31 - 1)
        super().__init__(recording, options, order=order, bucketing=bucketing, spans=Spans())

    def _build(self) -> ReplayBackend:
        backend: Any = BACKENDS.load("local")(
            self._train,
            model=dataclasses.replace(self.model, dtype=self._cell_dtype),
            total_steps=self._total_steps,
            temperature=self.recording.header.temperature,
            spans=self._spans,
        )
        return backend  # type: ignore[no-any-return]


class VersionWeights:
    """A policy that gets the weights of one version after the other: those that are stored, and else
    those of an earlier version after the recorded updates.

    Raises:
        RecordingError: a version is not stored, and there is nothing to make it from.
    """

    def __init__(self, recording: Recording, options: ReplayOptions, versions: Sequence[int]) -> None:
        self.recording, self.options, self.versions = recording, options, versions
        self._known: dict[Path, str] = {}
        self._updates: dict[int, list[int]] = defaultdict(list)
        for index, meta in enumerate(recording.metas):
            self._updates[meta.update].append(index)
        self._first: dict[int, InputMeta] = {}
        per_step = updates_per_step(recording.metas)
        for meta in recording.metas:
            if meta.update == meta.step * per_step:  # a later update of a step has weights of its own
                self._first.setdefault(meta.step, meta)
        self._stored = {version: self._find(version) for version in versions}
        self.missing = [version for version, folder in self._stored.items() if folder is None]
        """Versions whose weights are not stored."""
        self._trainer: _Trainer | None = None
        self._at = -1
        """The version that the trainer has."""
        if self.missing:
            self._plan()
        order = range(len(recording))
        size = model_size(
            model_config(recording.header, options),
            dtype=getattr(torch, options.cell.dtype),
            head=model_head(recording.header),
        )
        self._bucketing = plan_buckets(recording, order, options, max_positions=size.max_positions)
        self._policy = Policy(recording, options, order=order, bucketing=self._bucketing, spans=Spans())

    @property
    def exact(self) -> bool:
        """Whether the engine's logprobs must come out bit for bit."""
        header, here = self.recording.header, self._policy.backend.contract
        recorded = header.contract
        return (
            header.axes.get("engine") == "native"
            and recorded is not None
            and here is not None
            and not here.difference(KernelContract.from_json(recorded))
        )

    def each(self) -> Iterator[tuple[int, str]]:
        """Yield each version when its weights are loaded, and where they are from."""
        for version in self.versions:
            yield version, self._recompute(version) if version in self.missing else self._load(version)

    def logprobs(self, batch: PolicyBatch) -> Tensor:
        """[T] float32, nats, on the host, under the loaded weights."""
        return self._policy.backend.logprobs([self._bucketing.fit(batch)])[0].cpu()

    def close(self) -> None:
        """Close the policies."""
        if self._trainer is not None:
            self._trainer.close()
        self._policy.close()

    # --- stored weights

    def _meta(self, version: int) -> InputMeta:
        """The first input of the version's step; of a step that was not recorded, what names its weights."""
        unknown = InputMeta(step=version, update=0, micro_batch=0, num_micro_batches=1)
        return self._first.get(version, unknown)

    def _find(self, version: int) -> Path | None:
        return find_weights(self.recording.path, self._meta(version), known=self._known)

    def _load(self, version: int) -> str:
        meta = self._meta(version)
        if self._policy.use(meta) == "mismatch":
            raise self._other_weights(version, f"{self._stored[version]} contains", self._policy.fingerprint)
        return f"of {self._stored[version]}"

    def _other_weights(self, version: int, what: str, found: str) -> RecordingError:
        return RecordingError(
            f"hash-differs: version {version}: {what} the weights {found}, but the inputs of step {version} "
            f"were recorded with {self._meta(version).weights}",
            version=version,
        )

    # --- recomputed weights

    def _plan(self) -> None:
        """Refuse before anything is computed what cannot be made again."""
        config = self.recording.path.parent / "config.toml"
        if not config.is_file():
            raise RecordingError(
                f"no-such-file: version {self.missing[0]} of the policy is not stored, and making it again "
                f"needs the run's optimizer settings in {config}, which does not exist; record with "
                "--record-weights 'every 1'"
            )
        run = saved_run(config)
        axes = self.recording.header.axes
        if axes.get("backend") != "local" or self.recording.header.world_size > 1:
            raise RecordingError(
                f"unsupported-combination: version {self.missing[0]} of the policy is not stored, and "
                "updates are repeated only for a run of train.backend = 'local' on one rank; record with "
                "--record-weights 'every 1'"
            )
        cell = self.options.cell
        if cell.dtype != axes.get("dtype"):
            raise RecordingError(
                f"unsupported-combination: version {self.missing[0]} of the policy is not stored, and "
                f"updates give the recorded weights only in the recorded dtype {axes.get('dtype')}, not in "
                f"{cell.dtype}; record with --record-weights 'every 1'"
            )
        self._run = run
        self._train = run.train.model_copy(
            update={
                "backend": "local",
                "attention": cell.attention,
                "execution": cell.execution,
                "layout": cell.layout,
                "padding_side": cell.padding_side,
                "device": cell.device,
                "activation_checkpointing": cell.activation_checkpointing,
                "batch_invariant": cell.batch_invariant,
                "static_capacity": axes.get("static_capacity"),
            }
        )
        self._updates_per_step = self._train.minibatches * self._train.epochs_per_batch
        self._total_steps = run.policy_steps * self._updates_per_step
        position = -1
        for version in self.missing:
            start = self._start(version)
            for step in range(max(position, start), version):
                self._check_recorded(step, version)
            position = version

    def _start(self, version: int) -> int:
        """The latest version up to this one that updates can go on from: 0, or of a checkpoint."""
        steps = [step for step, _ in self._checkpoints() if step <= version]
        if steps:
            return max(steps)
        if 0 in self._first or self._run.policy_steps < self._run.steps:  # else a value model warms up alone
            return 0
        folder = self.recording.path.parent / "checkpoints"
        earlier = [step for step in self._checkpoints(complete=False) if step[0] <= version]
        if earlier:
            path, lacks = earlier[-1][1], [n for n in _STATES if not (earlier[-1][1] / n).is_file()]
            raise RecordingError(
                f"no-such-file: version {version} of the policy is not stored, and updates cannot go on from "
                f"{path}, which lacks {lacks[0]}: the optimizer's state is missing"
            )
        raise RecordingError(
            f"missing-setting: version {version} of the policy is not stored, and there is nothing to make "
            f"it from: step 0 was not recorded, and {folder} has no checkpoint with the optimizer's state of "
            f"step {version} or earlier; record with --record-weights 'every 1', or keep checkpoints "
            "(checkpoint.every, checkpoint.keep_last)"
        )

    def _checkpoints(self, *, complete: bool = True) -> list[tuple[int, Path]]:
        folder = self.recording.path.parent / "checkpoints"
        found = []
        for path in sorted(folder.glob("step-*")):
            match = _CHECKPOINT.fullmatch(path.name)
            if match is None or path.is_symlink():
                continue
            if not complete or all((path / name).is_file() for name in _STATES):
                found.append((int(match[1]), path))
        return found

    def _updates_of(self, step: int) -> range:
        """The updates of a step: fewer than in others if it had fewer samples than minibatches, and none
        while a value model warms up alone."""
        record, first = self._run.record, step * self._updates_per_step
        if step < self._run.steps - self._run.policy_steps:
            return range(0)
        updates = range(first, first + self._updates_per_step)
        if record.every > 1 or not record.covers(step) or first not in self._updates:
            return updates  # what is not recorded may have been an update
        return range(first, next((each for each in updates if each not in self._updates), updates.stop))

    def _check_recorded(self, step: int, version: int) -> None:
        """Raise RecordingError unless every input of the step's updates is there."""
        for update in self._updates_of(step):
            metas = [self.recording.metas[index] for index in self._updates.get(update, ())]
            if not metas or len(metas) != metas[0].num_micro_batches:
                raise RecordingError(
                    f"nothing-left: version {version} of the policy is not stored, and it cannot be made "
                    f"again: {len(metas)} of {metas[0].num_micro_batches if metas else 'the'} inputs of "
                    f"update {update} (step {step}) are recorded; record all inputs (record.every = 1, no "
                    "record.first_step), or the weights (--record-weights 'every 1')"
                )

    def _recompute(self, version: int) -> str:
        """Repeat updates until the trainer has the version, and copy its weights."""
        start = self._start(version)
        if self._trainer is None:
            self._trainer = _Trainer(
                self.recording, self.options, train=self._train, total_steps=self._total_steps
            )
        trainer = self._trainer
        if start > self._at:
            if start > 0:
                backend: Any = trainer.backend
                backend.load(self.recording.path.parent / f"checkpoints/step-{start:06d}")
            self._at = self._origin = start
        self._check_weights(self._at)
        while self._at < version:
            self._repeat(self._at)
            self._at += 1
            self._check_weights(self._at)
        self._policy.adopt(trainer.model.module)
        known = "" if self._meta(version).weights else " (their fingerprint is not recorded)"
        return f"recomputed from version {self._origin}{known}"

    def _repeat(self, step: int) -> None:
        """All updates of a step."""
        assert self._trainer is not None
        loss = token_loss(self.recording.header, "recorded")
        for update in self._updates_of(step):
            inputs = [self.recording[index] for index in self._updates[update]]
            if inputs[0].rng is not None:
                torch.set_rng_state(inputs[0].rng)
            self._check_update(inputs[0].meta)
            self._trainer.backend.forward_backward([each.batch for each in inputs], loss)
            self._trainer.backend.optimizer_step()

    def _check_update(self, meta: InputMeta) -> None:
        """A later update of a step: its weights are no version of their own."""
        found = self._fingerprint()
        if meta.weights is not None and meta.weights != found:
            raise RecordingError(
                f"hash-differs: repeating the updates of step {meta.step} (from version {meta.step}) "
                f"gives the weights {found} before update {meta.update}, but {meta.weights} was recorded"
            )

    def _check_weights(self, version: int) -> None:
        found, recorded = self._fingerprint(), self._meta(version).weights
        if recorded is not None and found != recorded:
            how = f"repeating the updates from version {self._origin} gives"
            if version == self._origin:
                how = "the version to start from has"
            raise self._other_weights(version, how, found)

    def _fingerprint(self) -> str:
        assert self._trainer is not None
        return fingerprint(module_tensors(self._trainer.model.module).items())
