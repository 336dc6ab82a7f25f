"""A test's engine that only holds weights: its workers are processes (tests/wire/receiver_worker.py) that say
what they got. It cannot generate."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

import torch

from lockstep.errors import EngineError
from lockstep.protocols.engine import EngineStats
from lockstep.schema.weights import WeightUpdate

WORKER = Path(__file__).parents[1] / "wire/receiver_worker.py"


class Source:
    """A train backend as far as a transfer needs one. `read` counts the tensors that were taken."""

    def __init__(self, tensors: dict[str, torch.Tensor], *, whole: bool = True) -> None:
        self.tensors, self.read, self.whole = tensors, 0, whole

    def weights(self, *, policy_version: int) -> WeightUpdate:
        def each():
            for name, tensor in self.tensors.items():
                self.read += 1
                yield name, tensor

        module = torch.nn.Identity() if self.whole else None
        return WeightUpdate(policy_version=policy_version, tensors=each, shared_module=module)


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of several dtypes; embed and lm_head are tied."""
    generator = torch.Generator().manual_seed(seed)
    weights = {"embed": torch.randn(40, 8, generator=generator).bfloat16()}
    for layer in range(3):
        weights[f"layers.{layer}.q"] = torch.randn(8, 8, generator=generator).bfloat16()
        weights[f"layers.{layer}.norm"] = torch.randn(7, generator=generator)
    return weights | {"lm_head": weights["embed"]}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    found = {}
    for name, tensor in tensors.items():
        data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
    return found


class Holder:
    external = True

    def __init__(self, transport, *, workers=1, todo=(), answer_seconds=None, device="cpu"):
        self.transports, self.receivers = (transport,), workers
        self.dirty, self.held, self.reason = True, {}, ""
        self.log: list[str] = []
        self.restarts, self.answer_seconds, self.recover = 0, answer_seconds, None
        self._device = device
        self.start(todo)

    def start(self, todo=()):
        environment = os.environ | {"RECEIVER_DEVICE": self._device}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(rank), *(todo if rank == self.receivers - 1 else ())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(self.receivers)
        ]

    def stats(self):
        return EngineStats(
            policy_version=0,
            requests=0,
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
            generate_seconds=0.0,
            kv_cache_bytes=0,
            restarts=self.restarts,
        )

    def memory(self):
        return {}

    def begin_update(self, session):
        self.log.append("begin")
        self.dirty, self.session, self.held = True, session, {}

    def receive(self, bucket):
        self.log.append(f"receive {bucket.index}")
        seconds = self.session.deadline - time.monotonic()
        values = bucket.as_json()
        self.handle = bucket.handle
        self.bytes = getattr(self, "bytes", 0) + bucket.num_bytes
        for process in self.processes:
            try:
                process.stdin.write(json.dumps({"bucket": values, "seconds": seconds}) + "\n")
                process.stdin.flush()
            except BrokenPipeError as error:
                raise EngineError("a worker is gone", code="wrong-state") from error
        answers = self._answers(self.answer_seconds or seconds)
        assert all(answer == answers[0] for answer in answers)
        assert not answers[0].keys() & self.held.keys()
        self.held |= answers[0]

    def _answers(self, seconds):
        """Of all workers; the first failure is everyone's."""
        found, deadline = [], time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                selector.register(process.stdout, selectors.EVENT_READ, process)
            while len(found) < self.receivers:
                ready = selector.select(max(deadline - time.monotonic(), 0.01))
                if not ready:
                    raise EngineError("a worker did not answer", code="wrong-state")
                for key, _ in ready:
                    line = key.fileobj.readline()
                    if not line:
                        raise EngineError(
                            f"a worker ended with exit status {key.data.wait()}", code="wrong-state"
                        )
                    answer = json.loads(line)
                    if "error" in answer:
                        raise EngineError(f"a worker says: {answer['error']}", code="wrong-state")
                    found.append(answer["tensors"])
        return found

    def finish_update(self, session):
        self.log.append("finish")
        self.dirty = False

    def fail_update(self, reason):
        self.log.append("fail")
        self.dirty, self.reason = True, reason

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
