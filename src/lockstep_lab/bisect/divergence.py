"""The first tensor that differs between two arms on one input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lockstep.execution import decoder_layers
from lockstep.models.architectures import causal_lm
from lockstep.schema.batch import PackedBatch
from lockstep_lab.bisect.arms import (
    NOISE_FACTOR,
    Arm,
    Outcome,
    floors,
    gradient_parts,
    largest_gap,
    reversed_order,
    run,
)
from lockstep_lab.bisect.capture import KERNEL, Capture, CapturedTensor, Key

HEAD = "lm_head (logprobs)"
# Sketches are exact to a few percent: the first difference may lie some tensors beside where they see it.
_AROUND = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The difference of one tensor between two arms."""

    key: Key
    kind: str
    shape: tuple[int, ...]
    """[tokens, ...]; of a parameter: its own."""
    relative: float
    """Frobenius norm of the difference over that of the larger one. Estimated from a sketch unless max_abs is
    known."""
    max_abs: float | None
    """None: only sketches were kept."""
    allowed: float
    """Tolerance of `relative` (for the head: of max_abs, nats)."""
    noise: float
    """`relative` (for the head: max_abs) between two orders of documents in cell A."""
    where: tuple[int, int] | None = None
    """(document, position) of the largest difference."""

    @property
    def beyond(self) -> bool:
        value = self.max_abs if self.key.path == HEAD else self.relative
        return value is None or not value <= self.allowed


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The first divergence of two arms on one input."""

    arms: tuple[Arm, Arm]
    first: Difference
    description: str
    gradual: bool
    """No tensor is beyond its tolerance, only the result is: `first` is the largest step towards it."""
    around: Sequence[Difference]
    """Tensors before and after `first`, in the order of execution."""
    growth: Sequence[Difference]
    """The output of every decoder layer, in the direction of `first`."""
    weights: str
    """Whether the module's parameters agree, in words; empty where it has none."""
    consumers: Sequence[str] = ()
    """Modules that were called with the tensor of `first`."""


class Tolerances:
    """How far tensors may differ: measured in cell A, with floors."""

    def __init__(self, a: Arm, b: Arm, batch: PackedBatch, *, tolerance: float | None) -> None:
        self._tolerance = tolerance
        self._nats, self._floor, self._gradient = floors(a, b, tolerance)
        plain_run = run(a, batch, capture=True)
        reversed_run = run(a, reversed_order(batch), capture=True, backwards=True)
        self.noise = {
            key: relative_difference(one, reversed_run.tensors[key])
            for key, one in plain_run.tensors.items()
            if key in reversed_run.tensors
        }
        self.parameters = gradient_parts(plain_run.gradients, reversed_run.gradients)
        self.head = largest_gap(plain_run.logprobs.double() - reversed_run.logprobs.double())
        self._worst = {"forward": 0.0, "backward": 0.0}

    def tensor(self, key: Key, *, depth: int) -> float:
        """Relative tolerance of a tensor after `depth` layers; it never shrinks from layer to layer."""
        if self._tolerance is not None:
            return self._tolerance
        self._worst[key.direction] = max(self._worst[key.direction], self.noise.get(key, 0.0))
        return max(self._floor * math.sqrt(1 + depth), NOISE_FACTOR * self._worst[key.direction])

    def parameter(self, name: str) -> float:
        """Relative tolerance of a parameter's gradient."""
        if self._tolerance is not None:
            return self._tolerance
        return max(self._gradient, NOISE_FACTOR * self.parameters.get(name, 0.0))

    def logprobs(self) -> float:
        """Tolerance of a token's logprob, nats."""
        return self._nats if self._tolerance is not None else max(self._nats, NOISE_FACTOR * self.head)


def find_first_divergence(a: Arm, b: Arm, batch: PackedBatch, *, tolerance: float | None) -> Finding:
    """Find the first tensor that differs: first by sketches, then by the whole tensors around it."""
    tolerances = Tolerances(a, b, batch, tolerance=tolerance)
    rough = _differences(run(a, batch, capture=True), run(b, batch, capture=True), tolerances, batch.lengths)
    position, _ = _first(rough)
    window = {d.key for d in rough[max(0, position - _AROUND) : position + _AROUND + 1]}
    whole = window.__contains__
    ones, others = (run(arm, batch, capture=True, whole=whole) for arm in (a, b))
    fine = _differences(ones, others, tolerances, batch.lengths)
    position, gradual = _first(fine)
    first = fine[position]
    layers = _layer_paths(a.module)
    assert ones.capture is not None
    return Finding(
        arms=(a, b),
        first=first,
        description=describe(first, fine, ones.capture),
        gradual=gradual,
        around=fine[max(0, position - 6) : position + 5],
        growth=[d for d in fine if d.key.path in layers and d.key.direction == first.key.direction],
        weights=_compare_weights(a, b, first.key),
        consumers=tuple(ones.capture.consumers.get(first.key.path, ())),
    )


def _layer_paths(module: nn.Module) -> set[str]:
    layers = {id(layer) for layer in decoder_layers(module)}
    return {path for path, m in module.named_modules() if id(m) in layers}


def _differences(
    ones: Outcome, others: Outcome, tolerances: Tolerances, lengths: Sequence[int]
) -> list[Difference]:
    """Compare every tensor that both arms have, in A's order: forward, head, backward with parameters."""
    assert ones.capture is not None
    layers, depth = _layer_paths(ones.capture.module), 0
    forward: list[Difference] = []
    backward: list[Difference] = []
    parameters = _parameter_differences(ones.gradients, others.gradients, tolerances)
    for key, one in ones.tensors.items():
        other = others.tensors.get(key)
        if other is None or other.shape != one.shape:
            continue
        differences = forward if key.direction == "forward" else backward
        differences.append(
            _difference(key, one, other, allowed=tolerances.tensor(key, depth=depth), lengths=lengths)
        )
        differences[-1] = replace(differences[-1], noise=tolerances.noise.get(key, 0.0))
        depth += key.path in layers
        if key.direction == "backward" and key.tensor.startswith("output"):
            own = [n for n in parameters if n.rpartition(".")[0] == key.path]
            backward += [parameters.pop(name) for name in own]
    return [*forward, _head_difference(ones, others, tolerances), *backward, *parameters.values()]


def _parameter_differences(
    ones: Mapping[str, Tensor], others: Mapping[str, Tensor], tolerances: Tolerances
) -> dict[str, Difference]:
    differences = {}
    for name, relative in gradient_parts(ones, others).items():
        path, _, last = name.rpartition(".")
        one, other = ones.get(name), others.get(name)
        gap = None
        if one is not None and other is not None:
            gap = largest_gap(one.float() - other.float().to(one.device))
        differences[name] = Difference(
            key=Key("backward", path, f"parameter {last}"),
            kind="parameter",
            shape=tuple((ones.get(name) if other is None else other).shape),  # type: ignore[union-attr]
            relative=relative,
            max_abs=gap,
            allowed=tolerances.parameter(name),
            noise=tolerances.parameters.get(name, 0.0),
        )
    return differences


def _head_difference(ones: Outcome, others: Outcome, tolerances: Tolerances) -> Difference:
    gap = ones.logprobs.double() - others.logprobs.double()
    scale = float(ones.logprobs.double().norm())
    return Difference(
        key=Key("forward", HEAD, "output"),
        kind="head",
        shape=tuple(ones.logprobs.shape),
        relative=float(gap.norm()) / scale if scale else float(gap.norm()),
        max_abs=largest_gap(gap),
        allowed=tolerances.logprobs(),
        noise=tolerances.head,
    )


def _difference(
    key: Key, one: CapturedTensor, other: CapturedTensor, *, allowed: float, lengths: Sequence[int]
) -> Difference:
    max_abs, where = None, None
    if one.whole and other.whole and one.values.numel():
        gap = (one.values.double() - other.values.to(one.values.device).double()).abs()
        gap = gap.nan_to_num(nan=torch.inf)
        max_abs = float(gap.max())
        row = int(gap.amax(1).argmax())
        document = 0
        while row >= lengths[document]:
            row -= lengths[document]
            document += 1
        where = (document, row)
    return Difference(
        key=key,
        kind=one.kind if one.kind == other.kind else f"{one.kind} / {other.kind}",
        shape=one.shape,
        relative=relative_difference(one, other),
        max_abs=max_abs,
        allowed=allowed,
        noise=0.0,
        where=where,
    )


def relative_difference(one: CapturedTensor, other: CapturedTensor) -> float:
    """Frobenius norm of the difference over the larger norm; infinite if only one arm has a NaN."""
    x, y = (s.values.double().nan_to_num(nan=0.0) for s in (one, other))
    if bool((one.values.isnan() != other.values.to(one.values.device).isnan()).any()):
        return float("inf")
    gap, scale = float((x - y.to(x.device)).norm()), max(float(x.norm()), float(y.norm()))
    return gap / scale if scale else gap


def _first(differences: Sequence[Difference]) -> tuple[int, bool]:
    """Position of the first difference beyond tolerance; else of the largest in proportion, and True."""
    for position, difference in enumerate(differences):
        if difference.beyond:
            return position, False
    ratios = [
        (d.relative if d.relative == d.relative else float("inf")) / max(d.allowed, 1e-300)
        for d in differences
    ]
    return max(range(len(ratios)), key=ratios.__getitem__), True


def describe(first: Difference, differences: Sequence[Difference], capture: Capture) -> str:
    """Describe where the difference begins."""
    key = first.key
    if key.path == HEAD:
        return "it begins in the head: the last hidden states agree, the logprobs do not"
    if key.direction == "backward":
        return _describe_backward(first, differences, capture)
    parent = key.path.removesuffix(f".{KERNEL}")
    if not first.kind.startswith("attention kernel"):
        return f"it begins in {key.path} ({first.kind}): what ran before it agrees, its output does not"
    if key.tensor == "output":
        return f"it begins inside the attention kernel of {parent}: q, k and v agree, its output does not"
    return (
        f"it begins between the projections and the attention kernel of {parent} (rope): the projection "
        f"agrees, the kernel's {key.tensor} does not"
    )


def _describe_backward(first: Difference, differences: Sequence[Difference], capture: Capture) -> str:
    key = first.key
    parent = key.path.removesuffix(f".{KERNEL}")
    if key.tensor.startswith("parameter "):
        return (
            f"it begins in the backward of {key.path}: the gradient at its output agrees, that of its "
            f"{key.tensor} does not"
        )
    if first.kind.startswith("attention kernel") and key.tensor != "output":
        into = next((d for d in differences if d.key == Key("backward", key.path, "output")), None)
        if into is not None and not into.beyond:
            return (
                f"it begins inside the backward of the attention kernel of {parent}: the gradient at its "
                f"output agrees, that of {key.tensor} does not"
            )
    users = [p for p in capture.consumers.get(key.path, []) if not p.endswith("self_attn")]
    back = " and ".join(users) if users else "what uses it"
    return f"it begins in the backward of {back}: the gradient at {key.path} [{key.tensor}] does not agree"


def _compare_weights(a: Arm, b: Arm, key: Key) -> str:
    path = key.path
    if path == HEAD:
        path = next(
            n for n, m in a.module.named_modules() if m is causal_lm(a.module).get_output_embeddings()
        )
    path = path.removesuffix(f".{KERNEL}")
    modules = dict(a.module.named_modules()), dict(b.module.named_modules())
    if path not in modules[0] or path not in modules[1]:
        return ""
    own, theirs = (dict(m[path].named_parameters()) for m in modules)
    if not own:
        return ""
    unequal = [
        f"{name} (largest difference {largest_gap(p.float() - theirs[name].float().to(p.device)):.3g})"
        for name, p in own.items()
        if name in theirs and p.shape == theirs[name].shape and not torch.equal(p, theirs[name].to(p))
    ]
    return f"its weights differ: {', '.join(unequal)}" if unequal else "its weights are the same in both"
