"""What an engine is given: its spec, options in its own words, and requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from lockstep.common_errors import outside_vocabulary
from lockstep.config.declarations import engines
from lockstep.config.engine import EngineConfig
from lockstep.engine import ENGINES
from lockstep.errors import ConfigError, EngineError
from lockstep.models.admission import PROVEN, Ways, check_proof, measured_gaps
from lockstep.models.architectures import text_config
from lockstep.models.load import LoadedModel, attention_implementation
from lockstep.models.miniature import documents, random_miniature
from lockstep.models.proof_rows import Gap, eager_logprobs, largest_gap
from lockstep.protocols.engine import InferenceEngine, ReceivesWeights, SharesWeights
from lockstep.registry import require_call, require_members
from lockstep.schema.rollout import GenerationRequest, SamplingParams

# Proof that the embedded engines, which decode token by token over their caches, agree with transformers'
# eager attention on prompt and completion alone: see lockstep.models.admission.


EMBEDDED = tuple(name for name, engine in engines().items() if not engine.external)
_COMPLETION = 8  # the shortest document stays within the lengths that the miniature names
_SEEDS = (1, 2)


def admit_decoding(engine: str, model: LoadedModel) -> None:
    """Let an embedded engine sample with `model` if its decoding is proven; runs the proof if need be.

    Raises:
        ModelError: it computes other numbers than transformers does; the text has both.
    """
    if engine in EMBEDDED and not model.name.startswith(PROVEN):
        decoding_proof(engine, text_config(model.module), name=model.name)


def decoding_proof(engine: str, config: PretrainedConfig, *, name: str) -> tuple[Gap, ...]:
    """Raises ModelError, see `check_proof`."""
    return check_proof(config, kind=f"decoded by {engine}", ways=_decoding(engine), name=name)


def decoding_gaps(engine: str, config: PretrainedConfig, *, name: str) -> tuple[Gap, ...]:
    """Return what `decoding_proof` checks. Raises ModelError, see `measured_gaps`."""
    return measured_gaps(config, kind=f"decoded by {engine}", ways=_decoding(engine), name=name)


def _decoding(engine: str) -> Ways:
    return lambda small: [decoded_gap(engine, small)]


def decoded_gap(engine: str, small: PretrainedConfig) -> Gap:
    """The largest logprob gap over two samples of each document as a prompt, in one batch."""
    kernel = "varlen" if engine == "native" else "sdpa"
    module = random_miniature(small, attention=attention_implementation(kernel))
    model = LoadedModel(
        module=module,
        tokenizer=None,
        eos_token_ids=(),
        pad_token_id=0,
        dtype=torch.float32,
        name="miniature",
        max_positions=1024,
    )
    sampling = SamplingParams(max_tokens=_COMPLETION)
    requests = [
        GenerationRequest(prompt_token_ids=tuple(ids), sampling=sampling, seeds=_SEEDS) for ids in documents()
    ]
    settings = {"kv_cache_tokens": 1024} if engine == "native" else {}
    instance = ENGINES.load(engine)(EngineConfig(name=engine, max_batch=8, **settings), model=model)
    try:
        completions = [sample for group in instance.generate(requests) for sample in group]
    finally:
        instance.close()
    ours = [torch.tensor(sample.logprobs) for sample in completions]
    whole = [[*sample.prompt_token_ids, *sample.token_ids] for sample in completions]
    theirs = [logprobs[-len(one) :] for logprobs, one in zip(eager_logprobs(small, whole), ours, strict=True)]
    return largest_gap(f"decoded by engine {engine}", ours, theirs, [len(ids) for ids in whole])


# Checks that an engine has the members that its protocol declares.


def load_engine_class(name: str) -> Any:
    """Import the engine that `name` means, and check it.

    Returns:
        The class, or a function that makes an engine; either has the attribute `external`.

    Raises:
        ConfigError: there is no such engine, or it lacks members; the text names all of them.
    """
    found = ENGINES.load(name)
    if inspect.isclass(found):
        wanted = ["external", *methods(protocol_of(getattr(found, "external", False)))]
    else:
        wanted = ["external"]
    what = f"engine.name = {name!r}"
    require_members(found, wanted, what=what)
    if ":" in name:
        require_call(found, "config", named=["spec" if found.external else "model"], what=what)
    return found


def require_engine(engine: Any, *, name: str) -> InferenceEngine:
    """Return `engine`. Raises ConfigError, and closes it, if it lacks a member that its protocol declares."""
    what = f"an object of engine.name = {name!r}"
    require_members(engine, ("close", "external"), what=what)
    protocol = protocol_of(engine.external)
    try:
        require_members(engine, [*methods(protocol), *attributes(protocol)], what=what)
    except ConfigError:
        engine.close()
        raise
    checked: InferenceEngine = engine
    return checked


def protocol_of(external: bool) -> type:
    """The protocol of an engine with that attribute."""
    return ReceivesWeights if external else SharesWeights


def methods(protocol: type) -> list[str]:
    """Names of the methods that `protocol` declares, inherited ones first."""
    return [
        name
        for base in _bases(protocol)
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]


def attributes(protocol: type) -> list[str]:
    """Names of the attributes that `protocol` declares, inherited ones first."""
    return [
        name
        for base in _bases(protocol)
        for name in [
            *inspect.get_annotations(base),
            *(name for name, value in vars(base).items() if isinstance(value, property)),
        ]
    ]


def _bases(protocol: type) -> list[type]:
    return [base for base in reversed(protocol.__mro__) if base.__module__ == InferenceEngine.__module__]


# What an engine that does not share the trainer's modules needs besides its config.


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """The model that an engine serves, and where it runs."""

    folder: Path
    """A Hugging Face folder; with weights "pushed" it needs the config and the tokenizer, if there is one."""
    weights: Literal["folder", "pushed"]
    """pushed: the engine starts dirty, with random weights, and the first update sends the real ones."""
    model_name: str
    """ModelConfig.name, for messages."""
    dtype: str
    """bfloat16, float16 or float32: always explicit, never the engine's "auto"."""
    vocab_size: int
    max_model_len: int
    """Longest prompt and completion together, in tokens."""
    eos_token_ids: tuple[int, ...]
    tokenizer: Any | None
    """Lockstep's tokenizer, used to find stop strings and decode texts. None: the model has none."""
    device: str
    """cpu, or cuda:N of the trainer: where an engine that gets no GPU of its own runs."""
    shares_device: bool
    """Whether a trainer uses the same GPU."""
    temperatures: frozenset[float]
    """All temperatures that will be used; some engines fix at start which logprobs they return."""
    work_dir: Path
    """For logs, folders and files of weights; the run directory's `engine/`."""
    seed: int = 0
    batch_invariant: bool = False
    """Of the trainer's forward: native in a process of its own then computes with the same kernels."""
    execution: str = "eager"
    """LoadedModel.execution of the trainer."""
    threads: int = 0
    """CPU threads of torch, which decide bits; 0: the default of the process."""


# Shared parts of the translations to vLLM and SGLang.


SHARED_MEMORY_FRACTION = 0.45
"""Fraction of a GPU that a trainer uses too: the rest is for weights, gradients and optimizer state."""


def memory_fraction(config: EngineConfig, spec: EngineSpec) -> float | None:
    """Fraction of its GPU that the engine may use; None: its own default."""
    if config.memory_fraction is not None:
        return config.memory_fraction
    return SHARED_MEMORY_FRACTION if spec.shares_device and spec.device != "cpu" else None


def checked_options(
    config: EngineConfig, own: Mapping[str, Any], *, aliases: Mapping[str, str], refused: Mapping[str, str]
) -> dict[str, Any]:
    """`config.options` under the engine's field names.

    Args:
        own: fields that are set already.
        aliases: other spellings of the engine for fields in `own`.
        refused: option -> why it may not be set, and what to set instead.

    Raises:
        ConfigError: an option that we set ourselves, or that would change what a request means.
    """
    checked = {}
    for written, value in config.options.items():
        name = written.lstrip("-").replace("-", "_")
        name = aliases.get(name, name)
        if name in refused:
            raise ConfigError(
                f"unsupported-combination: engine.options.{written} is not available: {refused[name]}"
            )
        if name in own:
            raise ConfigError(
                f"contradiction: engine.options.{written} = {value!r} would override what Lockstep sets "
                f"itself ({name} = {own[name]!r}); leave it out and use [engine] and [model] instead"
            )
        if name in checked:
            raise ConfigError(
                f"duplicate: engine.options names {name} twice ({written!r} is another spelling of it)",
                setting=f"engine.options.{name}",
            )
        checked[name] = value
    return checked


def command_flags(arguments: Mapping[str, Any], *, no_flags: bool) -> list[str]:
    """`--name value` for each argument; a switch is `--name`, or `--no-name` where the engine knows it.

    Args:
        no_flags: whether a switch can be turned off with --no-NAME; else False is left out.
    """
    flags: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is False:
            flags += [f"--no-{flag[2:]}"] if no_flags else []
        elif value is not None:
            flags += [flag, str(value)]
    return flags


def stop_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> list[int]:
    """Every id that ends a sample, each once."""
    eos = () if params.ignore_eos else eos_token_ids
    return list(dict.fromkeys((*params.stop_token_ids, *eos)))


def refusals(engine: str, params: SamplingParams) -> Callable[..., EngineError]:
    """Return what makes the error for a field of `params` that `engine` cannot honour, of
    the name, why, and what to do instead."""

    def refuse(field: str, why: str, instead: str) -> EngineError:
        value = getattr(params, field)
        return EngineError(
            f"unsupported-sampling: engine {engine} cannot honour sampling.{field} = {value!r}: {why}; "
            f"{instead}"
        )

    return refuse


def check_common(engine: str, params: SamplingParams) -> None:
    """Raises EngineError for values that vLLM and SGLang alike refuse or change."""
    refuse = refusals(engine, params)
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= getattr(params, name) <= 2.0:
            raise refuse(name, "its range is [-2, 2]", f"set {name} within it")
    if params.logprob_kind != "temperature_scaled":
        raise refuse("logprob_kind", "only one kind is known", "set 'temperature_scaled'")


def penalties_of(params: SamplingParams) -> list[str]:
    """The penalties that are on."""
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return [name for name, value in off.items() if getattr(params, name) != value]


def truncations_of(params: SamplingParams) -> list[str]:
    """The truncations that are on and have an effect: at temperature 0 none has."""
    if params.temperature == 0.0:
        return []
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    return [name for name, value in off.items() if getattr(params, name) != value]


# Checks of generation requests, before anything is computed; stop strings, and the text of a completion.


_REMEMBERED = 64


class RequestCheck:
    """Checks requests against what a model can take. May be called from any thread."""

    def __init__(
        self, *, vocab_size: int, max_positions: int, tokenizer: Any | None, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._vocab_size, self._max_positions, self._tokenizer = vocab_size, max_positions, tokenizer
        self._eos_token_ids = eos_token_ids
        self._good: tuple[SamplingParams, ...] = ()
        """Settings that were checked: the requests of a run have few different ones."""

    def __call__(self, request: GenerationRequest, *, index: int) -> None:
        """Raises EngineError naming the request, the value and what to change."""
        ids, sampling, vocab_size = request.prompt_token_ids, request.sampling, self._vocab_size
        if not ids:
            raise EngineError(
                f"empty: request {index} has an empty prompt; give it at least one token, such as the bos id"
            )
        if len(ids) >= self._max_positions:
            raise EngineError(
                f"too-long: request {index}: a prompt of {len(ids)} tokens leaves no room for a completion "
                f"in the model's {self._max_positions} positions (max_position_embeddings); lower "
                "data.max_prompt_tokens"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            token, fix = low if low < 0 else high, "the prompt was made with another tokenizer"
            raise outside_vocabulary(EngineError, f"request {index}", token, vocab_size, fix=fix)
        if sampling not in self._good:
            _check_sampling(sampling, vocab_size=vocab_size)
            check_stop_strings(self._tokenizer, sampling, eos_token_ids=self._eos_token_ids)
            self._good = (*self._good[1 - _REMEMBERED :], sampling)
        for seed in request.seeds:
            if not 0 <= seed < 1 << 63:
                raise EngineError(
                    f"out-of-range: request {index}: seed {seed} is not a 63-bit unsigned integer"
                )
        if request.begun:
            self._check_begun(request, index=index)

    def _check_begun(self, request: GenerationRequest, *, index: int) -> None:
        if len(request.begun) != len(request.seeds):
            raise EngineError(
                f"wrong-shape: request {index}: begun has {len(request.begun)} entries for "
                f"{len(request.seeds)} seeds; give one per seed, empty for a sample that has not begun"
            )
        for spans in request.begun:
            written = [token for span in spans for token in span.token_ids]
            most = min(request.sampling.max_tokens, self._max_positions - len(request.prompt_token_ids))
            if len(written) >= most:
                raise EngineError(
                    f"too-long: request {index}: a sample of {len(written)} tokens was begun, which leaves "
                    f"none of its {most}; it has ended"
                )
            if any(len(span.logprobs) != len(span.token_ids) for span in spans):
                raise EngineError(f"wrong-shape: request {index}: begun spans need a logprob per token")
            if written and not 0 <= min(written) <= max(written) < self._vocab_size:
                fix = "they were sampled from another model"
                token = min(written) if min(written) < 0 else max(written)
                raise outside_vocabulary(EngineError, f"request {index}", token, self._vocab_size, fix=fix)


def _check_sampling(p: SamplingParams, *, vocab_size: int) -> None:
    wrong = [
        (p.max_tokens < 1, f"max_tokens = {p.max_tokens} must be at least 1"),
        (
            not 0 <= p.min_tokens <= p.max_tokens,
            f"min_tokens = {p.min_tokens} must be between 0 and max_tokens = {p.max_tokens}",
        ),
        (not p.temperature >= 0.0, f"temperature = {p.temperature} must be 0 (greedy) or positive"),
        (not 0.0 < p.top_p <= 1.0, f"top_p = {p.top_p} must be in (0, 1]"),
        (p.top_k == 0 or p.top_k < -1, f"top_k = {p.top_k} must be positive, or -1 for off"),
        (not 0.0 <= p.min_p <= 1.0, f"min_p = {p.min_p} must be in [0, 1]"),
        (not p.repetition_penalty > 0.0, f"repetition_penalty = {p.repetition_penalty} must be positive"),
        (
            p.logprob_kind != "temperature_scaled",
            f"logprob_kind = {p.logprob_kind!r} is not 'temperature_scaled'",
        ),
        (
            any(not 0 <= i < vocab_size for i in p.stop_token_ids),
            f"stop_token_ids = {p.stop_token_ids} has an id outside the vocabulary of {vocab_size} entries",
        ),
    ]
    for failed, message in wrong:
        if failed:
            raise EngineError(f"out-of-range: sampling: {message}", setting=f"sampling.{message.split()[0]}")


def check_stop_strings(
    tokenizer: Any | None, sampling: SamplingParams, *, eos_token_ids: Iterable[int]
) -> None:
    """Raises EngineError for stop strings that could never be found."""
    stop = sampling.stop
    if not stop:
        return
    if tokenizer is None:
        raise EngineError(
            f"no-tokenizer: sampling.stop = {list(stop)!r} needs a tokenizer, but this model has none; set "
            "sampling.stop_token_ids"
        )
    ends = set(tokenizer.convert_ids_to_tokens(sorted(eos_token_ids)))
    skipped = set(_special_tokens(tokenizer).values()) if sampling.skip_special_tokens else set()
    for text in stop:
        if not text:
            raise EngineError(
                "empty: sampling.stop contains an empty string, which would end every sample; remove it"
            )
        if text in ends:
            raise EngineError(
                f"unsupported-combination: sampling.stop contains the end-of-sequence token {text!r}, which "
                "ends a completion anyway and is not part of its text; remove it"
            )
        if text in skipped:
            raise EngineError(
                f"unsupported-combination: sampling.stop contains the special token {text!r}, which "
                "sampling.skip_special_tokens = true leaves out of the text; set "
                "sampling.skip_special_tokens = false, or sampling.stop_token_ids = "
                f"[{tokenizer.convert_tokens_to_ids(text)}]"
            )


class StopStrings:
    """Looks for stop strings in the text of one growing completion.

    Text is decoded a few tokens at a time: a token may be part of a character or change the space before it,
    so each new piece is the difference of two decodings that start at the same earlier token. Only the tail
    that could hold the beginning of a stop string is searched again.
    """

    def __init__(self, decoding: Decoding, stop: Sequence[str]) -> None:
        self._decoding = decoding
        self._stop = tuple(stop)
        self._keep = max(len(s) for s in stop) - 1
        self._tail = ""
        self._start = 0
        self._read = 0

    def find(self, token_ids: Sequence[int]) -> str | None:
        """Find the stop string that starts first in the text of `token_ids`; None if there is none.

        Call it with the completion so far, which must grow from call to call.
        """
        before = self._decoding(token_ids[self._start : self._read])
        after = self._decoding(token_ids[self._start :])
        if after.endswith("\ufffd"):  # an incomplete character: wait for the rest of its bytes
            new = ""
        else:
            new = after[len(before) :]
            self._start, self._read = self._read, len(token_ids)
        text = self._tail + new
        matches = [(text.find(s), s) for s in self._stop if s in text]
        self._tail = text[-self._keep :] if self._keep else ""
        return min(matches)[1] if matches else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """From the token ids of a completion to the text that rewards, stop strings and files get.

    The text is what the policy wrote, without the tokens that say where it ends: every end-of-sequence id is
    left out, wherever it stands, and so is a stop id that ends a turn in the tokenizer's chat template, such
    as the id of <|im_end|> in a base model whose end of sequence is <|endoftext|>. Other special tokens stay
    unless `skip_special_tokens`; pads too, as a completion has no pads but those that were sampled.
    """

    tokenizer: Any
    end_ids: frozenset[int]
    skip_special_tokens: bool

    @classmethod
    def of(cls, tokenizer: Any, sampling: SamplingParams, *, eos_token_ids: Iterable[int]) -> Decoding:
        """Return the decoding of completions sampled with `sampling`."""
        return cls(
            tokenizer=tokenizer,
            end_ids=frozenset((*eos_token_ids, *_turn_ends(tokenizer, sampling.stop_token_ids))),
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def __call__(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, spaces left as they are."""
        return str(
            self.tokenizer.decode(
                [i for i in token_ids if i not in self.end_ids],
                skip_special_tokens=self.skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )


def _turn_ends(tokenizer: Any, stop_token_ids: Sequence[int]) -> list[int]:
    """The stop ids that are special tokens of the chat template."""
    if not stop_token_ids or not tokenizer.chat_template:
        return []
    special, template = _special_tokens(tokenizer), str(tokenizer.chat_template)
    return [i for i in stop_token_ids if i in special and special[i] in template]


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Those that decoding skips, by id; `all_special_tokens` has only those with a role, such as eos."""
    added = tokenizer.added_tokens_decoder.items()
    return {number: token.content for number, token in added if token.special}


def completion_text(
    decoding: Decoding | None, token_ids: Sequence[int], *, stop: str | None, keep: bool
) -> str | None:
    """The decoded completion, cut at the stop string that ended it (after it when `keep`)."""
    if decoding is None:
        return None
    text = decoding(token_ids)
    if stop is None:
        return text
    at = text.find(stop)
    return text if at < 0 else text[: at + len(stop) if keep else at]
