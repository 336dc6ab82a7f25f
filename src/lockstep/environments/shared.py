"""Many async environments in one process and event loop: `environment.isolation = "shared"`.

Each has a socket of its own to the trainer, as in a process of its own. A call that awaits too long is
cancelled; one that blocks the event loop stops all of them, and the trainer ends the process.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time

from lockstep.environments.author import EnvironmentClass
from lockstep.environments.channel import Message, packets, receive_within, send_within
from lockstep.environments.instance import Instance
from lockstep.rollout.reward_functions import raised

_SEND_SECONDS = 600.0
"""For a trainer that is busy to take a reply."""


def serve(environment: EnvironmentClass, control: int, *, limit: int) -> None:
    """Serve instances, whose sockets come over `control`, until the trainer closes it."""
    asyncio.run(_serve(environment, control, limit))


async def _serve(environment: EnvironmentClass, control: int, limit: int) -> None:
    loop = asyncio.get_running_loop()
    requests = socket.socket(fileno=control)
    requests.setblocking(False)
    ended, tasks = asyncio.Event(), set[asyncio.Task[None]]()

    def accept() -> None:
        try:
            request, descriptors, *_ = socket.recv_fds(requests, 16, 1)
        except BlockingIOError:
            return
        if not request:
            ended.set()
        for fd in descriptors:
            task = loop.create_task(_one(Instance(environment, limit=limit), fd))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    loop.add_reader(control, accept)
    await ended.wait()


async def _one(instance: Instance, fd: int) -> None:
    with socket.socket(fileno=fd) as channel:
        channel.setblocking(False)
        while (job := await receive_within(channel, math.inf)) is not None:
            reply = await _reply(instance, job)
            await send_within(channel, packets({**reply, "id": job["id"]}), time.monotonic() + _SEND_SECONDS)


async def _reply(instance: Instance, job: Message) -> Message:
    seconds = job["seconds"]
    try:
        async with asyncio.timeout(seconds):
            return await instance.reply(job)
    except TimeoutError:
        return {"problem": f"took longer than {seconds:g} s", "kind": "timeout", "seconds": seconds}
    except (SystemExit, KeyboardInterrupt) as error:  # the process is not its own to end
        return {"problem": raised(error), "kind": "raised", "seconds": 0.0}
