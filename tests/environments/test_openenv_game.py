"""Games on an OpenEnv server: that of its own template, on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosting import hosted, processes, run

pytest.importorskip("openenv", reason="openenv is not installed: pip install 'lockstep-rl[openenv]'")
pytestmark = pytest.mark.slow  # its import alone takes seconds

COMMON = Path(__file__).parents[1] / "common"
INIT = "from openenv.cli.__main__ import main; main()"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What `openenv init` writes, as it is."""
    folder = tmp_path_factory.mktemp("openenv")
    made = subprocess.run(
        [sys.executable, "-c", INIT, "init", "echo_env", "-o", str(folder)], capture_output=True, timeout=300
    )
    assert made.returncode == 0, made.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, cwd=folder / "echo_env")
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, seconds=300.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)


def wait_for(url: str, process: subprocess.Popen[bytes], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no answer from {url}; the server's status is {process.poll()}")


def test_a_game_on_the_server_of_the_template(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "ECHO_URL", server)

    async def played(host: Any) -> list[Any]:
        instance = await host.open({"prompt": "Echo.", "seed": 3}, seed=1)
        said: list[Any] = [await instance.reset()]
        for number, text in enumerate(("Hello", "A longer message")):
            result = await instance.step(text, turn=number)
            said.append((result.text, result.reward, result.done, result.error))
        await instance.close()
        return said

    with hosted("openenv_echo:Echo", COMMON, max_live=1, tool_seconds=120.0) as host:
        assert host.describe()["form"] == "gym"
        # The template's reward: a tenth for each character, at most 1.
        steps = [("Hello", 0.5, False, None), ("A longer message", 1.0, False, None)]
        # Its server holds one session, which the first instance has left when the second one comes.
        assert [run(played(host)) for _ in range(2)] == [["Echo Env environment ready!", *steps]] * 2
        assert processes(host) == []


def test_actions_and_observations_as_json(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_URL", server)
    sys.modules.pop("openenv_echo", None)
    import openenv_echo

    async def played() -> list[Any]:
        game = openenv_echo.Json()
        try:
            first = await game.reset(seed=3, word="not sent")
            return [first, *[await game.step(text) for text in ('{"message": "Hi"}', "Hi", "[1]")]]
        finally:
            await game.close()

    first, good, bad, worse = run(played())
    assert first["echoed_message"] == "Echo Env environment ready!"
    assert (good[0]["echoed_message"], good[0]["message_length"], good[1:]) == ("Hi", 2, (0.2, False))
    assert bad[0].startswith("error: an action is a JSON object, and this is no JSON")
    assert json.dumps(worse) == '["error: an action is a JSON object", 0.0, false]'
