"""How ranks connect, and how each of them verifies that the others are ranks of its run.

    launcher   hosts a store on loopback, whose keys begin with a prefix that follows from the run's secret
    ranks      get the secret by their environment, meet in the store and make the default process group
    ranks      prove to each other that they know the secret, before anything else travels

Any user of the machine can connect to a port on loopback, list the keys of the store and join in the place
of a rank, but not prove to know the secret: then the ranks end with an error. The prefix gives nothing away.

Under torchrun and deepspeed the store is theirs, and they decide who can reach it. Where the user sets
LOCKSTEP_RANKS_SECRET on every node, the ranks prove that they know it there too.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from lockstep.errors import ConfigError, LockstepError
from lockstep.ranks.environment import LAUNCHER_PID, SECRET
from lockstep.wire.groups import host_store as host_store

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
            f"wrong-environment: {SECRET} has {len(secret)} characters, at least {_SHORTEST} are needed; "
            "take what `openssl rand -hex 32` prints, the same on every node"
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
            f"wrong-environment: {SECRET} is not in the environment of this rank, so it cannot join the "
            "others; leave starting the ranks to --ranks N"
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
            f"{'has' if len(strangers) == 1 else 'have'} a secret of the run and this rank has none; set "
            f"{SECRET} to the same value on every node, or on none"
        )
    raise RankError(
        f"not-authenticated: rank {rank} of {size}: what joined as {who} does not know the secret of this "
        f"run, so it is not one of its ranks; nothing was exchanged with it. Another program on {_where()} "
        f"takes part in the rendezvous: find it, then start again (under torchrun: {SECRET} must be the same "
        "on every node)"
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
