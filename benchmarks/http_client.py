"""Does httpx answer for 256 samples at once as cheaply as Lockstep's own client of engine servers?

    pip install httpx==0.28.1 httpx2==2.16.2
    python benchmarks/http_client.py --json FILE

A server in another process, which has no model, answers only when every request of a round is there, so that
all connections are open at a time:

    posts    256 POSTs; each reply has 256 tokens with logprobs, as vLLM's /inference/v1/generate gives them
    events   8 POSTs of 32 samples each, as Lockstep asks SGLang; 32 events per sample, of 8 tokens each

Every side sends the same requests, holds each reply to the same largest size and reads JSON with the same
parser. httpx and httpx2 (its successor, which huggingface-hub brings) run in one thread: as one AsyncClient
that keeps its connections from round to round and, for posts, also as an AsyncClient for each request
("alone"), since a pool's work grows with its connections. Lockstep's client opens a connection for each
request. The sides take turns within a round, in an order that turns as well; the ratios are of the same
round. CPU seconds are those of the client's process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pydantic_core

from lockstep.engine.remote.driver import EventStreams
from lockstep.engine.remote.http import MAX_REPLY_BYTES, HttpClient, Reply

SAMPLES, TOKENS = 256, 256
WAVES, EVENT_TOKENS = 8, 8
PROMPT_TOKENS = 128
LIBRARIES = {"httpx": httpx, "httpx2": httpx2}
Other = Callable[[Any, str, str], Awaitable[int]]


def main(argv: list[str]) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        asyncio.run(serve())
        return 0
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        result = {
            "command": ["benchmarks/http_client.py", *argv],
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "load": os.getloadavg()},
            "versions": {name: version(name) for name in LIBRARIES} | {"python": platform.python_version()},
            "posts": measure(url, own_posts, httpx_posts, httpx_posts_alone, rounds=args.rounds),
            "events": measure(url, own_events, httpx_events, rounds=args.rounds),
        }
    finally:
        server.kill()
        server.wait()
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(url: str, own: Callable[[HttpClient], int], *others: Other, rounds: int) -> dict[str, Any]:
    """Seconds of each side in each round, medians, and the medians of the ratios to Lockstep's client."""
    client = HttpClient(url, name="benchmark")
    with asyncio.Runner() as runner:
        sides: dict[str, Callable[[], int]] = {"lockstep": lambda: own(client)}
        kept = {name: new_client(module, url) for name, module in LIBRARIES.items()}
        for name, one in kept.items():
            for other in others:
                side = f"{name} alone" if other is httpx_posts_alone else name
                sides[side] = lambda one=one, name=name, other=other: runner.run(other(one, name, url))
        seconds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for number in range(-1, rounds):  # the first warms up
            order = list(sides)
            for side in order[number % len(order) :] + order[: number % len(order)]:
                taken = timed(sides[side])
                if number >= 0:
                    seconds[side].append(taken)
        for one in kept.values():
            runner.run(one.aclose())
    return summary(own.__name__.removeprefix("own_"), seconds)


def new_client(module: Any, url: str) -> Any:
    """An AsyncClient without proxies and deadlines, of as many connections as there are samples."""
    limits = module.Limits(max_connections=SAMPLES, max_keepalive_connections=SAMPLES)
    return module.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False, verify=False)


def timed(side: Callable[[], int]) -> dict[str, float]:
    """Seconds of one round, whose tokens are counted."""
    started, cpu_started = time.perf_counter(), time.process_time()
    tokens = side()
    found = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
    assert tokens == SAMPLES * TOKENS, tokens
    return found


def summary(name: str, seconds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side, rounds in seconds.items():
        found[side] = {"rounds": rounds}
        for kind in ("seconds", "cpu_seconds"):
            ratios = [one[kind] / ours[kind] for one, ours in zip(rounds, seconds["lockstep"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            median = statistics.median(one[kind] for one in rounds)
            found[side][kind] = {"median": median, "ratio": middle, "ratio_quartiles": [low, high]}
            print(
                f"{name:8}{side:14}{kind:13}{median:8.3f}   ratio {middle:5.2f} [{low:.2f}, {high:.2f}]",
                flush=True,
            )
    return found


def request_body(number: int) -> dict[str, Any]:
    return {"request_id": str(number), "token_ids": list(range(PROMPT_TOKENS))}


def own_posts(client: HttpClient) -> int:
    """Tokens of 256 POSTs, by Lockstep's client."""
    tokens = 0
    with client.batch(limit=SAMPLES) as batch:
        for number in range(SAMPLES):
            batch.submit(number, "/posts", request_body(number))
        while batch.waiting:
            for _, reply in batch.poll(1.0):
                assert isinstance(reply, Reply), reply
                tokens += len(reply.json()["choices"][0]["token_ids"])
    return tokens


def own_events(client: HttpClient) -> int:
    """Tokens of the events of 8 POSTs, by Lockstep's client."""
    tokens, left = 0, WAVES
    with EventStreams(client) as streams:
        for number in range(WAVES):
            streams.open(number, "/events", json.dumps(request_body(number)).encode())
        while left:
            for _, event in streams.poll(1.0):
                if event is None:
                    left -= 1
                else:
                    assert isinstance(event, bytes), event
                    tokens += len(pydantic_core.from_json(event)["output_ids"])
    return tokens


async def httpx_posts(client: Any, name: str, url: str) -> int:
    """The same by one client of httpx or httpx2."""
    return sum(await asyncio.gather(*(httpx_post(client, number) for number in range(SAMPLES))))


async def httpx_posts_alone(client: Any, name: str, url: str) -> int:
    """The same by a client for each request."""

    async def alone(number: int) -> int:
        async with new_client(LIBRARIES[name], url) as one:
            return await httpx_post(one, number)

    return sum(await asyncio.gather(*map(alone, range(SAMPLES))))


async def httpx_post(client: Any, number: int) -> int:
    """Tokens of one POST."""
    body = json.dumps(request_body(number), separators=(",", ":")).encode()
    received = bytearray()
    async with client.stream("POST", "/posts", content=body) as reply:
        assert reply.status_code == 200
        async for piece in reply.aiter_raw():
            received += piece
            assert len(received) <= MAX_REPLY_BYTES
    value = pydantic_core.from_json(received, allow_inf_nan=False, cache_strings="keys")
    return len(value["choices"][0]["token_ids"])


async def httpx_events(client: Any, name: str, url: str) -> int:
    """The same by one client of httpx or httpx2."""

    async def one(number: int) -> int:
        tokens, received = 0, bytearray()
        body = json.dumps(request_body(number)).encode()
        async with client.stream("POST", "/events", content=body) as reply:
            async for piece in reply.aiter_raw():
                received += piece
                assert len(received) <= MAX_REPLY_BYTES
                *events, rest = bytes(received).split(b"\n\n")
                received = bytearray(rest)
                for event in events:
                    if event != b"data: [DONE]":
                        tokens += len(pydantic_core.from_json(event.removeprefix(b"data: "))["output_ids"])
        return tokens

    return sum(await asyncio.gather(*map(one, range(WAVES))))


def vllm_reply() -> bytes:
    """One sample as vLLM answers it."""
    ids = [(7919 * i) % 150_000 for i in range(TOKENS)]
    content = [{"token_id": t, "logprob": -1.0 / (1 + t), "rank": 1 + t % 7} for t in ids]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length"}
    return json.dumps({"request_id": "0", "choices": [choice], "usage": {"prompt_tokens": 128}}).encode()


def sglang_event(at: int) -> bytes:
    """One event of a sample as SGLang sends it, as a chunk of HTTP."""
    ids = [(7919 * i) % 150_000 for i in range(at, at + EVENT_TOKENS)]
    logprobs = [[-1.0 / (1 + t), t, None] for t in ids]
    meta = {"id": "sample-0000", "finish_reason": None, "output_token_logprobs": logprobs}
    text = b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(text), text)


class Gate:
    """Opens for all when `size` have come, again and again."""

    def __init__(self, size: int) -> None:
        self._size, self._here, self._open = size, 0, asyncio.Event()

    async def wait(self) -> None:
        event, self._here = self._open, self._here + 1
        if self._here == self._size:
            self._here, self._open = 0, asyncio.Event()
            event.set()
        await event.wait()


async def serve() -> None:
    """Print the port, and answer until killed."""
    posts, events = Gate(SAMPLES), Gate(WAVES)
    reply = vllm_reply()
    chunks = [sglang_event(at) for at in range(0, TOKENS, EVENT_TOKENS)]

    async def answer(path: bytes, writer: asyncio.StreamWriter) -> None:
        if path == b"/posts":
            await posts.wait()
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % len(reply) + reply)
            return
        await events.wait()
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for chunk in chunks:
            for _ in range(SAMPLES // WAVES):
                writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                await answer(head.split()[1], writer)
                await writer.drain()
                if b"connection: close" in head:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def cpu_name() -> str:
    """As the kernel says it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
