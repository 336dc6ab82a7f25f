"""One rank of test_fsdp2.py: an FSDP2Backend beside a LocalBackend that is given the same micro-batches. Runs
the checks named on the command line, one JSON object each on stdout."""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fsdp2_experts
import fsdp2_faults
import fsdp2_lora
import torch
import torch.distributed as dist
from fsdp2_tools import (
    BUCKET,
    Collectives,
    OfWholeDocuments,
    apart,
    compare_steps,
    difference,
    fixtures,
    gradient_error,
    micro_batches,
    pair,
)

sys.path += [str(Path(__file__).parents[1] / name) for name in ("loop", "common")]

from scored_tools import compare_on_ranks

from lockstep.algorithms.offline import DPO
from lockstep.algorithms.ppo import ValueLoss
from lockstep.config.algorithm import DPOConfig
from lockstep.config.ppo import ValueConfig
from lockstep.execution import install_joint
from lockstep.packing.packs import pack, repack
from lockstep.processes.child import relax_gc
from lockstep.ranks.context import RankContext, init_ranks
from lockstep.schema.batch import PreferenceSample


def check_sgd() -> Any:
    return compare_steps(pair(optimizer="sgd", lr=0.1), steps=4, tolerance=1e-5)


def check_adamw() -> Any:
    return compare_steps(pair(), steps=4, tolerance=1e-4)


def check_tp() -> Any:
    return compare_steps(pair(optimizer="sgd", lr=0.1, tp=2), steps=3, tolerance=1e-5)


def check_tp_tied() -> Any:
    """tiny-qwen3: norms on heads, whose gradients are added up; embedding and head are one Parameter."""
    return compare_steps(pair(shape="tiny-qwen3", tp=2), steps=3, tolerance=1e-4)


def check_ring() -> Any:
    return compare_steps(pair(optimizer="sgd", lr=0.1, ring=2), steps=3, tolerance=1e-5)


def check_ring_gather() -> Any:
    """Gathered keys: gradients within 1e-6 of one process's, and the same bits the second time."""
    local, backend = pair(ring=2, ring_comm="all_gather", attention="varlen")
    documents = [torch.arange(3, 90).tolist(), *fixtures.random_documents(2, seed=7)]
    batches, found = [fixtures.build_batch(documents, weight=0.01)], []
    for each in (local, backend, backend):
        each.forward_backward(batches, fixtures.NegativeLogprob())
        found.append(each.gradients())
        each.drop_gradients()
    assert all(torch.equal(found[1][name], found[2][name]) for name in found[1])
    error = gradient_error(found[1], found[0])
    assert error < 1e-6, error
    return {"gradient": error}


def check_ring_whole() -> Any:
    """A loss that needs all logprobs of a document at once."""
    loss = OfWholeDocuments()
    return compare_steps(pair(optimizer="sgd", lr=0.1, ring=2), steps=3, tolerance=1e-5, loss=loss)


def check_dp_tp() -> Any:
    return compare_steps(pair(optimizer="sgd", lr=0.1, tp=2), steps=3, tolerance=1e-5)


def check_dp_ring() -> Any:
    loss = OfWholeDocuments()
    return compare_steps(pair(optimizer="sgd", lr=0.1, ring=2), steps=3, tolerance=1e-5, loss=loss)


def check_ring_tp() -> Any:
    return compare_steps(pair(shape="tiny-qwen3", ring=2, tp=2), steps=3, tolerance=1e-4)


def value_steps(*, steps: int = 20, bucket: Any = None, **settings: Any) -> Any:
    """A value model by its own loss. Plain descent with small steps, so that what is seen is each step's own
    rounding."""
    both = pair(head="scalar", optimizer="sgd", lr=1e-3, total_steps=steps, **settings)
    return compare_steps(
        both,
        steps=steps,
        tolerance=3e-6,
        loss=ValueLoss(ValueConfig(clip=0.2)),
        bucket=bucket,
    )


def check_value() -> Any:
    return value_steps()


def check_value_tp() -> Any:
    return value_steps(tp=2, steps=5)


def check_value_ring() -> Any:
    return value_steps(ring=2, steps=5)


def check_value_static() -> Any:
    return value_steps(static_capacity=True, steps=3, bucket=BUCKET)


def uncompiled(**settings: Any) -> Any:
    """A pair whose joint graphs are graphs of eager operators: for what is about graphs and not about their
    code, which takes half a minute to compile. tests/parity trains the compiled code of both backends."""
    with mock.patch("lockstep.train.base.install_joint", partial(install_joint, compiler="aot_eager")):
        return pair(**settings)


def check_joint() -> Any:
    """The decoder's graph around which FSDP2 gathers all weights; layers checkpointed inside of it."""
    settings = {"optimizer": "sgd", "lr": 0.1, "activation_checkpointing": True, "max_recompiles": 0}
    both = uncompiled(execution="joint", **settings)
    return compare_steps(both, steps=2, tolerance=1e-5, bucket=BUCKET)


def check_joint_ref() -> Any:
    """The frozen policy runs the policy's graphs, made once, with weights of its own."""
    local, backend = uncompiled(execution="joint", ref=True, lr=0.1)
    first = [repack(batch, BUCKET) for batch in micro_batches(0)]
    expected = local.ref.logprobs(first)
    compare_steps((local, backend), steps=2, tolerance=1e-2, bucket=BUCKET)
    assert apart(backend.ref.logprobs(first), expected) < 1e-6
    assert apart(backend.logprobs(first), expected) > 1e-2
    report = backend.compile_report()
    assert report is not None and (report.recompiles, report.graph_breaks) == (0, 0), report
    _, half = uncompiled(execution="joint", ref=True, dtype="bfloat16")
    for step in range(2):  # the reference goes first, while the policy's weights are float32 shards
        ref, policy = half.ref.logprobs(first), half.logprobs(first)
        assert all(map(torch.equal, ref, policy)) == (step == 0)
        half.forward_backward(first, fixtures.NegativeLogprob())
        half.optimizer_step()
    return {"graphs": report.graphs}


def check_joint_ref_alone() -> Any:
    """A shape that is new to the second rank alone, whose reference meets it first."""
    local, backend = uncompiled(execution="joint", ref=True)
    small = [repack(batch, BUCKET) for batch in micro_batches(0, 2)]
    backend.ref.logprobs(small)
    wide = repack(micro_batches(0, 2)[1], dataclasses.replace(BUCKET, tokens=2 * BUCKET.tokens))
    for model in ("ref", "policy"):
        found, expected = (
            (each.ref if model == "ref" else each).logprobs([small[0], wide]) for each in (backend, local)
        )
        assert apart(found, expected) < 1e-6
    return {}


def check_joint_collectives() -> Any:
    """All weights are gathered once per step, and all gradients reduced once."""
    _, backend = uncompiled(execution="joint")
    batches = [repack(batch, BUCKET) for batch in micro_batches(0, 6)]
    backend.forward_backward(batches[:2], fixtures.NegativeLogprob())
    backend.optimizer_step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        backend.forward_backward(batches, fixtures.NegativeLogprob())
    names = Counter(event.name for event in seen.events())  # a dispatch mode would switch compilation off
    counts = {name: names[f"c10d::{name}"] for name in ("_allgather_base_", "_reduce_scatter_base_")}
    assert set(counts.values()) == {1}, names
    return counts


def check_checkpointing() -> Any:
    return compare_steps(pair(activation_checkpointing=True), steps=2, tolerance=1e-4)


def check_gathered_between() -> Any:
    return compare_steps(pair(reshard_after_forward=False), steps=3, tolerance=1e-4)


def check_static_padded() -> Any:
    return compare_steps(pair(static_capacity=True, layout="padded"), steps=2, tolerance=1e-4)


def check_offloaded_parameters() -> Any:
    local, backend = pair(parameter_device="cpu")
    return compare_steps((local, backend), steps=2, tolerance=1e-4)


def check_ref() -> Any:
    local, backend = pair(ref=True, lr=0.1)
    first = local.ref.logprobs(micro_batches(0))
    compare_steps((local, backend), steps=2, tolerance=1e-2)
    for batches in (micro_batches(0), micro_batches(1)):
        found = backend.ref.logprobs(batches)
        assert apart(found, local.ref.logprobs(batches)) < 1e-6
        assert apart(found, backend.logprobs(batches)) > 1e-2
    assert apart(backend.ref.logprobs(micro_batches(0)), first) < 1e-6
    return {}


def check_one_micro_batch() -> Any:
    """Fewer micro-batches than ranks."""
    return compare_steps(pair(), steps=2, tolerance=1e-4, count=1)


def check_several_calls() -> Any:
    """Gradients of several calls add up, also those that tensor parallel ranks add up."""
    size = dist.get_world_size()
    local, backend = pair(shape="tiny-qwen3", tp=2 if size == 2 else 1)
    loss = fixtures.NegativeLogprob()
    for batch in micro_batches(0):
        local.forward_backward([batch], loss)
        backend.forward_backward([batch], loss)
        error = gradient_error(backend.gradients(), local.gradients())
        assert error < 1e-5, error
    return {"gradient": error}


def check_collectives() -> Any:
    """Of n micro-batches each block gathers its weights 2n times (n times the last one; all once without
    reshard_after_forward) and reduces its gradients once (or n times: then no rank keeps whole ones in
    between); the root, embedding and head, gathers once."""
    seen = {}
    for reshards, reduces in ((True, "auto"), (False, "per_step"), (True, "per_micro_batch")):
        _, backend = pair(reshard_after_forward=reshards, reduce_gradients=reduces)
        backend.forward_backward(micro_batches(0, 2), fixtures.NegativeLogprob())
        backend.optimizer_step()
        turns = 3
        batches = micro_batches(0, turns * dist.get_world_size())
        with Collectives() as counted:
            backend.forward_backward(batches, fixtures.NegativeLogprob())
        layers = 2
        gathers = (2 * layers - 1) * turns + 1 if reshards else layers + 1
        reductions = (layers + 1) * (turns if reduces == "per_micro_batch" else 1)
        seen[f"{reshards} {reduces}"] = dict(counted.counts)
        assert counted.counts["_allgather_base_"] == gathers, counted.counts
        assert counted.counts["_reduce_scatter_base_"] == reductions, counted.counts
        assert counted.counts["allreduce_"] == 1, counted.counts  # what was seen of all micro-batches
    return seen


def check_reduced_each() -> Any:
    """Gradients reduced after each micro-batch against those reduced once per step: the same up to the order
    of float32 sums, whatever the shards are, and the same bits if it is done again."""
    seen = {}
    for more in (
        {},
        {"parameter_device": "cpu"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "optimizer_device": "cpu"},
        {"shape": "tiny-qwen3", "tp": 2},
        {"ring": 2},
        {"lora": fsdp2_lora.LORA},
    ):
        local, once = pair(**more)
        each = [pair(reduce_gradients="per_micro_batch", **more)[1] for _ in range(2)]
        for backend in (local, once, *each):
            # Three micro-batches: with two data parallel ranks the second one's last is empty. The second
            # call adds to what the first one reduced.
            backend.forward_backward(micro_batches(0), fixtures.NegativeLogprob())
            backend.forward_backward(micro_batches(1, 2), fixtures.NegativeLogprob())
        found, again = (backend.gradients() for backend in each)
        assert all(torch.equal(found[name], again[name]) for name in found)
        error = gradient_error(found, once.gradients())
        # tp and ring add up partial products, of which the reference has the whole ones.
        bound = 1e-5 if "tp" in more or "ring" in more else 1e-6
        against = gradient_error(found, local.gradients())
        assert error < 1e-6 and against < bound, (more, error, against)
        seen[str(more)] = (error, against)
    return seen


def check_reduced_each_in_steps() -> Any:
    return compare_steps(pair(reduce_gradients="per_micro_batch"), steps=3, tolerance=1e-4)


def check_reduced_each_joint() -> Any:
    """The joint graph's gradients, all of the model at a time."""
    both = uncompiled(execution="joint", optimizer="sgd", lr=0.1, reduce_gradients="per_micro_batch")
    return compare_steps(both, steps=2, tolerance=1e-5, bucket=BUCKET)


def check_reduced_each_compiled() -> Any:
    both = pair(execution="compile", optimizer="sgd", lr=0.1, reduce_gradients="per_micro_batch")
    return compare_steps(both, steps=2, tolerance=1e-5, bucket=BUCKET)


def check_weights_one_at_a_time() -> Any:
    """What an engine is sent: the shapes are known before, and a weight is gone when the next is gathered."""
    seen = {}
    for more in ({}, {"shape": "tiny-qwen3", "tp": 2}, {"lora": fsdp2_lora.LORA}):
        _, backend = pair(dtype="bfloat16", **more)
        update, shapes, given, alive = backend.weights(policy_version=1), {}, [], []
        gathered = backend._gathered

        def look(*of: Any, gathered: Any = gathered, given: Any = given, alive: Any = alive) -> Any:
            alive.append(sum(weight() is not None for weight in given))
            return gathered(*of)

        with mock.patch.object(backend, "_gathered", look):
            for name, weight in update.tensors():
                shapes[name] = tuple(weight.shape)
                given.append(weakref.ref(weight))
                del weight
        assert update.shapes == shapes
        seen[str(more)] = (len(alive), sum(alive))
        assert alive and not any(alive), seen
    return seen


def check_ring_of_few() -> Any:
    """Packs so small that a rank of the ring has no token of them."""
    seen = {}
    for loss in (fixtures.NegativeLogprob(), OfWholeDocuments()):
        local, backend = pair(ring=2)
        batches = [fixtures.build_batch([d], weight=0.5) for d in ([5, 6, 7], [8, 9, 10, 11])]
        expected, found = local.forward_backward(batches, loss), backend.forward_backward(batches, loss)
        assert apart(found.losses, expected.losses) < 1e-5
        assert apart(found.logprobs, expected.logprobs) < 1e-5
        seen[type(loss).__name__] = gradient_error(backend.gradients(), local.gradients())
        assert seen[type(loss).__name__] < 1e-5, seen
    return seen


def check_preferences() -> Any:
    """DPO: a loss over pairs of documents, against a reference, on every mesh."""
    generator = torch.Generator().manual_seed(0)
    algorithm, seen = DPO(DPOConfig()), {}
    samples = []
    for number, ids in enumerate(fixtures.random_documents(8, seed=5)):
        mask = torch.rand(len(ids), generator=generator) < 0.7
        mask[-1] = False
        samples.append(PreferenceSample(token_ids=torch.tensor(ids), loss_mask=mask, sample_id=number))
    weights = algorithm.loss_weights(samples)
    plain = [pack(samples[i : i + 4], weights[i : i + 4]) for i in (0, 4)]
    size = dist.get_world_size()
    for mesh in ({}, {"tp": 2}, {"ring": 2}, *([{"tp": 2, "ring": 2}] if size == 4 else [])):
        both, found = pair(ref=True, **mesh), []
        for backend in both:
            figures = []
            for _ in range(3):
                known = zip(plain, backend.ref.logprobs(plain), strict=True)
                batches = [dataclasses.replace(b, ref_logprobs=lp) for b, lp in known]  # type: ignore[call-arg]
                stats = backend.forward_backward(batches, algorithm.loss())
                figures += [*map(float, stats.losses), backend.optimizer_step()["grad_norm"]]
            found.append(figures)
        seen[str(mesh)] = difference(found[1], found[0])
        assert seen[str(mesh)] < 1e-5, (seen, found)
    return seen


def check_bfloat16() -> Any:
    """The same cast of the same masters, gradients added up in float32: only sums are in another order."""
    worst = 0.0
    for more in ({}, {"optimizer_device": "cpu"}, {"grad_accum_dtype": "model"}):
        local, backend = pair(dtype="bfloat16", lr=1e-2, **more)
        loss = fixtures.NegativeLogprob()
        for step in range(6):
            batches = micro_batches(step)
            expected, found = local.forward_backward(batches, loss), backend.forward_backward(batches, loss)
            pairs = zip(found.losses, expected.losses, strict=True)
            worst = max(worst, *(abs(float(a) / float(b) - 1) for a, b in pairs))
            if step == 0:  # later on, weights differ in their last bits
                error = gradient_error(backend.gradients(), local.gradients())
                assert error < (0.02 if "grad_accum_dtype" in more else 1e-5), (error, more)
            norms = backend.optimizer_step()["grad_norm"], local.optimizer_step()["grad_norm"]
            assert abs(norms[0] / norms[1] - 1) < 1e-2, norms
        weights = dict(backend.weights(policy_version=0).tensors())
        assert all(w.dtype == torch.bfloat16 for w in weights.values())
    assert worst < 1e-2, worst
    return {"loss": worst}


def check_deadlines() -> Any:
    """Of every group that the mesh makes: what init_ranks was told."""
    _, backend = pair()
    mesh, cpu = backend.mesh, torch.device("cpu")
    groups = (mesh.shared.group, mesh.ring_group, mesh.tp_group)
    found = [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]
    assert set(found) == {60.0}, found
    return found


def check_hf_plan() -> Any:
    return compare_steps(pair(tp=2, tp_plan="hf"), steps=2, tolerance=1e-4)


def check_groups_left_out() -> Any:
    """Through the loop: optimizer steps for which the second rank has no pack."""
    return compare_on_ranks("fsdp2", RANKS[0])


RANKS: list[RankContext] = []
"""That of this process, once it has connected."""
CHECKS = {
    name.removeprefix("check_"): check
    for name, check in (vars(fsdp2_experts) | vars(fsdp2_faults) | vars(fsdp2_lora) | dict(globals())).items()
    if name.startswith("check_")
}


def main() -> None:
    torch.set_num_threads(1)
    with init_ranks(device="cpu", seconds=60.0) as ranks:
        RANKS.append(ranks)
        for name in sys.argv[1:]:
            torch.manual_seed(0)
            try:
                result = {"check": name, "ok": True, "seen": CHECKS[name]()}
            except Exception:
                result = {"check": name, "ok": False, "seen": traceback.format_exc()[-4000:]}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    relax_gc()
    main()
