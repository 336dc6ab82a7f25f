"""Live environments: each fails alone, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosting import hosted, processes, run
from raising import raises

from lockstep.environments.host import Instance, ToolHost
from lockstep.environments.results import EnvironmentFailure, ToolResult
from lockstep.errors import ConfigError, DataError, EngineError

COMMON = Path(__file__).parents[1] / "common"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def host() -> Iterator[ToolHost]:
    with hosted("faulty_tools:Faulty", COMMON, max_live=16, tool_seconds=5.0, result_characters=100) as host:
        yield host
        assert processes(host) == []


def gone(pids: list[int], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(runs(pid) for pid in pids)


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def calls(host: ToolHost, *names: str | tuple[str, dict[str, Any]]) -> list[ToolResult]:
    async def one() -> list[ToolResult]:
        instance = await host.open({}, seed=1)
        given = [(call, {}) if isinstance(call, str) else call for call in names]
        results = await instance.calls(given, turn=0)
        await instance.close()
        return results

    return run(one())


def texts(results: list[ToolResult]) -> list[tuple[str, str | None]]:
    return [(result.text, result.error) for result in results]


def test_several_calls_of_a_turn_run_in_order(host: ToolHost) -> None:
    added = [("add", {"number": number}) for number in (1, 10, 100)]
    assert texts(calls(host, *added)) == [("1", None), ("11", None), ("111", None)]


def test_results_hold_no_control_characters(tmp_path: Path) -> None:
    """Some tokenizers drop them, so that the ids of a result would not be its text's."""
    (tmp_path / "terminal.py").write_text(
        "class Terminal:\n"
        "    def reset(self):\n"
        "        return [{'role': 'user', 'content': 'a\\x00b'}]\n"
        "    def shell(self) -> str:\n"
        '        """Run."""\n'
        "        return '\\x1b[1mred\\x1b[0m\\r\\n\\tok\\x7f \u00e9'\n"
    )

    async def both(host: ToolHost) -> tuple[Any, ToolResult]:
        instance = await host.open({}, seed=1)
        given = await instance.reset(), await instance.call("shell", {}, turn=0, call=0)
        await instance.close()
        return given

    with hosted("terminal:Terminal", tmp_path) as host:
        messages, result = run(both(host))
    assert messages == [{"role": "user", "content": "ab"}]
    assert (result.text, result.error) == ("[1mred[0m\n\tok \u00e9", None)


def test_an_exception_leaves_the_instance_alive(host: ToolHost) -> None:
    first, second = calls(host, "fail", ("add", {"number": 2}))
    assert (first.text, first.error) == ("error: fail raised LookupError: by design", "raised")
    assert 'raise LookupError("by design")' in first.detail
    assert (second.text, second.error) == ("2", None)


GONE = {
    "leave": ("died", "ended: its process exited with status 3"),
    "crash": ("died", "ended: its process was killed by SIGKILL"),
    "hang": ("timeout", "took longer than 5 s"),
    "flood": ("flood", "printed more than 8 MiB, and was ended"),
}


@pytest.mark.parametrize("name", GONE)
def test_what_ends_an_instance(host: ToolHost, name: str) -> None:
    kind, how = GONE[name]
    first, second = texts(calls(host, name, ("add", {"number": 2})))
    assert first == (f"error: {name} {how}", kind)
    assert second == (f"error: add cannot run: {how}", "ended")
    assert processes(host) == []  # nor what `hang` has started


RESULTS = {
    "giant": ("x" * 100 + "\n[cut: 10000000 characters in all, the first 100 are shown]", None),
    "nan": ("NaN", None),
    "slow": ("done", None),
    "copy": ("original", None),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results(host: ToolHost, name: str) -> None:
    (result,) = calls(host, name)
    assert (result.text, result.error) == RESULTS[name]
    assert result.truncated == (name == "giant")


def test_what_json_cannot_say(host: ToolHost) -> None:
    shallow, deep, cyclic = calls(host, ("nested", {"depth": 3}), ("nested", {"depth": 9**6}), "cyclic")
    assert shallow.text == "[[[[]]]]"
    for result in (deep, cyclic):
        assert result.error == "wrong-result" and "cannot be written as JSON" in result.text


def test_what_the_policy_calls_wrongly(host: ToolHost) -> None:
    endless: dict[str, Any] = {}
    endless["value"] = {"value": {}}
    for _ in range(5000):
        endless = {"value": endless}
    results = calls(
        host,
        ("substract", {}),
        ("add", [1]),  # type: ignore[list-item]
        ("add", {}),
        ("add", {"number": 1, "other": 2}),
        ("_start_children", {}),
        ("echo", endless),
        ("echo", {"value": {"a": [float("nan"), "\ud800", {"b": None}]}}),
    )
    kinds = ["unknown-tool", *["wrong-arguments"] * 3, "unknown-tool", "wrong-arguments", None]
    assert [result.error for result in results] == kinds
    assert "the tools are: add, fail," in results[0].text
    assert results[1].text == "error: the arguments of add are a list, not a JSON object"
    assert results[-1].text == '{"a": [NaN, "?", {"b": null}]}'


def test_random_numbers_depend_on_sample_turn_and_call(host: ToolHost) -> None:
    async def drawn(seed: int, turn: int) -> list[str]:
        instance = await host.open({}, seed=seed)
        results = await instance.calls([("draw", {}), ("draw", {})], turn=turn)
        await instance.close()
        return [result.text for result in results]

    first, again, later, other = [run(drawn(*which)) for which in ((1, 0), (1, 0), (1, 1), (2, 0))]
    assert first == again
    assert len({*first, *later, *other}) == 6


def test_a_constructor_or_reset_that_fails_names_its_row(host: ToolHost) -> None:
    rows = [("rows.jsonl row 0", {"start": 1}), ("rows.jsonl row 1", {"fails": "raise"})]
    with raises(ConfigError, "wrong-part: rows.jsonl row 1, raised ValueError: this row"):
        run(host.check(rows))
    with pytest.raises(EnvironmentFailure, match=r"row 2: .* exited with status 5") as caught:
        run(opened(host, {"fails": "exit"}, "row 2"))
    assert caught.value.kind == "died"
    with raises(DataError, "wrong-type: row 3.start"):
        run(opened(host, {"start": object()}, "row 3"))
    assert processes(host) == []
    run(opened(host, {}, "row 4"))


async def opened(host: ToolHost, row: dict[str, Any], where: str) -> Instance:
    instance = await host.open(row, seed=0, where=where)
    try:
        await instance.reset()
    finally:
        await instance.close()
    return instance


def test_an_instance_that_is_closed_takes_its_children_along(host: ToolHost) -> None:
    async def closed() -> list[int]:
        one, other = await host.open({}, seed=0), await host.open({}, seed=0)
        mine, theirs = [await i.call("children", {}, turn=0, call=0) for i in (one, other)]
        pids = [int(pid) for pid in mine.text.strip("[]").split(",")]
        others = [int(pid) for pid in theirs.text.strip("[]").split(",")]
        await one.close()
        assert not any(map(runs, pids)) and all(map(runs, others))
        await other.close()
        return pids + others

    assert len(set(run(closed()))) == 4
    assert processes(host) == []


def test_room_is_waited_for_and_given_back(host: ToolHost) -> None:
    async def full() -> list[int]:
        instances = [await host.open({}, seed=0) for _ in range(host.max_live)]
        waiting = [asyncio.ensure_future(host.open({"start": i}, seed=0)) for i in range(3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        for instance in instances[:2]:
            await instance.close()
        more = [await task for task in waiting[1:]]
        assert len(processes(host)) == host.max_live
        for instance in (*instances[2:], *more):
            await instance.close()
        return [host._room._free]

    assert run(full()) == [host.max_live]


def test_a_call_that_is_given_up_ends_its_instance(host: ToolHost) -> None:
    async def cancelled() -> ToolResult:
        instance = await host.open({}, seed=0)
        task = asyncio.ensure_future(instance.call("hang", {}, turn=0, call=0))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return await instance.call("add", {"number": 1}, turn=1, call=0)

    assert run(cancelled()).error == "ended"
    assert host._room._free == host.max_live


def test_a_reply_that_came_in_time_counts_though_the_loop_was_busy(host: ToolHost) -> None:
    async def busy() -> ToolResult:
        instance = await host.open({}, seed=0)
        task = asyncio.ensure_future(instance.call("add", {"number": 4}, turn=0, call=0))
        await asyncio.sleep(0)
        time.sleep(host.tool_seconds + 0.3)  # such as a trainer that holds the interpreter
        result = await task
        await instance.close()
        return result

    assert run(busy()).text == "4"


def test_a_fork_of_the_trainer_neither_uses_nor_holds_an_instance(host: ToolHost) -> None:
    async def before() -> tuple[Instance, int]:
        instance = await host.open({}, seed=0)
        return instance, int((await instance.call("where", {}, turn=0, call=0)).text)

    instance, pid = run(before())
    copy = os.fork()
    if copy == 0:
        try:
            with raises(EngineError, "wrong-state"):
                run(host.open({}, seed=0))
            host.close()
            time.sleep(60)  # it holds every descriptor
        finally:
            os._exit(1)
    try:
        assert run(instance.call("add", {"number": 5}, turn=1, call=0)).text == "5"
        run(instance.close())
        assert not runs(pid)
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)


FAULTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "fail": ({}, "raised"),
    "leave": ({}, "died"),
    "hang": ({}, "timeout"),
    "flood": ({}, "flood"),
    "slow": ({}, None),
    "nan": ({}, None),
    "nested": ({"depth": 40}, None),
    "giant": ({}, None),
    "cyclic": ({}, "wrong-result"),
}


async def sample(host: ToolHost, index: int, turns: int) -> tuple[int, float | str]:
    """One sample: its calls that came out as the table says, and its reward."""
    draw, right, ended, total = random.Random(index), 0, False, index
    instance = await host.open({"start": index}, seed=index)
    assert await instance.reset() == f"Start at {index}."
    for turn in range(turns):
        name = draw.choice([*FAULTS, *["add"] * 5])
        given, error = FAULTS.get(name, ({"number": turn}, None))
        result = await instance.call(name, given, turn=turn, call=0)
        total += turn if name == "add" and not ended else 0
        right += result.error == ("ended" if ended else error)
        right -= name == "add" and not ended and result.text != str(total)
        ended |= error in ("died", "timeout", "flood")
    try:
        reward: float | str = await instance.reward({})
    except EnvironmentFailure as failure:
        reward = failure.kind
    assert reward == ("ended" if ended else float(total))
    await instance.close()
    return right, reward


@pytest.mark.parametrize("samples", [25, pytest.param(250, marks=pytest.mark.exhaustive)])
def test_every_call_is_accounted_for(host: ToolHost, samples: int) -> None:
    """Four calls for each sample, some of which fail in every way; the others are untouched."""

    async def step() -> list[tuple[int, float | str]]:
        return await asyncio.gather(*(sample(host, index, turns=4) for index in range(samples)))

    # 16 live at a time, and each loses at most one deadline; the rest is for starting.
    outcomes = run(step(), seconds=-(-samples // host.max_live) * host.tool_seconds + 60.0 + samples / 2)
    assert [right for right, _ in outcomes] == [4] * samples
    rewards = [reward for _, reward in outcomes]
    assert 0 < rewards.count("ended") < samples
    assert processes(host) == [] and host._room._free == host.max_live


LIVES = """
import asyncio, sys
from lockstep.environments.host import ToolHost
host = ToolHost("faulty_tools:Faulty", tool_seconds=100)
async def main():
    instance = await host.open({}, seed=0)
    result = await instance.call("children", {}, turn=0, call=0)
    where = await instance.call("where", {}, turn=0, call=0)
    print(where.text, result.text.strip("[]").replace(",", ""), flush=True)
    await instance.call("hang", {}, turn=1, call=0)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_trainer(number: signal.Signals) -> None:
    command = [sys.executable, "-c", LIVES]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    trainer = subprocess.Popen(command, cwd=COMMON, env=environment, stdout=-1, stderr=-1, text=True)
    assert trainer.stdout is not None and trainer.stderr is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 3 and all(map(runs, pids))
    tree = [p.pid for p in psutil.Process(trainer.pid).children(recursive=True)]
    trainer.send_signal(number)
    _, said = trainer.communicate(timeout=60)
    assert trainer.returncode == -number if number == signal.SIGKILL else "KeyboardInterrupt" in said
    assert gone([*pids, *tree])


THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
class E:
    def act(self) -> str:
        'Act.'
"""
CLASS = """
class E:
    {init}
    {do}def act(self) -> str:
        'Act.'
    {more}
"""


@pytest.mark.parametrize(
    "source, settings, message",
    [
        ("raise SystemExit(3)", {}, "wrong-part: importing its module raised SystemExit"),
        ("import no_such_module_of_mine", {}, "missing-package: no_such_module_of_mine"),
        ("E = 3", {}, "wrong-part: is a int"),
        (THREADS, {}, "wrong-part: has started threads"),
        (
            CLASS.format(init="def __init__(self): raise OSError('no')", do="", more=""),
            {},
            "wrong-part: making an object of it raised OSError: no",
        ),
        (
            CLASS.format(init="def __init__(self): import os; os._exit(0)", do="", more=""),
            {},
            "process-died: making an object of it",
        ),
        (
            CLASS.format(init="def __init__(self): import time; time.sleep(600)", do="", more=""),
            {"tool_seconds": 0.5},
            "deadline: making an object of it took longer than 0.5 s",
        ),
        (
            CLASS.format(init="", do="", more=""),
            {"isolation": "shared"},
            "unsupported-combination: environment.isolation = 'shared', act is not async",
        ),
        (
            CLASS.format(init="", do="", more="def get_reward(self): return 1.0"),
            {"isolation": "sandbox"},
            "unsupported-combination: environment.isolation = 'sandbox', get_reward, rewards",
        ),
        (
            CLASS.format(init="", do="async ", more=""),
            {"isolation": "sandbox"},
            "unsupported-combination: environment.isolation = 'sandbox', act is async",
        ),
    ],
)
def test_what_is_refused_before_the_first_step(
    tmp_path: Path, source: str, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "refused_tools.py").write_text(source)
    with raises(ConfigError, message), hosted("refused_tools:E", tmp_path, **settings):
        pass


def test_with_drop_a_tool_that_fails_is_the_end_of_its_sample(host: ToolHost) -> None:
    async def dropped(name: str) -> str | None:
        instance = await host.open({}, seed=0, where="row 7")
        try:
            return (await instance.call(name, {}, turn=0, call=0)).error
        finally:
            await instance.close()

    host.on_error = "drop"  # which nothing in its processes depends on
    try:
        with pytest.raises(EnvironmentFailure, match=r"^row 7: fail raised LookupError: by design") as caught:
            run(dropped("fail"))
        assert caught.value.kind == "raised"
        assert run(dropped("add")) == "wrong-arguments"
    finally:
        host.on_error = "message"


def test_without_the_process_that_forks_no_sample_is_lost_silently() -> None:
    async def killed(host: ToolHost) -> tuple[str | None, list[int]]:
        instance = await host.open({"a": 2, "b": 3}, seed=0)
        (zygote,) = psutil.Process(host._process.pid).children()
        pids = [zygote.pid, *(process.pid for process in zygote.children(recursive=True))]
        zygote.kill()
        assert gone(pids)
        error = (await instance.call("multiply", {"a": 1, "b": 1}, turn=0, call=0)).error
        with raises(EngineError, "process-died: calculator:Calculator"):
            await host.open({"a": 2, "b": 3}, seed=0)
        return error, pids

    with hosted("calculator:Calculator", EXAMPLES, max_live=2) as host:
        assert host.describe()["has_torch"] is False
        error, pids = run(killed(host))
        assert error == "died" and len(pids) == 2


def test_a_game_of_the_examples() -> None:
    async def played(host: ToolHost, number: int | None) -> tuple[list[str], float]:
        instance = await host.open({} if number is None else {"game": 31 + number}, seed=5)
        first = await instance.reset()
        assert first == "Guess my number, from 1 to 32."
        low, high, total = 1, 32, 0.0
        texts: list[str] = []
        for turn in range(6):
            guess = (low + high) // 2
            result = await instance.step(f"My guess: {guess}", turn=turn)
            texts.append(result.text)
            total += result.reward or 0.0
            if result.done:
                break
            low, high = (guess + 1, high) if result.text == "Too low." else (low, guess - 1)
        assert await instance.reward({}) is None
        await instance.close()
        return texts, total

    with hosted("guessing_game:Guess", EXAMPLES) as host:
        described = host.describe()
        assert (described["form"], described["reward"], host.tools) == ("gym", "step", [])
        assert described["reads"] == ["game"]
        assert run(played(host, 10)) == (["Too high.", "Too low.", "Too high.", "Right!"], 1.0)
        assert run(played(host, 16)) == (["Right!"], 1.0)
        assert run(played(host, None)) == run(played(host, None))


@pytest.mark.exhaustive
def test_512_live_calculators_fit_into_6_gib() -> None:
    def own(pid: int) -> int:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))

    async def live(host: ToolHost) -> int:
        instances = await asyncio.gather(*(host.open({"a": i, "b": 3}, seed=i) for i in range(512)))
        await asyncio.gather(*(instance.reset() for instance in instances))
        for turn in range(3):
            given = {"a": turn, "b": turn}
            await asyncio.gather(*(i.call("multiply", given, turn=turn, call=0) for i in instances))
        found = psutil.Process(host._process.pid).children(recursive=True)
        assert len(found) == 513
        total = sum(own(process.pid) for process in found)
        await asyncio.gather(*(instance.close() for instance in instances))
        return total

    with hosted("calculator:Calculator", EXAMPLES, max_live=512) as host:
        assert run(live(host), seconds=400) <= 6 << 30
