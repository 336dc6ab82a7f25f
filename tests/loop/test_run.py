import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sampled
from raising import raises

from lockstep import loops
from lockstep.config.load import load_run
from lockstep.config.run import GRPORun
from lockstep.config.train import EvalConfig
from lockstep.errors import ConfigError, DataError, EngineError, RewardError
from lockstep.loop.evaluate import Evaluation, score
from lockstep.loop.run import Run
from lockstep.loops import rl
from lockstep.ranks.context import RankContext
from lockstep.rollout import prompt_kinds
from lockstep.rollout.environment import SingleTurn
from lockstep.rollout.rewards import RewardSet
from lockstep.schema.rollout import RolloutGroup

TINY = {
    "steps": 3,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.sampling.max_tokens": 4,
    "eval.before": False,
    "eval.after": False,
    "log.tensorboard": False,
    "log.display": "plain",
    "checkpoint.export_at_end": False,
}


def tiny(folder: Path, **settings: object) -> GRPORun:
    run = load_run("tiny", overrides=TINY | {"run_dir": str(folder)} | settings)
    assert isinstance(run, GRPORun)
    return run


def test_a_failing_reward_costs_no_finished_step(tmp_path: Path) -> None:
    calls = 0

    def reward(prompt: str, completion: str, row: dict[str, object]) -> float:
        nonlocal calls
        calls += 1
        if calls > 8:  # two steps of four rollouts
            raise ValueError("out of luck")
        return float(calls % 2)

    run = tiny(tmp_path / "run")
    with raises(RewardError, "reward-failed: reward, row 5, raised ValueError: out of luck"):
        loops.train(run, rewards=[reward])
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    log = tmp_path / "run" / "logs" / "rank-0.log"
    failed = log.read_text()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d === started: rank 0 of 1, lockstep ", failed)
    assert re.findall(r" step (\d)/3  reward ", failed) == ["1", "2"]
    assert " Traceback (most recent call last):\n" in failed and 'ValueError("out of luck")' in failed
    summary = loops.train(run, resume=tmp_path / "run", rewards=[lambda prompt, completion, row: 1.0])
    assert (summary["outcome"], summary["steps"]) == ("finished", 3)
    added = log.read_text().removeprefix(failed)
    assert " === resumed: rank 0 of 1, " in added and " finished after " in added
    assert re.findall(r" step (\d)/3  reward ", added) == ["3"]


def test_what_was_resolved_is_said_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loops.train(tiny(tmp_path / "run", **{"model.dtype": "bfloat16", "train.attention": "varlen"}))
    out = capsys.readouterr().out
    assert (
        "on cpu in bfloat16: local backend, engine hf, varlen (cpu reference) attention, eager, shared" in out
    )
    axes = json.loads((tmp_path / "run" / "manifest.json").read_text())["axes"]
    assert (axes["dtype"], axes["attention"], axes["support"]) == ("bfloat16", "varlen", "supported")
    first, *rest = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert first["logprob_gap_first_step_ok"] == 1.0
    assert not any("logprob_gap_first_step_ok" in line for line in rest)


def test_an_untested_combination_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loops.train(
        tiny(tmp_path / "run", **{"train.attention": "hf:eager", "model.dtype": "bfloat16", "steps": 1})
    )
    assert (
        capsys.readouterr().out.count("untested combination: an attention implementation of transformers")
        == 1
    )


def test_changed_data_is_not_resumed(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", **{"data.size": 8})
    loops.train(run)
    file = tmp_path / "run" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"data_fingerprint": "of other data"}))
    with raises(DataError, "values-differ: data"):
        loops.train(tiny(tmp_path / "run", **{"data.size": 8, "steps": 4}), resume=tmp_path / "run")


def test_other_settings_are_not_resumed_from_python_either(tmp_path: Path) -> None:
    loops.train(tiny(tmp_path / "run", steps=1))
    with raises(ConfigError, "not-resumable", settings=["train.lr"]):
        loops.train(tiny(tmp_path / "run", **{"train.lr": 0.1, "steps": 2}), resume=tmp_path / "run")


def test_times_between_steps_are_reported_with_the_next_step(tmp_path: Path) -> None:
    loops.train(tiny(tmp_path / "run", **{"checkpoint.every": 1}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["time/save" in line for line in lines] == [False, True, True]


def test_a_start_that_fails_says_that_its_folder_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(prompt_kinds, "CPU_SECONDS", 0.2)
    with raises(ConfigError, "deadline"):
        loops.train(tiny(folder, **{"eval.after": True, "eval.kinds": {"any": "(.+)+!"}}))
    assert capsys.readouterr().out.splitlines() == [
        f"run directory: {folder}",
        "no step had begun, so the files of this run are removed",
    ]
    assert not folder.exists()
    loops.train(tiny(folder, steps=1))
    capsys.readouterr()
    with pytest.raises(ConfigError):  # a run that is there stays
        loops.train(tiny(folder, **{"train.lr": 0.1}), resume=folder)
    assert "removed" not in capsys.readouterr().out


def test_a_log_that_the_error_names_behind_a_link_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    failed = cast(Run, SimpleNamespace(_begun=False, dir=SimpleNamespace(path=tmp_path / "runs" / "a")))
    died = EngineError(f"The end of its log, {tmp_path}/disk/a/engine/hf.log:", code="process-died")
    assert Run._leaves_something(failed, died)
    assert not Run._leaves_something(failed, EngineError("no log", code="process-died"))


def judged(rewards: object, groups: list[RolloutGroup], kinds: dict[str, str] | None = None) -> Evaluation:
    environment = SingleTurn(cast(RewardSet, rewards))
    return score(groups, environment, kinds=kinds or {}, ranks=RankContext.alone(), max_tokens=8)


def answered(prompt: str, answer: str, *, completion: str) -> RolloutGroup:
    turn = sampled.completion((1,), (2,), stop_reason=2, text=completion)
    return sampled.group([sampled.rollout(turn)], text=prompt, row={"answer": answer})


def test_kinds_of_problems_are_reported_apart() -> None:
    rewards = SimpleNamespace(strict=lambda row, completion: None, pop_counts=dict)
    groups = [
        answered("1 + 1", "2", completion="2"),
        answered("3 - 1", "2", completion="2 of 4"),
        answered("3 - 2", "1", completion="4"),
        answered("9 - 2", "7", completion="9 - 2 = 7"),
    ]
    kinds = {"sums": r"\d \+ \d", "differences": r"\d - \d", "products": r"\*"}
    numbers = judged(rewards, groups, kinds).as_dict()
    assert numbers["lenient_accuracy"] == 0.5
    assert numbers["lenient_accuracy/sums"] == 1.0
    assert numbers["lenient_accuracy/differences"] == pytest.approx(1 / 3)
    assert numbers["lenient_accuracy/products"] is None


def test_an_evaluation_is_printed_in_three_lines() -> None:
    rewards = SimpleNamespace(strict=lambda row, completion: completion == "2", pop_counts=dict)
    groups = [answered("1 + 1", "2", completion="2"), answered("3 - 1", "2", completion="2 of 4")]
    evaluation = judged(rewards, groups, {"sums": r"\+"})
    assert str(evaluation).splitlines() == [
        "strict accuracy 0.500, lenient accuracy 1.000, lenient accuracy of sums 1.000, mean reward 0.000",
        "2 prompts, 2 samples",
        "1.0 tokens on average, 0 samples cut off at 8 tokens",
    ]
    assert "Rollout" not in repr(evaluation)


def test_a_kind_that_is_no_regular_expression_is_refused() -> None:
    with raises(ValueError, "wrong-format: kinds.sums"):
        EvalConfig(kinds={"sums": "("})


def test_a_kind_that_would_be_searched_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_kinds, "CPU_SECONDS", 0.2)
    rewards = SimpleNamespace(strict=lambda row, completion: None, pop_counts=dict)
    groups = [answered("1 + 1", "2", completion="2"), answered("a" * 40 + "!", "2", completion="2")]
    kinds = {"sums": r"\d \+ \d", "letters": "(a+)+$"}
    with raises(ConfigError, "deadline: eval.kinds.letters"):
        judged(rewards, groups, kinds)


def test_such_a_kind_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_kinds, "CPU_SECONDS", 0.2)
    run = tiny(tmp_path / "run", **{"eval.after": True, "eval.kinds": {"any": "(.+)+!"}})
    with raises(ConfigError, "deadline: eval.kinds.any"):
        loops.train(run)
    assert not (tmp_path / "run").exists()


def test_what_an_evaluation_counts_is_not_reported_by_the_next_step(tmp_path: Path) -> None:
    class Counting:
        """Stands for the rewards; a verifier that finds no answer counts it, also when it is asked again."""

        counts = 0

        def strict(self, row: object, completion: str) -> bool:
            self.counts += 1
            return False

        def pop_counts(self) -> dict[str, int]:
            taken, self.counts = self.counts, 0
            return {"verifier/no_answer": taken}

    rewards = Counting()
    result = judged(rewards, [answered("1 + 1", "2", completion="none")])
    assert (result.strict_accuracy, result.lenient_accuracy) == (0.0, 0.0)
    assert rewards.pop_counts() == {"verifier/no_answer": 0}


def test_a_due_last_checkpoint_is_not_saved_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    save = Run.save
    monkeypatch.setattr(Run, "save", lambda self, done, **how: saved.append(done) or save(self, done, **how))
    loops.train(tiny(tmp_path / "run", **{"checkpoint.every": 3}))
    assert saved == [3]


def test_a_page_that_writes_no_rollouts_has_them_written(tmp_path: Path) -> None:
    """A copy of the page without the line: the same rollouts and ledger, each step's once."""
    lines = Path(rl.__file__).read_text().splitlines(keepends=True)
    page: dict[str, Any] = {}
    exec("".join(line for line in lines if "run.write_rollouts(" not in line), page)
    loops.train(tiny(tmp_path / "theirs"))
    page["train"](tiny(tmp_path / "ours"))
    names = ["ledger.jsonl", *(f"rollouts/step-{step:06d}.jsonl" for step in range(3))]
    ours, theirs = ([(tmp_path / run / name).read_text() for name in names] for run in ("ours", "theirs"))
    assert ours == theirs and all(theirs)


def test_the_folder_to_resume_may_be_a_text(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", steps=1)
    rl.train(run)
    rl.train(tiny(tmp_path / "run", steps=2), resume=str(tmp_path / "run"))  # type: ignore[typeddict-item]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
