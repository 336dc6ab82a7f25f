"""A FAKE SGLang server: it has SGLang's endpoints and manners, and no model.

It speaks HTTP as SGLang 0.5.16 does (or, with plan "sessions", as 0.5.23), refuses every field that SGLang
does not have, where the real one would ignore it, and dies where the real one dies. A completion of prompt
[.., p] with max_new_tokens n is p+1, p+2, ..., modulo VOCAB, with the logprobs -0.125, -0.25, ...; it ends at
a stop id. The plan is JSON in the file that FAKE_SGLANG_PLAN names: {"starts": [{...}, ...]}, one entry for
each start of a server, the last one for all later ones:

    flush: false            /flush_cache says no          token_seconds: s    time of each token
    die_at_token: n         SIGKILL of itself             hang_at_token: n    nothing comes any more
    sessions: true          updates need begin and end    reads: false        a model that cannot be read
    weight_version: text    what samples are said to have been made with
    nan_at_token: n         logits that are not finite    abort_at_token: n   an abort nobody asked for
    info: {...}             over what /server_info says   break_streams: n    the first n answers break off
    slow_update: s          time of each update           cumulative: true    chunks repeat what was sent
    fail_start: text        an error before it listens    architectures: [..] of another model
    abort_waiting: true     samples are aborted in the queue that they were put back into
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import signal
import struct
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from sglang._version import __version__

VOCAB = 256
FIELDS = {
    "/generate": {
        "rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
        "return_text_in_logprobs", "stream",
    },
    "/abort_request": {"rid", "abort_all"},
    "/release_memory_occupation": {"tags"},
    "/resume_memory_occupation": {"tags"},
    "/begin_weight_update": set(),
    "/end_weight_update": set(),
    "/update_weights_from_tensor": {"serialized_named_tensors", "load_format", "flush_cache"},
    "/update_weights_from_distributed": {
        "names", "dtypes", "shapes", "group_name", "load_format", "flush_cache",
    },
    "/update_weights_from_disk": {"model_path", "load_format", "flush_cache"},
    "/init_weights_update_group": {
        "master_address", "master_port", "rank_offset", "world_size", "group_name", "backend",
    },
    "/destroy_weights_update_group": {"group_name"},
    "/update_weight_version": {"new_version", "abort_all_requests"},
    "/get_weights_by_name": {"name", "truncate_size"},
}  # fmt: skip
SAMPLING = {
    "n", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_new_tokens", "stop_token_ids", "ignore_eos", "sampling_seed", "stream_interval",
}  # fmt: skip
NEW_IN_23 = {"/begin_weight_update", "/end_weight_update"}
ALLOWED = {
    ("types", "SimpleNamespace"), ("torch", "Tensor"), ("torch.storage", "TypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch", "uint8"), ("torch", "bfloat16"), ("torch", "float32"), ("torch", "float16"),
}  # fmt: skip


class State:
    def __init__(self, args: dict, plan: dict, log: Path | None) -> None:
        self.args, self.plan, self.log = args, plan, log
        self.lock = threading.Lock()
        self.running: dict[str, threading.Event] = {}
        self.released: set[str] = set()
        self.session = False
        self.version = "default"
        self.weights: dict[str, list[float]] = {}
        self.tokens = 0
        self.cached: set[tuple[int, ...]] = set()
        self.broken = 0

    def note(self, path: str, body: dict) -> None:
        """For the tests: what was asked, in order."""
        if self.log is not None:
            with self.lock, open(self.log, "a") as file:
                file.write(json.dumps([path, body]) + "\n")


STATE: State


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Refused(Exception):
    """Answered with status 400."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "FakeSGLang"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._handle({})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        text = self.rfile.read(length)
        self._handle(json.loads(text) if text else {})

    def _handle(self, body: dict) -> None:
        parts = urlsplit(self.path)
        key = STATE.args["api_key"]
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._json({"error": "Unauthorized"}, status=401)
            return
        STATE.note(parts.path, body)
        known = FIELDS.get(parts.path)
        if parts.path in NEW_IN_23 and not STATE.plan.get("sessions"):
            self._json({"detail": "Not Found"}, status=404)
            return
        unknown = set(body) - (known if known is not None else set())
        if unknown:
            self._json({"error": {"message": f"the fake knows no field {sorted(unknown)}"}}, status=400)
            return
        name = "do" + parts.path.replace("/", "_")
        if not hasattr(self, name):
            self._json({"detail": "Not Found"}, status=404)
            return
        try:
            getattr(self, name)(body, parse_qs(parts.query))
        except Refused as error:
            self._json({"error": {"message": str(error)}}, status=400)

    def _json(self, value: object, *, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _done(self, success: bool, message: str = "Success") -> None:
        self._json({"success": success, "message": message}, status=200 if success else 400)

    # what it is

    def do_model_info(self, body: dict, query: dict) -> None:
        config = json.loads((Path(STATE.args["model_path"]) / "config.json").read_text())
        architectures = STATE.plan.get("architectures", config.get("architectures"))
        self._json(
            {
                "model_path": STATE.args["model_path"],
                "architectures": architectures,
                "weight_version": STATE.version,
            }
        )

    def do_server_info(self, body: dict, query: dict) -> None:
        length = STATE.args["context_length"]
        said = {
            **STATE.args,
            "max_req_input_len": length - 6,
            "version": __version__,
            "internal_states": [{"memory_usage": {"weight": 0.5, "kvcache": 2.0}}],
            "fake": True,
        }
        self._json(said | STATE.plan.get("info", {}))

    def do_v1_loads(self, body: dict, query: dict) -> None:
        self._json({"loads": [{"num_used_tokens": STATE.tokens, "token_usage": 0.25}]})

    # samples

    def do_generate(self, body: dict, query: dict) -> None:
        if "weights" in STATE.released or "kv_cache" in STATE.released:
            die()  # an illegal memory access
        params = body["sampling_params"]
        many = isinstance(params, list)
        if not many:
            self._json({"output_ids": [0], "meta_info": {"finish_reason": {"type": "length", "length": 1}}})
            return
        for one in params:
            if set(one) - SAMPLING:
                raise Refused(f"the fake knows no sampling field {sorted(set(one) - SAMPLING)}")
        ids, rids = body["input_ids"], body["rid"]
        if not len(ids) == len(rids) == len(params) or len(set(rids)) != len(rids):
            raise Refused("rids, prompts and parameters do not belong together")
        for prompt, one in zip(ids, params, strict=True):
            if len(prompt) + one["max_new_tokens"] > STATE.args["context_length"]:
                raise Refused("Requested token count exceeds the model's maximum context length")
        with STATE.lock:
            for rid in rids:
                STATE.running[rid] = threading.Event()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        samples = [FakeSample(*x) for x in zip(rids, ids, params, range(len(rids)), strict=True)]
        try:
            self._decode(samples)
            self._chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with STATE.lock:
                for rid in rids:
                    STATE.running.pop(rid, None)
            self.close_connection = True

    def _decode(self, samples: list[FakeSample]) -> None:
        while samples:
            time.sleep(STATE.plan.get("token_seconds", 0.0))
            for sample in list(samples):
                event = sample.step()
                if event is not None:
                    self._chunk(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
                if sample.reason is not None:
                    samples.remove(sample)
            STATE.tokens += 1
            if STATE.plan.get("die_at_token") == STATE.tokens:
                die()
            if STATE.plan.get("hang_at_token") == STATE.tokens:
                threading.Event().wait()
            if STATE.tokens > 1 and STATE.broken < STATE.plan.get("break_streams", 0):
                STATE.broken += 1
                raise BrokenPipeError

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def do_abort_request(self, body: dict, query: dict) -> None:
        with STATE.lock:
            for rid, event in STATE.running.items():
                if body["abort_all"] or rid.startswith(body["rid"]):
                    event.set()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    # memory

    def do_flush_cache(self, body: dict, query: dict) -> None:
        deadline = time.monotonic() + float(query.get("timeout", ["0"])[0])
        while STATE.running and time.monotonic() < deadline:
            time.sleep(0.01)
        yes = STATE.plan.get("flush", True) and not STATE.running
        if yes:
            STATE.cached.clear()
        text = b"Cache flushed.\n" if yes else b"Flush cache failed.\n"
        self.send_response(200 if yes else 400)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_release_memory_occupation(self, body: dict, query: dict) -> None:
        if STATE.running or not STATE.args["enable_memory_saver"]:
            die()  # an assertion in the scheduler
        STATE.released |= set(body["tags"])
        if "weights" in body["tags"]:
            STATE.weights = {}
        self._json(None)

    def do_resume_memory_occupation(self, body: dict, query: dict) -> None:
        if not set(body["tags"]) <= STATE.released:
            die()  # a KeyError in the scheduler
        STATE.released -= set(body["tags"])
        self._json(None)

    # weights

    def do_begin_weight_update(self, body: dict, query: dict) -> None:
        if STATE.session:
            self._done(False, "a weight-update session is already open; call end_weight_update() first")
            return
        STATE.session = True
        self._done(True)

    def do_end_weight_update(self, body: dict, query: dict) -> None:
        if not STATE.session:
            self._done(False, "no weight-update session is open; call begin_weight_update() first")
            return
        STATE.session = False
        self._done(True)

    def _may_update(self) -> bool:
        time.sleep(STATE.plan.get("slow_update", 0.0))
        if "weights" in STATE.released:
            die()
        if STATE.plan.get("sessions") and not STATE.session:
            self._done(False, "must run between begin_weight_update() and end_weight_update()")
            return False
        return True

    def do_update_weights_from_tensor(self, body: dict, query: dict) -> None:
        if not self._may_update():
            return
        if body["load_format"] != "flattened_bucket" or body["flush_cache"]:
            raise Refused("the fake expects flattened buckets that are not flushed")
        payloads = body["serialized_named_tensors"]
        if len(payloads) != STATE.args["tp_size"]:
            die()  # an IndexError in the scheduler
        value = Unpickler(io.BytesIO(base64.b64decode(payloads[0], validate=True))).load()
        for meta in value["metadata"]:
            STATE.weights[meta.name] = [float(meta.start_idx), float(meta.end_idx)]
        self._done(True)

    def do_update_weights_from_distributed(self, body: dict, query: dict) -> None:
        if self._may_update():
            for name in body["names"]:
                STATE.weights[name] = []
            self._done(True)

    def do_init_weights_update_group(self, body: dict, query: dict) -> None:
        self._done(True, "Succeeded to initialize custom process group.")

    def do_destroy_weights_update_group(self, body: dict, query: dict) -> None:
        self._done(True)

    def do_update_weights_from_disk(self, body: dict, query: dict) -> None:
        if not self._may_update():
            return
        if body["load_format"] == "dummy":
            self._json({"success": False, "message": "Failed to get model loader"}, status=200)
            return
        for file in Path(body["model_path"]).glob("*.safetensors"):
            STATE.weights.update(read_safetensors(file))
        self._done(True, "Succeeded to update model weights.")  # whatever the names were

    def do_update_weight_version(self, body: dict, query: dict) -> None:
        STATE.version = body["new_version"]
        self._done(True)

    def do_get_weights_by_name(self, body: dict, query: dict) -> None:
        if not STATE.plan.get("reads", True) or body["name"] not in STATE.weights:
            raise Refused("Get parameter by name failed")
        values = STATE.weights[body["name"]]
        self._json(values[: body["truncate_size"]] if values and not isinstance(values[0], list) else values)


class FakeSample:
    def __init__(self, rid: str, prompt: list[int], params: dict, index: int) -> None:
        self.rid, self.prompt, self.params, self.index = rid, prompt, params, index
        self.ids: list[int] = []
        self.sent = 0
        self.reason: dict | None = None
        self.cached = len(prompt) if tuple(prompt) in STATE.cached else 0
        STATE.cached.add(tuple(prompt))

    def step(self) -> dict | None:
        """One token; the event that it makes."""
        if STATE.running[self.rid].is_set():
            self.reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            return self._event()
        token = (self.prompt[-1] + len(self.ids) + 1) % VOCAB
        self.ids.append(token)
        count, params = len(self.ids), self.params
        if not params["ignore_eos"] and token in params["stop_token_ids"]:
            self.reason = {"type": "stop", "matched": token}
        elif count == params["max_new_tokens"]:
            self.reason = {"type": "length", "length": count}
        if STATE.plan.get("nan_at_token") == count:
            self.reason = {"type": "stop", "matched": "NaN happened"}
        if STATE.plan.get("abort_at_token") == count:
            self.reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        interval = params.get("stream_interval") or 1
        due = interval == 1 or count % interval == 1
        return self._event() if due or self.reason is not None else None

    def _event(self) -> dict:
        incremental = STATE.args["incremental_streaming_output"]
        start = self.sent if incremental else 0
        logprobs = [[-(k + 1) / 8, self.ids[k], None] for k in range(start, len(self.ids))]
        ids = self.ids[start:]
        aborted = self.reason is not None and self.reason["type"] == "abort"
        if aborted and incremental and STATE.plan.get("abort_waiting"):
            # of a sample that was put back into the queue: what was sent last again, and every logprob
            self.ids = self.ids[: self.sent]
            ids = self.ids[-1:]
            logprobs = [[-(k + 1) / 8, self.ids[k], None] for k in range(len(self.ids))]
        self.sent = len(self.ids)
        meta = {
            "id": self.rid,
            "finish_reason": self.reason,
            "prompt_tokens": len(self.prompt),
            "weight_version": STATE.plan.get("weight_version", STATE.version),
            "completion_tokens": len(self.ids),
            "cached_tokens": self.cached,
            "input_token_logprobs": [],
            "output_token_logprobs": logprobs,
            "output_token_logprobs_length": len(self.ids),
        }
        return {"output_ids": ids, "meta_info": meta, "index": self.index}


class Unpickler(pickle.Unpickler):
    """Lets in what SGLang 0.5.23 lets in, of what Lockstep sends."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in ALLOWED:
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        if name == "SimpleNamespace":
            return types.SimpleNamespace
        return (lambda *args: args) if name == "rebuild_cuda_tensor" else f"{module}.{name}"


def read_safetensors(file: Path) -> dict[str, list]:
    """Rows of float32 or bfloat16 tensors, by name."""
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    found = {}
    for name, spec in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + size + at for at in spec["data_offsets"])
        raw = data[start:end]
        if spec["dtype"] == "BF16":
            words = struct.unpack(f"<{len(raw) // 2}H", raw)
            values = [struct.unpack("<f", struct.pack("<I", w << 16))[0] for w in words]
        else:
            values = list(struct.unpack(f"<{len(raw) // 4}f", raw))
        row = spec["shape"][1] if len(spec["shape"]) == 2 else 0
        rows = [values[i : i + row] for i in range(0, len(values), row)] if row else values
        found[name] = rows
    return found


def parse(argv: list[str]) -> dict:
    """Strict: an option that the fake's ServerArgs does not have is an error."""
    import argparse
    from dataclasses import MISSING, fields
    from typing import get_origin, get_type_hints

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    hints = get_type_hints(ServerArgs)
    extras = get_type_hints(ServerArgs, include_extras=True)
    for field in fields(ServerArgs):
        settings = extras[field.name].__metadata__[0].settings if get_origin(extras[field.name]) else {}
        if settings.get("no_cli"):
            continue
        first = settings.get("cli_name") or "--" + field.name.replace("_", "-")
        names = [first, *settings.get("aliases", ())]
        default = None if field.default is MISSING else field.default
        if hints[field.name] is bool:
            parser.add_argument(*names, dest=field.name, action="store_true")
        else:
            parser.add_argument(*names, dest=field.name, type=hints[field.name], default=default)
    parser.add_argument("--config", type=Path, default=Path(os.devnull))
    args = vars(parser.parse_args(argv))
    lines = args.pop("config").read_text().splitlines()
    return args | {line.split(": ")[0].replace("-", "_"): json.loads(line.split(": ")[1]) for line in lines}


def next_plan() -> tuple[dict, Path | None]:
    path = os.environ.get("FAKE_SGLANG_PLAN")
    if not path:
        return {}, None
    starts = json.loads(Path(path).read_text())["starts"]
    counter = Path(path).with_suffix(".count")
    number = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(number + 1))
    return starts[min(number, len(starts) - 1)], Path(path).with_suffix(".log")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    print("this is a FAKE SGLang server, for tests", flush=True)
    plan, log = next_plan()
    args = parse(sys.argv[1:])
    if plan.get("fail_start"):
        raise RuntimeError(plan["fail_start"])
    if plan.get("cumulative"):
        args["incremental_streaming_output"] = False
    STATE = State(args, plan, log)
    Server((args["host"], args["port"]), Handler).serve_forever()
