"""The engine of a config, and several of them behind a dispatcher."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from lockstep.config.engine import EngineConfig, has_own_weights
from lockstep.engine.local_server.engine import LocalServerEngine
from lockstep.engine.spec import EngineSpec, admit_decoding, load_engine_class, require_engine
from lockstep.engine.streaming import Ended, Streaming, Turn
from lockstep.errors import ConfigError, EngineError
from lockstep.models.load import LoadedModel
from lockstep.protocols.engine import (
    EngineStats,
    Finished,
    Handle,
    InferenceEngine,
    ReceivesWeights,
    SharesWeights,
)
from lockstep.schema.contract import KernelContract
from lockstep.schema.rollout import GenerationRequest
from lockstep.schema.weights import Transport, UpdateSession, WeightBucket, WeightUpdate


def is_external(config: EngineConfig) -> bool:
    """Whether the engine has weights of its own, which must be sent to it."""
    return has_own_weights(config) or bool(load_engine_class(config.name).external)


def make_engine(
    config: EngineConfig, *, model: LoadedModel | None = None, spec: EngineSpec | None = None
) -> InferenceEngine:
    """Build the engine that `config` names; a Dispatcher when `config.replicas` is above 1.

    Args:
        model: the model that an embedded engine samples with.
        spec: for an external engine: the model that it serves, and where.

    Raises:
        ConfigError: unknown engine, or one that cannot run like this here.
        EngineError: an engine did not start; those that did are closed.
        ModelError: its decoding of this model fails the proof of lockstep.engine.spec.
    """
    factory = load_engine_class(config.name)
    if has_own_weights(config) and not factory.external:
        factory = LocalServerEngine

    def make(index: int, **inputs: LoadedModel | EngineSpec) -> InferenceEngine:
        return require_engine(factory(one_of(config, index), **inputs), name=config.name)

    if not factory.external:
        if model is None:
            raise ConfigError(
                f"missing-argument: engine {config.name!r} uses the trainer's modules, but got no model"
            )
        admit_decoding(config.name, model)
        return _together(config, lambda _: make(0, model=model), external=False)
    if spec is None:
        raise ConfigError(
            f"missing-argument: engine {config.name!r} has its own weights and needs an EngineSpec of the "
            "model, but got none"
        )
    if config.max_model_len is not None:
        spec = dataclasses.replace(spec, max_model_len=config.max_model_len)
    _check_devices(config, spec)
    return _together(
        config,
        lambda i: make(i, spec=spec_of(config, spec, i)),
        external=True,
    )


def one_of(config: EngineConfig, index: int) -> EngineConfig:
    """The config of one replica, with its own GPUs."""
    if config.replicas == 1:
        return config
    devices = config.cuda_devices[index * config.tp : (index + 1) * config.tp]
    return config.model_copy(update={"replicas": 1, "cuda_devices": devices})


def spec_of(config: EngineConfig, spec: EngineSpec, index: int) -> EngineSpec:
    """The spec of one replica: a folder of its own, and whether it shares the trainer's GPU."""
    devices = one_of(config, index).cuda_devices
    shares = spec.shares_device and (not devices or cuda_index(spec.device) in devices)
    work_dir = spec.work_dir / f"replica-{index}" if config.replicas > 1 else spec.work_dir
    return dataclasses.replace(spec, shares_device=shares, work_dir=work_dir)


def cuda_index(device: str) -> int:
    """N of "cuda:N"; 0 for "cuda"."""
    return int(device.partition(":")[2] or 0)


def _check_devices(config: EngineConfig, spec: EngineSpec) -> None:
    if spec.device == "cpu" and config.cuda_devices:
        raise ConfigError(
            f"unsupported-combination: engine.cuda_devices = {list(config.cuda_devices)} cannot be used with "
            "a model on the CPU; leave it out, or set train.device = 'cuda'"
        )
    gpus = config.replicas * config.tp
    if spec.device != "cpu" and config.url is None and gpus > 1 and not config.cuda_devices:
        raise ConfigError(
            f"contradiction: engine.replicas * engine.tp = {config.replicas} * {config.tp} needs {gpus} "
            f"GPUs, but all of them would be {spec.device}; list {gpus} GPUs in engine.cuda_devices"
        )
    if spec.device == "cpu" and config.tp > 1:
        raise ConfigError(
            f"unsupported-combination: engine.tp = {config.tp} needs GPUs to split matrices over, but the "
            "engine is on a CPU; set engine.tp = 1"
        )


def _together(
    config: EngineConfig, make: Callable[[int], InferenceEngine], *, external: bool
) -> InferenceEngine:
    """The engine, or a dispatcher over all replicas. Servers start at the same time, a minute each."""
    if config.replicas == 1:
        return make(0)
    if not external:
        return Dispatcher([cast(SharesWeights, make(index)) for index in range(config.replicas)])
    with ThreadPoolExecutor(config.replicas, thread_name_prefix="lockstep-start") as executor:
        starts = [executor.submit(make, index) for index in range(config.replicas)]
    failed = [start.exception() for start in starts]
    if any(failed):
        for start, error in zip(starts, failed, strict=True):
            if error is None:
                start.result().close()
        where, first = next((i, error) for i, error in enumerate(failed) if error is not None)
        if isinstance(first, EngineError):
            raise first.with_message(
                f"replica {where} of {config.replicas}: {first}", kind=EngineError
            ) from first
        raise first
    return DispatcherOfOwnWeights([cast(ReceivesWeights, start.result()) for start in starts])


# Several engines with the whole model each, behind the interface of one.
#
# requests ──► groups of one prompt ──► the replica with the fewest outstanding tokens ──► a thread each
#                                               ▲ next turn: the replica of the last one          │
# calling thread: Finished, one after the other ┴──────────── queue of finished samples ◄─────────┘


ABORT_SECONDS = 60.0
"""Seconds that replicas may take to stop after one of them failed."""
POLL_SECONDS = 0.2
"""Between two looks for replicas that got their first request from another thread."""

E = TypeVar("E", bound=InferenceEngine)


def assign(requests: Sequence[GenerationRequest], replicas: int) -> list[list[int]]:
    """Assign requests to replicas: for each replica the indices, in request order.

    Requests with the same prompt stay together, for the prefix cache. The largest group goes first, each to
    the replica with the fewest outstanding tokens: prompt and max_tokens of every sample that it has.

    Example:
        Prompts a, b, a, c with 100, 90, 100 and 30 tokens on 2 replicas: a and a (200) to the first, b and c
        (120) to the second: [[0, 2], [1, 3]].
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.prompt_token_ids, []).append(index)
    costs = {p: sum(outstanding_tokens(requests[i]) for i in members) for p, members in groups.items()}
    loads = [0] * replicas
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for prompt in sorted(groups, key=lambda p: (-costs[p], groups[p][0])):
        replica = loads.index(min(loads))
        loads[replica] += costs[prompt]
        shares[replica] += groups[prompt]
    return [sorted(share) for share in shares]


def outstanding_tokens(request: GenerationRequest) -> int:
    """Upper bound on the tokens of a request: prompt and max_tokens of each of its samples."""
    return len(request.seeds) * (len(request.prompt_token_ids) + request.sampling.max_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """A replica's call, or its stream, has ended."""

    replica: int
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """A sample of a replica's stream."""

    replica: int
    finished: Finished


Event = _Done | _Sample


class _Replicas(Streaming, Generic[E]):
    """Base of both kinds of dispatcher: everything but the weights."""

    def __init__(self, engines: Sequence[E]) -> None:
        super().__init__(f"in {len(engines)} replicas")
        self.engines: tuple[E, ...] = tuple(engines)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._given: int | None = None
        """The replica that gets the next request, if that is decided."""
        self._loads = [0] * len(engines)
        """Outstanding tokens of each replica."""
        self._running_on: list[dict[tuple[Handle, int], tuple[Turn, int]]] = [{} for _ in engines]
        """Of each replica, by what its stream calls a sample: the turn, and the index in its request."""
        self._homes: dict[Handle | tuple[int, ...], int] = {}
        """The replica of each request, and of each prompt, since the dispatcher was idle."""
        self._threads: set[int] = set()
        """Replicas whose stream a thread iterates."""
        self._stuck: set[int] = set()
        """Replicas that did not stop when they were aborted."""
        self.partial_rollouts = all(getattr(engine, "partial_rollouts", False) for engine in engines)

    def _submit_all(self, requests: Sequence[GenerationRequest]) -> list[Handle]:
        """All are known, so they are spread together."""
        handles: dict[int, Handle] = {}
        try:
            for replica, share in enumerate(assign(requests, len(self.engines))):
                self._given = replica
                handles |= {index: self._submit(requests[index]) for index in share}
        finally:
            self._given = None
        return [handles[index] for index in range(len(requests))]

    def _accept(self, turn: Turn) -> None:
        """Pass a turn on: the next turn of a sample to where its context is cached, a request to where its
        prompt is, or where the fewest tokens are outstanding."""
        prompt = turn.request.prompt_token_ids
        replica = self._given
        if replica is None:
            replica = self._homes.get(prompt if turn.after is None else turn.handle)
        if replica is None:
            replica = self._loads.index(min(self._loads))
        engine, handle = self.engines[replica], turn.handle
        try:
            if turn.after is None:
                handle = engine.submit(turn.request)
            else:
                before = turn.after.completion
                added = prompt[len(before.prompt_token_ids) + len(before.token_ids) :]
                engine.continue_(turn.after, added, sampling=turn.request.sampling)
        except EngineError as error:
            self._raise(replica, error)
        self._homes[prompt] = self._homes[turn.handle] = replica
        self._loads[replica] += outstanding_tokens(turn.request)
        for index, sample in enumerate(turn.samples):
            self._running_on[replica][handle, sample] = (turn, index)

    def _advance(self) -> list[Ended]:
        try:
            while True:
                for replica, running in enumerate(self._running_on):
                    if running and replica not in self._threads:
                        self._iterate(replica)
                try:
                    event = self._events.get(timeout=POLL_SECONDS)
                except queue.Empty:  # each engine keeps its own deadline
                    continue
                if isinstance(event, _Sample):
                    return [self._back(event)]
                self._threads.discard(event.replica)
                if event.error is not None:
                    self._raise(event.replica, event.error)
        except BaseException as error:
            for other in self._stop():
                error.add_note(
                    f"replica {other.replica} did not stop within {ABORT_SECONDS:g} s after the abort"
                    if other.error is None
                    else f"after that, replica {other.replica} failed too: {other.error}"
                )
            raise

    def _iterate(self, replica: int) -> None:
        """Iterate a replica's stream in a thread."""
        # The queue of now: a thread that outlives an abort must not put its samples into the next run's.
        engine, events = self.engines[replica], self._events

        def iterate() -> None:
            for finished in engine.finished():
                events.put(_Sample(replica=replica, finished=finished))

        self._threads.add(replica)
        _in_thread(iterate, replica=replica, events=events)

    def _back(self, event: _Sample) -> Ended:
        finished = event.finished
        with self._turn:
            turn, index = self._running_on[event.replica].pop((finished.handle, finished.sample))
            one = turn.request.sampling.max_tokens + len(turn.request.prompt_token_ids)
            self._loads[event.replica] -= one
        return turn, index, finished.completion

    def _require_ready(self) -> None:
        if self._stuck:
            raise EngineError(
                f"deadline: replicas {sorted(self._stuck)} of {len(self.engines)} did not stop within "
                f"{ABORT_SECONDS:g} s after the abort; build new engines"
            )

    def sleep(self) -> None:
        self._require_idle("sleep")
        self._all(lambda _, engine: engine.sleep())

    def wake(self) -> None:
        self._all(lambda _, engine: engine.wake())

    def abort(self) -> None:
        """See InferenceEngine; safe from another thread."""
        super().abort()
        for engine in self.engines:
            engine.abort()

    def stats(self) -> EngineStats:
        """Sums over replicas; the seconds are the dispatcher's, so that tokens per second count all
        replicas."""
        every = [engine.stats() for engine in self.engines]
        used = [s.kv_cache_use for s in every if s.kv_cache_use is not None]
        return EngineStats(
            policy_version=min(s.policy_version for s in every),
            requests=sum(s.requests for s in every),
            prompt_tokens=sum(s.prompt_tokens for s in every),
            cached_tokens=sum(s.cached_tokens for s in every),
            completion_tokens=sum(s.completion_tokens for s in every),
            generate_seconds=self._seconds,
            kv_cache_bytes=sum(s.kv_cache_bytes for s in every),
            queued=sum(s.queued for s in every),
            kv_cache_use=sum(used) / len(used) if used else None,
            restarts=sum(s.restarts for s in every),
            recomputed_tokens=sum(s.recomputed_tokens for s in every),
        )

    def close(self) -> None:
        """Close every replica, also when one of them raises."""
        self._close_stream()
        self._all(lambda _, engine: engine.close())

    def _end(self) -> None:
        """Nothing is left, or the rest is dropped."""
        dropped = any(self._running_on)
        failed = self._stop()
        self._homes.clear()
        if failed and not dropped:  # else there is a reason to drop, and it is raised
            self._raise(
                failed[0].replica,
                failed[0].error or EngineError("wrong-state: its stream did not end"),
            )

    def _stop(self) -> list[_Done]:
        """Abort what still runs and wait for it: an engine that generates cannot be called again. Returns
        the replicas that failed meanwhile."""
        for replica, running in enumerate(self._running_on):
            if running:
                self.engines[replica].abort()
                if replica not in self._threads:
                    self._iterate(replica)  # only its stream rids an engine of what was submitted
        deadline, failed = time.monotonic() + ABORT_SECONDS, []
        while self._threads and (left := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(event, _Done):
                self._threads.discard(event.replica)
                failed += [event] if event.error is not None else []
        self._stuck |= self._threads
        failed += [_Done(replica=replica) for replica in sorted(self._threads)]
        # A new queue: what a thread that is still stuck will say, nobody reads.
        self._events, self._threads = queue.SimpleQueue(), set()
        self._loads = [0] * len(self.engines)
        self._running_on = [{} for _ in self.engines]
        return failed

    def _all(self, call: Callable[[int, E], Any]) -> list[Any]:
        """Run `call` on every replica at the same time, with its number.

        Raises:
            EngineError: the first error in replica order, after all have ended.
        """
        replicas = range(len(self.engines))
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        for replica, engine in enumerate(self.engines):

            def run(replica: int = replica, engine: E = engine) -> Any:
                return call(replica, engine)

            _in_thread(run, replica=replica, events=events)
        done: dict[int, _Done] = {}
        while len(done) < len(replicas):
            event = events.get()  # each engine keeps its own deadline
            assert isinstance(event, _Done)
            done[event.replica] = event
        failed = [done[replica] for replica in replicas if done[replica].error is not None]
        if failed:
            first, *others = failed
            assert first.error is not None
            for other in others:
                first.error.add_note(f"replica {other.replica} failed too: {other.error}")
            self._raise(first.replica, first.error)
        return [done[replica].result for replica in replicas]

    def _raise(self, replica: int, error: BaseException) -> NoReturn:
        where = f"replica {replica} of {len(self.engines)}"
        if isinstance(error, EngineError):
            raise error.with_message(f"{where}: {error}", kind=EngineError) from error
        error.add_note(f"in {where}")
        raise error


class Dispatcher(_Replicas[SharesWeights]):
    """Replicas over the trainer's modules, or over modules in this process."""

    external = False
    contract: KernelContract | None = None

    def update_weights(self, update: WeightUpdate) -> None:
        """See SharesWeights; one replica after the other, since `update.tensors` may only be read in this
        thread."""
        self._require_idle("update_weights")
        for replica, engine in enumerate(self.engines):
            try:
                engine.update_weights(update)
            except EngineError as error:
                self._raise(replica, error)


class DispatcherOfOwnWeights(_Replicas[ReceivesWeights]):
    """Replicas that receive their weights: every bucket goes to all of them."""

    external = True

    def __init__(self, engines: Sequence[ReceivesWeights]) -> None:
        super().__init__(engines)
        self._recover: Callable[..., None] | None = None
        self._one_recovery = threading.Lock()

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transports that all replicas support, in the first one's order."""
        first, *others = (engine.transports for engine in self.engines)
        return tuple(t for t in first if all(t in other for other in others))

    @property
    def contract(self) -> KernelContract | None:
        """The kernels that all replicas compute with; None: they differ, or promise no bits."""
        first, *others = (getattr(engine, "contract", None) for engine in self.engines)
        return first if all(other == first for other in others) else None

    @property
    def dirty(self) -> bool:
        """Whether any replica is dirty."""
        return any(engine.dirty for engine in self.engines)

    def _require_ready(self) -> None:
        super()._require_ready()
        dirty = [replica for replica, engine in enumerate(self.engines) if engine.dirty]
        if dirty and not self._running:  # a replica that restarts while it generates gets its weights there
            raise EngineError(
                f"wrong-state: replicas {dirty} of {len(self.engines)} do not have the trained weights: no "
                "update was pushed, or the last one did not finish; push the weights before calling generate"
            )

    @property
    def receivers(self) -> int:
        """Worker processes of all replicas: ranks of a collective besides the trainer's."""
        return sum(self._receivers())

    def begin_update(self, session: UpdateSession) -> None:
        with self._turn:
            self._wait_until_idle("update", deadline=session.deadline)
        self._all(lambda _, engine: engine.begin_update(session))

    def receive(self, bucket: WeightBucket) -> None:
        """Send a bucket to all replicas at the same time: a broadcast waits for every one of them."""
        self._all(lambda replica, engine: engine.receive(self._bucket_of(bucket, replica)))

    def finish_update(self, session: UpdateSession) -> None:
        self._all(lambda _, engine: engine.finish_update(session))

    def fail_update(self, reason: str) -> None:
        self._all(lambda _, engine: engine.fail_update(reason))

    def _receivers(self) -> list[int]:
        return [engine.receivers for engine in self.engines]

    def _bucket_of(self, bucket: WeightBucket, replica: int) -> WeightBucket:
        """`bucket` for one replica: in a collective its workers have ranks of their own."""
        if bucket.transport != "collective" or bucket.handle is None:
            return bucket
        first = int(bucket.handle["first_rank"]) + sum(self._receivers()[:replica])
        return dataclasses.replace(bucket, handle={**bucket.handle, "first_rank": first})

    def read_back(self, names: Sequence[str]) -> dict[str, Tensor] | None:
        """Read back from the first replica; None when one of them cannot be read.

        Raises:
            EngineError: two replicas hold different values.
        """
        first: dict[str, Tensor] | None
        first, *others = self._all(lambda _, engine: engine.read_back(names))
        if first is None or any(other is None for other in others):
            return None
        for replica, other in enumerate(others, start=1):
            for name, values in first.items():
                if name not in other or not torch.equal(values, other[name]):
                    raise EngineError(
                        f"values-differ: replicas 0 and {replica} hold different values of {name!r}"
                    )
        return first

    def memory(self) -> dict[str, float]:
        """Memory in bytes that each replica reports, under "replica N, NAME"."""
        memories = self._all(lambda _, engine: engine.memory())
        return {
            f"replica {i}, {name}": value
            for i, memory in enumerate(memories)
            for name, value in memory.items()
        }

    def describe(self) -> dict[str, Any]:
        """The description of the first replica, and those of all replicas under "replicas"."""
        descriptions = [dict(engine.describe()) for engine in self.engines]
        return {**descriptions[0], "replicas": descriptions}

    @property
    def recover(self) -> Callable[..., None] | None:
        """Callback for a restarted replica: sends the current weights to that replica alone, because the
        others are generating."""
        return self._recover

    @recover.setter
    def recover(self, push: Callable[..., None] | None) -> None:
        self._recover = push
        for engine in self.engines:

            def push_to_one(engine: ReceivesWeights = engine) -> None:
                assert push is not None
                with self._one_recovery:
                    push(engine)

            engine.recover = None if push is None else push_to_one


def _in_thread(call: Callable[[], Any], *, replica: int, events: queue.SimpleQueue[Event]) -> None:
    def run() -> None:
        try:
            events.put(_Done(replica=replica, result=call()))
        except BaseException as error:  # handed to the waiting thread, which raises it
            events.put(_Done(replica=replica, error=error))

    threading.Thread(target=run, name=f"lockstep-replica-{replica}", daemon=True).start()
