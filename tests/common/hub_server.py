"""A stand-in for the Hugging Face hub on loopback: as much of its HTTP API as an upload needs, with the form
of its requests and replies as huggingface_hub sends and reads them."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_stand_in_0123456789"


@dataclass
class Hub:
    """What the hub has been told."""

    url: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    """Of the commits so far, as REPO/PATH."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256."""
    refuses: int = 0
    """A status to answer commits with."""


@contextmanager
def hub() -> Iterator[Hub]:
    """A running hub, which knows one token."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_POST(self) -> None:
            self.reply(*self.posted(self.path.split("?")[0], self.body()))

        def do_PUT(self) -> None:
            content = self.body()
            state.objects[hashlib.sha256(content).hexdigest()] = content
            self.reply(200, {})

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def posted(self, path: str, body: bytes) -> tuple[int, Any]:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return 401, {"error": "Invalid username or password."}
            if path == "/api/repos/create":
                asked = json.loads(body)
                state.created.append(asked)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                return 200, {"url": f"{state.url}/{name}", "name": name}
            if "/preupload/" in path:
                names = [each["path"] for each in json.loads(body)["files"]]
                modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
                both = zip(names, modes, strict=True)
                return 200, {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in both]}
            if path.endswith("/info/lfs/objects/batch"):
                objects = json.loads(body)["objects"]
                for each in objects:
                    each["actions"] = {"upload": {"href": f"{state.url}/put/{each['oid']}"}}
                return 200, {"transfer": "basic", "objects": objects}
            assert "/commit/" in path, path
            return self.committed(path.removeprefix("/api/models/").split("/commit/")[0], body)

        def committed(self, repo: str, body: bytes) -> tuple[int, Any]:
            if state.refuses:
                return state.refuses, {"error": "You have no write access to this repository."}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    state.files[f"{repo}/{value['path']}"] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    state.files[f"{repo}/{value['path']}"] = state.objects[value["oid"]]
            return 200, {"commitOid": "c0ffee", "commitUrl": f"{state.url}/{repo}/commit/c0ffee"}

        def reply(self, status: int, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
