"""Completions, rows and rewards that try to get out: no file, process, socket, forged score or hang."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.cli.doctor import settings
from lockstep.config.rollout import RewardConfig
from lockstep.errors import ConfigError, RewardError
from lockstep.protocols.reward import RewardInput
from lockstep.rollout import rewards as rewards_module
from lockstep.rollout import sandbox, verifiers
from lockstep.rollout.rewards import EXTRACTORS, RewardSet
from lockstep.rollout.verifiers import VerifierFailure, VerifierProcess, evaluates

JUNK = "banana"
WRAPPED = {"tags": "<answer>{}</answer>", "boxed": "\\boxed{{{}}}", "last_line": "Well.\n{}", "text": "{}"}


@pytest.fixture(scope="module")
def judge() -> Iterator[VerifierProcess]:
    process = VerifierProcess()
    yield process
    process.close()


class Canaries:
    """What a completion may try to reach, and whether it did."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "canary"
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.seconds = f"47.{os.getpid()}"

    def payloads(self) -> list[str]:
        file, port = str(self.file), self.listener.getsockname()[1]
        return [
            f"__import__('os').system('touch {file}')",
            f"[open('{file}', 'w').write('x')]",
            f"__import__('subprocess').Popen(['setsid', 'sleep', '{self.seconds}'])",
            f"__import__('socket').create_connection(('127.0.0.1', {port}))",
            f"().__class__.__base__.__subclasses__()[0] or open('{file}', 'w')",
            "[__import__('os').write(fd, b'\\x11\\0\\0\\0{\"score\": 0.12345}') for fd in range(3, 30)]",
            f"(lambda: exec('open({file!r}, chr(119))'))()",
            f"sqrt.__globals__['__builtins__']['open']('{file}', 'w')",
            f"Symbol(\"open('{file}', 'w')\") + sympify(\"open('{file}', 'w')\")",
            f"{{'a': __import__('os').system('touch {file}')}}",
            f'["x", __import__("pathlib").Path("{file}").touch()]',
            "exit()",
            "9**9**9**9",
            "x**(9**9**9) - (1 << (1 << 60))",
            "[0] * 10**11",
            "(" * 5000 + "1" + ")" * 5000,
        ]

    def check(self) -> None:
        assert not self.file.exists()
        with pytest.raises(BlockingIOError):
            self.listener.accept()
        assert not [name for name, line in command_lines() if self.seconds in line]


def command_lines() -> Iterator[tuple[str, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                yield folder.name, (folder / "cmdline").read_text(errors="replace")
            except OSError:
                continue


@pytest.fixture
def canaries(tmp_path: Path) -> Iterator[Canaries]:
    result = Canaries(tmp_path)
    yield result
    result.check()
    result.listener.close()


def tasks() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return [name for name in sorted(DATASETS) if name != "composite"]  # it has no task of its own


def rows(task: str) -> tuple[Any, dict[str, Any]]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=3, size=8)
    row = {**dataset[0], "verifier": f"reasoning_gym:{task}", "verifier_settings": {}}
    return dataset, row


def replaced(value: Any, text: str) -> Any:
    """The value with `text` in place of every text in it."""
    if isinstance(value, str):
        return text
    if isinstance(value, dict):
        return {key: replaced(item, text) for key, item in value.items()}
    return [replaced(item, text) for item in value] if isinstance(value, list) else value


@pytest.mark.skipif(not sandbox.probe().sufficient, reason="this kernel gives no sandbox")
def test_all_tasks_of_the_package_hold(judge, canaries):
    """Right answers score as in the plain package after every attempt, which scores as junk does."""
    for task in tasks():
        dataset, row = rows(task)
        own = row["answer"] or ""  # one task has many right answers, and names none
        right = float(dataset.score_answer(answer=own, entry=row))
        junk = judge.reasoning_gym(row, JUNK, timeout=60)[0]
        for payload in canaries.payloads():
            answers = {EXTRACTORS[how](text.format(payload)) for how, text in WRAPPED.items()}
            for answer in answers - {None}:
                score, reason = judge.reasoning_gym(row, answer, timeout=60)
                assert not (reason or "").startswith("TimeoutError"), (task, answer)
                if evaluates(task):
                    assert score <= max(junk, 0.05), (task, answer, score)
                elif reason is None:  # such as credit for letters in common
                    assert score == float(dataset.score_answer(answer=answer, entry=row)), (task, answer)
        assert judge.reasoning_gym(row, own, timeout=60) == (right, None), task
        hostile = replaced(row, canaries.payloads()[0]) | {"verifier": row["verifier"]}
        for answer in (JUNK, own, "['1', '2']"):
            with contextlib.suppress(VerifierFailure):  # the row's fault, said so
                judge.reasoning_gym(hostile, answer, timeout=60)
    canaries.check()


@pytest.mark.skipif(not sandbox.probe().sufficient, reason="this kernel gives no sandbox")
def test_a_data_set_that_takes_too_long_is_an_error_with_the_task(judge):
    _, row = rows("n_queens")
    slow = {**row, "verifier_settings": {"n": 12}}  # every board is found first, which takes 2 s
    with pytest.raises(
        VerifierFailure, match=r"'n_queens': its data set could not be generated: TimeoutError"
    ):
        judge.reasoning_gym(slow, row["answer"], timeout=0.2)
    for _ in range(2):
        assert judge.reasoning_gym(row, row["answer"], timeout=60) == (1.0, None)


def test_math_holds(judge, canaries):
    for payload in canaries.payloads():
        for text in (payload, f"${payload}$", f"\\boxed{{{payload}}}"):
            if not ("**" in text or "((" in text):  # a time-out, which test_rewards looks at
                assert judge.math("4", text, timeout=20)[0] == 0.0, text
    assert judge.math("4", "$4$", timeout=60) == (1.0, None)


@pytest.mark.parametrize(
    ("text", "literal", "formula"),
    [
        ("[['_', 'Q'], [1, -2.5, 0x1f << 3]]", True, False),
        ("94*4 - (61 - 6)/2", True, True),
        ("-4*(-2*x - 8)**(3/2)/3 + sqrt(3)*sin(x_1) + C", False, True),
        ("{'a': (1, None), 'b': {True}}", True, False),
        ("x.real", False, False),
        ("exit()", False, False),
        ("exit", False, False),
        ("S('1')", False, False),
        ("sqrt('x')", False, False),
        ("sqrt(x, evaluate=1)", False, False),
        ("[x for x in (1,)]", False, False),
        ("f'{1}'", False, False),
        ("1 if 1 else 2", False, False),
        ("(y := 3)", False, False),
        ("'a' * 10", False, False),
        ("[0] * 3", False, False),
        ("10**5 + 7**30", True, True),
        ("9**9**9", False, False),
        ("1 << 99999999", False, False),
        ("[" + "12, " * 20_000 + "]", True, False),
        ("[" + "12, " * 30_000 + "]", False, False),
        ("2*x**10 - x**100/7 + (3*x + 8)**(5/2)*7**0.5", False, True),
        ("E**(-x**2/2)*sin(2*x)**3 + 2**(3*x) + root(x, 3)", False, True),
        ("(x + y + 1)**40", False, True),
        ("x**101", False, False),
        ("x**18446744073709551615", False, False),
        ("(1 + x)**(10**3)", False, False),
        ("(1 + x)**sqrt(10**6)", False, False),
        ("(1 + x)**log(exp(1000))", False, False),
        ("(1 + x)**(1000*y/y)", False, False),
        ("(1 + x)**((y/1000)**-1)", False, False),
        ("root(1 + x, 1/1000)", False, False),
        ("x**y**z", False, False),
        ("((x + 1)**8 + 1)**8", False, False),
        ("(1 + x)**60*(1 - x)**60", False, False),
        ("(x + y + z + 1)**20", False, False),
        ("1 # x", True, False),
    ],
)
def test_grammar(text, literal, formula):
    for check, passes in ((sandbox.check_literal, literal), (sandbox.check_formula, formula)):
        if passes:
            check(text)
        else:
            with pytest.raises(sandbox.NotInGrammar):
                check(text)


ATTEMPTS = """
import json, os, socket, sys
sys.path.insert(0, {root!r})
from lockstep.rollout import sandbox
sandbox.supervise(int(sys.argv[1]))
sandbox.limits()
sandbox.lock(sandbox.readable_places(), may_fork=True)
def tried(call):
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return "done"
def forked():
    if os.fork() == 0:
        os._exit(0)
forking = tried(forked)
sandbox.lock(None, may_fork=False)
attempts = dict(
    read=lambda: open("/etc/passwd"), write=lambda: open("/tmp/x", "w"),
    append=lambda: open("/dev/null", "a"),
    folder=lambda: os.mkdir("/tmp/y"), exec=lambda: os.execv("/bin/true", ["true"]), fork=forked,
    network=socket.socket, pair=socket.socketpair, kill=lambda: os.kill(os.getppid() or 1, 9),
    library=lambda: open(os.__file__).close(), environment=lambda: os.environ["SECRET"],
)
print(json.dumps({{"forking": forking}} | {{name: tried(call) for name, call in attempts.items()}}))
sys.stdout.flush()
"""


ODD = """
import os, struct, time
from lockstep.rollout import verifiers as child

def score(job):
    if job["answer"] == "raise":
        raise NotImplementedError("no such case")
    if job["answer"] == "deep":
        for fd in range(3, 30):
            try:
                os.write(fd, struct.pack("<I", 4000) + b"[" * 4000)
            except OSError:
                pass
        time.sleep(60)
    return 0.5

child.SCORES["odd"] = score
judge = child.Judge("odd")
for own, answer in (("4", "raise"), ("4", "deep"), ("raise", "raise"), ("4", "5")):
    print(judge.reply({"answer": answer, "own_answer": own, "evaluates": False, "timeout": 30}))
judge._end()
"""


def test_whatever_an_answer_makes_a_verifier_raise_or_reply_scores_0():
    ended = subprocess.run([sys.executable, "-c", ODD], capture_output=True, text=True, timeout=120)
    raised, died = "NotImplementedError: no such case", "the verifier's process died, or its reply was"
    expected = [
        {"score": 0.0, "junk": raised},
        {"score": 0.0, "junk": f"{died} not a score"},
        {"error": raised},
        {"score": 0.5},
    ]
    assert [ast.literal_eval(line) for line in ended.stdout.splitlines()] == expected, ended.stderr


@pytest.mark.skipif(sandbox.probe().missing != [], reason="this kernel lacks a layer")
def test_code_in_the_sandbox_reaches_nothing():
    """The layer behind the grammar: what code could do if it ran all the same."""
    reader, writer = os.pipe()
    code = ATTEMPTS.format(root=sandbox.ROOT)
    ended = subprocess.run(
        [sys.executable, "-I", "-B", "-c", code, str(reader)],
        env={},
        pass_fds=[reader],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    os.close(reader)
    os.close(writer)
    refused = dict.fromkeys(("read", "write", "append", "folder", "exec", "fork", "network", "pair", "kill"))
    outcome = json.loads(ended.stdout)
    assert {name: outcome.pop(name) for name in refused} == dict.fromkeys(refused, "PermissionError")
    assert outcome == {"forking": "done", "library": "done", "environment": "KeyError"}


SECCOMP_ALONE = """
import sys
sys.path.insert(0, {root!r})
from lockstep.rollout import sandbox
namespaces = sandbox.isolate()
given = sandbox.lock(None, may_fork=False)
try:
    open({file!r} + "2", "w")
except PermissionError:
    sys.stdout.write(open({file!r}).read() + str(given["seccomp"]) + "".join(namespaces))
"""


@pytest.mark.skipif(not sandbox.probe().seccomp, reason="this kernel gives no seccomp")
def test_without_landlock_files_of_the_user_can_be_read_and_that_is_said(tmp_path, monkeypatch):
    file = tmp_path / "private"
    file.write_text("secret ")
    file.chmod(0o600)
    code = SECCOMP_ALONE.format(root=sandbox.ROOT, file=str(file))
    ended = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    names = sandbox.probe().namespaces
    assert ended.stdout == "secret True" + "".join(names), ended.stderr  # a mount namespace hides nothing

    given = sandbox.Isolation(namespaces=names, landlock=0, seccomp=True)
    for module in (rewards_module, sandbox):
        monkeypatch.setattr(module, "probe", lambda: given)
    (note,) = RewardSet([RewardConfig(name="math")]).notes()
    (finding,) = (found for found in settings() if found.name == "verifier sandbox")
    assert finding.status == "warning"
    for text in (note, finding.detail):
        assert "missing: Landlock: " in text and "could read every file of this user" in text
        assert "/sys/kernel/security/lsm" in text
    assert note.startswith("warning: ") and RewardSet([RewardConfig(name="ids")]).notes() == []
    whole = sandbox.Isolation(namespaces=tuple(sandbox.NAMESPACES), landlock=3, seccomp=True)
    nothing = sandbox.Isolation(namespaces=(), landlock=0, seccomp=False)
    assert whole.warning is None and "are refused" in str(nothing.warning)


BARE = """
from lockstep.rollout import sandbox, verifiers
sandbox.lock = lambda *_, **__: {"landlock": 0, "seccomp": False}
sandbox.isolate = lambda: []
main = verifiers.main
"""


def test_without_a_sandbox_an_evaluating_task_is_refused_unless_allowed_by_name(tmp_path, monkeypatch):
    (tmp_path / "bare_judge.py").write_text(BARE)
    monkeypatch.syspath_prepend(tmp_path)
    real = verifiers.JobProcess
    monkeypatch.setattr(verifiers, "JobProcess", lambda _, *rest, **more: real("bare_judge", *rest, **more))
    process = VerifierProcess()
    _, countdown = rows("countdown")
    _, plain = rows("chain_sum")
    with raises(ConfigError, "refused: countdown"):
        process.reasoning_gym(countdown, "1", timeout=60)
    assert process.reasoning_gym(plain, plain["answer"], timeout=60) == (1.0, None)
    answer = countdown["answer"]
    assert process.reasoning_gym(countdown, answer, timeout=60, allowed=["countdown"]) == (1.0, None)
    process.close()


class Spiteful:
    """An object that raises wherever it is looked at."""

    shape = ()

    def item(self) -> float:
        raise GeneratorExit

    def __repr__(self) -> str:
        raise ValueError("no repr")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def reward_input(row: dict[str, Any]) -> RewardInput:
    return RewardInput(
        prompt="p",
        completion="c",
        row=row,
        prompt_token_ids=(),
        completion_token_ids=(),
        finish_reason="stop",
    )


def raising(error: BaseException) -> Callable[..., Any]:
    def reward(**_: Any) -> Any:
        raise error

    return reward


def raising_later(error: BaseException) -> Callable[..., Any]:
    async def reward(**_: Any) -> Any:
        raise error

    return reward


OUTCOMES: list[tuple[Callable[..., Any], str]] = [
    (lambda **_: 10**400, "not a finite number"),
    (lambda **_: Spiteful(), "an object whose repr raises ValueError"),
    (raising(Unspeakable()), "raised Unspeakable: <Unspeakable whose text raises ValueError>"),
    (raising(ValueError("\x1b]0;pwn\x07\n")), r"raised ValueError: \x1b]0;pwn\x07\n"),
]
for kind in (SystemExit, KeyboardInterrupt, GeneratorExit):
    OUTCOMES += [(raising(kind(3)), f"{kind.__name__}: 3"), (raising_later(kind(3)), f"{kind.__name__}: 3")]


@pytest.mark.parametrize(("reward", "text"), OUTCOMES)
def test_a_reward_that_does_its_worst_is_one_error(reward, text):
    rewards = RewardSet([], functions=[reward])
    for _ in range(2):  # nothing was broken by the first
        with raises(RewardError, "reward-failed") as caught:
            rewards.score([reward_input({})])
        assert text in str(caught.value)


def test_a_reward_cannot_change_the_row():
    def within(*, row: Any, **_: Any) -> float:
        row["list"].append(1)
        assert json.dumps(row) and dict(row)["answer"] == "a"
        return len(row["list"])

    async def within_async(*, row: Any, **_: Any) -> float:
        row["list"].append(1)
        return len(row["list"])

    row = {"answer": "a", "list": [0]}
    (scored,) = RewardSet([], functions=[within, within_async]).score([reward_input(row)])
    assert scored is not None and scored.total == 4 and row == {"answer": "a", "list": [0]}
    for write in ("row['answer'] = 'x'", "row.update(a=1)", "del row['answer']", "row.pop('answer')"):
        scope: dict[str, Any] = {}
        exec(f"def reward(*, row, **_):\n    {write}\n    return 1.0", scope)
        with raises(RewardError, "reward-failed: reward"):
            RewardSet([], functions=[scope["reward"]]).score([reward_input(row)])
    assert row == {"answer": "a", "list": [0]}


def test_the_working_directory_is_no_place_of_packages(tmp_path, monkeypatch):
    """Reading a name such as "module:function" puts it on sys.path; a folder around it holds it too."""
    own, packages = tmp_path / "project" / "runs", tmp_path / "packages"
    for folder in (own, packages):
        folder.mkdir(parents=True)
    monkeypatch.chdir(own)
    added = [str(own), str(tmp_path / "project"), str(packages)]
    monkeypatch.setattr(sys, "path", [*sys.path, *added, os.path.join(sys.prefix, "lib", "anywhere")])
    places = sandbox.readable_places()
    assert [place for place in added if place in places] == [str(packages)]
    assert sandbox.ROOT in places and os.path.join(sys.prefix, "lib", "anywhere") in places
    monkeypatch.chdir(sys.prefix)  # the packages of an environment are there all the same
    assert os.path.join(sys.prefix, "lib", "anywhere") in sandbox.readable_places()
