"""Process groups: how ranks connect and verify each other, the default group, and objects sent over one."""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from lockstep.common_errors import too_large
from lockstep.errors import ConfigError, LockstepError
from lockstep.ranks.environment import LAUNCHER_PID, SECRET
from lockstep.wire.receive import host_store as host_store

# How ranks connect, and how each of them verifies that the others are ranks of its run.
#
#     launcher   hosts a store on loopback, whose keys begin with a prefix that follows from the run's secret
#     ranks      get the secret by their environment, meet in the store and make the default process group
#     ranks      prove to each other that they know the secret, before anything else travels
#
# Any user of the machine can connect to a port on loopback, list the keys of the store and join in the place
# of a rank, but not prove to know the secret: then the ranks end with an error. The prefix gives nothing
# away.
#
# Under torchrun and deepspeed the store is theirs, and they decide who can reach it. Where the user sets
# LOCKSTEP_RANKS_SECRET on every node, the ranks prove that they know it there too.


_SHORTEST = 32
"""Fewest characters of a secret."""
# Fixed, the tag's size is SHA-256's: ranks with and without a secret must send equally many bytes.
_NONCE_BYTES = 32
_TAG_BYTES = 32
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankError(LockstepError, RuntimeError):
    """Ranks cannot be set up, or cannot work together."""


@functools.cache
def run_secret() -> str | None:
    """Return the secret of this run, or None. It is removed from the environment: processes that a rank
    starts (rewards, engine servers) do not inherit it.

    Raises:
        ConfigError: it is too short to be one.
    """
    secret = os.environ.pop(SECRET, None)
    if secret is not None and len(secret) < _SHORTEST:
        raise ConfigError(
            f"wrong-environment: {SECRET} has {len(secret)} characters, but at least {_SHORTEST} are needed; "
            "use the output of `openssl rand -hex 32`, the same on every node"
        )
    return secret


def hidden_store(store: Store, secret: str) -> Store:
    """Return the part of a store whose keys begin with a prefix derived from the secret."""
    return PrefixStore("lockstep/" + _hmac(secret, b"keys").hex(), store)


def of_launcher() -> bool:
    """Return whether `lockstep.ranks.launch` started this process, and hosts its store."""
    return LAUNCHER_PID in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launcher_store(timeout: timedelta) -> Store:
    """Open a new connection to the launcher's store.

    Raises:
        RankError: this process was not given the secret.
        RuntimeError: torch's, when the store is not reached.
    """
    secret = run_secret()
    if secret is None:
        raise RankError(
            f"wrong-environment: {SECRET} is not set in the environment of this rank, so it cannot join the "
            "others; let --ranks N start the ranks"
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return hidden_store(TCPStore(address, port, is_master=False, timeout=timeout), secret)


def join(backend: str, *, timeout: timedelta) -> None:
    """Make the default process group: with the ranks of the launcher (ours, torchrun, deepspeed), or of this
    process alone, which then listens nowhere beyond loopback.

    The ranks are read from the environment only; MPI is not used.

    Args:
        backend: of torch.distributed.
        timeout: of every later collective, and of waiting for the other ranks here.

    Raises:
        RankError: a process that does not know the secret of the run has joined.
        RuntimeError: torch's, when the others do not connect.
    """
    if not all(name in os.environ for name in _LAUNCHER):
        if os.path.exists("/sys/class/net/lo"):
            # gloo would listen on the host's address otherwise, though there is nobody to talk to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if of_launcher():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = PrefixStore("torch", launcher_store(timeout))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    prove()


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for small tensors of a group's collectives: the host, unless its only backend is
    nccl."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")


def prove(group: dist.ProcessGroup | None = None) -> None:
    """Prove to every rank of a group that this one knows the secret of the run, and verify that all others
    do; without a secret, verify that the others have none either. Collective.

    Each sends a fresh nonce and then an HMAC over all nonces and its own rank, as tensors.

    Args:
        group: None: the default one.

    Raises:
        RankError: names the ranks that do not know it.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return
    secret = run_secret()
    nonces = b"".join(_exchange(secrets.token_bytes(_NONCE_BYTES), group))

    def tag(of: int) -> bytes:
        if secret is None:
            return bytes(_TAG_BYTES)
        # Over the nonces of all ranks: a tag that was recorded in another run fits nothing here.
        return _hmac(secret, f"rank {of} of {size}".encode() + nonces)

    tags = _exchange(tag(rank), group)
    # compare_digest takes equally long for every tag, so its time tells nothing about the right one.
    strangers = [of for of in range(size) if not hmac.compare_digest(tags[of], tag(of))]
    if not strangers:
        return
    who = f"rank {strangers[0]}" if len(strangers) == 1 else f"ranks {', '.join(map(str, strangers))}"
    if secret is None:
        raise RankError(
            f"not-authenticated: rank {rank} of {size}: {who} of this group "
            f"{'has' if len(strangers) == 1 else 'have'} a secret of the run, but this rank has none; set "
            f"{SECRET} to the same value on every node, or on none"
        )
    raise RankError(
        f"not-authenticated: rank {rank} of {size}: the process that joined as {who} does not know the "
        "secret of this run, so it is not one of its ranks; no data was exchanged with it. Another program "
        f"is using the rendezvous on {_where()}: find it, then start again (under torchrun: {SECRET} must be "
        "the same on every node)"
    )


def _where() -> str:
    return f"{os.environ.get('MASTER_ADDR', 'this machine')}:{os.environ.get('MASTER_PORT', '?')}"


def _hmac(secret: str, message: bytes) -> bytes:
    return hmac.new(secret.encode(), message, hashlib.sha256).digest()


def _exchange(value: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes; all send the same number."""
    own = torch.tensor(list(value), dtype=torch.uint8, device=group_device(group))
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return [bytes(part.tolist()) for part in parts]


# The default process group, for code that needs one also in a single process.


TIMEOUT = timedelta(minutes=10)
"""Deadline of every collective."""


def group_timeout(device: torch.device) -> timedelta:
    """Return the timeout of the default process group's collectives on this kind of device."""
    # Private, in torch 2.11 to 2.13: a group does not say publicly which timeout it was made with.
    group = dist.distributed_c10d._get_default_group()
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def ensure_process_group(device: torch.device, *, timeout: timedelta = TIMEOUT) -> None:
    """Make the default process group with `rendezvous.join`, unless there is one.

    Args:
        device: decides the backend, nccl or gloo.
        timeout: of every later collective, and of waiting for the other ranks here.
    """
    if not dist.is_initialized():
        join("nccl" if device.type == "cuda" else "gloo", timeout=timeout)


# Objects between ranks: JSON of a declared type in uint8 tensors, never a pickle.
#
#     shares = gather_objects(share, dict[str, float], group=group)
#
# The type decides what is decoded (dataclasses, tuples, paths, ...); a value of another type is refused by
# its sender and by every receiver. Floats keep every bit, NaN and infinities included.


T = TypeVar("T")

MAX_BYTES = 1 << 30
"""Largest object: a few times the rollouts of a large step."""


def gather_objects(value: T, kind: Any = JsonValue, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, by rank. Collective.

    Args:
        kind: its type, as an annotation; JsonValue takes what JSON itself has, so no tuples.
        group: None: the default one.

    Raises:
        RankError: the value is not of that type, or what another rank sent is not, or is too large.
    """
    return [
        decode_object(data, kind, sender=sender)
        for sender, data in enumerate(gather_bytes(encode_object(value, kind), group=group))
    ]


def broadcast_object(value: T, kind: Any = JsonValue, *, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value on every rank; the others' values are ignored. Collective; raises as
    `gather_objects`."""
    own = encode_object(value, kind) if dist.get_rank(group) == 0 else b""
    device = group_device(group)
    length = torch.tensor([len(own)], device=device)
    dist.broadcast(length, group=group, group_src=0)
    data = _tensor(own, _checked(int(length), 0), device)
    dist.broadcast(data, group=group, group_src=0)
    received: T = decode_object(_bytes(data), kind, sender=0)
    return received


def gather_bytes(data: bytes, *, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return every rank's bytes, by rank. Lengths are gathered first, then the bytes, padded to the longest.
    Collective."""
    device, size = group_device(group), dist.get_world_size(group)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.split(1)), torch.tensor([len(data)], device=device), group=group)
    sizes = [_checked(length, sender) for sender, length in enumerate(lengths.tolist())]
    padded = _tensor(data, max(sizes), device)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [_bytes(part[:length]) for part, length in zip(parts, sizes, strict=True)]


def encode_object(value: Any, kind: Any) -> bytes:
    """Encode a value as JSON. Raises RankError: it is not of that type, or too large."""
    adapter = _adapter(kind)
    try:
        adapter.validate_python(value, strict=True)  # a tuple is no JSON value, but would be written as one
        plain = adapter.dump_python(value, mode="json", warnings="error")
        data = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    except (PydanticSerializationError, ValidationError, TypeError, ValueError) as error:
        raise RankError(
            f"wrong-type: {_name(kind)} cannot be sent to the other ranks: {_short(error)}"
        ) from error
    if len(data) > MAX_BYTES:
        raise too_large(RankError, f"{_name(kind)} for the other ranks", len(data), MAX_BYTES)
    return data


def decode_object(data: bytes, kind: Any, *, sender: int) -> Any:
    """Decode a rank's JSON. Raises RankError: it is invalid, or not of that type."""
    try:
        # strict, as for the sender: a peer's "1" must not become the number 1.
        return _adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise RankError(f"bad-reply: rank {sender} did not send {_name(kind)}: {_short(error)}") from error


@functools.lru_cache(maxsize=128)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _name(kind: Any) -> str:
    if kind is JsonValue:
        return "a JSON value"
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)


def _short(error: Exception) -> str:
    """One line about the first error, without the value, which may be long or untrusted."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "at its top"
        return f"{where}: {first['msg']}"
    return " ".join(str(error).split())[:300]


def _checked(length: int, sender: int) -> int:
    if not 0 <= length <= MAX_BYTES:
        raise too_large(RankError, f"an object of rank {sender}", length, MAX_BYTES)
    return length


def _tensor(data: bytes, length: int, device: torch.device) -> Tensor:
    """The bytes, padded with zeros."""
    buffer = bytearray(length)
    buffer[: len(data)] = data
    # frombuffer refuses an empty buffer
    return torch.frombuffer(buffer or bytearray(1), dtype=torch.uint8).to(device)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
