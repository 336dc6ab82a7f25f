"""A server that we start answers nobody who does not know its token, and nobody else can read that."""

import asyncio
import contextlib
import json
import os
import stat
import sys
from pathlib import Path

import pytest
from raising import raises

from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.http import HttpClient
from lockstep.engine.remote.server import server_client
from lockstep.engine.vllm import server as vllm_server
from lockstep.engine.vllm.server import Installed
from lockstep.errors import ConfigError, EngineError
from lockstep.wire.server_token import TOKEN, RequireToken

from .servers import engine_in, requests_of, spec_in, write_plan
from .sglang import fakes as sglang

SECRET = "0123456789abcdef" * 4


def call(headers, *, kind="http", path="/collective_rpc"):
    """What the middleware sends, and whether it lets the request through."""
    sent, passed = [], []

    async def app(scope, receive, send):
        passed.append(scope["type"])

    async def send(message):
        sent.append(message)

    async def receive():
        raise AssertionError("nothing is read of a request that is refused")

    scope = {"type": kind, "path": path, "headers": headers}
    asyncio.run(RequireToken(app)(scope, receive, send))
    return sent, passed


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ([(b"host", b"x"), (b"authorization", f"Bearer {SECRET}".encode())], True),
        ([(b"Authorization", f"Bearer {SECRET}".encode())], True),
        ([], False),
        ([(b"authorization", SECRET.encode())], False),
        ([(b"authorization", b"Bearer ")], False),
        ([(b"authorization", f"Bearer {SECRET}x".encode())], False),
        ([(b"authorization", b"Bearer x"), (b"authorization", f"Bearer {SECRET}".encode())], False),
        ([(b"authorization", "Bearer \u00e9".encode("latin-1"))], False),
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_middleware_wants_the_token_on_every_path(monkeypatch, headers, passes, kind):
    monkeypatch.setenv(TOKEN, SECRET)
    for path in ("/collective_rpc", "/v1/models", "/health", "/sleep"):
        sent, passed = call(headers, kind=kind, path=path)
        assert passed == ([kind] if passes else [])
        refusal = [("http.response.start", 401), ("http.response.body", None)]
        refusal = refusal if kind == "http" else [("websocket.close", None)]
        assert [(m["type"], m.get("status")) for m in sent] == ([] if passes else refusal)
        if kind == "http" and not passes:
            assert dict(sent[0]["headers"])[b"content-length"] == str(len(sent[1]["body"])).encode()
    assert call([], kind="lifespan")[1] == ["lifespan"]


def test_vllm_gets_its_token_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(
        vllm_server, "installed_vllm", lambda python: Installed(version="0.32.0", scale_out=False)
    )
    monkeypatch.setenv("VLLM_API_KEY", "of another server")
    config = EngineConfig(name="vllm", python=Path(sys.executable))
    first, second = (vllm_server.make_server(config, spec_in(tmp_path)).spec for _ in range(2))
    assert len(first.token) == 64 and first.token != second.token
    assert first.environment["VLLM_API_KEY"] == first.environment[TOKEN] == first.token
    assert first.token not in " ".join(first.command) + repr(first)
    at = first.command.index("--middleware")
    assert first.command[at + 1] == "lockstep.wire.server_token.RequireToken"
    with raises(ConfigError, "contradiction: engine.env.VLLM_API_KEY"):
        vllm_server.make_server(config.model_copy(update={"env": {"VLLM_API_KEY": "x"}}), spec_in(tmp_path))


PATHS = ("/version", "/model_info", "/server_info", "/v1/models", "/generate", "/inference/v1/generate")


def check_private(engine, log):
    """Others are answered 401, and neither description nor log says the token."""
    spec = engine._server.spec
    stranger = HttpClient(spec.url, name="stranger", headers={"Authorization": "Bearer x"})
    for path in PATHS:
        assert stranger.get(path, seconds=5.0).status == stranger.post(path, {}, seconds=5.0).status == 401
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                assert spec.token.encode() not in (entry / "cmdline").read_bytes()
    assert stat.S_IMODE(os.stat(log).st_mode) == 0o600
    assert spec.token not in Path(log).read_text() + json.dumps(engine.describe()) + repr(spec)


def test_the_fake_vllm_answers_us_alone(tmp_path):
    write_plan(tmp_path)
    engine = engine_in(tmp_path, token=SECRET)
    try:
        assert len(engine.generate(requests_of(1))[0]) == 1
        check_private(engine, tmp_path / "fake.log")
        engine._server.spec.log.write_text(f"ValueError: api_key='{SECRET}'\n")
        engine._server._log_start = 0
        assert "api_key='(token)'" in engine._server.log_text()
    finally:
        engine.close()


def test_the_fake_sglang_answers_us_alone(tmp_path):
    engine = sglang.engine_in(tmp_path)
    try:
        assert len(engine.generate([sglang.request(1)])[0]) == 1
        check_private(engine, tmp_path / "engine" / "sglang.log")
        file = tmp_path / "engine" / "sglang-token.yaml"
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        assert file.read_text() == f'api-key: "{engine._server.spec.token}"\n'
    finally:
        engine.close()


def test_the_token_of_a_server_at_a_url_comes_from_the_environment(tmp_path, monkeypatch):
    write_plan(tmp_path)
    owner = engine_in(tmp_path, token=SECRET)
    url = owner._server.spec.url
    try:
        with raises(EngineError, "unreachable: engine.url"):
            engine_in(tmp_path, url=url)
        with raises(ConfigError, "wrong-environment: engine.token_env"):
            engine_in(tmp_path, url=url, config={"token_env": "OF_MINE"})
        monkeypatch.setenv("OF_MINE", SECRET)
        guest = engine_in(tmp_path, url=url, config={"token_env": "OF_MINE"})
        assert SECRET not in json.dumps(guest.describe())
        guest.close()
        for bad in ("a\r\nHost: evil", "\u00e9"):
            monkeypatch.setenv("OF_MINE", bad)
            with raises(ConfigError, "wrong-environment: engine.token_env"):
                server_client(EngineConfig(name="vllm", url=url, token_env="OF_MINE"), None)
    finally:
        owner.close()
    with raises(ValueError, "no-effect: engine.token_env"):
        EngineConfig(name="vllm", python=Path("/p"), token_env="OF_MINE")
