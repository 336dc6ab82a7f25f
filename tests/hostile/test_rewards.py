"""Users' rewards that crash, end the process, fork, hang or print: one error with the reward's name, and
nothing is left behind."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from starting import until

from lockstep.config.rollout import RewardConfig
from lockstep.errors import ConfigError, RewardError
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.reward_process import RewardWorker
from lockstep.rollout.rewards import RewardSet

MODULE = """
import asyncio, ctypes, os, random, re, signal, subprocess, sys, time
import datetime

calls = 0

def segfault(prompt, completion, row):
    ctypes.string_at(0)

def exits(prompt, completion, row):
    os._exit(0)

def killed(prompt, completion, row):
    os.kill(os.getpid(), signal.SIGKILL)

def sys_exits(prompt, completion, row):
    sys.exit(3)

def runaway(prompt, completion, row):
    return float(re.match(r"(a+)+$", "a" * 40 + "b") is not None)

def huge(prompt, completion, row):
    return "\\x1b" * (1 << 24)

def raises_huge(prompt, completion, row):
    raise ValueError("\\x1b]0;pwn\\x07" + "x" * (1 << 24))

def scribbles(prompt, completion, row):
    for fd in beyond_stderr():
        try:
            os.write(fd, b'\\x12\\0\\0\\0{"score": 0.12345}')
        except OSError:
            pass
    return 1.0

def closes(prompt, completion, row):
    for fd in beyond_stderr():
        try:
            os.close(fd)
        except OSError:  # that of the list itself
            pass
    return 1.0

def beyond_stderr():
    # A pipe keeps the number it had in the parent, which may have many files open.
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2]

def imports(prompt, completion, row):
    import no_such_module

async def async_exits(prompt, completion, row):
    os._exit(4)

def ok(prompt, completion, row):
    return 0.0

def forks(prompt, completion, row):
    global calls
    calls += 1
    pid = os.fork()
    if pid == 0 and completion == "stays":
        os.setsid()
        time.sleep(1000)
    if pid:
        with open("pids", "a") as file: file.write(f"{pid} {os.getpid()} {os.getppid()} ")
    return calls  # in the copy too, which must not answer

def prints(prompt, completion, row):
    print("\\x1b]0;pwn\\x07 said", completion)
    os.write(2, b"half a line")
    subprocess.run(["echo", "from a program"])
    return 1.0

def draws(prompt, completion, row):
    return random.random()

async def async_draws(prompt, completion, row):
    value = random.random()
    await asyncio.sleep(0)
    return value

def of_kwargs(prompt, completion, row, key, limit):
    shown = open(f"/proc/{os.getpid()}/cmdline").read()
    return float(key == "sk-secret" and limit == 0.1 and "sk-secret" not in shown)

def of_row(prompt, completion, row):
    assert row["day"] == datetime.date(2026, 1, 2) and row["image"] == b"\\0\\xff" and row["pair"] == (1, 2)
    row["day"] = 3

class Waits:
    def __init__(self, folder, name, other):
        import atexit
        from pathlib import Path
        def leave():  # once the other one leaves too
            Path(folder, name).touch()
            while not Path(folder, other).exists():
                time.sleep(0.01)
            Path(folder, name + "-left").touch()
        atexit.register(leave)
    def __call__(self, sample):
        return 1.0

class Keeps:
    def __init__(self, file):
        import atexit
        self.lines, self.file = [], file
        atexit.register(lambda: open(self.file, "w").write("".join(self.lines)))
    def __call__(self, sample):
        self.lines.append(sample.completion)
        return len(self.lines) + len(sample.completion_token_ids) / 10
"""


def sample(completion: str = "", **row: Any) -> RewardInput:
    return RewardInput(
        prompt="p",
        completion=completion,
        row=row,
        prompt_token_ids=(1,),
        completion_token_ids=(2, 3),
        finish_reason="stop",
        index=17,
    )


Make = Callable[..., RewardSet]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Writes MODULE into the working directory and names a reward of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worst.py").write_text(MODULE)
    sets = []

    def rewards(*names: str, **settings: Any) -> RewardSet:
        sets.append(RewardSet([RewardConfig(name=f"worst:{name}", **settings) for name in names]))
        return sets[-1]

    yield rewards
    for each in sets:
        each.close()


def totals(rewards: RewardSet, *inputs: RewardInput) -> list[float | None]:
    return [None if s is None else s.total for s in rewards.score(inputs)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("segfault", "its process was killed by SIGSEGV"),
        ("exits", "its process exited with status 0"),
        ("killed", "its process was killed by SIGKILL"),
        ("sys_exits", r"raised SystemExit: 3 \(worst.py, line \d+\)"),
        ("runaway", "raised TimeoutError: took longer than 0.5 s"),
        ("huge", r"returned '(\\x1b)+.* \(str\), not a finite number"),
        ("raises_huge", r"raised ValueError: \\x1b\]0;pwn\\x07x+ \(worst.py, line \d+\)"),
        ("scribbles", "it sent an invalid reply to the job"),
        ("closes", "its process exited with status 1"),
        ("imports", "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("async_exits", "its process exited with status 4"),
    ],
)
def test_the_worst_reward_is_one_error(name: str, text: str, make: Make) -> None:
    rewards = make(name, timeout_seconds=0.5 if name == "runaway" else 20)
    with pytest.raises(RewardError) as info:
        rewards.score([sample("abc")])
    said = str(info.value)
    assert said.startswith(f"reward 'worst:{name}' on row 18 (prompt 'p', ")
    assert re.search(text, said) and said.isprintable() and len(said) < 3000


def test_others_are_scored_when_a_worker_dies_under_drop(make: Make) -> None:
    rewards = make("exits", "ok", on_error="drop")
    assert totals(rewards, sample(), sample()) == [None, None]
    assert rewards.pop_counts() == {"worst:exits/failed": 2, "dropped": 2}


@pytest.mark.parametrize("end", ["close", "time-out", "the run is killed"])
def test_what_a_reward_forked_is_gone_with_it(end: str, make: Make, tmp_path: Path) -> None:
    if end == "the run is killed":
        code = (
            "import os, signal\n"
            "from lockstep.config.rollout import RewardConfig\n"
            "from lockstep.protocols.reward import RewardInput\n"
            "from lockstep.rollout.rewards import RewardSet\n"
            f"sample = {sample('stays')!r}\n"
            "RewardSet([RewardConfig(name='worst:forks')]).score([sample])\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -9
    else:
        rewards = make("forks", "runaway", timeout_seconds=0.5) if end == "time-out" else make("forks")
        if end == "time-out":
            with raises(RewardError, "reward-failed: worst:runaway, row 18"):
                rewards.score([sample("stays")])
        else:
            # Two processes come out of each call; one of them answers.
            assert totals(rewards, sample("stays"), sample("returns"), sample("stays")) == [1.0, 2.0, 3.0]
        rewards.close()
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == (9 if end == "close" else 3)
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids))


def test_what_a_reward_prints_is_shown_escaped(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    rewards = make("prints")
    assert totals(rewards, sample("a\nb")) == [1.0]
    rewards.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.splitlines()) == sorted(["\\x1b]0;pwn\\x07 said a", "b", "half a linefrom a program"])


def test_module_state_stays_between_calls_and_exit_handlers_run(make: Make, tmp_path: Path) -> None:
    rewards = make("Keeps", kwargs={"file": "kept"})
    assert totals(rewards, sample("a"), sample("b")) == [1.2, 2.2]
    assert totals(rewards, sample("c")) == [3.2]
    rewards.close()
    assert (tmp_path / "kept").read_text() == "abc"
    assert totals(rewards, sample("d")) == [1.2], "a closed set starts a process again"


def test_exit_handlers_of_several_rewards_run_at_the_same_time(make: Make, tmp_path: Path) -> None:
    del make  # which wrote the module
    pairs = [{"name": "a", "other": "b"}, {"name": "b", "other": "a"}]
    configs = [RewardConfig(name="worst:Waits", kwargs={"folder": str(tmp_path), **pair}) for pair in pairs]
    RewardSet(configs).close()
    assert {"a-left", "b-left"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["draws", "async_draws"])
def test_draws_follow_the_seed_of_the_run(name: str, make: Make) -> None:
    """Also over a death of the process, as on a resume."""
    rewards = make(name)
    random.seed(5)
    seeds = [random.getrandbits(63) for _ in range(3)]
    random.seed(5)
    first = totals(rewards, sample(), sample())
    rewards.close()
    expected = [random.Random(own_seed(f"worst:{name}", seed)).random() for seed in seeds]
    assert [*first, *totals(rewards, sample())] == expected
    seeded = dataclasses.replace(sample(), seed=seeds[0])  # whatever was drawn before
    assert totals(rewards, seeded) == [expected[0]]


def own_seed(name: str, seed: int) -> int:
    """Each reward draws numbers of its own from a sample's seed."""
    digest = hashlib.blake2b(f"lockstep reward {name} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def test_rows_arrive_as_they_are_and_read_only(make: Make) -> None:
    row = {"day": date(2026, 1, 2), "image": b"\0\xff", "pair": (1, 2)}
    with raises(RewardError, "reward-failed: worst:of_row, row 18"):
        make("of_row").score([sample("", **row)])
    for name in ("ok", "async_draws"):
        with raises(RewardError, f"reward-failed: worst:{name}, row 18") as caught:
            make(name).score([sample("", seen={1})])
        assert "DataError: row.seen: {1} (set)" in str(caught.value)


def test_kwargs_arrive_as_they_are_and_not_in_the_command_line(make: Make) -> None:
    rewards = make("of_kwargs", kwargs={"key": "sk-secret", "limit": 0.1})
    assert totals(rewards, sample("")) == [1.0]


def test_a_runaway_pattern_of_format_ends_at_its_time() -> None:
    pattern = {"pattern": "^(a+)+$"}
    rewards = RewardSet([RewardConfig(name="format", kwargs=pattern, timeout_seconds=2, on_error="drop")])
    assert totals(rewards, sample("aaa"), sample("a" * 40 + "b"), sample("b")) == [1.0, None, 0.0]
    rewards.close()


@pytest.mark.parametrize(
    ("source", "what", "cause"),
    [
        ("import os; os._exit(3)", "process-died: worst:f", "status 3"),
        ("import sys; sys.exit('\\x1bno')", "wrong-part: importing", r"SystemExit: \x1bno"),
        ("import ctypes; ctypes.string_at(0)", "process-died: worst:f", "SIGSEGV"),
        ("import os; os.fork(); 1 / 0", "wrong-part: importing", "ZeroDivisionError"),
        ("def f(: pass", "wrong-part: importing", "SyntaxError"),
    ],
)
def test_a_module_that_does_its_worst_is_a_config_error(
    source: str, what: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worst.py").write_text(source)
    with raises(ConfigError, what) as caught:
        RewardSet([RewardConfig(name="worst:f")])
    assert cause in str(caught.value)  # the module's own words


def test_a_worker_imports_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "light.py").write_text(
        "import sys\n"
        "from lockstep.protocols.reward import RewardInput\n"
        "large = {'torch', 'numpy', 'pydantic', 'asyncio'}\n"
        "def f(*, prompt, completion, row): return float(bool(large & {*sys.modules}))\n"
    )
    worker = RewardWorker("light:f", "light:f", kwargs=dict, timeout=60.0, concurrency=1)
    assert worker.one([sample()]) == [0.0]
    worker.close()
