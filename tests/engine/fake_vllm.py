"""A FAKE of vLLM's server: its routes as Lockstep uses them, over no model at all. Standard library only.

    python fake_vllm.py PORT PLAN.json

Token i of a sample with seed s is (s + i) % vocab with logprob -0.5. PLAN says what goes wrong, for each
start of the server in turn (the last one again for all further starts); what was asked of it is appended to
PLAN.asked, one JSON object per line. Not a test: run by test_server.py and others.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

PORT, PLAN = int(sys.argv[1]), Path(sys.argv[2])
STARTS = PLAN.with_suffix(".starts")
DEFAULTS = {
    "version": "0.32.0",
    "max_model_len": 64,
    "vocab": 100,
    "root": None,
    "info": {"dtype": "torch.float32", "logprobs_mode": "raw_logprobs"},
    "worker": "lockstep.wire.vllm_worker.LockstepWorker",
    "logprob": -0.5,
    "reset": True,
}


def plan() -> dict:
    every = json.loads(PLAN.read_text())
    count = int(STARTS.read_text()) if STARTS.exists() else 0
    starts = every.get("starts", [{}])
    return DEFAULTS | every.get("all", {}) | starts[min(count, len(starts)) - 1]


class State:
    def __init__(self):
        self.lock = threading.Lock()
        self.arrived = self.replied = self.tokens = 0
        self.asleep = False
        self.aborted = set()


STATE = State()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, value, status=200):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refused(self):
        """Without the token, if it was given one."""
        token = os.environ.get("LOCKSTEP_SERVER_TOKEN")
        if token is None or self.headers.get("Authorization") == f"Bearer {token}":
            return False
        self.reply({"error": "this server needs its token"}, 401)
        return True

    def do_GET(self):
        if self.refused():
            return
        path, now = urlsplit(self.path).path, plan()
        if path == "/health":
            self.reply(b"", now.get("health", 200))
        elif path == "/version":
            self.reply({"version": now["version"]})
        elif path == "/v1/models":
            card = {
                "id": now.get("id", str(PLAN.parent)),
                "root": now["root"],
                "max_model_len": now["max_model_len"],
            }
            self.reply({"data": [card]})
        elif path == "/metrics":
            if now.get("progress"):
                STATE.tokens += 1
            self.reply(
                f'vllm:generation_tokens_total{{engine="0"}} {STATE.tokens}.0\n'
                'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'.encode()
            )
        elif path == "/server_info" and now["info"] is not None:
            config = {"model_config": now["info"], "parallel_config": {"worker_extension_cls": now["worker"]}}
            self.reply({"vllm_config": config})
        elif path == "/is_sleeping":
            self.reply({"is_sleeping": STATE.asleep})
        else:
            self.reply({"detail": "Not Found"}, 404)

    def do_POST(self):
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.refused():
            return
        body, path, now = json.loads(text or b"null"), urlsplit(self.path).path, plan()
        with open(PLAN.with_suffix(".asked"), "a") as file:
            file.write(json.dumps({"path": self.path, "body": body}) + "\n")
        if path.startswith(now.get("die_at", "nowhere")):
            os.kill(os.getpid(), signal.SIGKILL)
        if path == "/inference/v1/generate":
            self.generate(body, now)
        elif path == "/collective_rpc":
            memory = {"weights": 1000, "kv_cache_bytes": 1000}
            usual = memory if body["method"] == "lockstep_memory" else {"ok": True}
            answer = now.get("rpc", {}).get(body["method"], usual)
            self.reply({"results": [answer]})
        elif path == "/reset_prefix_cache":
            self.reply({"success": now["reset"]})
        elif path == "/abort_requests":
            STATE.aborted |= {name.removeprefix("generate-tokens-") for name in body["request_ids"]}
            self.reply({"status": "aborted"})
        elif path in ("/sleep", "/wake_up"):
            STATE.asleep = path == "/sleep" and not now.get("insomnia")
            self.reply({"status": "done"})
        else:
            self.reply({"status": "done"})

    def generate(self, body, now):
        if max(body["token_ids"]) >= now["vocab"]:
            self.reply({"error": {"message": "Token id is out of vocabulary"}}, 400)
            return
        with STATE.lock:
            STATE.arrived += 1
            if STATE.arrived == now.get("die_at_sample"):
                print("RuntimeError: the fake was told to die", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        id, sampling = body.get("request_id", ""), body["sampling_params"]
        until = time.monotonic() + now.get("seconds", {}).get(str(sampling["seed"]), now.get("delay", 0.0))
        while time.monotonic() < until and id not in STATE.aborted:
            time.sleep(0.02)
        count = 1 if id in STATE.aborted else sampling["max_tokens"]
        ids = [(sampling["seed"] + i) % now["vocab"] for i in range(count)]
        content = [{"token_id": t, "logprob": now["logprob"], "rank": 1} for t in ids]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "abort" if id in STATE.aborted else "length",
            "stop_reason": None,
        } | now.get("choice", {})
        usage = {"prompt_tokens": len(body["token_ids"]), "prompt_tokens_details": {"cached_tokens": 3}}
        raw = now.get("raw")
        self.reply(
            raw.encode() if raw is not None else {"choices": [choice], "usage": usage}, now.get("status", 200)
        )
        with STATE.lock:
            STATE.replied += 1
            last = STATE.replied == now.get("die_after_replies")
        while last:
            if STATE.arrived > STATE.replied:  # one is still being answered
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)


def main():
    STARTS.write_text(str(int(STARTS.read_text()) + 1 if STARTS.exists() else 1))
    now = plan()
    print("this is a FAKE of vLLM's server, for tests", flush=True)
    if now.get("grandchild"):  # in a session of its own, deaf to SIGTERM, as a worker may be
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=now["grandchild"] != "near")
        PLAN.with_suffix(".pids").write_text(f"{os.getpid()} {child.pid}")
    if "print" in now:
        print(now["print"], flush=True)
    if "exit" in now:
        sys.exit(now["exit"])
    if "environment" in now:
        Path(now["environment"]).write_text(json.dumps(dict(os.environ)))
    if now.get("silent"):
        time.sleep(600)
    server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server.serve_forever()


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 512
    main()
