"""Runs cases of test_deepspeed.py in a process of their own: one rank of DeepSpeedBackend beside a
LocalBackend that is given every rank's micro-batches. One JSON object per case on stdout."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path += [str(Path(__file__).parents[1] / name) for name in ("loop", "common")]

from scored_tools import compare_on_ranks

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import LockstepError
from lockstep.execution.regions import decoder_layers
from lockstep.models.load import LoadedModel, load_model, share_parameters
from lockstep.models.lora import merged_state_dict
from lockstep.observe.metrics import Spans
from lockstep.processes.child import relax_gc
from lockstep.protocols.train import LossOutput
from lockstep.ranks.context import init_ranks
from lockstep.schema.batch import PackedBatch
from lockstep.train.deepspeed.backend import DeepSpeedBackend, _import_deepspeed
from lockstep.train.local import LocalBackend

_spec = importlib.util.spec_from_file_location("fixtures", Path(__file__).with_name("conftest.py"))
assert _spec is not None and _spec.loader is not None
fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fixtures)


class FailsInForward(fixtures.NegativeLogprob):  # type: ignore[name-defined, misc]
    """Fails at its second micro-batch, after one whole forward and backward."""

    calls = 0

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Any) -> LossOutput:
        self.calls += 1
        if self.calls > 1:
            raise ArithmeticError("on purpose")
        result: LossOutput = super().__call__(logprobs, entropy, batch, rows)
        return result


class FailsInBackward(fixtures.WholeSequence):  # type: ignore[name-defined, misc]
    """Fails in the middle of the decoder's backward: `module` is a layer."""

    def __init__(self, module: torch.nn.Module) -> None:
        def broken(*_: Any) -> None:
            raise ArithmeticError("on purpose")

        self.handle = module.register_full_backward_hook(broken)


def load(case: dict[str, Any], *, seed: int = 0, materialize: bool = True) -> LoadedModel:
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "down_proj")) if case.get("lora") else None
    config = ModelConfig(
        name=f"shape:{case.get('model', 'tiny-llama')}",
        dtype=case.get("dtype", "float32"),
        lora=lora,
        seed=seed,
    )
    attention = case.get("attention", "sdpa")
    return load_model(config, attention=attention, device=torch.device("cpu"), materialize=materialize)


def micro_batches(step: int, rank: int, count: int) -> list[PackedBatch]:
    docs = [fixtures.random_documents(2 + rank + i, seed=100 * step + 10 * rank + i) for i in range(count)]
    return [fixtures.build_batch(d, weight=1 / 50) for d in docs]


def without_tokens(batch: PackedBatch) -> PackedBatch:
    return dataclasses.replace(
        batch, loss_mask=torch.zeros_like(batch.loss_mask), loss_weights=torch.zeros_like(batch.loss_weights)
    )


def fail_first(case: dict[str, Any], backend: DeepSpeedBackend, batches: list[PackedBatch]) -> None:
    layer = decoder_layers(backend.module)[0]
    loss = FailsInForward() if case["fail"] == "forward" else FailsInBackward(layer)
    try:
        backend.forward_backward_own(batches, loss)
    except ArithmeticError:
        if case["fail"] == "backward":
            loss.handle.remove()
        return
    raise AssertionError("it was to fail")


def run(case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    config = TrainConfig(**{"lr": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.01, **case.get("train", {})})
    total_steps = case.get("steps", 3)
    eager = config.model_copy(update={"execution": "eager"})
    local = LocalBackend(eager, model=load(case), total_steps=total_steps)
    spans = Spans()
    config = config.model_copy(update={"zero_stage": case["stage"]})
    backend = DeepSpeedBackend(config, model=load(case), total_steps=total_steps, spans=spans)
    loss = fixtures.WholeSequence() if case.get("whole") else fixtures.NegativeLogprob()
    count = case.get("micro_batches", 2)
    worst = dict.fromkeys(("loss", "logprobs", "scored", "gradient", "norm", "again"), 0.0)
    for step in range(total_steps or case.get("inputs", 2)):
        parts = [micro_batches(step, r, count) for r in range(world)]
        if case.get("empty"):
            parts[-1] = [without_tokens(batch) for batch in parts[-1]]
        if case.get("fail") and step == 1:
            fail_first(case, backend, parts[rank])
        expected = local.forward_backward([b for part in parts for b in part], loss)
        for again in (False, True):  # dropped, then the same once more
            stats = backend.forward_backward_own(parts[rank], loss)
            found, reference = backend.gradients(), local.gradients()
            error = max(relative(found[name], reference[name]) for name in reference)
            worst["again" if again else "gradient"] = max(worst["again" if again else "gradient"], error)
            norm = torch.stack([g.double().norm() for g in reference.values()]).norm()
            worst["norm"] = max(worst["norm"], abs(backend.gradient_norm() / float(norm) - 1))
            assert set(reference) <= set(found)
            if not again:
                backend.drop_gradients()
                assert backend.gradients() == {}
        mine = slice(rank * count, (rank + 1) * count)
        for key, ours, theirs in (
            ("loss", stats.losses, expected.losses[mine]),
            ("logprobs", stats.logprobs, expected.logprobs[mine]),
            (
                "scored",
                backend.logprobs_own(parts[rank]),
                local.logprobs(parts[rank]),
            ),
        ):
            differences = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
            worst[key] = max(worst[key], *differences)
        if total_steps:
            steps = backend.optimizer_step(), local.optimizer_step()
            worst["norm"] = max(worst["norm"], abs(steps[0]["grad_norm"] / steps[1]["grad_norm"] - 1))
        else:
            backend.drop_gradients(), local.drop_gradients()
    head = backend.module.get_output_embeddings().weight  # type: ignore[operator]
    timed = spans.flush()
    result = {
        **worst,
        "case": case,
        "head_elements_outside": head.numel(),
        "spans": sorted(name for name in timed if name in ("time/forward", "time/backward")),
    }
    backend.close()
    return result


def train(case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """All micro-batches to every rank, as a loop gives them, and optimizer steps of both backends."""
    steps = case.get("steps", 20)
    config = TrainConfig(
        **{"lr": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.01, "warmup_steps": 3, **case.get("train", {})}
    )
    config = config.model_copy(update={"zero_stage": case["stage"]})
    alone = config.model_copy(
        update={"execution": "eager", "optimizer_device": "model", "parameter_device": "model"}
    )
    ref = case.get("ref", False)
    local = LocalBackend(alone, model=load(case), total_steps=steps, ref=ref)
    model = load(case)
    twin = share_parameters(model.module, attention="sdpa")  # an engine's, made before
    backend = DeepSpeedBackend(config, model=model, total_steps=steps, ref=ref)
    loss = fixtures.NegativeLogprob()
    losses, norms, scored = [], [], []
    for step in range(steps):
        batches = micro_batches(step % 4, 0, case.get("micro_batches", 3))  # one rank has none of the last
        pair = [made.forward_backward(batches, loss) for made in (backend, local)]
        updates = [made.optimizer_step() for made in (backend, local)]
        losses.append([float(sum(stats.losses)) for stats in pair])
        norms.append([update["grad_norm"] for update in updates])
        assert updates[0]["lr"] == updates[1]["lr"]
        if step % 7 == 0:
            for which in ("policy", "ref") if ref else ("policy",):
                scorers = [made.ref if which == "ref" else made for made in (backend, local)]
                ours, theirs = (scorer.logprobs(batches) for scorer in scorers)
                scored += [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    update = backend.weights(policy_version=3)
    shared = update.shared_module is backend.module
    ours = {name: tensor.detach().clone() for name, tensor in update.tensors()}
    assert shared or update.shapes == {name: tuple(tensor.shape) for name, tensor in ours.items()}
    theirs = dict(local.weights(policy_version=3).tensors())
    assert list(ours) == list(theirs), (list(ours)[:5], list(theirs)[:5])
    if shared:
        assert merged_state_dict(twin).keys() == ours.keys()
        assert all(torch.equal(tensor, ours[name]) for name, tensor in merged_state_dict(twin).items())
    if "export" in case:
        exported = Path(case["export"]) / f"stage-{case['stage']}"
        backend.export(exported)
        dist.barrier()
        found, notes = AutoModelForCausalLM.from_pretrained(
            exported, dtype=ours["model.norm.weight"].dtype, output_loading_info=True
        )
        assert not any(notes.values()), notes
        assert all(torch.equal(tensor, ours[name]) for name, tensor in found.state_dict().items())
    result = {
        "case": case,
        "loss": max(abs(a / b - 1) for a, b in losses),
        "norm": max(abs(a / b - 1) for a, b in norms),
        "scored": max(scored),
        "weights": max(relative(ours[name].float(), theirs[name].float()) for name in theirs),
        "equal": all(torch.equal(ours[name], theirs[name]) for name in theirs),
        "shared": shared,
        "exported": "export" in case,
        "clipped": max(norm for norm, _ in norms) > config.max_grad_norm,
        "fell": losses[-1][0] < losses[3][0],
    }
    backend.close()
    return result


def made(name: str, case: dict[str, Any], *, seed: int) -> Any:
    """`local`, `fsdp2`, `zero0` to `zero3`, of a model of that seed."""
    config = TrainConfig(lr=1e-2, max_grad_norm=0.5, weight_decay=0.01, **case.get("train", {}))
    if name == "local":
        return LocalBackend(config, model=load(case, seed=seed), total_steps=9)
    if name == "fsdp2":
        from lockstep.train.fsdp2.backend import FSDP2Backend

        return FSDP2Backend(config, model=load(case, seed=seed, materialize=False), total_steps=9)
    config = config.model_copy(update={"zero_stage": int(name.removeprefix("zero"))})
    return DeepSpeedBackend(config, model=load(case, seed=seed), total_steps=9)


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint but the generators' states."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith("rng"):
            found |= {f"{path.name.partition('-')[0]}:{name}": t for name, t in load_file(path).items()}
    return {name.replace(".safetensors:", ":"): tensor for name, tensor in found.items()}


def states(case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """A run that changes its backend at every step: each loads what the one before saved, and takes the step
    that the one before took too."""
    loss = fixtures.NegativeLogprob()
    root, result = Path(case["folder"]), {"case": case, "chain": []}

    def step(backend: Any, number: int) -> list[float]:
        stats = backend.forward_backward(micro_batches(number, 0, 3), loss)
        return [float(sum(stats.losses)), backend.optimizer_step()["grad_norm"]]

    def saved(backend: Any, name: str) -> Path:
        folder = root / (f"{name}-{rank}" if type(backend) is LocalBackend else name)
        if rank == 0 or type(backend) is LocalBackend:
            folder.mkdir()
        dist.barrier()
        backend.save(folder, background=True)()
        dist.barrier()
        return folder

    backend = made(case["chain"][0], case, seed=0)
    if case.get("at_start"):  # before any update: there are no moments yet
        step(backend, 0), backend.drop_gradients()
    else:
        step(backend, 0), step(backend, 1)
    for number, name in enumerate(case["chain"][1:]):
        done = backend.steps_done
        folder = saved(backend, str(number))
        expected = step(backend, 2 + number)
        goal = stored(saved(backend, f"{number}-after"))
        backend.close()
        backend = made(name, case, seed=0 if case.get("lora") else 7)  # LoRA: the base is not in it
        step(backend, 5)  # what is loaded must replace it
        backend.load(folder)
        assert backend.steps_done == done
        same = stored(saved(backend, f"{number}-again"))
        before = stored(folder)
        assert same.keys() == before.keys(), sorted(same.keys() ^ before.keys())[:5]
        found = step(backend, 2 + number)
        after = stored(saved(backend, f"{number}-then"))
        result["chain"].append(
            {
                "to": name,
                "unequal": [n for n in before if not same_bits(before[n], same[n])][:5],
                "step": max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)),
                "after": max(relative(after[n].float(), goal[n].float()) for n in goal),
                "after_equal": all(same_bits(after[n], goal[n]) for n in goal),
                "tensors": len(before),
            }
        )
    backend.close()
    return result


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(
        ours.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)
    )


class Broken(fixtures.NegativeLogprob):  # type: ignore[name-defined, misc]
    """Fails in the micro-batch whose first sample has this id."""

    def __init__(self, sample: int, how: str) -> None:
        self.sample, self.how = sample, how

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Any) -> LossOutput:
        value: LossOutput = super().__call__(logprobs, entropy, batch, rows)
        if batch.sample_ids[0] != self.sample or not batch.loss_mask.any():
            return value
        if self.how == "memory":
            raise torch.OutOfMemoryError("tried to allocate 1.00 TiB")
        return LossOutput(value.loss * float(self.how), value.terms)


def errors(case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """What is said on every rank, and that the step after it is right."""
    config = TrainConfig(lr=1e-2, max_grad_norm=0.5, zero_stage=case["stage"])
    local = LocalBackend(config, model=load(case), total_steps=9)
    backend = DeepSpeedBackend(config, model=load(case), total_steps=9)
    batches = [
        dataclasses.replace(batch, sample_ids=tuple(100 * i + n for n in range(len(batch.sample_ids))))
        for i, batch in enumerate(micro_batches(0, 0, 4))
    ]
    good = fixtures.NegativeLogprob()
    said: dict[str, list[str]] = {}

    def refused(name: str, attempt: Any) -> None:
        try:
            attempt()
        except LockstepError as error:
            said[name] = [type(error).__name__, str(error)]
        else:
            raise AssertionError(f"{name} was not refused")

    refused("nan", lambda: backend.forward_backward(batches, Broken(100, "nan")))
    refused("infinite", lambda: backend.forward_backward(batches, Broken(300, "inf")))
    refused("different", lambda: backend.forward_backward(batches[: 4 - rank], good))
    # a rank of its own would leave the other one waiting: both run out in their last micro-batch
    own = [batches[2 * i + rank] for i in range(2)]
    refused("memory", lambda: backend.forward_backward_own(own, Broken(200 + 100 * rank, "memory")))
    refused("no gradients", backend.optimizer_step)
    backend.forward_backward(batches, good)
    refused("twice", lambda: backend.forward_backward(batches, good))
    refused("save", lambda: backend.save(Path("nowhere")))
    backend.drop_gradients()
    backend.forward_backward([without_tokens(batch) for batch in batches], good)
    refused("nothing trained", backend.optimizer_step)
    pair = [made.forward_backward(batches, good) for made in (backend, local)]
    norms = [made.optimizer_step()["grad_norm"] for made in (backend, local)]
    folder = Path(case["folder"]) / f"uneven-{rank}"
    folder.mkdir()
    local._optimizer.updates[3] += 1  # type: ignore[attr-defined]
    local.save(folder)()
    refused("uneven", lambda: backend.load(folder))
    backend.close()
    worst = max(float((a - b).abs().max()) for a, b in zip(pair[0].logprobs, pair[1].logprobs, strict=True))
    return {"case": case, "said": said, "norm": abs(norms[0] / norms[1] - 1), "logprobs": worst}


def left_out(case: dict[str, Any], rank: int, world: int) -> dict[str, float]:
    """Through the loop: optimizer steps for which the second rank has no pack. By stage, how far gradients
    and weights are from those of a run that leaves nothing out."""
    with init_ranks(device="cpu", seconds=60.0) as ranks:
        return {
            str(stage): compare_on_ranks("deepspeed", ranks, zero_stage=stage)["apart"]
            for stage in case["stages"]
        }


def relative(ours: Tensor, theirs: Tensor) -> float:
    size = float(theirs.norm())
    return float((ours - theirs).norm()) / size if size else float(ours.norm())


def without_debug_information() -> None:
    """Of DeepSpeed's AdamW for the host: the same code in two thirds of the compiler's time."""
    builder = _import_deepspeed(torch.device("cpu")).ops.op_builder.CPUAdamBuilder
    flags = builder.cxx_args
    builder.cxx_args = lambda self: [flag for flag in flags(self) if flag != "-g"]


def main() -> None:
    torch.set_num_threads(1)
    without_debug_information()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    kinds = {"replay": run, "train": train, "states": states, "errors": errors, "left_out": left_out}
    for case in json.loads(sys.argv[1]):
        print(json.dumps(kinds[case.get("kind", "replay")](case, rank, world)), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    relax_gc()
    main()
