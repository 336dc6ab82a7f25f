"""One arm of a bisection: a loaded cell, its outcome on an input, and the difference of two outcomes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep import invariant
from lockstep.errors import ConfigError, LockstepError, ParityError, TrainError
from lockstep.models.load import share_parameters
from lockstep.protocols.train import TokenLoss
from lockstep.schema.batch import IGNORE_LABEL, PackedBatch
from lockstep.train.local import LocalBackend
from lockstep_lab.bisect.capture import Capture, CapturedTensor, Key, reverse_documents, token_rows
from lockstep_lab.replay.cell import ReplayOptions
from lockstep_lab.replay.policy import check_usable
from lockstep_lab.replay.replayer import Replayer

if TYPE_CHECKING:
    from lockstep.recording import Recording


AnyBatch = TypeVar("AnyBatch", bound=PackedBatch)


def take(batch: AnyBatch, parts: Sequence[tuple[int, int]]) -> AnyBatch:
    """Make an exact pack (no tail) of some documents of `batch`, in the order given.

    Args:
        parts: (index of a real document, how many of its *last* tokens): a completion is at a document's end,
            so a short cut still has something to train on.

    Raises:
        ValueError: no document, or one with no token or more than it has.
    """
    starts = [0, *accumulate(batch.lengths)]
    real = len(batch.sample_ids)
    bad = [(i, n) for i, n in parts if not (0 <= i < real and 1 <= n <= batch.lengths[i])]
    if bad or not parts:
        raise ValueError(f"cannot select {bad or 'no document'} from lengths {batch.lengths[:real]}")
    lengths = [n for _, n in parts]
    slots = torch.cat([torch.arange(starts[i + 1] - n, starts[i + 1]) for i, n in parts])
    per_token: dict[str, Any] = {
        field.name: value[slots]
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and value.shape == batch.token_ids.shape
    }
    ends = torch.tensor(list(accumulate(lengths)))
    per_token["positions"] = torch.cat([torch.arange(n) for n in lengths])
    per_token["labels"][ends - 1] = IGNORE_LABEL
    per_token["loss_mask"][ends - 1] = False
    per_token["loss_weights"] = torch.where(per_token["loss_mask"], per_token["loss_weights"], 0.0)
    names = {field.name for field in dataclasses.fields(batch)}
    if "policy_versions" in names:
        versions = getattr(batch, "policy_versions", ())
        per_token["policy_versions"] = tuple(versions[i] for i, _ in parts) if versions else ()
    return dataclasses.replace(
        batch,
        **per_token,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        lengths=tuple(lengths),
        sample_ids=tuple(batch.sample_ids[i] for i, _ in parts),
        shared=None,
    )


def reversed_order(batch: AnyBatch) -> AnyBatch:
    """Return the same documents, last one first, in an exact pack."""
    real = len(batch.sample_ids)
    return take(batch, [(i, batch.lengths[i]) for i in reversed(range(real))])


def exact(batch: AnyBatch) -> AnyBatch:
    """Return the same documents without a padded tail."""
    return take(batch, [(i, batch.lengths[i]) for i in range(len(batch.sample_ids))])


# The noise is that of one other order of documents: yet another may give a few times as much.
NOISE_FACTOR = 4.0
FLOORS: Mapping[torch.dtype, tuple[float, float, float]] = {
    torch.float64: (1e-9, 1e-12, 1e-10),
    torch.float32: (1e-4, 1e-5, 2e-4),
    torch.float16: (3e-2, 4e-3, 5e-2),
    torch.bfloat16: (2e-1, 2e-2, 2e-1),
}
"""dtype -> (nats of a token's logprob, relative difference of a tensor in the first layer, relative
difference of a parameter's gradient) that rounding alone explains."""
_SMALL_GRADIENT = 1e-4
"""A parameter whose gradient is this much smaller than all of them together is measured against that."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One cell, ready to run."""

    name: str
    """a, b, a-eager or b-eager."""
    label: str
    """The cell in words: "varlen + compile + packed"."""
    backend: LocalBackend
    loss: TokenLoss
    fit: Callable[[PackedBatch], PackedBatch] = exact
    """Adds to an exact pack the tail that the cell runs with."""
    backward: bool = True
    settings_apply: bool = False
    """Whether it runs under CUDA's settings for batch invariance (lockstep.invariant.configured)."""
    eager: Callable[[], Arm] | None = None
    """The same cell on the same weights without the compiler; None: it is eager."""

    @property
    def module(self) -> nn.Module:
        return self.backend.module


class ArmFailed(LockstepError):
    """An arm raised an exception, which is the cause of this one."""

    def __init__(self, arm: str, index: int) -> None:
        super().__init__(f"cell {arm} fails on input {index}", code="cell-failed", name=arm, input=index)
        self.arm, self.index = arm, index


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one arm on one input, in the order of the input's documents."""

    logprobs: Tensor
    """[trained tokens] float32, on the host."""
    gradients: Mapping[str, Tensor]
    tensors: Mapping[Key, CapturedTensor]
    capture: Capture | None


@dataclass(frozen=True, kw_only=True, slots=True)
class InputDifference:
    """The difference between two arms on one input."""

    logprob: float
    """Largest difference of a token's logprob, nats."""
    gradient: float
    """Largest relative difference of a parameter's gradient; 0 without backward."""
    parameter: str
    """The parameter with that difference."""


def run(
    arm: Arm,
    batch: PackedBatch,
    *,
    whole: Callable[[Key], bool] | None = None,
    calls: frozenset[str] = frozenset(),
    capture: bool = False,
    backwards: bool = False,
) -> Outcome:
    """Run one forward, and backward if the arm has one.

    Args:
        batch: an exact pack on the host.
        capture: capture the modules' tensors; `whole` and `calls`: see Capture.
        backwards: `batch` is a pack's `reversed_order`; what comes out is in the order of the original.
    """
    fitted = arm.fit(batch)
    config = arm.backend.config
    lengths = batch.lengths
    rows, shape = token_rows(fitted, layout=config.layout, padding_side=config.padding_side)
    rows = reverse_documents(rows, lengths) if backwards else rows
    recorder = Capture(arm.module, rows=rows, shape=shape, whole=whole, calls=calls) if capture else None
    if recorder is not None:
        with recorder:
            logprobs, gradients = _step(arm, fitted)
    else:
        logprobs, gradients = _step(arm, fitted)
    order = torch.arange(fitted.num_tokens)
    order = reverse_documents(order, lengths) if backwards else order
    trained = order[fitted.loss_mask[order]]
    return Outcome(
        logprobs=logprobs.cpu()[trained],
        gradients=gradients,
        tensors=recorder.tensors if recorder else {},
        capture=recorder,
    )


def _step(arm: Arm, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    with invariant.configured(arm.settings_apply):
        return _computed(arm, batch)


def _computed(arm: Arm, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    backend = arm.backend
    if not arm.backward:
        return backend.logprobs([batch])[0], {}
    backend.drop_gradients()
    try:
        stats = backend.forward_backward([batch], arm.loss)
        gradients = {name: g.detach().clone() for name, g in backend.live_gradients().items()}
    except TrainError:
        logprobs = backend.logprobs([batch])[0]
        if bool(torch.isfinite(logprobs).all()):
            raise
        return logprobs, {}  # a loss that is not finite stops a step; here it is what is looked for
    finally:
        backend.drop_gradients()
    return stats.logprobs[0], gradients


def compare(x: Outcome, y: Outcome) -> InputDifference:
    """Compare two outcomes. Raises ParityError when they do not have the same tokens."""
    if x.logprobs.shape != y.logprobs.shape:
        raise ParityError(
            f"wrong-shape: one cell returned {x.logprobs.numel()} logprobs and the other "
            f"{y.logprobs.numel()} for the same input"
        )
    parts = gradient_parts(x.gradients, y.gradients)
    worst = max(parts, key=lambda n: _rank(parts[n]), default="")
    return InputDifference(
        logprob=largest_gap(x.logprobs.double() - y.logprobs.double()),
        gradient=parts.get(worst, 0.0),
        parameter=worst,
    )


def gradient_parts(x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute the relative difference of every parameter's gradient; a missing gradient counts as zero."""
    total = total_norm(x.values())
    parts = {}
    for name in dict.fromkeys([*x, *y]):
        one, other = x.get(name), y.get(name)
        one = torch.zeros_like(other) if one is None and other is not None else one
        other = torch.zeros_like(one) if other is None and one is not None else other
        assert one is not None and other is not None
        other = other.to(one.device)
        scale = max(total_norm([one]), total_norm([other]), _SMALL_GRADIENT * total)
        gap = total_norm([one.float() - other.float()])
        parts[name] = gap / scale if scale > 0 else gap
    return parts


def differs(
    a: Arm, b: Arm, batch: PackedBatch, difference: InputDifference, *, tolerance: float | None
) -> bool:
    """Whether an input is beyond tolerance. The noise of reordered documents is measured only if a floor is
    exceeded."""
    nats, _, gradient = floors(a, b, tolerance)
    if difference.logprob <= nats and difference.gradient <= gradient:
        return False
    if tolerance is not None:
        return True
    noise = _input_noise(a, batch)
    allowed_nats = max(nats, NOISE_FACTOR * noise.logprob)
    allowed_gradient = max(gradient, NOISE_FACTOR * noise.gradient)
    return not (difference.logprob <= allowed_nats and difference.gradient <= allowed_gradient)


def _input_noise(a: Arm, batch: PackedBatch) -> InputDifference:
    return compare(run(a, batch), run(a, reversed_order(batch), backwards=True))


def floors(a: Arm, b: Arm, tolerance: float | None) -> tuple[float, float, float]:
    if tolerance is not None:
        return tolerance, tolerance, tolerance
    dtypes = (a.backend.model.dtype, b.backend.model.dtype)
    return max((FLOORS[dtype] for dtype in dtypes), key=lambda f: f[0])


def largest_gap(gap: Tensor) -> float:
    return float(gap.detach().abs().nan_to_num(nan=torch.inf).max()) if gap.numel() else 0.0


def total_norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(t.float().norm()) ** 2 for t in tensors))


def _rank(value: float) -> float:
    return value if value == value else float("inf")


# --- cells of a recording as arms -------------------------------------------------------------------------


class OpenCells:
    """Both cells, loaded.

    Raises:
        ConfigError, RecordingError, ModelError: before the first forward.
    """

    def __init__(self, recording: Recording, options_a: ReplayOptions, options_b: ReplayOptions) -> None:
        for name, options in (("a", options_a), ("b", options_b)):
            check_bisectable(name, options)
        self.recording = recording
        self._replayers = tuple(Replayer(recording, options) for options in (options_a, options_b))
        for replayer in self._replayers:
            replayer.policy.take_back_settings()  # each arm sets its own when it runs
        self.order = self._replayers[0].order
        self.a, self.b = (_arm(name, one) for name, one in zip("ab", self._replayers, strict=True))
        if self._replayers[0].size.num_layers != self._replayers[1].size.num_layers:
            raise ConfigError(
                "contradiction: the cells have different numbers of layers; give --num-layers once, outside "
                "--a and --b"
            )

    def inputs(self) -> Iterator[tuple[int, PackedBatch]]:
        """Yield (index, batch), with the weights that saw this input loaded."""
        for index in self.order:
            recorded = self.recording[index]
            check_usable(recorded.meta, index=index)
            for replayer in self._replayers:
                replayer.policy.use(recorded.meta)
            yield index, recorded.batch

    def weights_descriptions(self) -> tuple[str, str]:
        """Describe the weights of each cell."""
        return self._replayers[0].weights_description, self._replayers[1].weights_description


def check_bisectable(name: str, options: ReplayOptions) -> None:
    """Raise ConfigError for cells that run in several processes or inside another compiler's graph, or whose
    documents share rows."""
    cell = options.cell
    if cell.deepspeed or cell.ranks > 1 or options.simulate:
        raise ConfigError(
            f"unsupported-combination: --{name}: bisect looks into the modules of one process; leave "
            "--zero-stage, --deepcompile, --ranks and --simulate out (`lockstep matrix` compares such cells "
            "from outside)"
        )
    if cell.layout == "shared":
        raise ConfigError(
            f"unsupported-combination: --{name} has --layout shared: one row may belong to several "
            "documents, so its gradients cannot be compared with another cell's; use --layout packed"
        )
    if options.optimizer_step:
        raise ConfigError(
            f"unsupported-combination: --{name}: --optimizer-step would make the weights differ; leave it out"
        )


def _arm(name: str, replayer: Replayer) -> Arm:
    backend = replayer.policy.backend
    assert isinstance(backend, LocalBackend)
    arm = Arm(
        name=name,
        label=replayer.options.cell.label(),
        backend=backend,
        loss=replayer.loss,
        fit=replayer.bucketing.fit,
        backward=replayer.options.backward,
        settings_apply=replayer.policy.settings_apply,
    )
    if backend.config.execution == "eager":
        return arm

    def eager() -> Arm:
        """Make the eager arm over the same Parameters, with the same padded tail."""
        config = backend.config.model_copy(update={"execution": "eager"})
        module = share_parameters(backend.module, attention=replayer.options.cell.attention)
        if config.batch_invariant:
            invariant.convert(module)
        twin = LocalBackend(
            config,
            model=dataclasses.replace(backend.model, module=module),
            total_steps=0,
            temperature=backend.temperature,
        )
        label = dataclasses.replace(replayer.options.cell, execution="eager").label()
        return dataclasses.replace(arm, name=f"{name}-eager", label=label, backend=twin, eager=None)

    return dataclasses.replace(arm, eager=eager)
