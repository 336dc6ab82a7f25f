"""Attacks and faults: inputs of users, what should happen, and who says so.

Each case is a row: input, expected value, and the source of the expected value.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import crafted
import psutil
import pytest
import torch
import torch.distributed as dist
from raising import raises
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep import errors
from lockstep.cli.main import main
from lockstep.cluster.jobs import packed
from lockstep.cluster.launch import local_cluster
from lockstep.cluster.ray import _running_here, check_token
from lockstep.config.base import read_secrets
from lockstep.config.cluster import ClusterConfig
from lockstep.config.engine import EngineConfig
from lockstep.config.load import dump_toml, load_run
from lockstep.config.rollout import RewardConfig
from lockstep.engine.local_server import server as served
from lockstep.errors import ConfigError, DataError, EngineError, LockstepError, RewardError
from lockstep.loop import peer_checkpoint_server as copies
from lockstep.loop import role_server as roles
from lockstep.observe import flight, lock
from lockstep.observe.display import RunLog
from lockstep.observe.lock import RunLock, process_start, read_owner
from lockstep.protocols.reward import RewardInput
from lockstep.ranks import process_group
from lockstep.ranks.hang import examine
from lockstep.ranks.in_memory_checkpoint import step_folder, whole_parts
from lockstep.rollout.rewards import RewardSet
from lockstep.train.fsdp2 import sharded_model
from lockstep.transfer.buckets import BucketTransfer
from lockstep.transfer.senders import MemorySender
from lockstep.wire.server_token import bearer

# 26. The address of a local cluster: the attack on one that runs is in tests/cluster/test_ray.py

UNAUTHORIZED = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def _plant_flight(folder: Path) -> Callable[[], object]:
    path = crafted.record(folder, world_size=1)
    os.chown(path, UNAUTHORIZED, -1)
    return lambda: flight.read(path)


def _plant_lock(folder: Path) -> Callable[[], object]:
    (folder / "lock").write_text("")
    os.chown(folder / "lock", UNAUTHORIZED, -1)
    return lambda: RunLock(folder / "lock")


def _plant_owner(folder: Path) -> Callable[[], object]:
    _plant_lock(folder)
    return lambda: read_owner(folder / "lock")


def _plant_copies(folder: Path) -> Callable[[], object]:
    step_folder(folder / "copies", 3).mkdir(parents=True)
    os.chown(folder / "copies", UNAUTHORIZED, -1)
    return lambda: whole_parts(folder / "copies", 2)


def _plant_address(folder: Path) -> Callable[[], object]:
    """In the folder above that of the cluster."""
    pytest.importorskip("ray")
    (folder / "ray").mkdir()
    os.chown(folder / "ray", UNAUTHORIZED, -1)
    return lambda: local_cluster(ClusterConfig(temp_dir=folder / "ray"), ranks=1).__enter__()


def _plant_token(folder: Path) -> Callable[[], object]:
    (folder / "token").write_text("a" * 64)
    (folder / "token").chmod(0o600)
    os.chown(folder / "token", UNAUTHORIZED, -1)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(folder / "token")
    return lambda: check_token("auto")


@AS_ROOT
@pytest.mark.parametrize(
    "plant", [_plant_flight, _plant_lock, _plant_owner, _plant_copies, _plant_address, _plant_token]
)
def test_what_a_stranger_has_planted_is_not_believed(
    plant: Callable[[Path], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected: an error that says whose it is; by hand."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")  # is restored
    with tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as folder:
        read = plant(Path(folder))
        with raises(LockstepError, "not-ours"):
            read()
        assert not list(Path(folder).glob("ray/*"))


@pytest.mark.parametrize(("mode", "code"), [(0o644, "not-ours"), (0o640, "not-ours"), (0o600, None)])
def test_a_token_that_others_may_read_is_refused(
    mode: int, code: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected: the modes of docs/how-to/cluster.md; what `ray get-auth-token --generate` makes has 0644."""
    (tmp_path / "token").write_text("a" * 64)
    (tmp_path / "token").chmod(mode)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    if code is None:
        check_token("auto")
    else:
        with raises(ConfigError, code):
            check_token("auto")


@pytest.mark.parametrize(
    "user", [pytest.param(UNAUTHORIZED, marks=AS_ROOT), pytest.param(os.geteuid(), id="ours")]
)
def test_auto_finds_only_a_cluster_of_ours(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: by hand. Ray itself takes the address from any process that is called so."""
    real = psutil.process_iter
    with subprocess.Popen(
        ["/ray/raylet", "-c", "echo; read _", "--gcs-address=10.9.8.7:6379"],
        executable="/bin/sh",
        user=user,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as raylet:
        assert raylet.stdout is not None and raylet.stdout.readline()
        monkeypatch.setattr(
            psutil, "process_iter", lambda attrs: [p for p in real(attrs) if p.pid == raylet.pid]
        )
        if user == UNAUTHORIZED:
            with raises(ConfigError, "unreachable") as caught:
                _running_here()
            assert "10.9.8.7:6379" in str(caught.value)
        else:
            assert _running_here() == "10.9.8.7:6379"
        raylet.kill()


def test_a_flight_record_overwrites_nothing_through_a_link(tmp_path: Path) -> None:
    """Expected: the files that links in its place lead to are as they were; by hand."""
    (tmp_path / "mine").write_text("mine")
    for name in ("rank-0.part", "rank-0.stacks"):
        (tmp_path / name).symlink_to("mine")
    crafted.record(tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
    assert len(flight.read_all(tmp_path)) == 1


# end of 26


# 27. The state of a step's boundary: tests/field/test_c_resume.py

# end of 27


# 28. Restarting a run that cannot be resumed: tests/field/test_c_resume.py

# end of 28


# 29. The process that a file names


@contextmanager
def stranger(*, stopped: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else, which SIGUSR2 and SIGTERM end."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_hang_signals_only_the_process_that_holds_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expected: the process lives, and counts as gone; by hand."""
    with stranger() as process:
        path = crafted.record(tmp_path / "logs/flight", world_size=1)
        crafted.name_process(path, process.pid)
        record = flight.read(path)
        assert (record.pid, record.answers) == (process.pid, True)
        assert lock.state(record.pid, record.born) is not None  # its start time is right
        assert main(["hang", str(tmp_path), "--seconds", "0.1"]) == 0
        time.sleep(0.3)  # a signal that was sent has ended it by now
        assert process.poll() is None
    assert f"rank 0: pid {process.pid} has gone" in capsys.readouterr().out


def test_stop_signals_only_the_process_that_holds_the_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expected: the process lives, and the run has died; by hand."""
    (tmp_path / "config.toml").write_text("steps = 9\n")
    with stranger() as process:
        owner = {"pid": process.pid, "started": process_start(process.pid), "host": socket.gethostname()}
        (tmp_path / "lock").write_text(json.dumps(owner))
        assert main(["stop", str(tmp_path), "--timeout", "1"]) != 0
        time.sleep(0.3)
        assert process.poll() is None
    assert "nothing to stop; the run is died" in capsys.readouterr().err


# end of 29


# 30. Lengths of requests

TOKEN = "a" * 40


def engine_server() -> type[BaseHTTPRequestHandler]:
    return served.handler_of(None, token=TOKEN)


def role_server() -> type[BaseHTTPRequestHandler]:
    return type("Handler", (roles._Handler,), {"calls": None, "authorization": bearer(TOKEN)})


def checkpoint_server() -> type[BaseHTTPRequestHandler]:
    return type("Handler", (copies._Handler,), {"folder": None, "authorization": bearer(TOKEN)})


SERVERS = [(engine_server, "POST"), (role_server, "POST"), (checkpoint_server, "PUT")]
"""Every server of ours, with the method that has a body."""
# (header, status with the token: RFC 9110 8.6 has 1*DIGIT, and no other length can be acted upon)
LENGTHS = [
    ("Content-Length: -1", 400),
    ("Content-Length: " + "9" * 5000, 400),
    ("Content-Length: x", 400),
    ("Content-Length: \u00b2", 400),
    ("Content-Length: +5", 400),
    ("Content-Length: 1_0", 400),
    ("Content-Length: 1\r\nContent-Length: 2", 400),
    ("Transfer-Encoding: chunked", 400),
    ("Content-Length: 999999999999999", None),
]


@pytest.mark.parametrize(("server", "method"), SERVERS)
@pytest.mark.parametrize(("length", "known"), LENGTHS)
def test_no_server_believes_a_length(monkeypatch, server, method, length, known):
    """The connection stays open: a server that reads to its end answers nobody."""
    failed: list[object] = []
    monkeypatch.setattr(ThreadingHTTPServer, "handle_error", lambda *_: failed.append(sys.exc_info()))
    with ThreadingHTTPServer(("127.0.0.1", 0), server()) as listening:
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        for token, status in ((None, 401), (TOKEN, known)):
            if status is not None:
                assert asked(listening.server_address, method, length, token) == status
        listening.shutdown()
    assert not failed


def asked(address: tuple[str, int], method: str, length: str, token: str | None) -> int:
    """The status of the answer to a request whose body never ends."""
    head = f"{method} /abort HTTP/1.1\r\n{length}\r\n"
    if token is not None:
        head += f"Authorization: Bearer {token}\r\n"
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(f"{head}\r\n".encode("latin-1") + b"x" * 1000)
        return int(connection.makefile("rb").readline().split()[1])


def test_a_body_beyond_the_limit_is_not_read():
    handler = type("Handler", (roles._Handler,), {"calls": None, "authorization": bearer(TOKEN)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        assert asked(listening.server_address, "POST", f"Content-Length: {2**30 + 1}", TOKEN) == 413
        listening.shutdown()


# end of 30


# 31. Ledger, metrics and rollouts: tests/field/test_c_resume.py

# end of 31


# 32. Shared memory and flight files


@pytest.fixture
def deadline() -> Iterator[None]:
    """A call that waits for ever fails."""

    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize(("damage", "code"), crafted.DAMAGES.values(), ids=list(crafted.DAMAGES))
def test_a_flight_record_that_no_run_writes_is_named(
    damage: Callable[[Path], None], code: str, tmp_path: Path
) -> None:
    """Expected: an error that names the file; by hand."""
    for rank in (0, 1):
        path = crafted.record(tmp_path / "flight", rank=rank)
    damage(path)
    with raises(DataError, code) as caught:
        examine(tmp_path / "flight")
    assert "rank-1.flight" in str(caught.value)


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("damage", crafted.HARMLESS.values(), ids=list(crafted.HARMLESS))
def test_a_record_with_odd_values_is_reported(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """Expected: a report of both ranks, as text and as JSON; by hand."""
    for rank in (0, 1):
        path = crafted.record(tmp_path, rank=rank)
    damage(path)
    report = examine(tmp_path)
    assert [each.rank for each in report.ranks] == [0, 1]
    assert "rank 1: pid" in report.text() and len(report.as_dict()["ranks"]) == 2


@pytest.mark.usefixtures("deadline")
def test_stacks_name_no_file_that_is_read(tmp_path: Path) -> None:
    """Expected: no text of a file that is no source, and no wait for a fifo; by hand."""
    secret, fifo = tmp_path / "secret", tmp_path / "fifo.py"
    secret.write_text("the secret\n")
    os.mkfifo(fifo)
    for name in (secret, fifo):
        assert crafted.frame(name).source == ""


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("name", ["lock", "config.toml", "summary.json", "metrics.jsonl"])
def test_a_fifo_in_a_run_directory_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expected: an error that names it; by hand."""
    (tmp_path / "config.toml").write_text("steps = 9\n")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    for command in ("status", "stop"):
        assert main([command, str(tmp_path)]) != 0
        assert name in capsys.readouterr().err


# end of 32


# 33. Secrets: those of rewards and engines are read where a setting says, and stand nowhere else

KEY = "Zq8-live-4f1c9e77aa21"
# (settings that hold a secret); the way out is a variable or a file
HELD = [
    {"rewards": [{"name": "m:f", "kwargs": {"api_key": KEY}}]},
    {"rewards": [{"name": "m:f", "kwargs": {"auth_token": KEY}}]},
    {"rewards": [{"name": "m:f", "kwargs": {"header": f"Bearer {KEY}"}}]},
    {"rewards": [{"name": "http", "url": f"http://127.0.0.1:9/score?api_key={KEY}"}]},
    {"engine": {"name": "vllm", "python": "/p", "env": {"HF_TOKEN": KEY}}},
    {"engine": {"name": "vllm", "python": "/p", "env": {"HTTPS_PROXY": f"http://me:{KEY}@proxy:3128"}}},
    {"engine": {"name": "vllm", "python": "/p", "options": {"hf_token": KEY}}},
    {"data": {"source": f"https://me:{KEY}@example.org/rows.jsonl"}},
    {"log": {"wandb_project": "hf_" + "a1" * 17}},
    *(
        {"log": {"wandb_project": f"sk-{key}"}}
        for key in ("a1" * 24, "proj-x_-" + "a1" * 24, "ant-api03-" + "a1" * 46)
    ),
    {"data": {"columns": {"secret": "hf_" + "a1" * 17}}},
]


@pytest.mark.parametrize("values", HELD)
def test_no_setting_holds_a_secret(monkeypatch, values):
    monkeypatch.setattr(errors, "_hidden", set())
    with raises(ConfigError, "secret-in-config") as caught:
        load_run(kind="grpo", overrides=values)
    assert KEY not in str(caught.value) and "a1a1" not in str(caught.value)
    assert KEY not in str(caught.value.data)


# Names and values that look a little like secrets, and are none.
FREE = [
    {"rewards": [{"name": "m:f", "kwargs": {"end_token": "</answer>", "max_tokens": "5", "token": "END"}}]},
    {"engine": {"name": "vllm", "python": "/p", "env": {"TOKENIZERS_PARALLELISM": "false"}}},
    {"engine": {"name": "vllm", "python": "/p", "env": {"GOOGLE_APPLICATION_CREDENTIALS": "/keys/mine"}}},
    {"engine": {"name": "vllm", "python": "/p", "env": {"HTTPS_PROXY": "http://proxy:3128"}}},
    {"data": {"system_prompt": "You advise the bearer according to the certificates of 2024."}},
    {"data": {"source": "data/sk-SK-translated-instructions-2024.jsonl"}},  # Slovak
    {"data": {"source": "data/sk-wikipedia_instructions_v2/rows.jsonl"}},
    {"data": {"source": "words.jsonl", "columns": {"secret": "word", "password": "hint"}}},
    {"eval": {"kinds": {"password": "[Pp]assword"}}},
    {"rewards": [{"name": "m:f", "kwargs": {"api_key": "EMPTY", "judge": "http://127.0.0.1:8000/v1"}}]},
]


@pytest.mark.parametrize("values", FREE)
def test_other_settings_are_taken(values):
    assert load_run(kind="grpo", overrides=values)


# (place, mode of the file, code)
PLACES = [
    ("env:FIELD_KEY", None, None),
    ("env:FIELD_KEY_THAT_IS_NOT_SET", None, "wrong-environment"),
    ("file", 0o600, None),
    ("file", 0o400, None),
    ("file", 0o644, "not-ours"),
    ("file", 0o640, "not-ours"),
    ("file:/nowhere/key", None, "cannot-read"),
]


@pytest.mark.parametrize(("place", "mode", "code"), PLACES)
def test_a_secret_is_read_where_nobody_else_reads(tmp_path, monkeypatch, place, mode, code):
    monkeypatch.setenv("FIELD_KEY", KEY)
    if mode is not None:
        (tmp_path / "key").write_text(KEY + "\n")
        (tmp_path / "key").chmod(mode)
        place = f"file:{tmp_path / 'key'}"
    if code is None:
        assert read_secrets({"key": place}, setting="rewards.secrets") == {"key": KEY}
    else:
        with raises(ConfigError, code):
            read_secrets({"key": place}, setting="rewards.secrets")


@pytest.mark.parametrize("place", [KEY, f"env:{'hf_' + 'a1' * 17}", "file:key", "env:A B"])
def test_a_place_is_no_secret(place):
    with raises(ConfigError, "wrong-format") as caught:
        load_run(kind="grpo", overrides={"rewards": [{"name": "m:f", "secrets": {"key": place}}]})
    assert KEY not in str(caught.value) and "a1a1" not in str(caught.value)


def test_a_reward_gets_its_secret_and_no_error_does(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FIELD_PLACE", KEY)
    (tmp_path / "field_reward.py").write_text(
        "def f(*, prompt, completion, row, key):\n"
        "    print('with', key)\n"
        "    if completion == 'raise': raise ValueError(f'refused: Bearer {key}')\n"
        f"    return float(key == {KEY[:9]!r} + {KEY[9:]!r})\n"
    )
    config = RewardConfig(name="field_reward:f", secrets={"key": "env:FIELD_PLACE"})
    run = load_run(kind="grpo", overrides={"rewards": [config.model_dump()]})
    assert KEY not in dump_toml(run) and "env:FIELD_PLACE" in dump_toml(run)
    rewards = RewardSet([config], search_paths=[tmp_path])
    try:
        assert rewards.score([answer("x")])[0].total == 1.0
        with raises(RewardError, "reward-failed") as caught:
            rewards.score([answer("raise")])
    finally:
        rewards.close()
    log = RunLog(tmp_path / "log")
    log.error(caught.value)
    log.close()
    out = capfd.readouterr()
    assert "with [secret]" in out.err
    for text in (str(caught.value), (tmp_path / "log").read_text(), out.err):
        assert "[secret]" in text and KEY not in text


# A key of several lines is printed by lines; what is left of a cut one is taken out as well
LINES = [f"{line:02}Zk4+{line * 7919:x}/Zk4+" + "Qx" * line for line in range(1, 9)]
CUTS = [
    (LINES[3], "[secret]"),
    (f"key = {LINES[5]!r},", "key = '[secret]',"),
    ("\n".join(LINES), "[secret]"),
    (LINES[7][-9:] + " is its end", "[secret] is its end"),
    (f"begins with {LINES[0][:8]}", "begins with [secret]"),
    ("08Zk, 4+ and Qx stay", "08Zk, 4+ and Qx stay"),
]


@pytest.mark.parametrize(("text", "expected"), CUTS)
def test_lines_and_ends_of_a_secret_are_taken_out(monkeypatch, text, expected):
    monkeypatch.setattr(errors, "_hidden", set())
    errors.hide("\n".join(LINES))
    assert errors.redacted(text) == expected


class _Echo(BaseHTTPRequestHandler):
    """A service that gives back the request that it refuses."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(body)
        if not asked["samples"]:
            status, answer = 200, {"request_id": asked["request_id"], "scores": []}
        else:
            status, answer = self.server.answer(str(self.headers), asked)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


# (what the service answers to a request with a token); the last cuts it
ECHOES = [
    lambda headers, asked: (400, {"error": headers}),
    lambda headers, asked: (200, {"request_id": headers, "scores": [1.0]}),
    lambda headers, asked: (200, {"request_id": asked["request_id"], "scores": [{"error": headers}]}),
    lambda headers, asked: (200, {"request_id": asked["request_id"], "scores": [headers]}),
    lambda headers, asked: (200, {"request_id": asked["request_id"], "scores": headers}),
    lambda headers, asked: (400, {"error": "x" * 175 + f"Bearer {KEY}"}),
]


@pytest.mark.parametrize("echo", ECHOES)
def test_a_service_that_echoes_does_not_put_the_token_into_errors(monkeypatch, echo):
    monkeypatch.setenv("FIELD_SERVICE_KEY", KEY)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as service:
        service.answer = echo
        threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        url = f"http://127.0.0.1:{service.server_port}/score"
        rewards = RewardSet([RewardConfig(name="http", url=url, token_env="FIELD_SERVICE_KEY", retries=0)])
        with raises(RewardError, "reward-failed") as caught:
            rewards.score([answer("x")])
        rewards.close()
        service.shutdown()
    assert KEY[:8] not in str(caught.value) + str(caught.value.data) + str(caught.value.__cause__)


def answer(completion: str) -> RewardInput:
    return RewardInput(
        prompt="p",
        completion=completion,
        row={},
        prompt_token_ids=(),
        completion_token_ids=(1,),
        finish_reason="stop",
    )


# end of 33


# 34. An engine server killed under two ranks: real ones are in tests/loop/test_engine_process.py


class Pair:
    """Two ranks, each in a thread of its own."""

    world_size = 2

    def __init__(self) -> None:
        self._barrier, self._flags = threading.Barrier(2), []

    def any(self, flag: bool, *, what: str) -> bool:
        self._flags.append(flag)
        self._barrier.wait(60)
        found = any(self._flags)
        if self._barrier.wait(60) == 0:
            self._flags.clear()
        self._barrier.wait(60)
        return found


class Spread:
    """Weights of which each rank has a part; counts how often it took part in gathering them."""

    shared_module = None

    def __init__(self) -> None:
        self.gathered = 0

    def weights(self, *, policy_version: int) -> Spread:
        return self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.gathered += 1
        yield "w", torch.zeros(1)


class Sent(BucketTransfer):
    """The transfer of one rank, without an engine."""

    def __init__(self, source: Spread) -> None:
        super().__init__(EngineConfig(verify="off"), MemorySender(), device=torch.device("cpu"))
        self._last = (source, "engine", 7)  # type: ignore[assignment]
        self.sent: list[tuple[object, int]] = []

    def _send(self, source: object, target: object, *, policy_version: int) -> None:
        self.sent.append((target, policy_version))
        list(source.weights(policy_version=policy_version).tensors())  # type: ignore[attr-defined]


@pytest.mark.parametrize("died", [0, 1, 2])
@pytest.mark.parametrize("failed", [False, True])
def test_all_ranks_gather_for_an_engine_that_was_started_again(died: int, failed: bool) -> None:
    """Expected: as many gathers on both ranks as engines of rank 1 died, also when rank 0 failed meanwhile,
    and both get what their calls gave: by hand."""
    pair, sources = Pair(), [Spread(), Spread()]
    transfers = [Sent(source) for source in sources]

    def zero() -> str:
        if failed:
            raise RewardError("no reward", code="reward-failed")
        return "of 0"

    def one() -> str:
        for _ in range(died):
            transfers[1]._recover()
        return "of 1"

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(transfer.serve, make, ranks=pair)
            for transfer, make in zip(transfers, (zero, one), strict=True)
        ]
        if failed:
            with raises(RewardError, "reward-failed"):
                calls[0].result(60)
        else:
            assert calls[0].result(60) == "of 0"
        assert calls[1].result(60) == "of 1"
    assert [source.gathered for source in sources] == [died, died]
    assert transfers[0].sent == [] and transfers[1].sent == [("engine", 7)] * died


def test_an_engine_that_dies_when_others_do_not_sample_ends_the_run() -> None:
    with raises(EngineError, "wrong-state"):
        Sent(Spread())._recover()


# end of 34


# 35. Settled by a test


def test_every_group_of_ranks_proves_that_it_is_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The join race: ranks meet in the store again for each group of a mesh, where a stranger may be faster.
    Expected: by hand, of 8 ranks as 2 x 2 x 2: dp, ring and tp of two ranks, and dp with ring of four."""
    proved: list[int] = []
    monkeypatch.setattr(process_group, "prove", lambda group: proved.append(dist.get_world_size(group)))
    monkeypatch.setattr(sharded_model, "group_timeout", lambda device: None)  # a fake group has none
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda timeout, group: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        sharded_model.make_mesh(torch.device("cpu"), ring=2, tp=2)
    finally:
        dist.destroy_process_group()
    assert sorted(proved) == [2, 2, 2, 4]


def _link_out(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent.parent / "secret")


def _link_to_folder(folder: Path) -> None:
    (folder / "link").symlink_to("/etc")


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "fifo")


def _bomb(folder: Path) -> None:
    with (folder / "zeros").open("wb") as file:
        file.truncate(2**30)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (_link_out, "leads-out-of-folder"),
        (_link_to_folder, "leads-out-of-folder"),
        (_fifo, "not-a-file"),
        (_bomb, "too-large"),
    ],
)
def test_submit_packs_only_what_is_below_the_working_directory(
    make: Callable[[Path], None], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected: a refusal, and nothing left; by hand."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "work/data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    make(tmp_path / "work/data")
    run = load_run(kind="grpo", overrides={"rewards": [{"name": "exact_match"}], "run_dir": "/data/run"})
    with raises(ConfigError, code), packed(run, extra=[Path("data")]):
        pass
    assert list((tmp_path / "cache/submit").iterdir()) == []


def test_submit_packs_files_that_git_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves out what a .gitignore in the folder names. Expected: the folder without it; by hand."""
    (tmp_path / "data").mkdir()
    for name in (".gitignore", ".rayignore", "rows.jsonl"):
        (tmp_path / "data" / name).write_text("*\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    run = load_run(kind="grpo", overrides={"rewards": [{"name": "exact_match"}], "run_dir": "/data/run"})
    with packed(run, extra=[Path("data")]) as folder:
        assert [str(p.relative_to(folder)) for p in sorted(folder.rglob("*.*"))] == [
            "data/rows.jsonl",
            "run.toml",
        ]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_what_a_node_unpacks_stays_in_its_folder(tmp_path: Path) -> None:
    """Ray's own unpacking, on each node. Expected: no file outside, and no link; by hand."""
    from ray._private.runtime_env.packaging import unzip_package

    archive, target = tmp_path / "package.zip", tmp_path / "there"
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("../out", str(tmp_path / "absolute"), "a/../../up", "run.toml"):
            file.writestr(name, "text")
        file.writestr(link, "/etc/passwd")
    with contextlib.suppress(ValueError, RuntimeError, OSError):  # it may refuse the whole package
        unzip_package(str(archive), str(target), remove_top_level_directory=False, unlink_zip=False)
    assert sorted(path.name for path in tmp_path.iterdir()) in (["package.zip"], ["package.zip", "there"])
    assert not any(path.is_symlink() for path in target.rglob("*"))


# end of 35
