"""Base of the engines that compute in this process, over the trainer's Parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from lockstep.common_errors import not_finite, other_shape, other_tensors
from lockstep.config.engine import EngineConfig
from lockstep.engine.receiving import dirty
from lockstep.engine.sampling import SampleState
from lockstep.engine.spec import Decoding, StopStrings
from lockstep.engine.streaming import Ended, Ending, ModelEngine, OnToken, Turn, version_counts
from lockstep.errors import EngineError
from lockstep.models.load import LoadedModel
from lockstep.observe.metrics import is_out_of_memory
from lockstep.schema.rollout import Completion, GenerationRequest
from lockstep.schema.weights import WeightUpdate


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """One sample of a turn, from the request to its end."""

    turn: Turn
    index: int
    """In the turn's request."""
    state: SampleState
    stops: StopStrings | None
    end: int
    """Tokens of prompt and completion at most."""
    logprobs: list[float] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, tokens up to its last) of the versions before the current one."""
    done: bool = False
    cached_tokens: int | None = None
    """Prompt tokens whose keys and values another sample had computed; None: it has not run."""

    @classmethod
    def of(cls, turn: Turn, index: int, *, model: LoadedModel, **own: Any) -> Self:
        """Sample `index` of a turn, before its first token."""
        request, sampling = turn.request, turn.request.sampling
        stops = None
        if sampling.stop:
            decoding = Decoding.of(model.tokenizer, sampling, eos_token_ids=model.eos_token_ids)
            stops = StopStrings(decoding, sampling.stop)
        ends = (() if sampling.ignore_eos else model.eos_token_ids) + sampling.stop_token_ids
        sample = cls(
            turn=turn,
            index=index,
            state=SampleState(
                params=sampling,
                seed=request.seeds[index],
                prompt_token_ids=request.prompt_token_ids,
                end_ids=ends,
            ),
            stops=stops,
            end=end_of(request, model),
            **own,
        )
        for span in request.begun[index] if request.begun else ():
            assert span.policy_version is not None, "written by the policy"
            sample.state.token_ids += span.token_ids
            sample.logprobs += span.logprobs
            sample.written.append((span.policy_version, len(sample.state.token_ids)))
        return sample

    def add(self, token: int, logprob: float, on_token: OnToken | None) -> Ending | None:
        """Add the next token; returns how it ends the sample, if it does.

        Raises:
            EngineError: its logprob is NaN.
        """
        state, turn = self.state, self.turn
        if logprob != logprob:
            where = f"the logits of token {len(state.token_ids)} of sample {turn.samples[self.index]}"
            raise not_finite(f"request {turn.index}: {where}")
        state.token_ids.append(token)
        self.logprobs.append(logprob)
        if on_token is not None:
            on_token(turn.index, turn.samples[self.index], state.token_ids)
        if token in state.end_ids:
            return "stop", token
        if self.stops is not None:
            stop_string = self.stops.find(state.token_ids)
            if stop_string is not None and len(state.token_ids) >= state.params.min_tokens:
                return "stop", stop_string
        return ("length", None) if state.position >= self.end else None


def end_of(request: GenerationRequest, model: LoadedModel) -> int:
    """Tokens of prompt and completion at most."""
    return min(len(request.prompt_token_ids) + request.sampling.max_tokens, model.max_positions)


def versions(sample: Sample, last: int) -> tuple[tuple[int, int], ...]:
    """Completion.versions of a sample that version `last` ended."""
    return version_counts([*sample.written, (last, len(sample.state.token_ids))])


EndedSample = tuple[Sample, Ending]


class EmbeddedEngine(ModelEngine):
    """Implements lockstep.protocols.SharesWeights over the module of `model`, whose Parameters it shares.

    It computes in the thread that calls `generate`, or that iterates `finished`. An engine says how:

        _run()              works until something has ended, see Streaming._advance
        _module             where weights that are sent are copied into
        _give_back()        frees what can be made again: caches, buffers
        _weights_changed()  drops what was computed with the old weights
        _out_of_memory()    the setting to lower first, and the error's text
        _recompute()        drops the keys of the samples, which run on, and returns the samples; an engine
                            without it takes no update while samples run
    """

    external = False
    pauses = True
    _module: nn.Module

    def __init__(self, name: str, config: EngineConfig, *, model: LoadedModel, vocab_size: int) -> None:
        super().__init__(
            name,
            vocab_size=vocab_size,
            max_positions=model.max_positions,
            tokenizer=model.tokenizer,
            eos_token_ids=model.eos_token_ids,
        )
        self._config, self._model = config, model
        self.dirty = model.weights_follow
        """Whether the weights are not those of a whole update: the engine then refuses to generate."""
        self.on_token: OnToken | None = None
        """Called after each token, in the thread that computes; set it while nothing runs."""

    def _run(self) -> Sequence[EndedSample]:
        raise NotImplementedError

    def _give_back(self) -> None:
        raise NotImplementedError

    def _out_of_memory(self) -> tuple[str, str]:
        raise NotImplementedError

    def _weights_changed(self) -> None:
        """Nothing is kept by default."""

    def _recompute(self) -> Iterable[Sample]:
        self._require_idle("update_weights")
        return ()

    def _advance(self) -> list[Ended]:
        with self._explaining_memory():
            ended = self._run()
        return [(sample.turn, sample.index, self._of(sample, ending)) for sample, ending in ended]

    def _of(self, sample: Sample, ending: Ending) -> Completion:
        completion = self._completion(
            sample.turn.request,
            sample.state.seed,
            token_ids=sample.state.token_ids,
            logprobs=sample.logprobs,
            ending=ending,
            cached_tokens=sample.cached_tokens or 0,
        )
        written = versions(sample, self._policy_version) if sample.written else ()
        if not written:
            return completion
        return replace(completion, versions=written, policy_version=written[-1][0])

    @contextlib.contextmanager
    def _explaining_memory(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            setting, text = self._out_of_memory()
            self._give_back()
            raise EngineError(text, code="out-of-memory", setting=setting) from error

    def update_weights(self, update: WeightUpdate) -> None:
        """Sample from this version from now on. Tensors are copied one at a time, so that there is never a
        second set of them. Samples of a paused engine go on with this version, if it can compute their keys
        again.

        Raises:
            EngineError: samples are running, or the update is not for this module; nothing was changed. Or
                one of its tensors does not fit, which `update.shapes` did not say: the engine is dirty.
        """
        self._require_open()
        if self._resume_by is None:
            self._require_idle("update_weights")
        for sample in self._recompute():
            sample.written.append((self._policy_version, len(sample.state.token_ids)))
        if update.shared_module is None:
            copy_weights(self._module, update, engine=self.name, begin=self._begin_copy)
        elif update.shared_module is not self._model.module:
            raise EngineError(
                f"other-model: engine {self.name} reads the Parameters of the module it was built with, but "
                "the update names another; build the engine with the trainer's model, or send tensors"
            )
        self.dirty = False
        self._weights_changed()
        self._policy_version = update.policy_version

    def _begin_copy(self) -> None:
        self.dirty = True
        _resize(self._module.parameters(), present=True)

    def _require_ready(self) -> None:
        super()._require_ready()
        if self.dirty:
            raise dirty(self.name)

    def sleep(self) -> None:
        """Free KV cache, buffers and CUDA graphs. Parameters that are the trainer's stay; those of a module
        of its own, whose weights are sent, are freed too, and the engine is dirty until the next update."""
        self._require_open()
        self._require_idle("sleep")
        self._give_back()
        if self._model.weights_follow:
            self.dirty = True
            _resize(self._module.parameters(), present=False)
        if next(self._module.parameters()).is_cuda:
            torch.cuda.empty_cache()  # until then torch keeps the memory of the CUDA graphs
        self._state = "asleep"

    def wake(self) -> None:
        self._require_open()
        self._state = "awake"

    def close(self) -> None:
        """Idempotent; every other call but `stats` is an error afterwards."""
        self._close_stream()
        self._give_back()
        self._state = "closed"


# Taking named weights over into a module.


def copy_weights(
    module: nn.Module, update: WeightUpdate, *, engine: str, begin: Callable[[], None] = lambda: None
) -> None:
    """Copy every weight of an update by its Hugging Face name, one after the other, so that there is never a
    second set of them; values are cast to the module's dtype.

    Args:
        begin: called before anything is changed, when names and shapes are known to fit if they can be.

    Raises:
        EngineError: a name is unknown, missing or duplicate, a shape differs, or two names of one tied
            weight bring different values. Nothing was changed if `update.shapes` tells; else some weights
            were.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    tensors = update.tensors()
    try:
        if update.shapes is not None:
            _check_shapes(own, update.shapes, engine=f"{engine} (left unchanged)")
        begin()
        _copy(own, tensors, engine=engine)
    except (EngineError, RuntimeError):
        # Gathering them may be collective: the other ranks go through all of them.
        for _ in tensors:
            pass
        raise


def _check_shapes(own: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], *, engine: str) -> None:
    unknown, missing = shapes.keys() - own.keys(), own.keys() - shapes.keys()
    if unknown or missing:
        raise other_tensors(EngineError, f"engine {engine}", missing, unknown)
    for name, shape in shapes.items():
        if tuple(shape) != own[name].shape:
            raise other_shape(EngineError, f"engine {engine}: weight {name!r}", shape, own[name].shape)


@torch.no_grad()
def _copy(own: Mapping[str, Tensor], tensors: Iterator[tuple[str, Tensor]], *, engine: str) -> None:
    left, first_name = set(own), dict[int, str]()
    for name, tensor in tensors:
        if name in own and name not in left:
            raise EngineError(f"duplicate: engine {engine}: the weight update contains {name!r} twice")
        if name not in own:
            raise other_tensors(EngineError, f"engine {engine}", (), [name])
        _check_shapes({name: own[name]}, {name: tensor.shape}, engine=engine)
        twin = first_name.setdefault(id(own[name]), name)
        if twin == name:
            own[name].copy_(tensor)
        elif not torch.equal(own[name], tensor.to(own[name])):
            raise EngineError(
                f"values-differ: engine {engine}: {twin!r} and {name!r} are tied, but the update contains "
                "two values for them"
            )
        left.remove(name)
        del tensor  # before the next one is made
    if left:
        raise other_tensors(EngineError, f"engine {engine}", left)


def _resize(parameters: Iterable[Tensor], *, present: bool) -> None:
    """Allocate the memory of Parameters, or free it; no effect if it is so already. Everything that refers to
    them (views, compiled layers) finds them filled again, at other addresses: CUDA graphs do not."""
    for parameter in parameters:
        storage, size = parameter.untyped_storage(), parameter.nbytes if present else 0
        if storage.nbytes() != size:
            storage.resize_(size)
