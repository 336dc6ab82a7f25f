"""What the requests do: sessions, training clients, samplers and checkpoints, each of one user.

Handlers run in the server's thread and only look things up and queue; the worker's thread computes. Ids are
looked up together with their user, so somebody else's id is an unknown one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tinker import types

from lockstep.errors import DataError, EngineError, LockstepError
from lockstep.schema.rollout import GenerationRequest
from lockstep.serve import answers, wire
from lockstep.serve.losses import make_loss
from lockstep.serve.models import (
    MAX_BATCH,
    MOST_RANK,
    AdamSettings,
    AdapterSpec,
    BaseModel,
    Sampler,
    TrainingModel,
)
from lockstep.serve.ranks import RankedModel, RankModels
from lockstep.serve.run_files import ServedRun
from lockstep.serve.sessions import Client, Gone, Sampling, Session, Sessions, spec_of
from lockstep.serve.store import WEIGHTS, About, Checkpoint, Store, checked_name, expiry
from lockstep.serve.work import Answer, Job, Worker

MOST_CLIENTS = 64
"""Training clients whose adapters and optimizer states are in memory, if a server is not given a number."""
SAMPLE_SECONDS = 3600.0
"""The deadline of the sample requests that are executed together."""
MOST_SAMPLERS = 8
"""Modules with an engine, one for each shape of adapters that was sampled with lately."""
_MOST_METADATA = 2**16


class NotKept(DataError):
    """A result that is no longer there; the client sends the request again."""


class Service:
    """See the module."""

    def __init__(
        self,
        bases: Sequence[BaseModel],
        store: Store,
        *,
        most_clients: int = MOST_CLIENTS,
        sample_seconds: float = SAMPLE_SECONDS,
        ranks: RankModels | None = None,
    ) -> None:
        self.bases = {base.name: base for base in bases}
        self.store, self._sample_seconds, self._ranks = store, sample_seconds, ranks
        self.sessions = Sessions(self.bases, store, most_clients=most_clients)
        self.worker = Worker(self._sample_together, most_together=MAX_BATCH, ranks=ranks)
        self._samplers: OrderedDict[tuple[Any, ...], Sampler] = OrderedDict()
        self._salt = secrets.token_hex(16)

    def capabilities(self) -> dict[str, Any]:
        """Return the models."""
        return {
            "supported_models": [
                {
                    "model_name": base.name,
                    "max_context_length": base.max_positions,
                    "trainable": True,
                    "sampleable": True,
                }
                for base in self.bases.values()
            ]
        }

    # training clients

    def create_model(self, request: types.CreateModelRequest, user: str) -> str:
        """Queue the making of a training client; returns the request id."""
        session, base = self.sessions.get(request.session_id, user), self._base(request.base_model)
        if request.optimizer_config.type != "adamw":
            raise DataError(f"refused: optimizer {request.optimizer_config.type!r} is not served; use adamw")
        client = self._new_client(session, request.model_seq_id, base, self._spec(request.lora_config))
        client.metadata = _checked_metadata(request.user_metadata)
        if client.id in session.clients:
            return _creation(client.id)

        return self._create(session, client, {"model_id": client.id, "type": "create_model"})

    def _create(self, session: Session, client: Client, answer: dict[str, Any]) -> str:
        def run() -> Answer:
            self._trained(client)
            return _json(answer)

        request_id = self._queue(Job(_creation(client.id), client.id, run))
        session.write(client.row)
        session.clients[client.id] = client  # only now: a client that was not queued is not there
        return request_id

    def _trained(self, client: Client) -> TrainingModel | RankedModel:
        """Return a client's model, made or loaded if it is not in memory.

        Raises:
            DataError: a restart lost steps; its checkpoint is gone.
            CheckpointError: its checkpoint is damaged.
        """
        if client.lost:
            raise client.lost_steps()
        if client.model is None and client.origin is None:
            client.model = self._made(client)
        elif client.model is None:
            assert client.origin is not None
            folder = self.store.find(client.origin, owner=client.user, written=client.written).folder
            client.model = self._made(client, folder, optimizer=client.optimizer)
        return client.model

    def _made(
        self, client: Client, folder: Path | None = None, *, optimizer: bool = False
    ) -> TrainingModel | RankedModel:
        if self._ranks is not None:
            return self._ranks.make(client.base, client.spec, folder, optimizer=optimizer)
        if folder is None:
            return TrainingModel(client.base, client.spec)
        return TrainingModel.load(client.base, client.spec, folder, optimizer=optimizer)

    def _base(self, name: str) -> BaseModel:
        if name not in self.bases:
            raise DataError(
                f"unknown-name: base_model {name[:80]!r}; this server has {', '.join(self.bases)}"
            )
        return self.bases[name]

    def _new_client(self, session: Session, number: int, base: BaseModel, spec: AdapterSpec | None) -> Client:
        if not 0 <= number < 10**9:
            raise DataError(f"out-of-range: model_seq_id = {number}")
        client = Client(f"{session.id}:train:{number}", session.user, base, spec)
        if client.id not in session.clients:
            self.sessions.require_room()
        return client

    def _spec(self, config: types.LoraConfig | None) -> AdapterSpec | None:
        if config is None:
            return None
        if not 1 <= config.rank <= MOST_RANK:
            raise DataError(f"out-of-range: rank = {config.rank}; use 1 to {MOST_RANK}", field="rank")
        if not (config.train_attn or config.train_mlp):
            raise DataError("refused: adapters of the head alone are not served; set train_attn or train_mlp")
        seed = secrets.randbits(31) if config.seed is None else config.seed
        if not 0 <= seed < 2**63:
            raise DataError(f"out-of-range: seed = {seed}", field="seed")
        return AdapterSpec(
            rank=config.rank,
            seed=seed,
            attention=config.train_attn,
            mlp=config.train_mlp,
            unembed=config.train_unembed,
        )

    def info(self, model_id: str, user: str) -> dict[str, Any]:
        """Return what get_info tells of a training client."""
        client = self.sessions.client(model_id, user)
        name = client.base.name
        return {
            "type": "get_info",
            "model_id": client.id,
            "model_name": name,
            "model_data": {
                "arch": type(client.base.loaded.module).__name__,
                "model_name": name,
                "tokenizer_id": name,
            },
            "is_lora": client.spec is not None,
            "lora_rank": None if client.spec is None else client.spec.rank,
        }

    def train(self, request: wire.TrainRequest, user: str) -> str:
        """Queue a forward or forward_backward; returns the request id."""
        client = self.sessions.client(request.model_id, user)

        def run() -> Answer:
            model = self._trained(client)
            loss = make_loss(request.loss_fn, request.config)
            datums = wire.datums_of(
                request, vocab_size=model.base.vocab_size, max_positions=model.base.max_positions
            )
            if request.forward_only:
                return answers.trained(loss, datums, model.forward(datums))
            if client.run is None and not client.ended:
                client.run = ServedRun(self.store.folder(client.id), model=client.base.name)
            logprobs, metrics = model.forward_backward(datums, loss)
            if client.run is not None:
                client.run.add(loss=metrics["loss:sum"], tokens=sum(map(len, logprobs)))
                if client.ended:  # meanwhile
                    client.run.close()
            return answers.trained(loss, datums, logprobs, metrics)

        does = {"does": "forward" if request.forward_only else "train"}
        return self._step(client, request.seq_id, does, run, size=request.size)

    def optim_step(self, request: types.OptimStepRequest, user: str) -> str:
        """Queue an optimizer step; returns the request id."""
        client, params = self.sessions.client(request.model_id, user), request.optim_params

        def run() -> Answer:
            model = self._trained(client)
            if not isinstance(params, types.AdamParams):
                raise DataError(f"refused: optimizer {params.type!r} is not served; use AdamParams")
            metrics = model.optim_step(_adam(params))
            if client.run is not None:
                client.run.step(metrics, lr=params.learning_rate)
            return _json({"metrics": metrics})

        return self._step(client, request.seq_id, {"does": "train"}, run)

    def _step(
        self,
        client: Client,
        seq_id: int | None,
        does: Mapping[str, Any],
        run: Callable[[], Answer],
        *,
        size: int = 0,
    ) -> str:
        """Queue the next request of a training client. A request that was sent again is not executed again:
        it has the id of the first.

        Args:
            does: what the journal keeps of it (see sessions).
        """
        if seq_id is None or seq_id < 1:
            raise DataError(f"out-of-range: seq_id = {seq_id}; the first request of a client has 1")
        request_id = f"{client.id}:{seq_id}"
        if seq_id <= client.last_seq:
            return request_id
        if seq_id != client.last_seq + 1:
            raise DataError(
                f"out-of-order: {client.id} expects request {client.last_seq + 1}, not {seq_id}; one before "
                "it was lost, so nothing was executed",
                expected=client.last_seq + 1,
            )
        session = self.sessions.get(client.id.partition(":")[0], client.user)

        def executed() -> Answer:
            try:
                return run()
            except LockstepError:
                session.write({"client": client.number, "refused": seq_id})
                raise

        self.worker.require_room(size)
        session.write({"client": client.number, "request": seq_id, **does})
        client.last_seq, client.asked = seq_id, time.time()
        return self._queue(Job(request_id, client.id, executed, size=size))

    def _queue(self, job: Job) -> str:
        self.worker.submit(job)
        return job.id

    # checkpoints

    def save(self, request: types.SaveWeightsRequest, user: str) -> str:
        """Queue the saving of a training state; returns the request id."""
        client = self.sessions.client(request.model_id, user)
        name = checked_name(request.path or "")
        about = self._about(client, request)

        def run() -> Answer:
            fill = self._trained(client).save
            saved = self.store.write(
                client.id, "weights", name, about, fill=fill, overwrite=request.overwrite
            )
            return _json({"path": saved.path, "type": "save_weights"})

        return self._step(client, request.seq_id, {"does": "save"}, run)

    def save_for_sampler(self, request: types.SaveWeightsForSamplerRequest, user: str) -> str:
        """Queue the saving of weights to sample from; returns the request id."""
        client = self.sessions.client(request.model_id, user)
        if request.kind != "snapshot":
            raise DataError(
                f"refused: sampling clients of kind {request.kind!r} are not served; use snapshot"
            )
        name = None if request.path is None else checked_name(request.path)
        number = request.sampling_session_seq_id
        if name is None and number is None:
            raise DataError("missing-field: path or sampling_session_seq_id is needed")
        about, session = self._about(client, request), self.sessions.get(client.id.partition(":")[0], user)

        def run() -> Answer:
            model = self._trained(client)
            saved = self.store.write(
                client.id,
                "sampler_weights",
                name,
                about,
                fill=lambda folder: model.save_weights(folder / WEIGHTS),
            )
            if name is not None:
                return _json({"path": saved.path, "type": "save_weights_for_sampler"})
            sampling = Sampling(f"{session.id}:sample:{number}", user, client.base, saved)
            session.samplings[sampling.id] = sampling
            return _json({"sampling_session_id": sampling.id, "type": "save_weights_for_sampler"})

        does = {"does": "sampler", "sampling": number if name is None else None}
        return self._step(client, request.seq_id, does, run)

    def save_external(self, request: types.SaveWeightsExternalRequest, user: str) -> str:
        """Queue the writing of a folder for other programs; returns the request id."""
        client, name = self.sessions.client(request.model_id, user), checked_name(request.path)
        if request.age_encryption_recipients:
            raise DataError(
                "refused: age_encryption_recipients is not served; leave it out",
                field="age_encryption_recipients",
            )
        about = self._about(client, request)

        def run() -> Answer:
            fill = self._trained(client).export
            saved = self.store.write(client.id, "external_weights", name, about, fill=fill)
            return _json({"path": saved.path, "type": "save_weights_external"})

        return self._step(client, request.seq_id, {"does": "external"}, run)

    def _about(
        self,
        client: Client,
        request: types.SaveWeightsRequest
        | types.SaveWeightsForSamplerRequest
        | types.SaveWeightsExternalRequest,
    ) -> About:
        now = time.time()
        return About(
            owner=client.user,
            base_model=client.base.name,
            adapters=None if client.spec is None else asdict(client.spec),
            seq=request.seq_id or 0,
            time=now,
            expires_at=expiry(request.ttl_seconds, now=now),
            user_metadata=dict(getattr(request, "user_metadata", None) or {}),
            client_metadata=client.metadata,
        )

    def load(self, request: types.LoadWeightsRequest, user: str) -> str:
        """Queue the loading of a training state into a client, or into a new one; returns the request id."""
        if request.weights_access_token is not None:
            raise DataError("refused: weights_access_token is not served; use your own checkpoints")
        if request.optimizer_config is not None and request.optimizer_config.type != "adamw":
            raise DataError(f"refused: optimizer {request.optimizer_config.type!r} is not served; use adamw")
        if request.session_id is None or request.model_seq_id is None:
            return self._load_into(self.sessions.client(request.model_id or "", user), request)
        session = self.sessions.get(request.session_id, user)
        again = f"{session.id}:train:{request.model_seq_id}"
        if again in session.clients:  # perhaps its checkpoint has gone since
            return _creation(again)
        saved = self._training_state(request.path, user)
        base = self._base(request.base_model or saved.about.base_model)
        if base.name != saved.about.base_model:
            raise DataError(f"other-model: {saved.path} is of {saved.about.base_model}, not {base.name}")
        client = self._new_client(session, request.model_seq_id, base, spec_of(saved))
        client.origin, client.written = saved.path, saved.about.time
        client.optimizer, client.metadata = request.optimizer, _checked_metadata(request.user_metadata)
        answer = {"path": saved.path, "model_id": client.id, "type": "load_weights"}
        return self._create(session, client, answer)

    def _load_into(self, client: Client, request: types.LoadWeightsRequest) -> str:
        """Queue the loading of what is at the path when its turn comes: an earlier request may save there."""
        session = self.sessions.get(client.id.partition(":")[0], client.user)
        if (request.seq_id or 0) > client.last_seq:  # else it is a retry, or refused below
            self._fitting_state(client, request.path)

        def run() -> Answer:
            saved = self._fitting_state(client, request.path)
            session.write({"client": client.number, "loaded": request.seq_id, "written": saved.about.time})
            client.model, client.lost = self._made(client, saved.folder, optimizer=request.optimizer), False
            return _json({"path": saved.path, "model_id": client.id, "type": "load_weights"})

        does = {"does": "load", "path": request.path, "optimizer": request.optimizer}
        return self._step(client, request.seq_id, does, run)

    def _fitting_state(self, client: Client, path: str) -> Checkpoint:
        saved = self._training_state(path, client.user)
        if saved.about.base_model != client.base.name or _shape(spec_of(saved)) != _shape(client.spec):
            raise DataError(f"other-model: {saved.path} has another base model or other adapters")
        return saved

    def _training_state(self, path: str, user: str) -> Checkpoint:
        saved = self.store.find(path, owner=user)
        if saved.kind != "weights":
            raise DataError(f"refused: {saved.path} has no training state; give the path of a save_state")
        return saved

    # sampling

    def create_sampling(self, request: types.CreateSamplingSessionRequest, user: str) -> Sampling:
        """Open a sampling session for saved weights, or for a base model."""
        session, number = self.sessions.get(request.session_id, user), request.sampling_session_seq_id
        if not 0 <= number < 10**9:
            raise DataError(f"out-of-range: sampling_session_seq_id = {number}")
        if request.model_path is not None:
            saved = self.store.find(request.model_path, owner=user)
            if saved.kind != "sampler_weights":
                raise DataError(f"refused: {saved.path} is not sampler weights; save_weights_for_sampler")
            base, checkpoint = self._base(saved.about.base_model), saved
        else:
            base, checkpoint = self._base(request.base_model or ""), None
        sampling = Sampling(f"{session.id}:sample:{number}", user, base, checkpoint)
        if sampling.id not in session.samplings:
            path, written = (None, None) if checkpoint is None else (checkpoint.path, checkpoint.about.time)
            session.write({"sampling": number, "base": base.name, "path": path, "time": written})
        return session.samplings.setdefault(sampling.id, sampling)

    def sample(self, request: wire.SampleRequest, user: str) -> tuple[str, list[str]]:
        """Queue a sample request; returns the request id and an id for each sequence."""
        sampling = self.sessions.sampling(request.session_id, user)
        if not 0 <= request.seq_id < 2**63:
            raise DataError(f"out-of-range: seq_id = {request.seq_id}")
        request_id = f"{sampling.id}:{request.seq_id}"
        sequence_ids = [f"{request_id}:{index}" for index in range(request.n)]
        if self.worker.find(request_id) is not None:
            return request_id, sequence_ids
        prompt = torch.tensor(request.prompt, dtype=torch.int64).numpy()
        wire.check_tokens(prompt, "prompt", vocab_size=sampling.base.vocab_size)
        room = sampling.base.max_positions - len(prompt)
        if not len(prompt) or room < 1:
            raise DataError(
                f"too-long: the prompt has {len(prompt)} tokens; the model takes 1 to "
                f"{sampling.base.max_positions - 1}",
                found=len(prompt),
            )
        if request.targets is not None:
            named = request.targets[request.targets >= 0].numpy()
            wire.check_tokens(named, "target_prompt_logprobs", vocab_size=sampling.base.vocab_size)
        limit = min(request.sampling.max_tokens or room, room)
        request = dataclasses.replace(
            request, sampling=dataclasses.replace(request.sampling, max_tokens=limit)
        )
        payload = (sampling, request)
        self._queue(Job(request_id, sampling.id, batch=_kind(sampling), payload=payload, size=request.size))
        return request_id, sequence_ids

    def _sample_together(self, jobs: Sequence[Job]) -> list[Answer | LockstepError]:
        """Sample the requests of one sampling session, or of sessions with the same weights."""
        sampling: Sampling = jobs[0].payload[0]
        saved = sampling.checkpoint
        if saved is not None and not self.store.has(saved):
            raise DataError(
                "no-such-file: the weights of this sampling session are no longer kept; "
                "save_weights_for_sampler with a name keeps them"
            )
        sampler = self._sampler(sampling)
        if saved is not None:
            sampler.activate(saved.folder / WEIGHTS, written=saved.about.time)
        requests: list[wire.SampleRequest] = [job.payload[1] for job in jobs]
        groups = sampler.generate(
            [
                GenerationRequest(
                    prompt_token_ids=request.prompt,
                    sampling=request.sampling,
                    seeds=tuple(self._seed(job.id, request, index) for index in range(request.n)),
                )
                for job, request in zip(jobs, requests, strict=True)
            ],
            seconds=self._sample_seconds,
        )
        late = EngineError(
            f"deadline: the samples were not done after {self._sample_seconds:g} s; ask for fewer or shorter "
            "ones, or start the server with a higher --sample-seconds"
        )
        return [
            late
            if any(one.finish_reason == "abort" for one in group)
            else answers.sampled(sampler, request, group)
            for request, group in zip(requests, groups, strict=True)
        ]

    def _seed(self, request_id: str, request: wire.SampleRequest, index: int) -> int:
        """A sample's noise is a function of its request's seed; without one, of this server and request."""
        source = f"{self._salt} {request_id}" if request.seed is None else f"seed {request.seed}"
        digest = hashlib.blake2b(f"{source} {index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _sampler(self, sampling: Sampling) -> Sampler:
        full = sampling.checkpoint is not None and sampling.spec is None
        key = (sampling.base.name, _shape(sampling.spec), full)
        if key not in self._samplers:
            while len(self._samplers) >= MOST_SAMPLERS:
                self._samplers.popitem(last=False)[1].close()
            self._samplers[key] = Sampler(sampling.base, sampling.spec, own=full)
        self._samplers.move_to_end(key)
        return self._samplers[key]

    # results

    def job(self, request_id: str, user: str) -> Job:
        """Return a request of this user by its id.

        Raises:
            Gone: unknown, or somebody else's.
            NotKept: it is of a sampler, which can sample again.
        """
        session = self.sessions.find(request_id, user)
        found = None if session is None else self.worker.find(request_id)
        if found is not None:
            return found
        item, _, number = request_id.rpartition(":")
        if session is not None and item in session.samplings:
            raise NotKept(f"unknown-name: the result of {request_id[:120]!r} is not kept; sample again")
        client = None if session is None else session.clients.get(item)
        known = number.isascii() and number.isdecimal() and len(number) <= 20
        if client is None or not known or int(number) > client.last_seq:
            raise Gone(f"unknown-name: there is no request {request_id[:120]!r}, or no longer")
        # A request of an earlier start, or one so old that its result was dropped.
        job, seq = Job(request_id, client.id), int(number)
        answer = {"model_id": client.id, "type": "create_model"} if seq == 0 else client.answers.get(seq)
        if answer is not None:
            job.future.set_result(_json(dict(answer)))
        elif client.lost:
            job.future.set_exception(client.lost_steps())
        else:
            job.future.set_exception(DataError(f"wrong-state: the result of {request_id} is not kept"))
        return job


def _checked_metadata(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if (size := len(json.dumps(given))) > _MOST_METADATA:
        raise DataError(
            f"too-large: user_metadata has {size} bytes; keep it to {_MOST_METADATA}", field="user_metadata"
        )
    return given or {}


def _adam(params: types.AdamParams) -> AdamSettings:
    values = params.model_dump()
    settings = AdamSettings(**{field.name: values[field.name] for field in dataclasses.fields(AdamSettings)})
    checks = {
        "learning_rate": settings.learning_rate >= 0,
        "beta1": 0 <= settings.beta1 < 1,
        "beta2": 0 <= settings.beta2 < 1,
        "eps": settings.eps > 0,
        "weight_decay": settings.weight_decay >= 0,
        "grad_clip_norm": settings.grad_clip_norm >= 0,
    }
    for name, good in checks.items():
        if not good or not math.isfinite(values[name]):
            raise DataError(f"out-of-range: {name} = {values[name]}", field=name)
    return settings


def _shape(spec: AdapterSpec | None) -> AdapterSpec | None:
    return None if spec is None else spec.shape


def _kind(sampling: Sampling) -> str:
    """Requests with the same weights may be sampled together."""
    saved = sampling.checkpoint
    return sampling.base.name if saved is None else f"{sampling.base.name} {saved.path} {saved.about.time}"


def _creation(client_id: str) -> str:
    """The request that makes a client."""
    return f"{client_id}:0"


def _json(value: dict[str, Any]) -> Answer:
    return Answer(json.dumps(value).encode())
