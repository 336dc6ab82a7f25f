"""The interpreter of the policy: what it keeps, and what it cannot do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosting import hosted, run
from raising import raises

from lockstep.environments.host import ToolHost
from lockstep.environments.python_tool import MEMORY_BYTES
from lockstep.environments.results import ToolResult
from lockstep.errors import ConfigError
from lockstep.rollout import sandbox

pytestmark = pytest.mark.skipif(
    bool(sandbox.probe().missing), reason=f"no whole sandbox: {sandbox.probe().missing}"
)
TARGET = "lockstep.environments.python_tool:PythonTool"


@pytest.fixture(scope="module")
def host() -> Iterator[ToolHost]:
    with hosted(TARGET, Path.cwd(), tool_seconds=5.0, result_characters=1000, max_live=4) as host:
        yield host


def answers(host: ToolHost, *codes: str) -> list[ToolResult]:
    async def one() -> list[ToolResult]:
        instance = await host.open({}, seed=3)
        assert await instance.reset() is None
        results = await instance.calls([("python", {"code": code}) for code in codes], turn=0)
        await instance.close()
        return results

    return run(one())


def test_names_stay_for_a_sample(host: ToolHost) -> None:
    results = answers(host, "x = 6\ndef f(y): return x * y", "print('f:')\nf(7)", "if x: 'no value'")
    assert [result.text for result in results] == ["", "f:\n42\n", ""]
    (other,) = answers(host, "x")
    assert other.text.endswith("NameError: name 'x' is not defined\n") and other.error is None


def test_its_seed_is_the_sample_s(host: ToolHost) -> None:
    code = "import random, numpy as np; (random.random(), float(np.random.rand()))"
    assert answers(host, code)[0].text == answers(host, code)[0].text


FORBIDDEN = {
    "open('/etc/passwd')": "PermissionError",
    "open('/tmp/written', 'w')": "PermissionError",
    "import os; os.fork()": "PermissionError",
    "import os; os.kill(1, 9)": "PermissionError",
    "import subprocess; subprocess.run(['ls'])": "PermissionError",
    "import socket; socket.socket()": "PermissionError",
    "import os; os.listdir(os.path.expanduser('~'))": "PermissionError",
    f"x = bytearray({MEMORY_BYTES})": "MemoryError",
    "import sys; sys.exit(1)": "SystemExit",
    "1 +": "SyntaxError",
}


def test_what_it_cannot_do(host: ToolHost) -> None:
    results = answers(host, *FORBIDDEN, "'alive'")
    for (code, error), result in zip(FORBIDDEN.items(), results, strict=False):
        assert result.text.splitlines()[-1].startswith(error), (code, result.text)
    assert results[-1].text == "'alive'\n"


def test_no_secret_of_the_trainer_is_there(host: ToolHost, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = answers(host, "import os; sorted(os.environ)")
    allowed = {"LC_ALL", "LD_LIBRARY_PATH", "LOCKSTEP_PROCESS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    assert set(eval(result.text)) <= allowed


def test_code_that_takes_too_long_costs_the_names(host: ToolHost) -> None:
    _, late, after = answers(host, "x = 1", "while True: pass", "'x' in globals()")
    assert (late.error, after.text) == ("timeout", "False\n")
    assert late.text == (
        "error: python took longer than 5 s; the next call begins anew, without what earlier calls have left"
    )
    assert host._room._free == host.max_live


def test_a_new_interpreter_takes_the_place_of_the_old_one() -> None:
    async def both(host: ToolHost) -> tuple[ToolResult, ToolResult]:
        first = await host.open({}, seed=3)
        waits = asyncio.ensure_future(host.open({}, seed=4))
        await first.call("python", {"code": "while True: pass"}, turn=0, call=0)
        result = await first.call("python", {"code": "6 * 7"}, turn=0, call=1)
        assert not waits.done()
        await first.close()
        other = await (await waits).call("python", {"code": "6 * 8"}, turn=0, call=0)
        await waits.result().close()
        return result, other

    with hosted(TARGET, Path.cwd(), tool_seconds=2.0, max_live=1) as host:
        first, second = run(both(host))
        assert host._room._free == 1
    assert (first.text, second.text) == ("42\n", "48\n")


def test_what_it_prints_is_cut(host: ToolHost) -> None:
    (result,) = answers(host, "print('a' * 3_000_000)")
    assert result.truncated and result.text.startswith("a" * 1000 + "\n[cut: ")


FORGE = """
import os
for fd in range(3, 64):
    try:
        os.write(fd, {packet!r})
    except OSError:
        pass
"""
FORGED = [b"1", b"{", b'{"id": 2, "value": [1]}', b'{"id": 9, "value": "x", "truncated": false}']


@pytest.mark.parametrize("end", [b"\0", b"\1", b"\2"])
@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_reply_is_the_end_of_its_interpreter_only(host: ToolHost, end: bytes, forged: bytes) -> None:
    result, after = answers(host, FORGE.format(packet=end + forged), "1")
    assert (result.error, after.text) == ("died", "1\n")


def test_it_needs_a_sandbox() -> None:
    with raises(ConfigError, "unsupported-combination: environment.isolation = 'process', sandbox"):
        ToolHost(TARGET, isolation="process")


def test_a_sandbox_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weak.py").write_text(
        "from lockstep.environments.python_tool import PythonTool\n"
        "from lockstep.rollout import sandbox\n"
        "sandbox._landlock = lambda readable: 0\n"
    )
    with (
        raises(ConfigError, "refused: missing: Landlock"),
        hosted("weak:PythonTool", tmp_path, isolation="sandbox"),
    ):
        pass
