"""An engine for tests only: engine `hf` with weights of its own, that come in buckets.

It is no engine of any project. It keeps the promises of `ReceivesWeights`, and breaks those that `faults`
names.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.engine.hf.engine import HFEngine
from lockstep.errors import EngineError
from lockstep.models.load import LoadedModel, attention_implementation
from lockstep.schema.weights import WeightUpdate
from lockstep.wire.buckets import HEAD_VALUES, unpack
from lockstep.wire.receive import Receiver

MADE: list[ExternalHF] = []


class ExternalHF(HFEngine):
    external = True
    update_weights = None  # type: ignore[assignment]  # as of an engine that only receives

    def __init__(self, config, *, spec, faults=()):
        super().__init__(config, model=random_model(spec))
        self.spec, self.faults = spec, set(faults)
        self.transports = ("memory", "disk")
        self.dirty, self.recover, self.session, self.receivers = True, None, None, 1
        self.log: list[str] = []
        self.sessions = 0
        self._received: dict[str, torch.Tensor] = {}
        self._receiver = Receiver(torch.device("cpu"))
        self._answers: dict[tuple[int, ...], object] = {}
        MADE.append(self)

    def generate(self, requests, *, on_completion=None, **kwargs):
        if self.dirty:
            raise EngineError("the test's engine is dirty and refuses to generate", code="wrong-state")
        results = super().generate(requests, on_completion=on_completion, **kwargs)
        if "stale" in self.faults:  # what a prefix cache that is not flushed does, as badly as can be
            for request, group in zip(requests, results, strict=True):
                known = self._answers.setdefault(request.prompt_token_ids, copy.copy(group))
                group[:] = known
        return results

    def submit_all(self, requests):
        if self.dirty:
            raise EngineError("the test's engine is dirty and refuses to generate", code="wrong-state")
        return super().submit_all(requests)

    def begin_update(self, session):
        self.log.append("begin")
        self._fail_at("begin")
        assert time.monotonic() < session.deadline
        self.dirty, self.session = True, session
        self._received = {}

    def receive(self, bucket):
        self.log.append(f"receive {bucket.index}")
        self._fail_at(f"receive {bucket.index}")
        assert self.session is not None, "receive outside of a session"
        if bucket.transport == "memory":
            tensors = unpack(bucket.data, bucket.specs)
        else:
            values = bucket.as_json()
            tensors = self._receiver.tensors(values, deadline=self.session.deadline)
        for name, tensor in tensors:
            assert name not in self._received
            self._received[name] = tensor.clone()  # the bucket's memory is reused

    def finish_update(self, session):
        self.log.append("finish")
        self._fail_at("finish")
        assert session == self.session
        if "no lm_head" in self.faults:
            own = dict(self._skeleton.module.named_parameters(remove_duplicate=False))
            self._received["lm_head.weight"] = own["lm_head.weight"].detach().clone()
        if "one wrong" in self.faults:
            self._received["model.layers.1.self_attn.k_proj.weight"] += 0.5
        received = self._received
        super_update = WeightUpdate(
            policy_version=session.policy_version, tensors=lambda: iter(received.items())
        )
        HFEngine.update_weights(self, super_update)
        self._received, self.session, self.dirty = {}, None, False
        self.sessions += 1

    def fail_update(self, reason):
        self.log.append("fail")
        self.dirty, self.session = True, None
        self.reason = reason

    def read_back(self, names):
        if "unreadable" in self.faults:
            return None
        own = dict(self._skeleton.module.named_parameters(remove_duplicate=False))
        return {name: own[name].detach().flatten()[:HEAD_VALUES].clone() for name in names}

    def memory(self):
        return {"weights": 1024.0**3}

    def describe(self):
        return {"engine": "a test's, over hf", "version": "0", "environment": {"HF_HUB_OFFLINE": "1"}}

    def sleep(self):
        self.log.append("sleep")
        super().sleep()

    def wake(self):
        self.log.append("wake")
        super().wake()

    def close(self):
        self._receiver.close()
        super().close()

    def _fail_at(self, where):
        if where in self.faults:
            raise EngineError(f"the test's engine fails at {where}", code="wrong-state")


def random_model(spec) -> LoadedModel:
    """The folder's model with weights of its own."""
    config = AutoConfig.from_pretrained(Path(spec.folder))
    torch_state = torch.get_rng_state()
    module = AutoModelForCausalLM.from_config(
        config,
        dtype=getattr(torch, spec.dtype),
        attn_implementation=attention_implementation("sdpa"),
    ).eval()
    torch.set_rng_state(torch_state)
    return LoadedModel(
        module=module,
        tokenizer=spec.tokenizer,
        eos_token_ids=spec.eos_token_ids,
        pad_token_id=0,
        dtype=getattr(torch, spec.dtype),
        name=spec.model_name,
        max_positions=spec.max_model_len,
    )


class OneWrong(ExternalHF):
    def __init__(self, config, *, spec):
        super().__init__(config, spec=spec, faults=("one wrong",))


class OneWrongUnreadable(ExternalHF):
    def __init__(self, config, *, spec):
        super().__init__(config, spec=spec, faults=("one wrong", "unreadable"))


class NoHead(ExternalHF):
    def __init__(self, config, *, spec):
        super().__init__(config, spec=spec, faults=("no lm_head",))


class NoHeadUnreadable(ExternalHF):
    def __init__(self, config, *, spec):
        super().__init__(config, spec=spec, faults=("no lm_head", "unreadable"))


class Stale(ExternalHF):
    def __init__(self, config, *, spec):
        super().__init__(config, spec=spec, faults=("stale",))


class SaysCached(ExternalHF):
    """An engine whose cache still has the prompt after an update, and that says so."""

    def generate(self, requests, **kwargs):
        results = super().generate(requests, **kwargs)
        seen = self.__dict__.setdefault("_seen", set())
        for request, group in zip(requests, results, strict=True):
            if request.prompt_token_ids in seen:
                group[:] = [dataclasses.replace(c, cached_tokens=16) for c in group]
            seen.add(request.prompt_token_ids)
        return results


class RunsOut(ExternalHF):
    """Memory runs out in its second rollout."""

    def submit_all(self, requests):
        if len(requests) > 2 and self.sessions > 1:
            raise EngineError("the test's engine ran out of memory: CUDA out of memory", code="wrong-state")
        return super().submit_all(requests)


class WrongOnRank1(ExternalHF):
    def __init__(self, config, *, spec):
        super().__init__(config, spec=spec)
        if os.environ["RANK"] == "1":
            self.faults.add("receive 0")
