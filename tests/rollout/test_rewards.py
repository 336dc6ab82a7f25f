from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raising import raises

from lockstep.config.data import DataConfig
from lockstep.config.rollout import RewardConfig
from lockstep.data.rows import ReasoningGymRows
from lockstep.errors import ConfigError, RewardError
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.reward_functions import RewardFailure
from lockstep.rollout.rewards import RewardSet, Scored, lenient_accuracy, lenient_correct

Row = Mapping[str, Any]


def sample(completion: str, row: Row | None = None, ids: tuple[int, ...] = (1, 2, 4)) -> RewardInput:
    return RewardInput(
        prompt="p",
        completion=completion,
        row=row or {},
        prompt_token_ids=(1,),
        completion_token_ids=ids,
        finish_reason="stop",
        index=17,
    )


def gym_row(task: str = "chain_sum", slot: int = 0, **settings: Any) -> dict[str, Any]:
    return ReasoningGymRows(DataConfig(source=f"reasoning_gym:{task}", task=settings)).row("fixed", slot, 0)


def totals(rewards: RewardSet, inputs: list[RewardInput]) -> list[float | None]:
    return [None if s is None else s.total for s in rewards.score(inputs)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module into a folder that becomes the working directory; returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    counter = iter(range(100))

    def write(source: str) -> str:
        name = f"own_rewards_{next(counter)}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def test_the_verifier_judges_the_configured_part() -> None:
    row = gym_row(max_terms=2, max_digits=1)
    answer = row["answer"]
    text = RewardSet([RewardConfig()])
    last = RewardSet([RewardConfig(answer="last_number")])
    said = sample(f"So 77 it is not but {answer}", row)
    # The task itself gives partial credit to a text that contains the answer: the share of its length.
    share = len(answer) / len(said.completion)
    assert totals(text, [sample(f" {answer}\n", row), said]) == [1.0, pytest.approx(share)]
    assert text.strict(row, said.completion) is False
    assert totals(last, [said, sample("I do not know", row), sample("77", row)]) == [1.0, 0.0, 0.0]
    assert last.pop_counts() == {"verifier/no_answer": 1}
    assert last.pop_counts() == {}
    assert last.strict(row, f"It is {answer}") is True and last.strict(row, "77") is False


def test_partial_credit_is_not_strictly_right() -> None:
    row = gym_row("prime_factorization")
    rewards = RewardSet([RewardConfig()])
    assert totals(rewards, [sample("1 \u00d7 1", row)]) == [0.01]
    assert rewards.strict(row, "1 \u00d7 1") is False and rewards.strict(row, row["answer"]) is True


def test_junk_that_a_verifier_cannot_parse_scores_0_and_is_counted() -> None:
    row = gym_row("prime_factorization")
    rewards = RewardSet([RewardConfig()])
    assert totals(rewards, [sample("banana", row), sample(row["answer"], row)]) == [0.0, 1.0]
    assert rewards.pop_counts() == {"verifier/junk": 1}


def test_a_broken_row_is_an_error_and_no_junk() -> None:
    row = {**gym_row("prime_factorization"), "answer": "banana"}
    with raises(RewardError, "reward-failed: verifier, row 18") as info:
        RewardSet([RewardConfig()]).score([sample("2 \u00d7 3", row)])
    assert type(info.value.__cause__).__name__ == "VerifierFailure"


def test_rows_without_a_verifier_or_an_answer_are_a_config_error() -> None:
    for name, text in (("verifier", "missing-column: verifier"), ("math", "missing-column: answer")):
        with raises(ConfigError, text):
            RewardSet([RewardConfig(name=name, on_error="drop")]).score([sample("1", {"question": "x"})])


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        ("She pays 42.\n#### 1,042", "so the answer is $1042$", 1.0),
        ("#### 18", "She makes 9 * 2 = $18 every day.", 1.0),
        ("\\frac{1}{2}", "thus \\boxed{0.5}", 1.0),
        ("x^2 - 1", "$(x-1)(x+1)$", 1.0),
        ("4", "5", 0.0),
        ("4", "no idea", 0.0),
    ],
)
def test_math_in_another_thread(gold: str, completion: str, expected: float) -> None:
    rewards = RewardSet([RewardConfig(name="math")])
    result: list[Any] = []
    thread = threading.Thread(
        target=lambda: result.extend(rewards.score([sample(completion, {"answer": gold})]))
    )
    thread.start()
    thread.join()
    assert [s.total for s in result] == [expected]
    assert rewards.pop_counts() == ({"math/junk": 1} if completion == "no idea" else {})


def test_math_of_the_boxed_part() -> None:
    rewards = RewardSet([RewardConfig(name="math", answer="boxed")])
    row = {"answer": "\\frac{1}{2}"}
    boxes = [sample(r"\boxed{\frac{2}{4}} not 3", row), sample("1/2", row)]
    assert totals(rewards, boxes) == [1.0, 0.0]
    assert rewards.pop_counts() == {"math/no_answer": 1}


def test_a_verifier_that_never_ends_is_killed_scores_0_and_the_next_job_runs() -> None:
    rewards = RewardSet([RewardConfig(name="math", timeout_seconds=3)])
    inputs = [sample("$9^{9^{9^{9}}}$", {"answer": "4"}), sample("4", {"answer": "4"})]
    assert totals(rewards, inputs) == [0.0, 1.0]
    assert rewards.pop_counts() == {"math/junk": 1, "math/timeout": 1}


def test_an_answer_without_an_expression_is_the_rows_fault() -> None:
    with raises(RewardError, "reward-failed: math, row 18"):
        RewardSet([RewardConfig(name="math")]).score([sample("4", {"answer": ""})])


def test_simple_rewards_and_weights() -> None:
    rewards = RewardSet(
        [
            RewardConfig(name="ids", weight=2.0),
            RewardConfig(name="length", kwargs={"target": 4}),
            RewardConfig(name="format", kwargs={"pattern": "^<a>.*</a>$"}),
            RewardConfig(name="format", kwargs={"pattern": "z"}, weight=-1.0),
        ]
    )
    # ids: 2 of 3 are even. length: 3 tokens of 4. Both formats: the first matches over a line break.
    (scored,) = rewards.score([sample("<a>x\n</a>")])
    assert scored == Scored(
        total=pytest.approx(2 * 2 / 3 - 0.25 + 1.0),
        by_name={"ids": 2 / 3, "length": -0.25, "format": 1.0, "format#2": 0.0},
        weights={"ids": 2.0, "length": 1.0, "format": 1.0, "format#2": -1.0},
    )
    assert rewards.strict({}, "x") is None


def test_own_function_sync_async_and_class(module: Callable[[str], str]) -> None:
    name = module(
        "import asyncio\n"
        "def plain(prompt, completion, row, scale=1): return scale * (len(completion) + row['bonus'])\n"
        "async def slow(*, prompt, completion, row):\n"
        "    await asyncio.sleep(0.2)\n"
        "    return float(completion == 'ab')\n"
        "class Judge:\n"
        "    def __init__(self, share): self.share = share\n"
        "    async def __call__(self, sample): return self.share * len(sample.completion_token_ids)\n"
        "def later(prompt, completion, row): return slow(prompt=prompt, completion=completion, row=row)\n"
    )
    rewards = RewardSet(
        [
            RewardConfig(name=f"{name}:plain", kwargs={"scale": 10}),
            RewardConfig(name=f"{name}:slow"),
            RewardConfig(name=f"{name}:Judge", kwargs={"share": 0.5}),
            RewardConfig(name=f"{name}:later"),
        ]
    )
    (scored,) = rewards.score([sample("ab", {"bonus": 1})])
    assert scored is not None and list(scored.by_name.values()) == [30.0, 1.0, 1.5, 1.0]


TRL = """
import asyncio, random
def right(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]
def sizes(prompts, completions, completion_ids, level, unset=7, **kwargs):
    assert unset == 7 and 'prompt' not in kwargs and kwargs['answer'][0], kwargs
    assert [len(ids) for ids in completion_ids] == [3] * len(prompts)
    return [len(prompts) + 10 * l for l in level]
async def best(*, prompts, completions, scale):
    await asyncio.sleep(0.01)
    return [scale * (len(c) == max(map(len, completions))) for c in completions]
def said(prompts, completions):
    return [len(p[-1]['content'] + c[0]['content']) for p, c in zip(prompts, completions)]
class Counts:
    def __init__(self, add): self.add = add
    def __call__(self, completions, **_): return tuple(self.add + len(completions) for _ in completions)
def drawn(completions): return [random.random() for _ in completions]
def short(completions): return [1.0]
def wrong(completions): return 0.5
def nones(completions): return [1.0, None]
"""


def of_prompts(*texts: str, each: int = 2, **columns: Any) -> list[RewardInput]:
    """`each` samples of every prompt: "a", "ab", ..."""
    return [
        dataclasses.replace(
            sample("abc"[: n + 1], {"prompt": text, "answer": "ab", "level": i, **columns}),
            prompt=f"<user>{text}",
            index=i,
            seed=100 * i + n,
        )
        for i, text in enumerate(texts)
        for n in range(each)
    ]


def test_a_batch_reward_gets_the_samples_of_a_prompt_as_trl_passes_them(module: Callable[[str], str]) -> None:
    name = module(TRL)
    configs = {
        "right": {},
        "sizes": {},
        "best": {"scale": 2},
        "Counts": {"add": 1},
    }
    own: dict[str, Any] = {}
    exec(TRL, own)
    expected = {
        "right": [0.0, 1.0, 0.0, 1.0],
        "sizes": [2.0, 2.0, 12.0, 12.0],
        "best": [0.0, 2.0, 0.0, 2.0],
        "Counts": [3.0, 3.0, 3.0, 3.0],
    }
    for reward, kwargs in configs.items():
        rewards = RewardSet([RewardConfig(name=f"{name}:{reward}", kwargs=kwargs)])
        assert totals(rewards, of_prompts("one", "two")) == expected[reward], reward
    in_process = [own["right"], own["sizes"], own["Counts"](1), partial(own["best"], scale=2)]
    for reward, key in zip(in_process, ("right", "sizes", "Counts", "best"), strict=True):
        assert totals(RewardSet([], functions=[reward]), of_prompts("one", "two")) == expected[key], key


def test_a_batch_reward_of_conversations_gets_conversations(module: Callable[[str], str]) -> None:
    rewards = RewardSet([RewardConfig(name=f"{module(TRL)}:said")])
    talk = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1234"}]
    assert totals(rewards, [sample("ab", {"prompt": talk}), sample("", {"prompt": talk})]) == [6.0, 4.0]


def test_a_batch_reward_draws_the_same_for_a_prompt_whatever_else_is_scored(
    module: Callable[[str], str],
) -> None:
    rewards = RewardSet([RewardConfig(name=f"{module(TRL)}:drawn")])
    both = totals(rewards, of_prompts("one", "two"))
    assert len(set(both)) == 4
    assert totals(rewards, of_prompts("one", "two")[2:]) == both[2:]


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("short", "returned a list of 1 instead of a list of 2 numbers, one per completion"),
        ("wrong", "returned a float instead of a list of 2 numbers, one per completion"),
        ("nones", "returned None (NoneType), not a finite number"),
        ("sizes", "has the parameter 'level', which is no column of the rows"),
    ],
)
def test_what_a_batch_reward_does_wrong(reward: str, told: str, module: Callable[[str], str]) -> None:
    name = module(TRL)
    own: dict[str, Any] = {}
    exec(TRL, own)
    inputs = [
        dataclasses.replace(s, row={k: v for k, v in s.row.items() if k != "level"})
        for s in of_prompts("one", "two")
    ]
    sets = [RewardSet([RewardConfig(name=f"{name}:{reward}")]), RewardSet([], functions=[own[reward]])]
    for rewards in sets:
        with raises(RewardError, f"reward-failed: {reward}, row 1") as caught:
            rewards.score(inputs)
        assert told in str(caught.value)
        if reward == "sizes":  # told before the first step
            with raises(ConfigError, "missing-column: level, sizes"):
                rewards.check_row(inputs[0].row)
    dropping = RewardSet([RewardConfig(name=f"{name}:{reward}", on_error="drop")])
    assert totals(dropping, inputs) == ([1.0, None, 1.0, None] if reward == "nones" else [None] * 4)


def test_async_functions_run_together_and_within_a_running_loop(module: Callable[[str], str]) -> None:
    name = module(
        "import asyncio\n"
        "async def slow(prompt, completion, row):\n"
        "    await asyncio.sleep(0.3)\n"
        "    return int(completion)\n"
    )

    async def notebook(limit: int) -> tuple[list[float | None], float]:
        rewards = RewardSet([RewardConfig(name=f"{name}:slow", max_concurrency=limit)])
        start = time.monotonic()
        return totals(rewards, [sample(str(i)) for i in range(8)]), time.monotonic() - start

    values, seconds = asyncio.run(notebook(8))
    assert values == [float(i) for i in range(8)] and seconds < 1.5
    values, seconds = asyncio.run(notebook(2))
    assert values == [float(i) for i in range(8)] and seconds > 1.1


def test_a_module_beside_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_run.py").write_text("def f(prompt, completion, row): return 3\n")
    rewards = RewardSet([RewardConfig(name="beside_the_run:f")], search_paths=[tmp_path])
    assert totals(rewards, [sample("x")]) == [3.0]


NONSENSE = [None, float("nan"), float("inf"), "1.0", [1.0], np.array([1.0, 2.0])]


@pytest.mark.parametrize("value", NONSENSE, ids=lambda v: repr(v))
def test_nonsense_is_never_0(value: Any) -> None:
    def reward(prompt: str, completion: str, row: Row) -> Any:
        return value if completion == "bad" else 1.0

    with raises(RewardError, "reward-failed: reward, row 18") as caught:
        RewardSet([], functions=[reward]).score([sample("good"), sample("bad")])
    assert ": returned " in str(caught.value)


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1.0), np.array(1.0)], ids=repr)
def test_numbers_of_every_kind(value: Any) -> None:
    rewards = RewardSet([], functions=[lambda prompt, completion, row: value])
    assert totals(rewards, [sample("x")]) == [1.0]


def test_drop_leaves_the_rollout_out_and_counts_it(module: Callable[[str], str]) -> None:
    name = module(
        "def f(prompt, completion, row): return 1 / int(completion)\n"
        "async def g(prompt, completion, row): return 1 / int(completion)\n"
    )
    for function in ("f", "g"):
        target = f"{name}:{function}"
        rewards = RewardSet([RewardConfig(name=target, on_error="drop"), RewardConfig(name="ids")])
        assert [s is None for s in rewards.score([sample("1"), sample("0"), sample("2")])] == [
            False,
            True,
            False,
        ]
        assert rewards.pop_counts() == {f"{target}/failed": 1, "dropped": 1}
        strictly = RewardSet([RewardConfig(name=target)])
        with raises(RewardError, f"reward-failed: {target}, row 18") as info:
            strictly.score([sample("1"), sample("0"), sample("2")])
        assert isinstance(info.value.__cause__, RewardFailure)
        assert f"({name}.py, line {'fg'.index(function) + 1})" in str(info.value)
        assert "ZeroDivisionError: division by zero" in str(info.value)
        assert "ZeroDivisionError" in info.value.__cause__.__notes__[0]


@pytest.mark.parametrize("kind", ["sync", "patient", "blocking"])
def test_a_reward_that_never_returns(
    module: Callable[[str], str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.rollout.reward_functions.LOOP_GRACE_SECONDS", 0.5)
    name = module(
        "import asyncio, time\n"
        "def sync(prompt, completion, row): time.sleep(1000 if completion == 'bad' else 0); return 1\n"
        "async def patient(prompt, completion, row):\n"
        "    await asyncio.sleep(1000 if completion == 'bad' else 0); return 1\n"
        "async def blocking(prompt, completion, row): time.sleep(1000); return 1\n"
    )
    config = RewardConfig(name=f"{name}:{kind}", timeout_seconds=1.5, on_error="drop")
    start = time.monotonic()
    expected = [None, None] if kind == "blocking" else [1.0, None]
    rewards = RewardSet([config])
    assert totals(rewards, [sample("good"), sample("bad")]) == expected
    if kind != "blocking":
        assert totals(rewards, [sample("bad"), sample("good")]) == [None, 1.0]
    assert time.monotonic() - start < 500  # of the 1000 that they would take


def test_ctrl_c_interrupts_a_reward(tmp_path: Path) -> None:
    code = (
        "import os, time, lockstep.rollout.rewards as r\n"
        "from lockstep.protocols.reward import RewardInput\n"
        "def f(prompt, completion, row): os.write(1, b'started\\n'); time.sleep(1000)\n"
        "sample = RewardInput(prompt='', completion='', row={}, prompt_token_ids=(),\n"
        "                     completion_token_ids=(), finish_reason='stop')\n"
        "r.RewardSet([], functions=[f]).score([sample])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.strip().endswith("KeyboardInterrupt")


def test_wrong_rewards_die_at_construction(module: Callable[[str], str]) -> None:
    name = module("def f(prompt, text): return 1\nx = 3\nclass C: pass\n")
    broken = module("1 / 0\n")
    for config, text in (
        (RewardConfig(name="verifer"), "unknown-name: verifer"),
        (RewardConfig(name=f"{name}:f"), "wrong-part: signature"),
        (RewardConfig(name=f"{name}:g"), "wrong-part: g"),
        (RewardConfig(name=f"{name}:x"), "wrong-part: int"),
        (RewardConfig(name=f"{name}:C"), "wrong-part: instances must be callable"),
        (RewardConfig(name=f"{name}:C", kwargs={"a": 1}), "wrong-part: kwargs"),
        (RewardConfig(name="nowhere:f"), "missing-package: nowhere"),
        (RewardConfig(name=f"{broken}:f"), "wrong-part: importing"),
        (RewardConfig(name="length"), "missing-setting: rewards.kwargs"),
        (RewardConfig(name="format", kwargs={"pattern": "("}), "wrong-format: rewards.kwargs.pattern"),
        (RewardConfig(name="math", kwargs={"a": 1}), "no-effect: rewards.kwargs"),
    ):
        with raises(ConfigError, text):
            RewardSet([config])


def test_a_missing_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, "missing-package"):
        RewardSet([RewardConfig(name="math")])


def test_lenient_marks() -> None:
    row = {"answer": "#### 1,042"}
    assert lenient_correct(row, "1,042.0 = 1000 + 42") == (True, False)
    assert lenient_correct(row, "1000 + 42 is 1042") == (False, True)
    assert lenient_correct(row, "1042") == (True, True)
    assert lenient_correct(row, "none") == (False, False)
    assert lenient_correct({"answer": "Paris"}, "4") is None
    assert lenient_accuracy([(True, False), (True, True), (True, False), (False, True)]) == 0.75
    with pytest.raises(ValueError, match="of no rows"):
        lenient_accuracy([])
