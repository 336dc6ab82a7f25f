"""Our config and sampling parameters as SGLang's arguments. Written against SGLang 0.5.16 to 0.5.23."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from lockstep.common_errors import not_finite
from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.driver import Job, Sample, logprobs, mapping, token_ids, whole
from lockstep.engine.remote.http import BadReply
from lockstep.engine.spec import (
    EngineSpec,
    StopStrings,
    check_common,
    checked_options,
    command_flags,
    memory_fraction,
    penalties_of,
    refusals,
    stop_ids,
)
from lockstep.errors import ConfigError, EngineError
from lockstep.observe.text import printable
from lockstep.schema.rollout import SamplingParams

ENGINE = "sglang"
LOWEST_TEMPERATURE = 1e-6
"""SGLang is greedy below."""
SPARE_CONTEXT = 8
"""Positions that SGLang gets beyond ours: it ends samples a few tokens before its context does, and refuses
prompts that reach within 6 of it. The engine's client keeps samples within ours."""
EAGER = ("disable_decode_cuda_graph", "disable_prefill_cuda_graph", "disable_cuda_graph")
"""SGLang's command line has the first two; older ones the third. Its constructor takes the third."""

_ALIASES = {
    "model": "model_path",
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
    "data_parallel_size": "dp_size",
    "dp": "dp_size",
    "mem_fraction": "mem_fraction_static",
    "stream_output": "incremental_streaming_output",
}
_REFUSED = {
    "allow_auto_truncate": "a prompt that is too long would be silently truncated",
    "preferred_sampling_params": "every sampling parameter is sent with each request",
    "dp_size": "set engine.replicas",
    "pp_size": "weights are sent to the ranks of engine.tp only",
    "served_model_name": "the server is asked for the model by its folder",
    "quantization": "trained weights would be rounded when they are sent; set model.dtype",
    "api_key": "Lockstep generates a token for each server that it starts",
    "admin_api_key": "Lockstep generates a token for each server that it starts",
    "config": "it contains the server's token; set its options in engine.options",
    "rl_on_policy_target": "its logprobs come from logits rounded to bfloat16; set engine.batch_invariant",
    "disable_decode_cuda_graph": "set engine.eager",
    "disable_prefill_cuda_graph": "set engine.eager",
    "disable_cuda_graph": "set engine.eager",
}


def sglang_constructor(config: EngineConfig, spec: EngineSpec) -> dict[str, Any]:
    """Fields of sglang's ServerArgs.

    Raises:
        ConfigError: SGLang cannot do this here, or an option overrides what is set here.
    """
    own = _own_arguments(config, spec) | {"disable_cuda_graph": config.eager}
    return own | _options(config, own)


def sglang_server_command(
    config: EngineConfig, spec: EngineSpec, *, port: int, flags: frozenset[str]
) -> list[str]:
    """What comes after the interpreter to start SGLang's own server on this machine only.

    Args:
        flags: what this version's `launch_server --help` lists ("--tp-size", ...): some have changed their
            names.

    Raises:
        ConfigError: as sglang_constructor, or a flag that this version does not know.
    """
    own = _own_arguments(config, spec) | {"host": "127.0.0.1", "port": port}
    eager = dict.fromkeys(_eager_flags(flags), True) if config.eager else {}
    off = [name for name, value in config.options.items() if value is False]
    if off:
        raise ConfigError(
            f"no-effect: engine.options.{off[0]} = false has no effect: SGLang's command line can only turn "
            "switches on; leave it out"
        )
    command = command_flags(own | eager | _options(config, own), no_flags=False)
    unknown = [flag for flag in command if flag.startswith("--") and flag not in flags]
    if unknown:
        raise ConfigError(
            f"unknown-setting: this version of SGLang does not know {', '.join(unknown)}; leave it out of "
            "engine.options, or use a version from 0.5.16 to 0.5.23"
        )
    return ["-m", "sglang.launch_server", *command]


def _eager_flags(flags: frozenset[str]) -> tuple[str, ...]:
    new, old = EAGER[:2], EAGER[2:]
    return new if f"--{new[0].replace('_', '-')}" in flags else old


def _own_arguments(config: EngineConfig, spec: EngineSpec) -> dict[str, Any]:
    if spec.device == "cpu" and config.batch_invariant:
        raise ConfigError(
            "missing-device: engine.batch_invariant = true needs a GPU: SGLang's kernels for it need CUDA"
        )
    if spec.device == "cpu" and config.offloads:
        raise ConfigError("missing-device: engine.offload = true needs a GPU: SGLang frees only CUDA memory")
    arguments: dict[str, Any] = {
        "model_path": str(spec.folder),
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "random_seed": spec.seed,
        "context_length": spec.max_model_len + SPARE_CONTEXT,
        "max_running_requests": config.max_batch,
        "tp_size": config.tp,
        "disable_radix_cache": not config.prefix_caching,
        "enable_memory_saver": config.offloads,
        "enable_deterministic_inference": config.batch_invariant,
        "sampling_defaults": "openai",
        "load_format": "dummy" if spec.weights == "pushed" else "auto",
        "trust_remote_code": False,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
    }
    fraction = memory_fraction(config, spec)
    if fraction is not None:
        arguments["mem_fraction_static"] = fraction
    return arguments


def _options(config: EngineConfig, own: dict[str, Any]) -> dict[str, Any]:
    return checked_options(config, own, aliases=_ALIASES, refused=_REFUSED)


def sglang_environment(config: EngineConfig, spec: EngineSpec) -> dict[str, str]:
    """Variables of a started server. `config.env` is not among them."""
    return {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # logprobs after temperature, as ours
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # of the spare positions, which stay unused
        "HF_HUB_OFFLINE": "1",  # the model is a folder
    }


def sglang_sampling(
    params: SamplingParams, *, seed: int, eos_token_ids: tuple[int, ...], seeded: bool
) -> dict[str, Any]:
    """`sampling_params` of one sample, as plain JSON.

    `stop` and `keep_stop` are not in it: SGLang runs without a tokenizer, and the engine's client finds stop
    strings in the ids that stream in, then aborts the sample.

    Args:
        seeded: whether the server runs its deterministic mode, the only one in which it reads seeds; without
            one there every request would get the same seed, 42.

    Raises:
        EngineError: a field that SGLang would change or ignore.
    """
    _check(params, seeded=seeded)
    return {
        "n": 1,
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_new_tokens": 0,
        "stop_token_ids": stop_ids(params, eos_token_ids),
        "ignore_eos": params.ignore_eos,  # when on, it ignores stop_token_ids as well
    } | ({"sampling_seed": seed} if seeded else {})


def _check(params: SamplingParams, *, seeded: bool) -> None:
    check_common(ENGINE, params)
    refuse = refusals(ENGINE, params)
    if 0.0 < params.temperature < LOWEST_TEMPERATURE:
        raise refuse("temperature", "it would be greedy", "set 0, or a higher temperature")
    for name in penalties_of(params):
        why = "its logprobs come after penalties"
        if name == "repetition_penalty":
            why += ", and it penalises the completion's tokens but not the prompt's"
        raise refuse(name, why, "turn it off")
    for applies, name, why, instead in (
        (
            params.min_tokens,
            "min_tokens",
            "without a tokenizer it does not support it, and with one its logprobs come after stop ids were "
            "suppressed",
            "set it to 0",
        ),
        (
            params.min_p and seeded and params.temperature,
            "min_p",
            "with seeds its scheduler fails an assertion, which ends the server",
            "set min_p = 0, or engine.unseeded = true without engine.batch_invariant",
        ),
        (
            params.ignore_eos and params.stop_token_ids,
            "ignore_eos",
            f"it then ignores stop_token_ids = {list(params.stop_token_ids)} as well",
            "set ignore_eos = false, or leave stop_token_ids out",
        ),
    ):
        if applies:
            raise refuse(name, why, instead)


# The SGLang of an interpreter, and its command line options, without importing it.
#
# `launch_server --help` imports torch and most of SGLang, which takes longer than many a run's first step.
# The options are fields of dataclasses, and reading those from the source takes milliseconds.


OLDEST = (0, 5, 16)
"""Written and tested against this version and the newest; older ones lack fields that are sent."""
_SECONDS = 60.0
_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")
_OPTION_FILES = ("srt/server_args.py", "srt/arg_groups/fields/*.py")
_LOOK = (
    "import importlib.util, json; "
    "spec = importlib.util.find_spec('sglang'); "
    "print(json.dumps(list(spec.submodule_search_locations or []) if spec else []))"
)


@dataclass(frozen=True)
class SGLangPackage:
    """The package's folder, as some interpreter would import it."""

    folder: Path

    @cached_property
    def version(self) -> str:
        """Raises ConfigError when the package does not say."""
        for name in ("_version.py", "version.py"):
            file = self.folder / name
            if file.is_file() and (match := re.search(r"= *['\"](\d+\.\d+[^'\"]*)['\"]", file.read_text())):
                return match[1]
        raise ConfigError(
            f"unsupported-version: {self.folder} does not state its SGLang version; install a release"
        )

    @cached_property
    def flags(self) -> frozenset[str]:
        """Every "--option" of `launch_server`. Raises ConfigError when none is found."""
        files = [file for pattern in _OPTION_FILES for file in sorted(self.folder.glob(pattern))]
        flags = frozenset(flag for file in files for flag in _flags_in(ast.parse(file.read_text())))
        if "--model-path" not in flags:
            raise ConfigError(
                f"unsupported-version: no command line options were found in {self.folder} (SGLang "
                f"{self.version}); use a version from 0.5.16 to 0.5.23"
            )
        return flags


def find_package(python: Path | str, environment: Mapping[str, str]) -> SGLangPackage:
    """Find the SGLang that `python` would import with this environment.

    Raises:
        ConfigError: it has none, or one that is too old.
    """
    try:
        done = subprocess.run(
            [str(python), "-c", _LOOK],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise ConfigError(f"process-died: engine.python = {python} cannot be run: {reason}") from error
    folders = json.loads(done.stdout)
    if not folders:
        raise ConfigError(
            f"missing-package: {python} has no sglang; install it in a separate environment and set "
            "engine.python to that environment's interpreter (docs/how-to/sglang.md)"
        )
    package = SGLangPackage(Path(folders[0]))
    check_version(package.version)
    return package


def check_version(version: str) -> None:
    """Raises ConfigError for a version that is too old."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST:
        raise ConfigError(
            f"unsupported-version: SGLang {version} is older than {'.'.join(map(str, OLDEST))}, the oldest "
            "version that Lockstep supports; use a newer one"
        )


def _flags_in(tree: ast.Module) -> Iterator[str]:
    """A field's name makes its flag, unless its annotation names another one or none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
            yield node.value
        if not isinstance(node, ast.ClassDef):
            continue
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                words = {k.arg for k in ast.walk(line.annotation) if isinstance(k, ast.keyword)}
                if not words & {"no_cli", "cli_name"}:
                    yield f"--{line.target.id.replace('_', '-')}"


# Samples from SGLang's /generate: the requests, and how chunks become samples.
#
# One request asks for many samples, each with its own id, prompt, sampling parameters and seed, and is
# answered by one stream of events, in which each sample's chunks come as they are made:
#
#     {"output_ids": [5, 9], "meta_info": {"id": "ab-0-0.", "completion_tokens": 2, "finish_reason": null,
#      "output_token_logprobs": [[-0.7, 5, null], [-1.2, 9, null]], ...}, "index": 0}
#
# With `incremental_streaming_output`, which a started server has, a chunk holds what is new; else all that
# there is, so such a server sends the first token and the end only.


CHUNK_TOKENS = 128
"""Tokens of a sample between two chunks: few enough for the client to work while the GPU does."""
STOP_CHUNK_TOKENS = 8
"""The same with stop strings, which are found here: more than this many tokens are rarely computed in
vain."""
# Longer than any sample, which then comes in one chunk.
NO_CHUNKS = 1 << 30
NOT_FINITE = "NaN happened"
"""SGLang's name of the stop reason of a sample whose next token is outside the vocabulary."""
_FIXED = {
    "return_logprob": True,
    "logprob_start_len": -1,  # of completions only
    "top_logprobs_num": 0,
    "return_text_in_logprobs": False,
    "stream": True,
}


class UnrequestedAbort(EngineError):
    """The server aborted a sample without our request."""


def rid(job: Job) -> str:
    """The id of a sample at the server.

    /abort_request ends every sample whose id *begins* with the given one: with a sign at its end no id is the
    beginning of another.
    """
    return f"{job.id}."


def request_body(jobs: Sequence[Job], sampling: Sequence[Mapping[str, Any]], *, incremental: bool) -> bytes:
    """The body of one POST /generate for all of `jobs`; a prompt is made JSON once for its group."""
    prompts: dict[int, str] = {}
    for job in jobs:
        if id(job.request) not in prompts:
            prompts[id(job.request)] = _json(job.request.prompt_token_ids)
    sampling_params = [
        {**params, "stream_interval": _interval(job, incremental=incremental)}
        for job, params in zip(jobs, sampling, strict=True)
    ]
    rest = _json({"rid": [rid(job) for job in jobs], "sampling_params": sampling_params, **_FIXED})
    ids = ",".join(prompts[id(job.request)] for job in jobs)
    return f'{{"input_ids":[{ids}],{rest[1:]}'.encode()


def _interval(job: Job, *, incremental: bool) -> int:
    if job.request.sampling.stop:
        return STOP_CHUNK_TOKENS
    return CHUNK_TOKENS if incremental else NO_CHUNKS


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def read_event(text: bytes, what: str) -> dict[str, Any]:
    """One event of the stream. Raises BadReply, and EngineError for an error that the server reports."""
    try:
        event = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise BadReply(f"not-json: {what} sent a non-JSON event ({error}): {text[:200]!r}") from error
    if not isinstance(event, dict):
        raise BadReply(f"wrong-type: {what} sent an event that is not an object: {text[:200]!r}")
    if "error" in event:
        message = event["error"]
        if isinstance(message, dict):
            message = message.get("message", message)
        raise EngineError(f"refused: {what} refused the request: {printable(str(message)[:400])}")
    return event


@dataclass(slots=True, kw_only=True)
class Partial:
    """The part of a sample that has arrived."""

    job: Job
    incremental: bool
    stops: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    def add(self, event: Mapping[str, Any], *, aborting: bool, weight_version: str | None) -> Sample | None:
        """Add a chunk; returns the sample if the chunk ends it.

        Args:
            aborting: whether we requested an abort, so that this sample may end by one.
            weight_version: the version that the server must report; None: any.

        Raises:
            BadReply: fields are missing, or contradict each other.
            EngineError: the server failed on this sample, or sampled with other weights.
        """
        try:
            meta = mapping(event["meta_info"], "meta_info")
            reason = meta["finish_reason"]
            kind = _kind(reason)
            if kind == "abort":
                self._take(event, meta, exact=False)
                return self._aborted(reason, aborting=aborting)
            self._check_meta(meta, weight_version)
            start = len(self.token_ids)
            self._take(event, meta, exact=True)
            self.cached_tokens = whole(meta["cached_tokens"], "cached_tokens")
        except (KeyError, ValueError) as error:
            raise BadReply(
                f"bad-reply: engine sglang: an event of sample {self.job.sample} of request "
                f"{self.job.index} cannot be read: {error!r} in {ascii(event)[:400]}"
            ) from error
        stop_string = self._stop_string(start)
        if stop_string is not None:
            return self.sample("stop", stop_string)
        if kind is None:
            return None
        if kind == "length":
            return self.sample("length", None)
        matched = reason.get("matched")
        if matched == NOT_FINITE:
            where = f"the logits of token {len(self.token_ids) - 1} of sample {self.job.sample}"
            raise not_finite(f"engine sglang: request {self.job.index}: {where}")
        return self.sample("stop", matched)

    def sample(self, finish_reason: Any, stop_reason: Any) -> Sample:
        """What has arrived, as a finished sample."""
        return Sample(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cached_tokens=self.cached_tokens,
        )

    def _take(self, event: Mapping[str, Any], meta: Mapping[str, Any], *, exact: bool) -> None:
        """Append what is new. A chunk of an aborted sample may repeat its last token, and every logprob."""
        have = len(self.token_ids)
        new = whole(meta["completion_tokens"], "completion_tokens") - have
        ids = token_ids(event["output_ids"], "output_ids")
        entries = meta.get("output_token_logprobs") or []
        if not isinstance(entries, list):
            raise ValueError("output_token_logprobs is not a list")
        if not self.incremental and exact:
            ids, entries = ids[have:], entries[have:]
        if exact and not new == len(ids) == len(entries):
            raise ValueError(f"{new} new tokens, but {len(ids)} ids and {len(entries)} logprobs")
        if not exact:
            new = min(new, len(ids), len(entries)) if self.incremental else 0
            ids, entries = ids[: max(new, 0)], entries[: max(new, 0)]
        if have + len(ids) > self.job.request.sampling.max_tokens:
            raise ValueError(f"more tokens than max_tokens = {self.job.request.sampling.max_tokens}")
        if any(not isinstance(entry, list) or len(entry) < 2 for entry in entries):
            raise ValueError("an entry of output_token_logprobs is not [logprob, id, text]")
        if any(type(entry[1]) is not int or entry[1] != one for entry, one in zip(entries, ids, strict=True)):
            raise ValueError("logprobs for tokens other than the sampled ones")
        # A logprob that is not finite is null in JSON; the check of the sample refuses it.
        self.logprobs += logprobs([entry[0] for entry in entries], "output_token_logprobs")
        self.token_ids += ids

    def _check_meta(self, meta: Mapping[str, Any], weight_version: str | None) -> None:
        prompt = len(self.job.request.prompt_token_ids)
        if whole(meta["prompt_tokens"], "prompt_tokens") != prompt:
            raise ValueError(f"the server read a prompt of {meta['prompt_tokens']} tokens, not {prompt}")
        if weight_version is not None and meta["weight_version"] != weight_version:
            raise EngineError(
                f"values-differ: engine sglang sampled with weights {meta['weight_version']!a} instead of "
                f"{weight_version!r}: another client updated it, or it was restarted; let only one run use a "
                "server"
            )

    def _stop_string(self, start: int) -> str | None:
        """Find a stop string, and cut the sample at the token that completes it."""
        if self.stops is None:
            return None
        params = self.job.request.sampling
        for count in range(start + 1, len(self.token_ids) + 1):
            stop_string = self.stops.find(self.token_ids[:count])
            if stop_string is not None and count >= params.min_tokens:
                del self.token_ids[count:], self.logprobs[count:]
                return stop_string
        return None

    def _aborted(self, reason: Mapping[str, Any], *, aborting: bool) -> Sample:
        message = printable(str(reason.get("message"))[:400])
        if reason.get("status_code") is not None:
            code = ascii(reason["status_code"])[:40]
            raise EngineError(
                f"refused: engine sglang cannot sample request {self.job.index}: {message} ({code})"
            )
        if not aborting:
            raise UnrequestedAbort(
                f"unrequested-abort: engine sglang aborted sample {self.job.sample} of request "
                f"{self.job.index} ({message}) without being asked to: another client uses the server; let "
                "only one run use it"
            )
        return self.sample("abort", None)


def _kind(reason: Any) -> str | None:
    """Return why a sample ended: "stop", "length" or "abort"; None while it goes on."""
    if reason is None:
        return None
    kind = mapping(reason, "finish_reason").get("type")
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason has an unknown type, {ascii(kind)[:80]}")
    matched = reason.get("matched")
    if matched is not None and type(matched) not in (int, str):
        raise ValueError(f"finish_reason.matched is {ascii(matched)[:80]}, neither a token id nor a string")
    return str(kind)
