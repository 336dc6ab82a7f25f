"""A run that is killed and goes on: calls are made once, and the result is as if nothing had happened."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hosting import hosted, run
from raising import raises
from scripted import save_scripted

from lockstep.environments import recorded as recording
from lockstep.environments.instance import STATE_CHARACTERS, state_of
from lockstep.environments.journal import Journal, key_of
from lockstep.environments.recorded import RecordedInstance
from lockstep.environments.results import EnvironmentFailure
from lockstep.errors import TrainError
from lockstep.rollout.environment import Sampler, TrajectoryRules
from lockstep.schema.rollout import Prompt, SamplingParams

CALL = '<tool_call>{"name":"draw","arguments":{"n": 3}}</tool_call>'
TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{{- '<|' + m.role + '|>' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name":"' + call.function.name + '","arguments":' + call.function.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
DRAWS = '''
import random
import threading
from pathlib import Path

import psutil


def kill_trainer():
    Path("killed").touch()
    next(p for p in psutil.Process().parents() if "killed_run.py" in " ".join(p.cmdline())).kill()


class Draws:
    def reset(self, word):
        self.name = f"{word}-{random.getrandbits(40)}"
        self.drawn = []

    def draw(self, n: int) -> str:
        """Draw a number.

        Args:
            n: Any number.
        """
        self.drawn.append(random.random())
        with open("calls.txt", "a") as file:
            file.write(f"{self.name} {len(self.drawn)}\\n")
        return "x" * round(3 * self.drawn[-1])

    def get_reward(self):
        return sum(self.drawn)
'''
CONFIG = """
kind = "grpo"
steps = {steps}
environment = "draws:Draws"
model = {{ name = "{model}", dtype = "float32" }}
data = {{ source = "rows.jsonl", chat_template = "template.jinja", max_prompt_tokens = 100 }}
eval = {{ before = false, after = false }}
log = {{ tensorboard = false, display = "off" }}
checkpoint = {{ every = 2 }}

[rollout]
prompts_per_step = 2
group_size = 2
max_turns = 3
max_trajectory_tokens = 120
sampling = {{ max_tokens = 8, temperature = 0.05 }}
"""
PROGRAM = Path(__file__).with_name("killed_run.py")


def write_run(folder, config, draws=DRAWS):
    """Write what a run with the tool needs."""
    folder.mkdir(exist_ok=True)
    (folder / "draws.py").write_text(draws)
    (folder / "template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": "Go.", "word": word} for word in ("a", "b")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(config)


@pytest.fixture
def start(tiny_folder, tmp_path):
    """Run the program in a folder of its own, and return its exit status."""
    model = save_scripted(tiny_folder, tmp_path / "model", (CALL, "<|end|>"), special=False)

    def start(name, *arguments, draws=DRAWS, steps=4):
        folder = tmp_path / name
        write_run(folder, CONFIG.format(steps=steps, model=model), draws=draws)
        command = [sys.executable, str(PROGRAM), "run.toml", "run", *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, timeout=280, capture_output=True, text=True, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stdout + done.stderr
        return done.returncode

    return start


def metrics_of(folder):
    """The lines of metrics.jsonl, without what depends on time."""
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    timed = (
        "timestamp",
        "time/",
        "throughput/",
        "memory/",
        "engine/",
        "rollout/tool_seconds",
        "rollout/wait",
        "rollout/cached_tokens",
    )
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def weights_of(folder):
    return (folder / "run/checkpoints/step-000004/model.safetensors").read_bytes()


def calls_of(folder):
    return Counter((folder / "calls.txt").read_text().splitlines())


def test_a_killed_run_goes_on_without_making_calls_again(start, tmp_path):
    assert start("whole", "new") == 0
    assert start("killed", "new", 6, 3) == -signal.SIGKILL
    before = calls_of(tmp_path / "killed")
    assert 3 * 12 + 6 <= len(before) < 4 * 12  # steps 0 to 2, and at least half of the calls of step 3
    assert start("killed", "resume") == 0
    assert list((tmp_path / "killed/run/journal").iterdir()) == []  # checkpoint 4 has all of it
    assert calls_of(tmp_path / "killed") == calls_of(tmp_path / "whole")
    assert set(calls_of(tmp_path / "killed").values()) == {1}
    killed, whole = metrics_of(tmp_path / "killed"), metrics_of(tmp_path / "whole")
    assert killed == whole and len(whole) == 4
    assert len({line["reward/mean"] for line in whole}) == 4
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")


def test_a_call_that_was_running_is_answered_by_an_error(start, tmp_path):
    draws = DRAWS.replace(
        'return "x"', 'self.drawn[2:] and not Path("killed").exists() and kill_trainer()\n        return "x"'
    )
    assert start("killed", "new", draws=draws, steps=1) == -signal.SIGKILL
    assert start("killed", "resume", draws=draws, steps=1) == 0
    # Of the calls that are told as interrupted, at least the one that killed was made; none is made again.
    assert calls_of(tmp_path / "killed").total() <= 12
    (line,) = metrics_of(tmp_path / "killed")
    assert line["rollout/tool_calls"] == 12.0
    assert line["rollout/tool_errors"] == line["rollout/tool_errors/interrupted"] >= 1.0


def journal_in(folder, *, keep=3, rank=0):
    return Journal(folder / "journal", run="now", rank=rank, checkpoints=folder / "checkpoints", keep=keep)


def written(journal, what, *entries):
    async def write():
        for entry in entries:
            await journal.begun(entry["key"])
            journal.write(entry)

    journal.begin(what)
    asyncio.run(write())


def test_entries_of_all_ranks_are_found_again(tmp_path):
    first, second = {"key": "a", "value": 1}, {"key": "b", "value": [None, 0.1]}
    written(journal_in(tmp_path), "step-000003", first)
    written(journal_in(tmp_path, rank=1), "step-000003", second)
    path = tmp_path / "journal/step-000003.rank-0.jsonl"
    with path.open("a") as file:
        file.write('{"key": "c"}\n{"key": "d", "va')  # the disk was full, or the machine died
    journal = journal_in(tmp_path)
    journal.begin("step-000003")
    assert [journal.find(key) for key in "abcd"] == [first, second, {"key": "c"}, None]
    written(journal, "step-000003", {"key": "e", "value": 2})
    journal.begin("step-000003")
    assert journal.find("e") == {"key": "e", "value": 2}
    journal.begin("step-000004")
    assert journal.find("a") is None


def test_files_of_steps_that_no_resume_repeats_are_removed(tmp_path):
    journal = journal_in(tmp_path)
    for what in ("step-000003", "evaluation-during-000004", "step-000004", "step-000005", "step-000006"):
        written(journal, what, {"key": what, "value": 0})

    def left():
        return sorted(path.name.split(".")[0] for path in (tmp_path / "journal").iterdir())

    assert left() == [
        "evaluation-during-000004",
        *(f"step-{step:06d}" for step in (3, 4, 5, 6)),
    ]
    (tmp_path / "checkpoints/step-000005").mkdir(parents=True)
    (tmp_path / "checkpoints/step-000009").mkdir()  # the run goes on from an earlier one
    journal.begin("step-000007")
    assert left() == ["step-000005", "step-000006"]
    (tmp_path / "checkpoints/step-000006").mkdir()
    journal.close()
    assert left() == ["step-000006"]
    journal.begin("step-000020")
    assert left() == []


def test_a_full_disk_ends_the_step(tmp_path):
    journal = journal_in(tmp_path)
    journal.begin("step-000000")
    (tmp_path / "journal").symlink_to("/dev/full")
    with raises(TrainError, "cannot-write: journal"):
        journal.write({"key": "a"})


def test_a_key_is_of_all_calls_before():
    first = key_of("run", "draw", {"n": 1, "m": "\ud800"}, 0, 0)
    assert first == key_of("run", "draw", {"m": "\ud800", "n": 1}, 0, 0)
    others = {key_of("run", "draw", {"n": 2}, 0, 0), key_of(first, "draw", {"n": 1}, 0, 0)}
    assert len({first, *others}) == 3
    # Calls that are written as Python's may hold what JSON lacks.
    odd = [key_of("run", "draw", {"n": each}, 0, 0) for each in ({1: 2, "b": 3}, {(1, 2): 3}, {"y", "x"})]
    assert len({first, *odd}) == 4
    assert odd[2] == key_of("run", "draw", {"n": ["'x'", "'y'"]}, 0, 0)  # in any process


TOOL = '''
import time


class Waits:
    def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "waited"
'''


COUNTS = '''
import os
import threading


class Counts:
    def __init__(self):
        self.n = 0
        open("made.txt", "a").write("x")

    def add(self, n: int) -> int:
        """Add.

        Args:
            n: A number.
        """
        open("added.txt", "a").write("x")
        self.n += n
        return self.n

    def leave(self) -> None:
        """Leave."""
        os._exit(3)
'''
LOCK = "self.n = 0; self.lock = threading.Lock()"


def recorded(host, journal):
    """An instance of the same sample, as each process of the run makes one."""
    task = Prompt(index=0, token_ids=(1,), text="", row={})
    sample = Sampler(task, rules=TrajectoryRules.of(SamplingParams(max_tokens=1)), seed=7)
    sample.clock = lambda runs: None
    host.keeps_states = not host.describe()["repeatable"]
    journal.begin("step-000000")
    return RecordedInstance(host, task, sample, journal=journal)


async def called(instance, *calls):
    return [await instance.call(name, given, turn=i, call=0) for i, (name, given) in enumerate(calls)]


@pytest.mark.parametrize("kind", ["plain", "repeatable", "neither"])
def test_an_object_goes_on_where_it_was(tmp_path, kind):
    text = COUNTS if kind == "plain" else COUNTS.replace("self.n = 0", LOCK)
    text = (
        text.replace("    def __init__", "    _repeatable = True\n\n    def __init__")
        if kind[0] == "r"
        else text
    )
    (tmp_path / "counts.py").write_text(text)
    one, two = ("add", {"n": 1}), ("add", {"n": 2})

    async def twice(host, journal):
        (before,) = await called(recorded(host, journal), one)
        again = recorded(host, journal)
        if kind == "neither":
            with pytest.raises(EnvironmentFailure, match="killed between two calls"):
                await called(again, one, two)
            return before, None, None
        return before, *await called(again, one, two)

    with hosted("counts:Counts", tmp_path) as host:
        os.remove(tmp_path / "made.txt")  # of the first object, which only shows its size
        before, same, after = run(twice(host, journal_in(tmp_path)))
    made, added = (len((tmp_path / f"{name}.txt").read_text()) for name in ("made", "added"))
    assert (made, added) == {"plain": (1, 2), "repeatable": (2, 3), "neither": (1, 1)}[kind]
    assert before.text == "1"
    if kind != "neither":
        assert (same.text, after.text) == ("1", "3")


def test_an_object_that_has_ended_stays_so(tmp_path):
    (tmp_path / "counts.py").write_text(COUNTS)
    leave, add = ("leave", {}), ("add", {"n": 1})

    async def both(host):
        undisturbed = await called(recorded(host, journal_in(tmp_path / "one")), leave, add)
        journal = journal_in(tmp_path / "two")
        await called(recorded(host, journal), leave)
        return undisturbed, await called(recorded(host, journal), leave, add)

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with hosted("counts:Counts", tmp_path) as host:
        undisturbed, resumed = run(both(host))
    assert [result.error for result in resumed] == ["died", "ended"]
    assert [result.text for result in resumed] == [result.text for result in undisturbed]


def test_a_call_that_is_cancelled_is_noted_when_it_ends(tmp_path):
    (tmp_path / "waits.py").write_text(TOOL)
    journal, wait = journal_in(tmp_path), ("wait", {"seconds": 1.0})

    async def cancelled(host):
        instance = recorded(host, journal)
        call = asyncio.ensure_future(called(instance, wait))
        while not (tmp_path / "journal").exists():
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])
        await instance.close()
        assert call.cancelled()
        return await called(recorded(host, journal), wait)

    with hosted("waits:Waits", tmp_path) as host:
        (result,) = run(cancelled(host))
    assert (result.text, result.error, result.seconds) == ("waited", None, 0.0)


def test_a_call_that_is_cancelled_twice_is_not_waited_for_without_end(tmp_path, monkeypatch):
    """As run_episodes cancels those that it stops: once when it stops, and once when it returns."""
    (tmp_path / "waits.py").write_text(TOOL)
    monkeypatch.setattr(recording, "LAST_SECONDS", 0.5)

    async def cancelled(host):
        instance = recorded(host, journal_in(tmp_path))
        call = asyncio.ensure_future(called(instance, ("wait", {"seconds": 600.0})))
        while instance._instance is None or instance._instance._sent < 2:  # made, and called
            await asyncio.sleep(0.01)
        for _ in range(2):
            call.cancel()
            await asyncio.sleep(0.05)
        await asyncio.wait([call])
        await asyncio.sleep(0)
        assert call.cancelled()
        return instance._instance.gone

    with hosted("waits:Waits", tmp_path, tool_seconds=900.0) as host:
        assert run(cancelled(host)) == "it was abandoned"


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Base:
    __slots__ = ("hidden",)


class Slotted(Base):
    pass


class Listed(list):
    pass


def test_the_state_of_an_object_is_kept_if_it_is_plain_data():
    plain = Plain(product=6, seen=(1, (), ()), names={1: b"x", "y": [None, True, 0.1]})
    assert json.loads(state_of(plain)) == {
        "product": 6,
        "seen": {"$tuple": [1, {"$tuple": []}, {"$tuple": []}]},
        "names": {"$items": [[1, {"$bytes": "eA=="}], ["y", [None, True, 0.1]]]},
    }
    shared = []
    others = ({"a": shared, "b": shared}, {"a": {1}}, {"a": object()}, {"a": "x" * STATE_CHARACTERS})
    assert [state_of(Plain(**each)) for each in others] == [None] * 4
    assert [state_of(each) for each in (Slotted(), Listed(), object(), 3)] == [None] * 4
