"""Reward models in RL runs: they score as `lockstep score` and transformers do, on any number of ranks and
after a kill, and what is none is refused before the first step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from classifiers import save_classifier
from loop_runs import Commands, everything, kill, metrics_of
from role_worker_kills import kill_at
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from lockstep import loops
from lockstep.config.load import build, parse_toml
from lockstep.config.run import GRPORun
from lockstep.observe.metrics import check_ledger
from lockstep.observe.run_history import read_lines

QUESTIONS = [f"{i} + {i + 3} = ?" for i in range(12)]
TOML = """
kind = "grpo"
steps = 3
rewards = []
[model]
name = "{policy}"
dtype = "float32"
[data]
source = "{data}"
max_prompt_tokens = 64
[rollout]
prompts_per_step = 4
group_size = 2
[rollout.sampling]
max_tokens = 12
[reward_model]
name = "{reward}"
dtype = "float32"
weight = 0.5
overlong = "truncate_left"
[train]
lr = 1e-3
token_budget = 256
[eval]
num_prompts = 2
before = false
[checkpoint]
every = 1
background = false
[log]
tensorboard = false
"""


@pytest.fixture(scope="module")
def place(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy, two reward models, one of which has another tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("reward-role")
    shutil.copytree(tiny_folder, folder / "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    save_classifier(folder / "reward", tokenizer)
    save_classifier(folder / "two-labels", tokenizer, num_labels=2)
    other = AutoTokenizer.from_pretrained(folder / "policy")
    other.add_tokens(["+ ", "= ?"])
    other.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    save_classifier(folder / "other", other, seed=1)
    rows = [{"prompt": question} for question in QUESTIONS]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(
        TOML.format(policy=folder / "policy", data=folder / "data.jsonl", reward=folder / "reward")
    )
    return folder


def rollouts(run: Path) -> list[dict[str, Any]]:
    return [row for file in sorted((run / "rollouts").glob("*.jsonl")) for row in read_lines(file)]


def directly(folder: Path, rows: list[dict[str, Any]]) -> list[float]:
    """By transformers alone, one conversation at a time."""
    module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for row in rows:
        question = next(q for q in QUESTIONS if f"<|user|>{q}<" in row["prompt"])
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": row["completion"]},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            scores.append(module(input_ids=ids).logits.item())
    return scores


@pytest.fixture(scope="module")
def straight(lockstep: Commands, place: Path) -> Path:
    """An ensemble of both models, in one process."""
    run = place / "straight"
    ended = lockstep(
        *("train", place / "run.toml", "--run-dir", run, "--reward-model.others", place / "other"), cwd=place
    )
    assert (ended.out + ended.err).count("its tokenizer differs from the policy's") == 1
    return run


def test_its_scores_are_those_of_transformers_and_its_weight_counts(straight, place):
    rows = rollouts(straight)
    assert len(rows) >= 3 * 8
    first, second = directly(place / "reward", rows), directly(place / "other", rows)
    assert [row["rewards"]["model#1"] for row in rows] == pytest.approx(first, abs=1e-5)
    assert [row["rewards"]["model#2"] for row in rows] == pytest.approx(second, abs=1e-5)
    mean = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert [row["rewards"]["model"] for row in rows] == pytest.approx(mean, abs=1e-5)
    assert [row["reward"] for row in rows] == pytest.approx([score / 2 for score in mean], abs=1e-5)
    assert len({round(score, 3) for score in mean}) > 8
    steps = [row for row in metrics_of(straight) if "reward/model" in row]
    assert len(steps) == 3
    of_first = [row["rewards"]["model"] for row in rows if row["step"] == 0]
    assert steps[0]["reward/model"] == pytest.approx(sum(of_first) / 8)


def test_a_remote_model_that_is_killed_scores_the_same(straight, place, monkeypatch):
    killed = kill_at(monkeypatch, "rewards", 2)
    loops.train(run_of(place, ("reward_model",), others=(str(place / "other"),)))
    assert len(killed) == 1
    assert everything(place / "reward_model") == everything(straight)
    log = (place / "reward_model" / "logs" / "rank-0.log").read_text()
    assert log.count("its tokenizer differs from the policy's") == 1


def test_remote_roles_keep_the_bits_and_one_that_is_killed_is_started_again_alone(place, monkeypatch):
    ppo: dict[str, Any] = {"kind": "ppo", "algorithm": {"kl": {"coef": 0.1}}}
    loops.train(run_of(place, **ppo))
    loops.train(run_of(place, ("value", "reward_model", "ref"), **ppo))
    killed = kill_at(monkeypatch, "logprobs", 2)
    loops.train(run_of(place, ("ref",), ("value",), ("reward_model",), **ppo))
    assert len(killed) == 1
    together = numbers_of(place / "together")
    assert numbers_of(place / "value+reward_model+ref") == together
    apart = place / "ref value reward_model"
    assert numbers_of(apart) == together
    starts = {
        log.parent.name: log.read_text().count("=== lockstep: start") for log in apart.glob("remote/*/*.log")
    }
    assert starts == {"ref": 2, "value": 1, "reward_model": 1}
    rows = [row for row in read_lines(apart / "metrics.jsonl") if "time/step" in row]
    assert [row["world/restarts"] for row in rows] == [0.0, 1.0, 1.0]


@pytest.mark.slow
def test_the_remote_roles_of_two_ranks_keep_the_bits(lockstep, place):
    flags = ("--train.backend", "fsdp2", "--train.device", "cpu", "--ranks", "2")
    four = ("--cluster.colocate", '[["policy"], ["ref"], ["value"], ["reward_model"]]')
    places = {"one": (), "four": four, "own": (*four, "--cluster.dedicated-gpus", "true")}
    text = (place / "run.toml").read_text().replace('kind = "grpo"', 'kind = "ppo"')
    (place / "ppo.toml").write_text(text + "[algorithm.kl]\ncoef = 0.1\n")
    for name, placed in places.items():
        lockstep("train", place / "ppo.toml", *flags, *placed, "--run-dir", place / name, cwd=place)
    assert numbers_of(place / "four") == numbers_of(place / "own") == numbers_of(place / "one")
    logs = {
        str(log.parent.relative_to(place / "four" / "remote")) for log in place.glob("four/remote/*/*/*.log")
    }
    assert logs == {f"{role}/rank-{rank}" for role in ("ref", "value", "reward_model") for rank in (0, 1)}


def numbers_of(run: Path) -> dict[str, Any]:
    """All but the states of generators: who loads a reward model draws from its process's."""
    found = everything(run)
    found["weights"] = {name: of for name, of in found["weights"].items() if "/rng" not in name}
    return found


def run_of(place: Path, *groups: tuple[str, ...], kind: str = "grpo", **settings: Any) -> GRPORun:
    """The run of run.toml, with these remote groups."""
    values = parse_toml((place / "run.toml").read_bytes(), origin="test") | {"kind": kind}
    values["log"] |= {"display": "off"}
    values["run_dir"] = str(place / (" ".join(map("+".join, groups)) or "together"))
    if others := settings.pop("others", None):
        values["reward_model"] |= {"others": others}
    if groups:
        values["cluster"] = {"colocate": [["policy"], *groups]}
    run = build(values | settings, origin="test")
    assert isinstance(run, GRPORun)
    return run


def test_lockstep_score_gives_the_same_scores(straight, lockstep, place):
    rows = rollouts(straight)[:6]
    samples = place / "samples.jsonl"
    questions = [next(q for q in QUESTIONS if f"<|user|>{q}<" in row["prompt"]) for row in rows]
    lines = [{"prompt": q, "completion": row["completion"]} for q, row in zip(questions, rows, strict=True)]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = place / "scored.jsonl"
    options = ("--reward-model", place / "reward", "--reward-model.dtype", "float32")
    lockstep("score", "--data", samples, *options, "--out", out, cwd=place)
    scored = [row["reward"] for row in read_lines(out)]
    assert [row["rewards"]["model#1"] for row in rows] == pytest.approx(scored, abs=1e-5)


def test_a_killed_run_goes_on_exactly_and_refuses_other_weights(straight, lockstep, place):
    run, other = place / "broken", place / "other"
    orders = [kill("lockstep.rollout.reward_models:RewardModels.score", step=1)]
    flags = ("--reward-model.others", other)
    lockstep("train", place / "run.toml", "--run-dir", run, *flags, cwd=place, signals=orders, code=-9)

    file = other / "model.safetensors"
    before = file.read_bytes()
    weights = {name: tensor * 2 for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    ended = lockstep("train", "--resume", run, cwd=place, code=2)
    assert "has changed since" in ended.err
    file.write_bytes(before)

    lockstep("train", "--resume", run, cwd=place)
    assert everything(run) == everything(straight)
    found = check_ledger(run)
    assert (found.steps, found.trained, found.problems) == (3, 24, ())


def test_two_ranks_score_a_share_each_as_one_process_does(straight, lockstep, place):
    run = place / "ranks"
    spread = ("--ranks", "2", "--train.backend", "fsdp2", "--steps", "1")
    flags = ("--reward-model.others", place / "other", *spread)
    lockstep("train", place / "run.toml", "--run-dir", run, *flags, cwd=place)
    ours, theirs = ([row for row in rollouts(each) if row["step"] == 0] for each in (run, straight))
    assert [row["token_ids"] for row in ours] == [row["token_ids"] for row in theirs]
    for name in ("model", "model#1", "model#2"):
        found = [row["rewards"][name] for row in ours]
        assert found == pytest.approx([row["rewards"][name] for row in theirs], abs=1e-5)


def test_ppo_and_rewards_normalised_by_themselves_take_its_scores(lockstep, place, tmp_path):
    text = (place / "run.toml").read_text()
    (tmp_path / "ppo.toml").write_text(text.replace('kind = "grpo"', 'kind = "ppo"'))
    rewards = 'rewards = [{name = "length", weight = 0.01, kwargs = {target = 4}}]'
    text = text.replace("rewards = []", rewards)
    text += '[algorithm]\nmulti_objective_aggregation = "normalize_then_sum"\n'
    (tmp_path / "gdpo.toml").write_text(text)
    for name in ("ppo", "gdpo"):
        run = tmp_path / name
        lockstep("train", f"{name}.toml", "--run-dir", run, "--steps", "1", cwd=tmp_path)
        rows = [row for row in rollouts(run) if row["step"] == 0]
        found = [row["rewards"]["model"] for row in rows]
        assert found == pytest.approx(directly(place / "reward", rows), abs=1e-5)
        for row in rows:
            total = 0.5 * row["rewards"]["model"] + 0.01 * row["rewards"].get("length", 0.0)
            assert row["reward"] == pytest.approx(total)


def test_what_is_no_reward_model_is_refused_before_the_first_step(lockstep, place, tmp_path):
    def broken(name: str, change: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in (place / "reward").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        weights = load_file(folder / "model.safetensors")
        weights["score.weight"] = change(weights["score.weight"])
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    wide = broken("wide", lambda weight: torch.zeros(1, 2 * weight.shape[1]))
    nan = broken("nan", lambda weight: torch.full_like(weight, torch.nan))
    cases: dict[tuple[str | Path, ...], str] = {
        ("--reward-model.name", place / "two-labels"): "has 2 labels instead of 1",
        ("--reward-model.name", place / "policy"): "2 labels instead of 1",  # a causal LM
        ("--reward-model.name", wide): "score.weight",
        ("--reward-model.name", nan): "is nan in float32",
        ("--reward-model.name", "shape:tiny-llama"): "a shape has no trained weights to score with",
        ("--reward-model.name", tmp_path / "none"): "this folder does not exist",
        ("--reward-model.others", place / "reward"): "is named twice",
        ("--reward-model.aggregation", "min"): "has no effect with one model",
        ("--data.source", "ids"): "reads text",
    }
    for number, (flags, message) in enumerate(cases.items()):
        run = tmp_path / f"run-{number}"
        ended = lockstep("train", place / "run.toml", "--run-dir", run, *flags, cwd=tmp_path, code=None)
        assert ended.code in (1, 2) and message in ended.err, (flags, ended.out, ended.err)
        assert not (run / "metrics.jsonl").exists() or not metrics_of(run)
