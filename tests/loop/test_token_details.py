"""log.token_details: the trainer's figures of each token in rollouts/, against transformers and by hand."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sampled
import torch
from loop_runs import metrics_of
from raising import raises
from safetensors.torch import load_file
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep import Environment, loops
from lockstep.config.load import load_run
from lockstep.errors import TrainError
from lockstep.loop.token_details import TokenDetails, _rounded
from lockstep.loops import rl
from lockstep.packing import Planner
from lockstep.protocols.train import StepStats
from lockstep.rollout.environment import Sampler, Trajectories
from lockstep.schema.batch import PackedBatch, PolicyBatch, policy_samples, rollout_samples
from lockstep.schema.rollout import Prompt, Trajectory

Row = dict[str, Any]
DETAILS = ("policy_logprobs", "entropies", "advantages")
SMALL = {
    "steps": 3,
    "rollout.prompts_per_step": 3,
    "rollout.group_size": 4,
    "rollout.sampling.max_tokens": 14,
    "rollout.sampling.temperature": 0.7,
    "rollout.sampling.ignore_eos": False,
    "rollout.sampling.stop_token_ids": list(range(100, 130)),
    "train.token_budget": 80,
    "train.score_all_every": 1,
    "eval.before": False,
    "eval.after": False,
    "log.tensorboard": False,
    "log.display": "off",
    "log.token_details": True,
    "checkpoint.export_at_end": False,
    "checkpoint.save_at_end": False,
}


class Tells(Environment):
    """Turns of up to 3 and 5 tokens and the rest of the budget, with a reply of two and one of one between
    them; a turn that stops early ends the trajectory."""

    def tasks(self, step: int, n: int, seed: int) -> list[Prompt]:
        return [
            Prompt(index=step * n + i, token_ids=(*range(10, 13 + i), step + 1), text="") for i in range(n)
        ]

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        trajectory = await sample(max_tokens=3)
        for reply, most in (((7, 8), 5), ((9,), None)):
            if trajectory.token_ids[-1] in range(100, 130):
                break
            trajectory = await sample(reply, max_tokens=most)
        return trajectory

    def score(self, groups: Sequence[Trajectories]) -> list[list[float]]:
        return [[float(sum(t.token_ids) % 7) for t in trajectories] for _, trajectories in groups]


def trained(
    folder: Path, *, recipe: str = "tiny", environment: Environment | None = None, **settings: object
) -> list[list[Row]]:
    """The rows of each step of a run in `folder`."""
    start: dict[str, Any] = {"resume": settings.pop("resume", None)}
    run = load_run(recipe, overrides=SMALL | {"run_dir": str(folder)} | settings)
    loops.train(run, environment=environment, **start)
    return rows_of(folder)


def rows_of(folder: Path) -> list[list[Row]]:
    files = sorted((folder / "rollouts").glob("step-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def expected(model: PreTrainedModel, row: Row, *, temperature: float) -> tuple[list[float], list[float]]:
    """Logprobs and entropies of the policy's tokens of one row, from its ids and spans alone."""
    position, wanted = len(row["prompt_token_ids"]), list[int]()
    for author, count in row.get("spans", [["policy", len(row["token_ids"])]]):
        wanted += range(position, position + count) if author == "policy" else []
        position += count
    ids = torch.tensor(row["prompt_token_ids"] + row["token_ids"])
    with torch.no_grad():
        logits = model(ids[None]).logits[0].double() / temperature
    distribution = Categorical(logits=logits[[p - 1 for p in wanted]])
    return distribution.log_prob(ids[wanted]).tolist(), distribution.entropy().tolist()


def assert_as_transformers(model: PreTrainedModel, rows: Iterable[Row], *, temperature: float = 0.7) -> None:
    for row in rows:
        logprobs, entropies = expected(model, row, temperature=temperature)
        assert len(logprobs) == len(row["rollout_logprobs"]) > 0
        assert row["policy_logprobs"] == pytest.approx(logprobs, abs=1e-5)
        assert row["entropies"] == pytest.approx(entropies, abs=1e-5)


def assert_group_advantages(rows: Sequence[Row]) -> None:
    """GRPO: (r - mean) / (std + 1e-4) of the group, the same for all tokens."""
    by_prompt: dict[int, list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt_index"], []).append(row)
    for group in by_prompt.values():
        rewards = [row["reward"] for row in group]
        for row in group:
            value = (row["reward"] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)
            assert row["advantages"] == pytest.approx([value] * len(row["rollout_logprobs"]), abs=2e-6)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Callable[..., PreTrainedModel]:
    """The model of tiny_folder in float32, in transformers' own attention; or with a checkpoint's weights."""

    def load(checkpoint: Path | None = None) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(
            tiny_folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if checkpoint is not None:
            model.load_state_dict(load_file(checkpoint / "model.safetensors"))
        return model

    return load


@pytest.mark.parametrize("layout", ["packed", "shared", "padded"])
def test_turns_cut_off_and_not_are_as_transformers_scores_them(
    layout: str, reference: Callable[..., PreTrainedModel], tiny_folder: Path, tmp_path: Path
) -> None:
    settings = {"train.layout": layout, "model.name": str(tiny_folder), "checkpoint.every": 1}
    keep = {"checkpoint.keep_last": 3, "algorithm.mask_truncated": True, "steps": 2}
    steps = trained(tmp_path / "run", environment=Tells(), **settings, **keep)
    assert {row["finish_reason"] for rows in steps for row in rows} == {"stop", "length"}
    assert {len(row.get("spans", [1])) for rows in steps for row in rows} >= {1, 5}
    assert_as_transformers(reference(), steps[0])
    assert_as_transformers(reference(tmp_path / "run/checkpoints/step-000001"), steps[1])
    for rows, metrics in zip(steps, metrics_of(tmp_path / "run"), strict=True):
        assert_group_advantages(rows)
        assert_logged(rows, metrics)


def assert_logged(rows: Sequence[Row], metrics: Row) -> None:
    """The metrics of a step that scored every token once are means of what its rows say."""
    pairs = [zip(row["policy_logprobs"], row["rollout_logprobs"], strict=True) for row in rows]
    gaps = [abs(ours - theirs) for pair in pairs for ours, theirs in pair]
    assert statistics.mean(gaps) == pytest.approx(metrics["logprob_gap_mean"], abs=1e-6)
    assert max(gaps) == pytest.approx(metrics["logprob_gap_max"], abs=1e-6)
    entropies = [value for row in rows for value in row["entropies"]]
    assert statistics.mean(entropies) == pytest.approx(metrics["entropy"], rel=1e-5)


def test_nothing_else_depends_on_it(tmp_path: Path) -> None:
    """Bit for bit, with groups left out, and over four optimizer steps per rollout batch."""
    several = {"train.minibatches": 2, "train.epochs_per_batch": 2, "train.score_all_every": 2}
    on = trained(tmp_path / "on", **several)
    off = trained(tmp_path / "off", **several, **{"log.token_details": False})
    assert metrics_of(tmp_path / "on") == metrics_of(tmp_path / "off")
    without = [[{k: v for k, v in row.items() if k not in DETAILS} for row in rows] for rows in on]
    assert without == off and on != off


def test_several_optimizer_steps_score_with_the_weights_before_the_first(
    reference: Callable[..., PreTrainedModel], tiny_folder: Path, tmp_path: Path
) -> None:
    """All logprobs are of the rollout's weights, though these are trained twice; and so are the entropies of
    the first minibatch."""
    several = {"train.minibatches": 2, "train.epochs_per_batch": 2, "train.lr": 1e-2, "steps": 1}
    (rows,) = trained(tmp_path / "run", environment=Tells(), **several, **{"model.name": str(tiny_folder)})
    for number, row in enumerate(rows):
        logprobs, entropies = expected(reference(), row, temperature=0.7)
        assert row["policy_logprobs"] == pytest.approx(logprobs, abs=1e-5)
        assert (row["entropies"] == pytest.approx(entropies, abs=1e-5)) is (number < 6)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_an_engine_equal_to_the_bit_has_no_gap(minibatches: int, tmp_path: Path) -> None:
    """Whether a forward computed the logprobs, sample by sample, or the rollout's own are `old`."""
    settings = {"engine.name": "native", "train.batch_invariant": True, "train.device": "cpu"}
    shape = {"train.minibatches": minibatches, "train.accumulate": "sample" if minibatches == 1 else "pack"}
    steps = trained(tmp_path / "run", environment=Tells(), **settings, **shape, **{"steps": 2})
    assert all(row["policy_logprobs"] == row["rollout_logprobs"] for rows in steps for row in rows)
    reused = [row.get("old_logprobs_reused") for row in metrics_of(tmp_path / "run")]
    assert reused == [None if minibatches == 1 else 1.0] * 2


def test_groups_without_a_signal_have_advantages_only(tmp_path: Path) -> None:
    class Same(Tells):
        """Rewards of the second task are equal."""

        def score(self, groups: Sequence[Trajectories]) -> list[list[float]]:
            return [
                [0.0 if task.index % 3 == 1 else float(i) for i, _ in enumerate(trajectories)]
                for task, trajectories in groups
            ]

    first, second, third = trained(
        tmp_path / "run", environment=Same(), **{"train.score_all_every": 2, "train.layout": "packed"}
    )
    for rows, scored in ((first, {0, 1, 2}), (second, {0, 2}), (third, {0, 1, 2})):
        assert {row["prompt_index"] % 3 for row in rows if row["policy_logprobs"] is not None} == scored
        for row in rows:
            assert (row["entropies"] is None) is (row["policy_logprobs"] is None)
            assert len(row["advantages"]) == len(row["rollout_logprobs"])
            assert any(row["advantages"]) is (row["prompt_index"] % 3 != 1)


def test_a_value_models_advantages_and_its_warm_up(tmp_path: Path) -> None:
    steps = trained(tmp_path / "run", recipe="tiny-ppo", **{"value.warmup_batches": 1})
    assert all(row["policy_logprobs"] is row["entropies"] is None for row in steps[0])
    for rows, metrics in zip(steps, metrics_of(tmp_path / "run"), strict=True):
        advantages = [value for row in rows for value in row["advantages"]]
        assert len(advantages) == sum(len(row["rollout_logprobs"]) for row in rows)
        assert all(len(set(row["advantages"])) == len(row["advantages"]) for row in rows)
        # algorithm.whiten_advantages, over all tokens of the step
        assert statistics.mean(advantages) == pytest.approx(0.0, abs=1e-5)
        assert statistics.pstdev(advantages) == pytest.approx(1.0, abs=0.01)
        if rows is not steps[0]:
            assert_logged(rows, metrics)


def test_dynamic_sampling_and_a_resumed_run(tmp_path: Path) -> None:
    """The groups that are trained on are those that later rounds found."""

    class Seldom(Tells):
        def score(self, groups: Sequence[Trajectories]) -> list[list[float]]:
            return [[float(sum(t.token_ids) % 5 == 0) for t in trajectories] for _, trajectories in groups]

    settings = {"algorithm.name": "dapo", "algorithm.dynamic_sampling": True}
    whole = trained(tmp_path / "whole", environment=Seldom(), **settings)
    assert max(row["sample"] for rows in whole for row in rows) >= 4, "no group was sampled again"
    cut = settings | {"steps": 2, "checkpoint.save_at_end": True}
    trained(tmp_path / "cut", environment=Seldom(), **cut)
    assert trained(tmp_path / "cut", environment=Seldom(), resume=tmp_path / "cut", **settings) == whole
    for rows, metrics in zip(whole, metrics_of(tmp_path / "whole"), strict=True):
        assert_logged(rows, metrics)


def test_by_hand() -> None:
    """Two rollouts in one pack: a prompt of 2, a turn of 2, a reply of 1, a turn of 1; and a turn of 3. A
    third one is not scored. Slot t of the pack has logprob -t, old logprob -t - 100 and entropy t + 0.5."""
    told = Trajectory.of(sampled.completion((5, 6), (7, 8), (-1.0, -2.0)))
    told = told.continued((9,), sampled.completion((5, 6, 7, 8, 9), (4,), (-3.0,)))
    others = [Trajectory.of(sampled.completion((5,), (7, 8, 4), -1.0)) for _ in range(2)]
    rollouts = rollout_samples([told, *others])
    samples = policy_samples(rollouts, [torch.arange(len(each)) + 0.25 for each in rollouts])
    plan = Planner(token_budget=64, static_capacity=False, max_seqlen=16, max_documents=3)
    (batch,) = plan(samples[:2], [each.loss_mask.float() for each in samples[:2]])
    assert batch.sample_ids == (0, 1)
    slots = torch.arange(batch.num_slots).float()
    stats = StepStats(losses=[], logprobs=[-slots], entropy=[slots + 0.5])
    later = StepStats(losses=[], logprobs=[slots + 9], entropy=[slots + 9])

    def added(batch: PackedBatch) -> list[Row]:
        details, rows = TokenDetails(), [{"rollout_logprobs": [0.0] * 3} for _ in range(3)]
        details.begin(samples)
        details.add([batch], stats)
        details.add([batch], later)
        details.add_to(rows)
        return rows

    rows = added(batch)
    # The first document's mask is True at slots 1, 2 and 4 (of 6), the second one's at 6, 7 and 8.
    assert [row["policy_logprobs"] for row in rows] == [[-1.0, -2.0, -4.0], [-6.0, -7.0, -8.0], None]
    assert [row["entropies"] for row in rows] == [[1.5, 2.5, 4.5], [6.5, 7.5, 8.5], None]
    assert [row["advantages"] for row in rows] == [[1.25, 2.25, 4.25], [0.25, 1.25, 2.25], [0.25, 1.25, 2.25]]

    old = added(dataclasses.replace(PolicyBatch.of(batch), old_logprobs=-slots - 100))
    assert [row["policy_logprobs"] for row in old] == [
        [-101.0, -102.0, -104.0],
        [-106.0, -107.0, -108.0],
        None,
    ]
    assert [row["entropies"] for row in old] == [row["entropies"] for row in rows]


def test_a_trajectory_of_parts_is_one_row() -> None:
    """A turn of 2, one of 1 in another context, and a rollout beside them; each slot has its own values."""
    told = Trajectory.of(sampled.completion((5, 6), (7, 8), -1.0))
    told = told.branched(sampled.completion((5, 9), (4,), -1.0))
    rollouts = rollout_samples([told, Trajectory.of(sampled.completion((5,), (7, 8, 4), -1.0))])
    samples = policy_samples(rollouts, [torch.arange(len(each)) + 0.25 for each in rollouts])
    plan = Planner(token_budget=64, static_capacity=False, max_seqlen=16, max_documents=3)

    def row_of_parts(scored: int) -> Row:
        part = samples[:scored]
        (batch,) = plan(part, [each.loss_mask.float() for each in part])
        slots = torch.arange(batch.num_slots).float()
        details, rows = TokenDetails(), [{"rollout_logprobs": [0.0] * 3} for _ in range(2)]
        details.begin(samples)
        details.add([batch], StepStats(losses=[], logprobs=[-slots], entropy=[slots + 0.5]))
        details.add_to(rows)
        return {name: rows[0][name] for name in DETAILS}

    advantages = [1.25, 2.25, 1.25]
    # The first document takes slots 0 to 3, the second one 4 to 6.
    assert row_of_parts(3) == dict(
        zip(DETAILS, ([-1.0, -2.0, -5.0], [1.5, 2.5, 5.5], advantages), strict=True)
    )
    assert row_of_parts(1) == dict(zip(DETAILS, (None, None, advantages), strict=True))


def test_numbers_are_rounded_as_those_of_the_engine_are() -> None:
    """To 6 places by Python's round(): where trainer and engine are equal to the bit, their rows are."""
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(20_000, generator=generator) * 4, torch.arange(-4096, 4096) / 2**13])
    assert _rounded(values) == [round(value, 6) for value in values.tolist()]


def page_with(line: str) -> Callable[..., Any]:
    """`train` of a copy of the page that has `line` where it writes the rollouts."""
    text, written = Path(rl.__file__).read_text(), "run.write_rollouts(step, estimates.groups)"
    assert text.count(written) == 1
    page: dict[str, Any] = {}
    exec(text.replace(written, line), page)
    train: Callable[..., Any] = page["train"]
    return train


def test_a_page_that_leaves_the_writing_to_log(tmp_path: Path) -> None:
    page_with("pass")(load_run("tiny", overrides=SMALL | {"steps": 1, "run_dir": str(tmp_path / "run")}))
    (rows,) = rows_of(tmp_path / "run")
    assert len(rows) == 3 * 4 and all(row["policy_logprobs"] for row in rows)


def test_a_page_that_writes_other_groups_is_told_so(tmp_path: Path) -> None:
    train = page_with("run.write_rollouts(step, estimates.groups[1:])")
    with raises(TrainError, "values-differ: log.token_details = true"):
        train(load_run("tiny", overrides=SMALL | {"run_dir": str(tmp_path / "run")}))
    (rows,) = rows_of(tmp_path / "run")  # a step that fails keeps its rollouts
    assert len(rows) == 2 * 4 and not any(name in row for row in rows for name in DETAILS)
