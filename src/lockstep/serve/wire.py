"""The API's messages, by the definitions of the `tinker` package: decoded, checked and encoded.

The only importer of `tinker`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import BaseModel, StrictInt, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from lockstep.errors import DataError
from lockstep.observe.files import parse_json
from lockstep.schema.rollout import SamplingParams
from lockstep.serve.losses import INPUTS

PROTOBUF = "application/x-protobuf"
MOST_BODY = 64 * 2**20
"""Bytes of a request."""
MOST_DATUMS, MOST_SAMPLES, MOST_STOPS = 4096, 1024, 64
MOST_CANDIDATES = 64
"""Tokens of one position whose logprobs a sample request may ask for."""
_NO_LOGPROB = -99999.0
"""The client's sign for a position without candidates; see tinker.types.topk_logprobs."""

Message = TypeVar("Message", bound=BaseModel)
_FLOATS = ("weights", "logprobs", "advantages", "sequence_ratio_mask")
_DTYPES: Mapping[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Datum:
    """One document of a training request; L is the length of the model's input."""

    inputs: Tensor
    """[L] int64: the model's input."""
    targets: Tensor
    """[L] int64: the token that each position predicts; need not be the next input."""
    floats: Mapping[str, Tensor]
    """[L] float32 each: weights, or logprobs, advantages and, for gspo, sequence_ratio_mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """A forward or forward_backward."""

    model_id: str
    seq_id: int
    forward_only: bool
    loss_fn: str
    config: Mapping[str, float | str]
    datums: Sequence[Any]
    """As they came; `datums_of` checks them."""
    size: int
    """Bytes of the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """A request of a sampling session."""

    session_id: str
    seq_id: int
    prompt: tuple[int, ...]
    n: int
    seed: int | None
    sampling: SamplingParams
    """max_tokens 0: as many as the context has room for."""
    prompt_logprobs: bool
    last: int
    """How many of the prompt's last tokens are scored, alone and with candidates."""
    top_prompt: int
    """How many of the likeliest tokens are returned for each token of the prompt; 0: none."""
    top_sampled: int
    """The same for each sampled token."""
    targets: Tensor | None
    """[P - 1, K] int64: ids to score in place of each token of the prompt but the first; -1: none."""
    size: int
    """Bytes of the request."""


class TTLRequest(BaseModel):
    """When a checkpoint expires; the client has no type for it."""

    ttl_seconds: StrictInt | None


def parse(kind: type[Message], body: bytes) -> Message:
    """Decode a JSON request.

    Raises:
        DataError: it is not JSON, or not a request of this kind; names the field.
    """
    value = parse_json(body, "the request", DataError, limit=MOST_BODY)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the request"
        raise DataError(f"wrong-field: {field}: {first['msg']}", field=field) from error


def train_request(body: bytes) -> TrainRequest:
    """Decode a forward_backward request.

    Raises:
        DataError: the bytes are not that message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise DataError(f"wrong-format: the body is not a ForwardBackwardRequest: {error}") from error
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return TrainRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        forward_only=message.forward_only,
        loss_fn=message.loss_fn,
        config=config,
        datums=message.data,
        size=len(body),
    )


def datums_of(request: TrainRequest, *, vocab_size: int, max_positions: int) -> list[Datum]:
    """Decode and check the documents of a request.

    Raises:
        DataError: the loss misses an input or does not take one, a length or shape differs, a token is not in
            the vocabulary, a number is not finite, or a document has no room in the context.
    """
    if not 1 <= len(request.datums) <= MOST_DATUMS:
        raise DataError(
            f"out-of-range: the request has {len(request.datums)} datums; send 1 to {MOST_DATUMS}",
            found=len(request.datums),
        )
    limits = {"vocab_size": vocab_size, "max_positions": max_positions}
    return [
        _datum(datum, f"datum {number}", INPUTS[request.loss_fn], **limits)
        for number, datum in enumerate(request.datums)
    ]


def _datum(datum: Any, where: str, takes: tuple[str, ...], *, vocab_size: int, max_positions: int) -> Datum:
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise DataError(f"refused: {where}: chunks of kind {kind} are not served; send token ids")
        parts.append(_numbers(chunk.encoded_text.tokens, np.dtype("<i4"), f"{where}: tokens"))
    inputs = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    check_tokens(inputs, f"{where}: model_input", vocab_size=vocab_size)
    if not 1 <= len(inputs) < max_positions:
        raise DataError(
            f"too-long: {where} has {len(inputs)} tokens; the model takes 1 to {max_positions - 1}, and the "
            "target of the last",
            found=len(inputs),
        )
    given = set(datum.loss_fn_inputs)
    optional = {"weights"}
    if missing := set(takes) - given - optional:
        raise DataError(f"missing-field: {where}: the loss needs {', '.join(sorted(missing))}")
    if unknown := given - set(takes):
        raise DataError(
            f"unknown-name: {where}: the loss takes {', '.join(takes)}, not {', '.join(sorted(unknown))}"
        )
    arrays = {}
    for name in sorted(given):
        tensor = datum.loss_fn_inputs[name]
        if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
            raise DataError(
                f"refused: {where}: {name} has several candidates for each position, which are not served; "
                "send one dense row",
                field=name,
            )
        whole = name == "target_tokens"
        if tensor.dtype not in _DTYPES or (whole and tensor.dtype == pb.DTYPE_FLOAT32):
            kinds = "int64" if whole else "float32 or int64"
            raise DataError(f"wrong-type: {where}: {name} must be {kinds}", field=name)
        arrays[name] = _numbers(tensor.dense, _DTYPES[tensor.dtype], f"{where}: {name}")
        if len(arrays[name]) != len(inputs):
            raise DataError(
                f"wrong-shape: {where}: {name} has {len(arrays[name])} entries for {len(inputs)} tokens",
                field=name,
            )
        if not np.isfinite(arrays[name]).all():
            raise DataError(f"not-finite: {where}: {name} has an entry that is not finite", field=name)
    check_tokens(arrays["target_tokens"], f"{where}: target_tokens", vocab_size=vocab_size)
    if "sequence_ratio_mask" in arrays and not arrays["sequence_ratio_mask"].any():
        raise DataError(f"out-of-range: {where}: sequence_ratio_mask marks no token; it must mark one")
    if "weights" in takes:
        arrays.setdefault("weights", np.ones(len(inputs), np.float32))
    return Datum(
        inputs=torch.from_numpy(inputs.astype(np.int64)),
        targets=torch.from_numpy(arrays["target_tokens"].astype(np.int64)),
        floats={n: torch.from_numpy(arrays[n].astype(np.float32)) for n in _FLOATS if n in arrays},
    )


def _numbers(raw: bytes, dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    if len(raw) % dtype.itemsize:
        raise DataError(f"wrong-format: {where}: {len(raw)} bytes are not a whole number of {dtype.name}")
    return np.frombuffer(raw, dtype)


def check_tokens(tokens: NDArray[Any], where: str, *, vocab_size: int) -> None:
    """Check that every id is in the vocabulary. Raises DataError."""
    if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        bad = next(int(t) for t in tokens if not 0 <= t < vocab_size)
        raise DataError(
            f"outside-vocabulary: {where}: token {bad} is not in the vocabulary of {vocab_size}", token=bad
        )


# sampling


def sample_request(body: bytes) -> SampleRequest:
    """Decode a sample request and refuse by name what is not served.

    Raises:
        DataError: it is malformed, out of range, or asks for something that is not served.
    """
    request = parse(types.SampleRequest, body)
    if request.prompt_alt_tokens_k:
        raise DataError(
            "refused: prompt_alt_tokens_k is not served; leave it at 0", field="prompt_alt_tokens_k"
        )
    for name in ("model_path", "base_model"):
        if getattr(request, name) is not None:
            raise DataError(f"refused: {name} is not served in a sample request; leave it out", field=name)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= MOST_CANDIDATES:
            raise DataError(
                f"out-of-range: {name} = {getattr(request, name)}; ask for 0 to {MOST_CANDIDATES}", field=name
            )
    if request.sampling_session_id is None or request.seq_id is None:
        raise DataError("missing-field: sampling_session_id and seq_id are needed")
    if not 1 <= request.num_samples <= MOST_SAMPLES:
        raise DataError(
            f"out-of-range: num_samples = {request.num_samples}; ask for 1 to {MOST_SAMPLES}",
            field="num_samples",
        )
    tokens: list[int] = []
    for chunk in request.prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise DataError(f"refused: prompt: chunks of kind {chunk.type} are not served; send token ids")
        tokens += chunk.tokens
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < len(tokens)):
        raise DataError(
            f"out-of-range: prompt_logprobs_last_n = {last} needs prompt_logprobs, and must be 1 to "
            f"{len(tokens) - 1}",
            field="prompt_logprobs_last_n",
        )
    return SampleRequest(
        session_id=request.sampling_session_id,
        seq_id=request.seq_id,
        prompt=tuple(tokens),
        n=request.num_samples,
        seed=request.sampling_params.seed,
        sampling=_sampling(request.sampling_params),
        prompt_logprobs=bool(request.prompt_logprobs),
        last=max(0, len(tokens) - 1) if last is None else last,
        top_prompt=request.topk_prompt_logprobs,
        top_sampled=request.topk_sample_logprobs,
        targets=_targets(request.target_prompt_logprobs, rows=len(tokens) - 1),
        size=len(body),
    )


def _targets(given: Any, *, rows: int) -> Tensor | None:
    if given is None:
        return None
    name = "target_prompt_logprobs"
    if given.sparse_crow_indices is not None:
        raise DataError(f"refused: {name} in sparse rows is not served; send a dense tensor", field=name)
    shape = tuple(given.shape or ())
    good = len(shape) == 2 and shape[0] == rows and 1 <= shape[1] <= MOST_CANDIDATES
    if given.dtype != "int64" or not good or len(given.data) != shape[0] * shape[1]:
        raise DataError(
            f"wrong-shape: {name} must be int64 [{rows}, 1 to {MOST_CANDIDATES}], not {given.dtype} {shape}",
            field=name,
        )
    try:
        return torch.from_numpy(np.asarray(given.data, np.int64).reshape(shape))
    except OverflowError as error:
        raise DataError(f"out-of-range: {name} has an id of more than 64 bits", field=name) from error


def _sampling(params: Any) -> SamplingParams:
    """None ends at the end of sequence, [] at nothing, and stops are in addition to the end of sequence."""
    stop = params.stop
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    strings = tuple(s for s in stops if isinstance(s, str))
    ids = tuple(s for s in stops if isinstance(s, int))
    if len(stops) > MOST_STOPS or any(not s for s in strings):
        raise DataError(f"out-of-range: stop takes at most {MOST_STOPS} stops, and none that is empty")
    checks = {
        "temperature": math.isfinite(params.temperature) and 0 <= params.temperature <= 100,
        "top_p": 0 < params.top_p <= 1,
        "top_k": params.top_k == -1 or params.top_k >= 1,
        "max_tokens": params.max_tokens is None or params.max_tokens >= 1,
    }
    if bad := [name for name, good in checks.items() if not good]:
        raise DataError(f"out-of-range: {bad[0]} = {getattr(params, bad[0])}", field=bad[0])
    return SamplingParams(
        max_tokens=params.max_tokens or 0,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop=strings,
        stop_token_ids=ids,
        ignore_eos=stop is not None and not isinstance(stop, str) and not stops,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One sample: its tokens, their logprobs at temperature 1, and whether it stopped by itself."""

    token_ids: Sequence[int]
    logprobs: Tensor
    stopped: bool
    top: tuple[Tensor, Tensor] | None = None
    """ids and logprobs [S, k] of the likeliest tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredPrompt:
    """What is returned of a prompt of P tokens; None: not asked for."""

    logprobs: Tensor | None = None
    """[P] float32, NaN where not scored."""
    top: tuple[Tensor, Tensor] | None = None
    """ids and logprobs [R, k] of the likeliest tokens in place of each of the last R."""
    targets: Tensor | None = None
    """[P - 1, K] float32."""


def sample_response(sequences: Sequence[Sampled], prompt: ScoredPrompt, *, length: int) -> bytes:
    """Encode the answer to a sample request. length: P."""
    message = pb.SampleResponse()
    for sequence in sequences:
        one = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stopped else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.token_ids, "<i4").tobytes(),
            logprobs=_bytes(sequence.logprobs),
        )
        if sequence.top is not None:
            _fill_top(one.topk_sampled_logprobs, sequence.top, length=len(sequence.token_ids))
    if prompt.logprobs is not None:
        message.prompt_logprobs = _bytes(prompt.logprobs)
    if prompt.top is not None:
        _fill_top(message.topk_prompt_logprobs, prompt.top, length=length)
    if prompt.targets is not None:
        tensor = message.target_prompt_logprobs
        tensor.dtype, tensor.dense = pb.DTYPE_FLOAT32, _bytes(prompt.targets)
        tensor.shape.extend(prompt.targets.shape)
    encoded: bytes = message.SerializeToString()
    return encoded


def _fill_top(message: Any, top: tuple[Tensor, Tensor], *, length: int) -> None:
    """Write candidates of the last positions of `length`; those before them have none."""
    ids, logprobs = top
    before = (length - ids.shape[0], 0)
    whole = torch.nn.functional.pad(logprobs, (0, 0, *before), value=_NO_LOGPROB)
    message.length, message.k, message.logprobs = length, ids.shape[1], _bytes(whole)
    padded = torch.nn.functional.pad(ids, (0, 0, *before))
    message.token_ids = padded.to("cpu", torch.int32).numpy().astype("<i4").tobytes()


def train_response(fields: Mapping[str, Sequence[Tensor]], metrics: Mapping[str, float]) -> bytes:
    """Encode the answer to forward and forward_backward. fields: name -> [L] float32 for each datum."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord")
    for name, rows in fields.items():
        field, ends = record.fields[name], np.cumsum([0, *(4 * len(row) for row in rows)], dtype="<i8")
        field.dtype, field.offsets = pb.DTYPE_FLOAT32, ends.tobytes()
        field.data, record.num_datums = b"".join(map(_bytes, rows)), len(rows)
    encoded: bytes = message.SerializeToString()
    return encoded


def _bytes(values: Tensor) -> bytes:
    return values.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4").tobytes()


class _TinkerPath(BaseModel):
    tinker_path: str


def tinker_path(body: bytes) -> str:
    """Decode a request that names a checkpoint. Raises DataError."""
    return parse(_TinkerPath, body).tinker_path
