"""Checks that the vLLM server at a url is the one that this run needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.engine.remote.driver import SHORT_SECONDS
from lockstep.engine.remote.http import BadReply, HttpClient, Reply
from lockstep.engine.spec import EngineSpec
from lockstep.engine.vllm.translate import LogprobsMode, vllm_logprobs_mode
from lockstep.errors import EngineError
from lockstep.observe.files import read_json

log = logging.getLogger(__name__)

WORKER = "lockstep.wire.vllm_worker.LockstepWorker"
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
        raise EngineError(
            f"server-settings: {where} takes prompts and completions of {longest} tokens together, and this "
            f"run has up to {spec.max_model_len}; start it with --max-model-len {spec.max_model_len}",
            flag="--max-model-len",
        )
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
            raise EngineError(
                f"server-settings: {where} computes in {dtype}, and this run in {spec.dtype}; start it with "
                f"--dtype {spec.dtype}",
                flag="--dtype",
            )
    _check_vocabulary(client, name, spec, where=where)
    mode = _usable_mode(str(info.get("logprobs_mode") or _find_mode(client, name)), spec, where=where)
    return ServerInfo(model=name, logprobs_mode=mode, can_update=info.get("worker_extension_cls") == WORKER)


def _usable_mode(mode: str, spec: EngineSpec, *, where: str) -> LogprobsMode:
    """Check the mode: processed logprobs are right at every temperature, raw ones at 0 and 1."""
    needed = vllm_logprobs_mode(spec.temperatures)
    if mode == "processed_logprobs":
        return "processed_logprobs"
    if mode == needed:
        return needed
    raise EngineError(
        f"server-settings: {where} gives {mode}, and temperatures {sorted(spec.temperatures)} need "
        f"{needed}; start it with --logprobs-mode {needed}",
        flag="--logprobs-mode",
    )


def _model_card(client: HttpClient) -> Mapping[str, Any]:
    cards = client.get("/v1/models", seconds=SHORT_SECONDS).object().get("data")
    if not isinstance(cards, list) or not cards or not isinstance(cards[0], dict) or "id" not in cards[0]:
        raise EngineError(
            f"bad-reply: {client.url}/v1/models names no model; is that a vLLM server?", name="models"
        )
    return cards[0]


def _check_model(card: Mapping[str, Any], spec: EngineSpec, *, where: str) -> None:
    root = str(card.get("root") or card["id"])
    if root in (str(spec.folder), spec.model_name) or Path(root) == spec.folder.resolve():
        return
    theirs, ours = _config(Path(root)), _config(spec.folder)
    if theirs is None:
        raise EngineError(
            f"other-model: {where} serves {root!r}, and this run's model is {spec.model_name!r} "
            f"({spec.folder}); start one that serves it, or set model.name",
            name=root,
        )
    different = sorted(
        k for k in (theirs.keys() | (ours or {}).keys()) if theirs.get(k) != (ours or {}).get(k)
    )
    if different:
        raise EngineError(
            f"other-model: {where} serves {root!r}, another model than this run's {spec.model_name!r} "
            f"({spec.folder}): their config.json differ in {', '.join(different[:8])}",
            names=different,
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
        raise EngineError(f"bad-reply: {reply.what} answered without its configuration", name="configuration")
    parallel = config.get("parallel_config")
    worker = parallel.get("worker_extension_cls") if isinstance(parallel, dict) else None
    return dict(config["model_config"]) | {"worker_extension_cls": worker}


def _check_vocabulary(client: HttpClient, name: str, spec: EngineSpec, *, where: str) -> None:
    """Check that the largest id is accepted and the next one is not."""
    # vLLM takes ids up to the larger of the two.
    size = max(spec.vocab_size, len(spec.tokenizer) if spec.tokenizer is not None else 0)
    last, beyond = _one_token(client, name, spec.vocab_size - 1), _one_token(client, name, size)
    if last.status == 403:
        raise EngineError(
            f"server-settings: {where} has its token route switched off; start it with --enable-scale-out",
            flag="--enable-scale-out",
        )
    if last.status == 404:
        raise EngineError(
            f"unsupported-version: {where} has no /inference/v1/generate, which vLLM has since 0.26",
            name="/inference/v1/generate",
        )
    if last.status != 200 or beyond.status == 200:
        raise EngineError(
            f"other-model: {where} has {'a smaller' if last.status != 200 else 'a larger'} vocabulary than "
            f"this run's model, {spec.vocab_size} entries: it "
            f"{'refuses' if last.status != 200 else 'takes'} token id "
            f"{spec.vocab_size - 1 if last.status != 200 else size}; it serves another model"
            + (f" ({last.error_text()})" if last.status != 200 else ""),
            reason="smaller" if last.status != 200 else "larger",
        )


def _find_mode(client: HttpClient, name: str) -> str:
    """Find the mode by a request with one candidate token: processed logprobs are 0, raw ones are not."""
    reply = _one_token(client, name, 0).object()
    try:
        value = float(reply["choices"][0]["logprobs"]["content"][0]["logprob"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadReply(f"wrong-result: {client.url} answered a sample without its logprob") from error
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
