"""Checks of fsdp2_worker.py: errors, where weights come from, and where they go."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_tools import (
    another,
    apart,
    compare_steps,
    difference,
    equal_tensors,
    fixtures,
    folder,
    gradient_error,
    load,
    micro_batches,
    pair,
    relative,
    settings,
    shared_folder,
    train,
)
from pytest import raises
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.errors import ConfigError, TrainError
from lockstep.execution.regions import decoder_layers
from lockstep.packing.packs import empty_batch
from lockstep.protocols.train import LossOutput
from lockstep.schema.batch import PackedBatch
from lockstep.train.fsdp2.backend import FSDP2Backend
from lockstep.train.local import LocalBackend


class Poisoned(fixtures.NegativeLogprob):  # type: ignore[name-defined, misc]
    """The loss (`where` = "loss") or its gradient of the micro-batch that has sample 10 is not finite."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Any) -> LossOutput:
        value: LossOutput = super().__call__(logprobs, entropy, batch, rows)
        if 10 not in batch.sample_ids or not batch.loss_mask.any():
            return value
        if self.where == "loss":
            return LossOutput(value.loss * float("nan"), value.terms)
        steep = (logprobs * 0.0).sum().abs().sqrt()  # 0, with an infinite slope
        return LossOutput(value.loss + steep, value.terms)


def check_not_finite(**mesh: Any) -> Any:
    """Every rank says which micro-batch it was; nothing is changed, and the next step is right."""
    said = {}
    for where in ("loss", "gradient"):
        local, backend = pair(**mesh)
        before = {name: w.clone() for name, w in backend.weights(policy_version=0).tensors()}
        with raises(TrainError) as caught:
            backend.forward_backward(micro_batches(0), Poisoned(where))
            assert where == "gradient"
            backend.optimizer_step()
        said[where] = str(caught.value)
        assert "micro-batch 1 of 3" in said[where] and "samples are [10, 11, 12]" in said[where], said
        assert "No weight was changed" in said[where]
        assert all(torch.equal(w, before[n]) for n, w in backend.weights(policy_version=0).tensors())
        assert backend.gradients() == {} and backend.gradient_norm() == 0.0
        compare_steps((local, backend), steps=2, tolerance=1e-4)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, said)
    assert all(one == said for one in everywhere), everywhere
    return said


def check_not_finite_reduced_each() -> Any:
    return check_not_finite(reduce_gradients="per_micro_batch")


def check_not_finite_tp() -> Any:
    return check_not_finite(tp=2)


def check_other_batches() -> Any:
    """A rank that is given one micro-batch less, or another one: an error everywhere, and the step can be
    done again."""
    local, backend = pair()
    first = dist.get_rank() == 0
    for mine in (micro_batches(0, 3 if first else 2), micro_batches(0 if first else 1, 3)):
        for call in (lambda m: backend.forward_backward(m, fixtures.NegativeLogprob()), backend.logprobs):
            with raises(TrainError) as caught:
                call(mine)
            assert caught.value.code == "ranks-differ" and "3" in str(caught.value)
    return compare_steps((local, backend), steps=1, tolerance=1e-4)


class Breaks(fixtures.NegativeLogprob):  # type: ignore[name-defined, misc]
    """Raises in the second call, or in the middle of the backward of the second call."""

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Any) -> LossOutput:
        self.calls += 1
        if self.calls == 2 and self.where == "forward":
            raise ArithmeticError("on purpose")
        value: LossOutput = super().__call__(logprobs, entropy, batch, rows)
        return value


def check_recovers(**train: Any) -> Any:
    """An error of the caller's, on every rank, in forward or in backward: the next step is right."""
    local, backend = pair(**train)
    batches = micro_batches(0, 2 * dist.get_world_size())
    with raises(ArithmeticError):
        backend.forward_backward(batches, Breaks("forward"))
    compare_steps((local, backend), steps=1, tolerance=1e-4)
    calls = 0

    def broken(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ArithmeticError("on purpose")

    handle = decoder_layers(backend.module)[0].register_full_backward_hook(broken)
    with raises(ArithmeticError):
        backend.forward_backward(batches, Breaks("backward"))
    handle.remove()
    compare_steps((local, backend), steps=1, tolerance=1e-4)

    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    handle = decoder_layers(backend.module)[1].register_forward_pre_hook(exhausted)
    with raises(TrainError) as caught:
        backend.forward_backward(batches, fixtures.NegativeLogprob())
    assert caught.value.code == "out-of-memory" and "token slots" in str(caught.value)
    handle.remove()
    return compare_steps((local, backend), steps=2, tolerance=1e-4)


def check_recovers_reduced_each() -> Any:
    """Shards of earlier micro-batches are forgotten too."""
    return check_recovers(reduce_gradients="per_micro_batch")


def check_rest() -> Any:
    """A backend that gives its memory back has the same figures and saves the same, and its parts are gone
    between calls."""
    with shared_folder() as place:
        seen = []
        for dtype in ("float32", "bfloat16"):
            for parts in ((), ("states", "ref", "weights")):
                backend = pair(dtype=dtype, ref=True)[1]
                backend.offload(*parts)
                figures = train(backend, range(2))
                batches = micro_batches(2)
                assert backend.ref is not None
                scores = [torch.cat(scorer.logprobs(batches)).tolist() for scorer in (backend, backend.ref)]
                gone = {part: not any(map(size_of, backend._tensors_of(part))) for part in parts}
                assert all(gone.values()), gone
                where = folder(place, f"{dtype}{len(parts)}")
                backend.save(where)()
                backend.load(where)
                dist.barrier()
                seen.append((figures, scores, train(backend, range(2, 3))))
            assert seen[-1] == seen[-2]
            assert equal_tensors(place / f"{dtype}0", place / f"{dtype}3")
    return len(seen)


def size_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.ndim else 0


def check_nothing_to_train() -> Any:
    _, backend = pair()
    with raises(TrainError) as caught:
        backend.optimizer_step()
    assert caught.value.code == "no-gradients"
    backend.forward_backward([empty_batch(b) for b in micro_batches(0)], fixtures.NegativeLogprob())
    with raises(TrainError) as caught:
        backend.optimizer_step()
    assert caught.value.code == "no-gradients"
    backend.forward_backward(micro_batches(0), fixtures.NegativeLogprob())
    with raises(TrainError) as caught:
        backend.save(Path("/nowhere"))
    assert caught.value.code == "wrong-state"
    return {}


def check_routers_without_trained_tokens() -> Any:
    """Router losses are of all tokens: with trained tokens in one micro-batch of three, and in none."""
    local, backend = pair(shape="tiny-qwen3-moe", router_aux_loss=0.1, router_z_loss=0.01)
    first, *others = micro_batches(0)
    worst, loss = {}, fixtures.NegativeLogprob()
    for name, batches in (("one", [first, *map(empty_batch, others)]), ("none", [*map(empty_batch, others)])):
        expected, found = local.forward_backward(batches, loss), backend.forward_backward(batches, loss)
        worst[f"{name}: loss"] = apart(found.losses, expected.losses)
        worst[f"{name}: gradient"] = gradient_error(backend.gradients(), local.gradients())
        theirs, ours = local.optimizer_step(), backend.optimizer_step()
        assert theirs.keys() == ours.keys() and theirs["experts/aux_loss"] > 0
        worst[f"{name}: metrics"] = max(abs(ours[key] - value) for key, value in theirs.items())
    assert all(error < 1e-4 for error in worst.values()), worst
    return worst


class Recorded:
    """A WeightSource that notes what is read."""

    def __init__(self, source: Any) -> None:
        self.source, self.elements = source, 0

    def read_part(self, name: str, **where: Any) -> Tensor:
        found: Tensor = self.source.read_part(name, **where)
        self.elements += found.numel()
        return found


def check_sharded_start(**mesh: int) -> Any:
    """No rank reads or keeps more than its share of the weights, which are those of the model to the bit.
    (Of a matrix that is split by columns a rank reads its rows and cuts them.)"""
    model = load(weights=False)
    source = Recorded(model.source)
    model = dataclasses.replace(model, source=source)
    backend = FSDP2Backend(settings(**mesh), model=model, total_steps=1)
    whole = load().module
    count = sum(p.numel() for p in whole.parameters())
    kept = sum(backend._policy.local(name).numel() for name, _ in whole.named_parameters())
    assert source.elements <= count / backend.mesh.shards, (source.elements, count)
    assert kept <= 1.01 * count / dist.get_world_size(), (kept, count)  # norms are on all of a tp group
    found = dict(backend.weights(policy_version=0).tensors())
    assert all(torch.equal(found[name], w) for name, w in whole.state_dict().items())
    return {"read": source.elements, "kept": kept, "whole": count}


def check_sharded_start_tp() -> Any:
    return check_sharded_start(tp=2)


def check_checkpoints() -> Any:
    """Any mesh loads what any mesh saved, a LocalBackend too and from one; on the same mesh to the bit."""
    size = dist.get_world_size()
    meshes = [{}, {"tp": 2}, {"ring": 2}] + ([{"tp": 2, "ring": 2}] if size == 4 else [])
    seen: dict[str, float] = {}
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 1e-2)):
        with shared_folder() as place:
            first = another(dtype=dtype, seed=0)
            train(first, range(2))
            first.save(folder(place, "first"))()
            dist.barrier()
            expected = train(first, range(2, 4))
            for index, mesh in enumerate(meshes):
                one = another(dtype=dtype, seed=1 + index, **mesh)
                one.load(place / "first")
                assert one.steps_done == 2
                again = folder(place, f"again{index}")
                one.save(again)()
                dist.barrier()
                if not index:
                    assert equal_tensors(place / "first", again), "the same mesh, other bits"
                figures = train(one, range(2, 4))
                error = difference(figures, expected)
                assert (error == 0.0) if not index else (error < bound), (mesh, error)
                seen[f"{dtype} {mesh}"] = error
                alone = LocalBackend(settings(), model=load(dtype=dtype, shape="tiny-qwen3"), total_steps=10)
                alone.load(again)
                error = difference(train(alone, range(2, 4)), expected)
                assert error < bound, (mesh, error)
    return seen


def check_checkpoint_of_local() -> Any:
    with shared_folder() as place:
        local = LocalBackend(settings(), model=load(dtype="bfloat16", shape="tiny-qwen3"), total_steps=10)
        train(local, range(2))
        where = folder(place, "local")
        if dist.get_rank() == 0:
            local.save(where)()
        dist.barrier()
        expected, seen = train(local, range(2, 4)), {}
        for mesh in ({}, {"tp": 2}, {"optimizer_device": "cpu"}, {"parameter_device": "cpu"}):
            backend = another(dtype="bfloat16", seed=3, **mesh)
            backend.load(where)
            seen[str(mesh)] = difference(train(backend, range(2, 4)), expected)
            assert seen[str(mesh)] < 1e-2, seen
    return seen


def check_hf_plan_refused() -> Any:
    for mesh in ({"tp": 2, "tp_plan": "hf"}, {"tp": 4}):
        with raises(ConfigError) as caught:
            pair(**mesh)
    return str(caught.value)


def check_export() -> Any:
    """A tied model, from two ranks that share its matrices: as the one of LocalBackend."""
    local, backend = pair(dtype="bfloat16", shape="tiny-qwen3", tp=2)
    train(local, [0]), train(backend, [0])
    with shared_folder() as place:
        backend.export(place / "model")
        found, info = AutoModelForCausalLM.from_pretrained(
            place / "model", output_loading_info=True, dtype="auto"
        )
        assert not any(info.values()), info
        expected = local.module.state_dict()
        assert found.state_dict().keys() == expected.keys()
        errors = [relative(weight, expected[name]) for name, weight in found.state_dict().items()]
        assert max(errors) < 4e-3 and found.dtype == torch.bfloat16, errors
    return {"error": max(errors)}
