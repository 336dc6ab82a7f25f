"""A small run directory for the pages of lockstep view, and a client for their server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from threading import Thread

from lockstep.view.server import Server

EVIL = "<script>alert(1)</script>\x1b[31m\u202e</textarea>'\"&amp;"
REWARDS = (0.25, 0.5, 0.75)
CONFIG = """
kind = "grpo"
name = "page"
steps = 5

[model]
name = "shape:tiny-llama"

[data]
source = "ids"

[[rewards]]
name = "ids"
"""


def make_run(folder: Path, *, text: str = EVIL, metric: str = "loss", details: bool = True) -> Path:
    """Write a run of three steps, with two prompts of two samples in each; `details`: log.token_details."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    manifest = {"started": "2026-01-02T03:04:05+00:00", "torch": "2.11", "axes": {"engine": "hf"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rows = [{"step": 0, "evaluation": "before", "timestamp": 100.0, "eval/mean_reward": 0.125}]
    for step, reward in enumerate(REWARDS):
        row = {"step": step, "timestamp": 101.0 + step, "reward/mean": reward, metric: -0.5 * step}
        row["entropy"] = (1.0, "NaN", "Infinity")[step]
        rows.append(row | {"time/step": 2.0, "time/generate": 1.5, "time/optimizer": 0.25})
        samples = [_rollout(step, 2 * step + prompt, sample, text) for prompt in (0, 1) for sample in (0, 1)]
        for one in samples if not details else ():
            for name in ("policy_logprobs", "entropies", "advantages"):
                del one[name]
        (folder / "rollouts" / f"step-{step:06d}.jsonl").write_text("".join(map(_line, samples)))
    (folder / "metrics.jsonl").write_text("".join(map(_line, rows)))
    (folder / "summary.json").write_text(json.dumps({"outcome": "finished", "wall_seconds": 4.0}))
    return folder


def _rollout(step: int, prompt: int, sample: int, text: str) -> dict[str, object]:
    return {
        "step": step,
        "prompt_index": prompt,
        "sample": sample,
        "prompt": f"question {prompt} {text}",
        "completion": f"answer {sample} {text}",
        "prompt_token_ids": [1, 2],
        "token_ids": [7, 8, 9],
        "rollout_logprobs": [-0.5, -1.25, -2.0],
        "policy_logprobs": [-0.5, -1.0, -2.5],
        "entropies": [0.1, 0.2, 0.3],
        "advantages": [1.5, 1.5, 1.5],
        "finish_reason": "stop",
        "reward": 0.5 + sample,
        "rewards": {"ids": 0.5 + sample},
        "seed": 11,
        "policy_version": step,
    }


def _line(row: dict[str, object]) -> str:
    return json.dumps(row) + "\n"


@contextmanager
def serving(*paths: Path) -> Iterator[Client]:
    """Serve the runs on a free port, from a thread."""
    server = Server(list(paths), port=18765)
    thread = Thread(target=server.run)
    thread.start()
    try:
        yield Client(server)
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


class Client:
    """Requests to a server, with its cookie unless another is given."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.host = f"127.0.0.1:{server.port}"
        self.cookie = f"lockstep-view-{server.port}={server.token}"

    def ask(
        self,
        path: str,
        *,
        cookie: str | None = None,
        method: str = "GET",
        headers: dict[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        """The answer; its body is in `content`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        sent = {"Host": self.host, "Cookie": self.cookie if cookie is None else cookie} | (headers or {})
        try:
            connection.putrequest(method, path, skip_host=True)
            for name, value in sent.items():
                for each in value.split("\n"):
                    connection.putheader(name, each)
            connection.endheaders()
            answer = connection.getresponse()
            answer.content = answer.read()  # type: ignore[attr-defined]
        finally:
            connection.close()
        return answer

    def page(self, path: str) -> Page:
        """The page, which must be there."""
        answer = self.ask(path)
        assert answer.status == 200, (path, answer.status, answer.content[-2000:])  # type: ignore[attr-defined]
        return Page(answer.content.decode())  # type: ignore[attr-defined]


class Page(HTMLParser):
    """What a browser would see of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.tags, self.text = source, [], ""
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._inside = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag in ("script", "style"):
            getattr(self, f"{tag}s").append("")

    def handle_endtag(self, tag: str) -> None:
        """Text after it is not its text."""
        self._inside = ""

    def handle_data(self, data: str) -> None:
        """Keep it."""
        if self._inside in ("script", "style"):
            getattr(self, f"{self._inside}s")[-1] += data
        else:
            self.text += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Attributes of the elements that have these."""
        wanted = {name.replace("_", "-").rstrip("-"): value for name, value in attributes.items()}
        return [has for name, has in self.tags if name == tag and wanted.items() <= has.items()]
