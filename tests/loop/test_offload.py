"""Offloaded roles free their memory between calls, and change no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import TINY

from lockstep.config.load import build, parse_toml
from lockstep.config.run import GRPORun
from lockstep.errors import ConfigError
from lockstep.loop.determinism import weights_hash
from lockstep.loop.memory_plan import plan_memory
from lockstep.loops.online import OnlineParts, OnlineTrainer, build_online
from lockstep.models.memory import phase_totals
from lockstep.models.offload import OffloadedTensors

PPO = TINY.replace('kind = "grpo"', 'kind = "ppo"')


def run_of(text: str = PPO, **overrides: Any) -> GRPORun:
    values = parse_toml(text.encode(), origin="test")
    for path, value in overrides.items():
        *sections, name = path.split("__")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    run = build(values, origin="test")
    assert isinstance(run, GRPORun)
    return run


ALL = {"algorithm__kl__coef": 0.05, "offload": ["policy", "ref", "value"]}


def test_tensors_come_back_as_they_were_left() -> None:
    whole = torch.arange(24.0)
    tensors = [whole[:8].view(2, 4), whole, torch.arange(5), torch.empty(0)]
    offloaded = OffloadedTensors(tensors)
    assert offloaded.bytes == 24 * 4 + 5 * 8
    assert whole.untyped_storage().nbytes() == 0 and tensors[2].untyped_storage().nbytes() == 0
    with offloaded.on_device(), offloaded.on_device():
        assert whole.tolist() == list(range(24))
        tensors[0].mul_(2)
    assert whole.untyped_storage().nbytes() == 0
    with offloaded.on_device():
        assert whole[:9].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 8]
        assert tensors[2].tolist() == list(range(5))


def test_blocks_of_host_memory_are_filled_across_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.models.offload._BLOCK", 7)
    tensors = [torch.arange(3), torch.arange(10, 15, dtype=torch.uint8), torch.arange(2.0)]
    with OffloadedTensors(tensors).on_device():
        assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2], [10, 11, 12, 13, 14], [0.0, 1.0]]


def held(parts: OnlineParts) -> dict[str, int]:
    """Bytes on the device, by role and part."""
    value = parts.value
    assert value is not None
    found = {}
    for name, backend in (("policy", parts.backend), ("value", value.backend)):
        for part in ("weights", "states", "ref"):
            tensors = backend._tensors_of(part)
            found[f"{name} {part}"] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_whose_roles_sleep_has_the_same_bits(dtype: str, tmp_path: Path) -> None:
    seen = []
    for sleep in ([], ALL["offload"]):
        run = run_of(**{**ALL, "offload": sleep, "model__dtype": dtype, "train__minibatches": 2})
        parts = build_online(run)
        trainer, steps = OnlineTrainer(parts), []
        for step in range(2):
            trainer.push(policy_version=step)
            steps.append(trainer.update(trainer.sample(step).groups, step=step).metrics)
        folder = tmp_path / f"{dtype}-{len(sleep)}"
        folder.mkdir()
        offloaded = {name for name, size in held(parts).items() if not size}
        gone = {"policy states", "policy ref", "value weights", "value states"} if sleep else set()
        assert offloaded == gone | {"value ref"}
        hashes = parts.roles.save(folder)()
        parts.roles.load(folder)
        value = parts.value
        assert value is not None
        with value.backend._on_device("weights"):
            seen.append((steps, weights_hash(parts.backend), weights_hash(value.backend), hashes.keys()))
        parts.close()
    assert seen[0] == seen[1]


def test_a_save_in_the_background_has_what_was_there(tmp_path: Path) -> None:
    parts = build_online(run_of(**ALL))
    trainer = OnlineTrainer(parts)
    trainer.push(policy_version=0)
    trainer.update(trainer.sample(0).groups, step=0)
    for name, background in (("now", False), ("later", True)):
        (tmp_path / name).mkdir()
        finish = parts.roles.save(tmp_path / name, background=background)
        finish()
    for file in ("model.safetensors", "optimizer.safetensors"):
        now, later = (sorted((tmp_path / name).rglob(file)) for name in ("now", "later"))
        assert now and [p.read_bytes() for p in now] == [p.read_bytes() for p in later]
    parts.close()


def refusals() -> list[tuple[dict[str, Any], str, str]]:
    return [
        ({"offload": ["ref"]}, PPO, "no ref with separate memory"),
        ({"offload": ["value"]}, TINY, "no value with separate memory"),
        ({"offload": ["reward_model"]}, PPO, "no reward_model with separate memory"),
        ({"offload": ["policy", "policy"]}, PPO, "names a role twice"),
        ({"offload": ["policy"], "train__backend": "deepspeed"}, PPO, "train.backend = 'local' or 'fsdp2'"),
        ({"offload": ["value"], "record__enabled": True}, PPO, "leave 'value' out"),
        ({"offload": ["value"], "train__execution": "joint", "train__cuda_graph": True}, PPO, "captured"),
    ]


@pytest.mark.parametrize(("overrides", "text", "says"), refusals())
def test_what_cannot_sleep_is_refused(overrides: dict[str, Any], text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_of(text, **overrides)
    assert says in str(caught.value)


def test_the_plan_counts_sleeping_roles_in_their_turns_alone() -> None:
    device = torch.device("cuda")
    overrides = {**ALL, "model__dtype": "bfloat16"}
    resident, offloaded = (
        plan_memory(run_of(**{**overrides, "offload": sleep}), device=device)
        for sleep in ([], ALL["offload"])
    )
    shape = resident.shape
    before, after = phase_totals(resident.parts), phase_totals(offloaded.parts)
    states, weights = 12 * shape.parameters, 2 * shape.parameters  # masters and two moments; bfloat16
    value = next(p.bytes for p in resident.parts if p.name == "value model: parameters") // 2
    gone = states + weights + 2 * value + 12 * value
    assert before["always"] - after["always"] == gone
    assert after["host"] - before["host"] == gone
    # An update has the states of one role, and of the value model its weights as well.
    update = {
        role: sum(part.bytes for part in resident.parts if (part.role, part.phase) == (role, "update"))
        for role in ("policy", "value")
    }
    assert after["update"] == max(update["policy"] + states, update["value"] + 14 * value)
    assert offloaded.peak_bytes < resident.peak_bytes
    assert any("offload" in part.setting for part in resident.parts)


def test_on_a_cpu_the_plan_is_the_same() -> None:
    plans = [
        plan_memory(run_of(**{**ALL, "offload": s}), device=torch.device("cpu")) for s in ([], ["policy"])
    ]
    assert plans[0].parts == plans[1].parts
