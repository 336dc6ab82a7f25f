"""The real `tinker` client against a server, and plain requests to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.engine.remote.server import free_port

tinker = pytest.importorskip("tinker", reason="the client of the API; `pip install lockstep-rl[serve]`")
types = tinker.types
PROMPT = [5, 6, 7, 8, 9]
SECONDS = 240


class Killable:
    """`lockstep serve` as a process of its own, always on the same port and directory."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory, self.port, self._flags = directory, free_port(), flags
        self._errors = directory.with_name(f"{directory.name}.err")
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        self.tokens = json.loads((directory / "tokens.json").read_text())
        self.store = SimpleNamespace(directory=directory)

    def start(self) -> None:
        command = [sys.executable, "-m", "lockstep", "serve", "--model", "tiny=shape:tiny-qwen3"]
        command += [*self._flags, "--dir", str(self.directory), "--port", str(self.port), "--user", "ada"]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ)
            )
        assert self.process.stdout is not None
        assert any(line.strip() == "serve: ready" for line in self.process.stdout)

    def another(self) -> str:
        """What a second server in the same directory says."""
        command = [*self.process.args[:-3], str(self.port + 1), "--user", "ada"]  # type: ignore[index]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False).stderr

    def told(self) -> str:
        """What the server wrote to stderr."""
        return self._errors.read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def restart(self) -> None:
        self.kill()
        self.start()


def datum(tokens: list[int], **floats: list[float]) -> Any:
    """A document whose targets are its next tokens."""
    inputs = {"target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])}
    for name, values in floats.items():
        inputs[name] = types.TensorData(data=values, dtype="float32", shape=[len(values)])
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def sampled(sampler: Any, *, n: int = 2, **params: Any) -> Any:
    request = types.SamplingParams(**{"max_tokens": 8, "seed": 3, **params})
    return sampler.sample(types.ModelInput.from_ints(PROMPT), n, request).result(SECONDS)


def forward(client: Any, tokens: list[int]) -> torch.Tensor:
    """The logprobs of all tokens but the first, by the trainer."""
    data = [datum(tokens, weights=[0.0] * (len(tokens) - 1))]
    output = client.forward(data, "cross_entropy").result(SECONDS)
    return output.loss_fn_outputs[0]["logprobs"].to_torch()


def gap(client: Any, sequence: Any) -> float:
    """The largest |trainer - sampler| over a sample's tokens, nats."""
    trainer = forward(client, [*PROMPT, *sequence.tokens])[len(PROMPT) - 1 :]
    return float((trainer - torch.tensor(sequence.logprobs)).abs().max())


def post(
    served: Any, path: str, body: Any, *, user: str | None = "ada", **headers: str
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer; body: bytes, or a value that is sent as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{served.url}/api/v1/{path}", raw, headers, method="POST")
    if user is not None:
        request.add_header("X-API-Key", served.tokens[user])
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def message(model_id: str, seq_id: int = 1, tokens: bytes = b"\5\0\0\0", **floats: bytes) -> bytes:
    from tinker.proto import tinker_public_pb2 as pb

    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    one = request.data.add()
    one.model_input.add().encoded_text.tokens = tokens
    target = one.loss_fn_inputs["target_tokens"]
    target.dtype, target.dense = pb.DTYPE_INT64, floats.pop("targets", b"\6" + bytes(7))
    for name, raw in floats.items():
        one.loss_fn_inputs[name].dtype, one.loss_fn_inputs[name].dense = pb.DTYPE_FLOAT32, raw
    encoded: bytes = request.SerializeToString()
    return encoded


def result(served: Any, request_id: str, user: str = "ada") -> dict[str, Any]:
    while True:
        status, answer = post(served, "retrieve_future", {"request_id": request_id}, user=user)
        if status != 408:
            return answer


def weights(served: Any, client: Any, name: str) -> dict[str, torch.Tensor]:
    """The trained weights, from the file that a sampler reads."""
    from safetensors.torch import load_file

    client.save_weights_for_sampler(name).result(SECONDS)
    folder = served.store.directory / "models" / client.model_id / "sampler_weights" / name
    return load_file(folder / "weights.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
