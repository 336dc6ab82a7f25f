"""ServerProcess with real processes: fakes of vLLM's server (fake_vllm.py), which load no model."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from raising import raises
from starting import alive, until

from lockstep import errors
from lockstep.engine.remote import server as server_module
from lockstep.engine.remote.server import (
    check_interpreter,
    check_port_free,
    free_port,
    masked,
    server_environment,
    server_gpus,
)
from lockstep.errors import ConfigError, EngineError
from lockstep.processes.programs import MARKER

from .servers import answers, kill, pids, process, write_plan


@pytest.fixture
def started(tmp_path):
    """Servers that are ended after the test, whatever happened."""
    servers = []

    def start(*plan, **settings):
        write_plan(tmp_path, *plan)
        servers.append(process(tmp_path, **settings))
        servers[-1].start(answers(servers[-1]))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_a_server_answers_is_seen_and_ended_with_all_its_processes(started, tmp_path):
    server = started({"grandchild": True})
    assert server.ended() is None and server.starts == 1
    fake, child = pids(tmp_path)
    assert alive(fake) and alive(child)
    server.stop()
    assert not alive(fake) and not alive(child)
    assert server.ended() == "was not started" and server.pid is None
    server.stop()  # again: nothing


def test_health_deadline_shows_the_log_and_what_is_waited_for(tmp_path):
    write_plan(tmp_path, {"silent": True, "print": "loading a very large model"})
    server = process(tmp_path, start_seconds=1.0)
    with pytest.raises(EngineError) as caught:
        server.start(answers(server))
    text = str(caught.value)
    assert "engine.start_seconds = 1" in text and "loading a very large model" in text
    assert f"GET {server.spec.url}/health" in text and "Connection refused" in text
    assert str(server.spec.log) in text
    assert server.ended() is not None


def test_unhealthy_is_not_ready(tmp_path):
    write_plan(tmp_path, {"health": 503})
    server = process(tmp_path, start_seconds=1.0)
    with raises(EngineError, "deadline: engine.start_seconds"):
        server.start(answers(server))


def test_death_at_start_shows_the_reason(tmp_path):
    noise = "(EngineCore pid=7) ERROR 11-21 03:51:40 [core.py:1] ValueError: no kernel for head_dim=16\\n"
    warning = "(APIServer pid=7) WARNING 11-21 03:51:40 [x.py:1] KeyError: harmless"
    last = "\\n".join(f"frame {i}" for i in range(40)) + "\\nRuntimeError: see above"
    write_plan(tmp_path, {"exit": 3, "print": f"{warning}\n{noise}{last}".replace("\\n", "\n")})
    server = process(tmp_path)
    with pytest.raises(EngineError) as caught:
        server.start(answers(server))
    text = str(caught.value)
    assert "exited with status 3" in text
    assert "The first error in its log: ValueError: no kernel for head_dim=16" in text
    assert "frame 39" in text and "frame 1\n" not in text


def test_secrets_in_the_log_are_not_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "_hidden", {"bell\x07-in-a-token", "-----KEY\nof-two-lines\nKEY-----"})
    monkeypatch.setenv("HTTPS_PROXY", "http://me:pass%21word@proxy:3128")
    monkeypatch.setenv("HF_TOKEN", "0123456789-of-the-hub")
    lines = "ProxyError: http://me:pass%21word@proxy:3128\nauth pass!word\nbell\x07-in-a-token\n"
    lines += "-----KEY\nof-two-lines\nKEY-----\n0123456789-of-the-hub\nRuntimeError: no model\n"
    server = process(tmp_path)
    server.spec.log.write_text("0123456789-of-the-hub\n" + lines)
    monkeypatch.setattr(server_module, "_TAIL_BYTES", len(lines) + 8)  # from "the-hub" on
    text = str(EngineError(server.log_text(), code="process-died"))
    assert [line.strip() for line in text.splitlines()] == [
        "The first error in its log: ProxyError: http://[secret]@proxy:3128",
        f"The end of its log, {server.spec.log}:",
        "[secret]",
        "ProxyError: http://[secret]@proxy:3128",
        "auth [secret]",
        "[secret]",
        "[secret]",
        "[secret]",
        "RuntimeError: no model",
    ]


def test_death_by_signal_is_named(started):
    server = started({"grandchild": True})
    fake, child = pids(server.spec.log.parent)
    kill(fake, signal.SIGKILL)
    assert server.wait_ended(15.0) == "was killed by SIGKILL"
    assert not alive(child)  # what it had started went with it


def test_a_command_that_does_not_exist(tmp_path):
    write_plan(tmp_path)
    server = process(tmp_path)
    object.__setattr__(server.spec, "command", (str(tmp_path / "nothing"), "x"))
    with raises(EngineError, "process-died", reason="exited with status 127"):
        server.start(answers(server))


def test_port_in_use(tmp_path):
    write_plan(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with raises(EngineError, "port-in-use"):
            check_port_free(port, name="vllm")
        server = process(tmp_path, port=port)
        with raises(EngineError, "port-in-use"):
            server.start(answers(server))
        assert server.starts == 0
    check_port_free(port, name="vllm")


def test_a_port_taken_while_the_server_starts(tmp_path):
    write_plan(tmp_path, {"exit": 1, "print": "OSError: [Errno 98] Address already in use"})
    server = process(tmp_path)
    with raises(EngineError, "port-in-use", during="start"):
        server.start(answers(server))


def test_free_ports_are_given_out_once():
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200


def test_no_connection_is_given_a_free_port():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < first for port in (free_port() for _ in range(50)))


def test_environment_is_explicit(started, tmp_path, monkeypatch):
    for name in ("RANK", "MASTER_PORT", "PYTHONPATH", "MY_SECRET_SETTING"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    seen = tmp_path / "environment.json"
    server = started({"environment": str(seen)}, NCCL_SOCKET_IFNAME="lo", HF_HOME="/ours")
    theirs = json.loads(seen.read_text())
    ours = dict(server.spec.environment)
    for environment in (theirs, ours):
        environment.pop(MARKER, None)  # of every process that we start
        environment.pop("LC_CTYPE", None)  # each Python sets it for itself in an environment without a locale
    assert theirs == ours
    assert theirs["NCCL_DEBUG"] == "INFO" and theirs["NCCL_SOCKET_IFNAME"] == "lo"
    assert theirs["HF_HOME"] == "/ours" and theirs["HF_TOKEN"] == "hf_verysecret"
    assert not {"RANK", "MASTER_PORT", "PYTHONPATH", "MY_SECRET_SETTING"} & set(theirs)
    log = server.spec.log.read_text()
    assert "environment: NCCL_SOCKET_IFNAME=lo" in log
    assert "environment: HF_TOKEN=(set)" in log and "verysecret" not in log
    assert f"command: {sys.executable}" in log


def test_environment_order_and_secrets():
    base = {"PATH": "/bin", "HF_HOME": "/base", "VLLM_X": "base", "EDITOR": "vi", "CUDA_VISIBLE_DEVICES": "3"}
    found = server_environment(
        needed={"VLLM_X": "needed", "VLLM_Y": "needed"}, extra={"VLLM_Y": "user"}, base=base
    )
    assert found == {
        "PATH": "/bin",
        "HF_HOME": "/base",
        "VLLM_X": "needed",
        "VLLM_Y": "user",
        "CUDA_VISIBLE_DEVICES": "3",
        "PYTHONUNBUFFERED": "1",
    }
    assert masked({"HF_TOKEN": "x", "VLLM_API_KEY": "y", "EMPTY_TOKEN": "", "HF_HOME": "/a"}) == {
        "HF_TOKEN": "(set)",
        "VLLM_API_KEY": "(set)",
        "EMPTY_TOKEN": "",
        "HF_HOME": "/a",
    }


@pytest.mark.parametrize(
    ("devices", "device", "visible", "expected"),
    [
        ((), "cpu", "0", ""),
        ((), "cuda:1", None, "1"),
        ((), "cuda:1", "4,6", "6"),
        ((), "cuda", "5", "5"),
        ((0, 1), "cuda:0", "4,6", "4,6"),
        ((2, 3), "cuda:0", None, "2,3"),
        ((1,), "cuda:0", "GPU-a,GPU-b", "GPU-b"),
    ],
)
def test_gpus_of_a_server(devices, device, visible, expected):
    assert server_gpus(devices, device=device, visible=visible) == expected


def test_a_gpu_that_is_not_visible_is_refused():
    with raises(ConfigError, "wrong-environment: engine.cuda_devices"):
        server_gpus((2,), device="cuda:0", visible="4,6")


def test_an_interpreter_that_is_none(tmp_path):
    check_interpreter(Path(sys.executable))
    for wrong in (tmp_path, tmp_path / "missing", Path(__file__)):
        with raises(ConfigError, "not-a-file: engine.python"):
            check_interpreter(wrong)


OWNER = """
import sys, threading, time
sys.path[:0] = {paths!r}
from servers import answers, process
server = process({folder!r})
def start():
    server.start(answers(server))
thread = threading.Thread(target=start)  # a server outlives the thread that started it
thread.start()
thread.join()
time.sleep(1.0)
print("up" if server.ended() is None else "gone", flush=True)
{then}
"""


def owner(folder, then="time.sleep(600)"):
    write_plan(folder, {"grandchild": True})
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "common")]
    code = OWNER.format(paths=paths, folder=str(folder), then=then)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "up\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_when_the_owner_is_killed(tmp_path, number):
    child = owner(tmp_path)
    processes = pids(tmp_path)
    assert all(alive(p) for p in processes)
    kill(child.pid, number)
    child.wait(10)
    until(lambda: not any(alive(p) for p in processes))


def test_no_orphan_when_the_owner_is_killed_but_a_fork_of_it_lives(tmp_path):
    """A fork holds the other end of the watcher's pipe open, so the pipe alone would not tell."""
    then = "import os\npid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(60)"
    child = owner(tmp_path, then=then)
    processes, fork = pids(tmp_path), int(child.stdout.readline())
    try:
        kill(child.pid, signal.SIGKILL)
        child.wait(10)
        until(lambda: not any(alive(p) for p in processes))
        assert alive(fork)
    finally:
        kill(fork, signal.SIGKILL)


def test_no_orphan_when_the_owner_ends_without_a_word(tmp_path):
    child = owner(tmp_path, then="")
    assert child.wait(30) == 0
    until(lambda: not any(alive(p) for p in pids(tmp_path)))


def test_the_server_ends_with_its_watcher(started, tmp_path):
    server = started({"grandchild": "near"})
    fake, child = pids(tmp_path)
    kill(server.pid, signal.SIGKILL)
    until(lambda: not alive(fake))  # by the kernel, whether we look or not
    assert server.wait_ended(5.0) == "was killed by SIGKILL"
    assert not alive(child)


def test_stop_after_the_watcher_was_killed_leaves_nothing(started, tmp_path):
    server = started({"grandchild": "near"})
    processes = pids(tmp_path)
    kill(server.pid, signal.SIGKILL)
    server.stop()
    assert not any(alive(p) for p in processes)


def test_a_server_starts_again_in_the_same_log(started, tmp_path):
    server = started({"print": "first life"}, {"print": "second life"})
    server.start(answers(server))
    assert server.starts == 2 and server.ended() is None
    log = server.spec.log.read_text()
    assert "first life" in log and "=== lockstep: start 2 of the fake server" in log
    text = server.log_text()
    assert "second life" in text and "first life" not in text


def test_stop_from_another_thread_ends_a_start(tmp_path):
    write_plan(tmp_path, {"silent": True})
    server = process(tmp_path, start_seconds=60.0)
    caught = []

    def start():
        try:
            server.start(answers(server))
        except EngineError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    until(lambda: server.pid is not None)
    server.stop()
    thread.join(20)
    assert not thread.is_alive() and "before it answered" in str(caught[0])


def test_environment_of_this_process_is_left_alone(started):
    before = dict(os.environ)
    started({})
    assert dict(os.environ) == before
