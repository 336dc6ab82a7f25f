"""One worker of a test's engine: takes buckets as JSON lines, answers each with a JSON line.

    {"bucket": {...}, "seconds": 10}  ─► {"tensors": {name: [dtype, shape, sha256]}} or {"error": text}
    {"hang": 5}                       ─► sleeps before the next one

argv: rank, and what to do at which bucket: die-before-1, hang-before-1.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

import torch

from lockstep.wire.buckets import WireError
from lockstep.wire.receive import Receiver


def main() -> None:
    rank, todo = int(sys.argv[1]), sys.argv[2:]
    device = os.environ.get("RECEIVER_DEVICE", "cpu")
    receiver = Receiver(device, rank=rank)
    for line in sys.stdin:
        values = json.loads(line)
        bucket = values["bucket"]
        if f"die-before-{bucket['index']}" in todo:
            os._exit(7)
        if f"hang-before-{bucket['index']}" in todo:
            time.sleep(600)
        if f"raise-before-{bucket['index']}" in todo:
            print(json.dumps({"error": "no room for it"}), flush=True)
            continue
        try:
            found = {}
            for name, tensor in receiver.tensors(bucket, deadline=time.monotonic() + values["seconds"]):
                data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                found[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
            print(json.dumps({"tensors": found}), flush=True)
        except WireError as error:
            print(json.dumps({"error": str(error)}), flush=True)


main()
