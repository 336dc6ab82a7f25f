"""Engines over fake servers, for the tests of this folder."""

import json
import os
import sys
from pathlib import Path

from sampled import engine_spec
from starting import until

from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.engine import RemoteEngine
from lockstep.engine.remote.http import HttpClient
from lockstep.engine.remote.server import (
    ServerProcess,
    ServerSpec,
    free_port,
    server_client,
    server_environment,
)
from lockstep.engine.vllm.server import VLLMDriver
from lockstep.schema.rollout import GenerationRequest, SamplingParams

FAKE = Path(__file__).with_name("fake_vllm.py")


def write_plan(folder, *starts, **every):
    path = Path(folder) / "plan.json"
    path.write_text(json.dumps({"starts": list(starts) or [{}], "all": every}))
    return path


def process(folder, *, start_seconds=20.0, port=None, token="", **environment):
    port = free_port() if port is None else port
    environment |= {"LOCKSTEP_SERVER_TOKEN": token} if token else {}
    return ServerProcess(
        ServerSpec(
            name="fake",
            command=(sys.executable, str(FAKE), str(port), str(Path(folder) / "plan.json")),
            environment=server_environment(needed={}, extra=environment),
            port=port,
            log=Path(folder) / "fake.log",
            start_seconds=start_seconds,
            grace_seconds=1.0,
            token=token,
        )
    )


def answers(server):
    """A `ready` for ServerProcess.start."""
    client = HttpClient(server.spec.url, name="fake")

    def ready():
        try:
            return None if client.get("/health", seconds=1.0).status == 200 else "not healthy"
        except Exception as error:
            return str(error)

    return ready


def spec_in(folder, **changes):
    own = {"weights": "folder", "eos_token_ids": (99,), "folder": Path(folder), "work_dir": Path(folder)}
    return engine_spec(**own | changes)


def engine_in(folder, *, config=None, spec=None, url=None, token="token of the fake"):
    """`vllm` over a fake server of its own, or over the one at `url`."""
    where = {"url": url} if url else {"python": sys.executable}
    settings = where | {"request_seconds": 20.0, "start_seconds": 20.0} | (config or {})
    config = EngineConfig(name="vllm", **settings)
    spec = spec_in(folder, **(spec or {}))
    server = None if url else process(folder, start_seconds=config.start_seconds, token=token)
    client = server_client(config, server)
    driver = VLLMDriver(config, spec, client=client, server=server)
    return RemoteEngine(config, spec=spec, client=client, driver=driver, server=server)


def requests_of(*seeds, prompt=(1, 2, 3), **sampling):
    params = SamplingParams(**({"max_tokens": 4} | sampling))
    return [GenerationRequest(prompt_token_ids=tuple(prompt), sampling=params, seeds=tuple(seeds))]


def asked(folder, path="/inference/v1/generate"):
    """Bodies that the fake was sent, in order."""
    file = Path(folder) / "plan.asked"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["body"] for line in lines if line["path"].startswith(path)]


def pids(folder):
    """Of the fake and of its child, once both run."""
    file = Path(folder) / "plan.pids"
    until(lambda: file.exists() and len(file.read_text().split()) == 2)
    return [int(p) for p in file.read_text().split()]


def kill(pid, number):
    os.kill(pid, number)
