"""The modules that other processes run, and how a process of ours is recognised.

    Child([*python(ROLE_SERVER), str(path)])     # python -m lockstep.loop.role_server PATH

The names of the modules of `lockstep` stand here only. Every process that we start has MARKER in its
environment. Nothing is recognised by a module's name in its command line: modules move, and anyone may run a
file of that name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import psutil

from lockstep.processes.supervisor import TITLE

MARKER = "LOCKSTEP_PROCESS"
"""In the environment of every process that Lockstep starts: "1"."""

COMMAND = "lockstep"
"""The command `lockstep`; ranks run it."""
LOCAL_SERVER = "lockstep.engine.local_server.server"
"""The engines native and hf in a server process. Argument: a file."""
ROLE_SERVER = "lockstep.loop.role_server"
"""Remote roles. Argument: a file."""
PEER_CHECKPOINT_SERVER = "lockstep.loop.peer_checkpoint_server"
"""Peer checkpoints of a node. Arguments: folder and address."""
RAY_HEAD = "lockstep.cluster.launch"
"""The head of a Ray cluster on this machine."""
PROGRAMS = (COMMAND, LOCAL_SERVER, ROLE_SERVER, PEER_CHECKPOINT_SERVER, RAY_HEAD)

REWARDS = "lockstep.rollout.reward_process"
VERIFIERS = "lockstep.rollout.verifiers"
PROMPT_SEARCH = "lockstep.rollout.prompt_kinds"
CHAT_TEMPLATE = "lockstep.observe.template_renderer"
TOOLS = "lockstep.environments.zygote"
PYTHON_TOOL = "lockstep.environments.python_tool"
"""Not a program: the module of an environment that TOOLS runs in a sandbox."""
JOBS = (REWARDS, VERIFIERS, PROMPT_SEARCH, CHAT_TEMPLATE, TOOLS)
"""Modules whose `main` a JobProcess runs."""

VLLM_WORKER = "lockstep.wire.vllm_worker.LockstepWorker"
"""vLLM's --worker-extension-cls."""
VLLM_MIDDLEWARE = "lockstep.wire.server_token.RequireToken"
"""vLLM's --middleware."""


def python(module: str, *, unbuffered: bool = False) -> list[str]:
    """Return the start of the command line that runs a module with this Python."""
    return [sys.executable, *(["-u"] if unbuffered else []), "-m", module]


def marked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the marker of our processes."""
    return {**environment, MARKER: "1"}


def role_of(process: psutil.Process) -> str | None:
    """Return the role of a process of ours: "guard" for a supervisor, "rank0", "roles", ..., "" before the
    process has named itself, and for what it has started by itself. None: Lockstep did not start it, or its
    environment cannot be read.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    try:
        if MARKER not in process.environ():
            return None
    except (psutil.AccessDenied, psutil.ZombieProcess):
        return None
    name: str = process.name()
    return name.removeprefix(TITLE) if name.startswith(TITLE) else ""
