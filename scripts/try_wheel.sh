#!/usr/bin/env bash
# Run what the README shows with an installed wheel, in an empty folder: scripts/try_wheel.sh FOLDER_OF_LOCKSTEP
set -euo pipefail
bin="$(cd "$1" && pwd)"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 PYTHONPATH=

"$bin/lockstep" --version
"$bin/python" - <<'PYTHON'
import importlib.resources, sys
import lockstep, lockstep_lab

for package in (lockstep, lockstep_lab):
    assert package.__file__.startswith(sys.prefix), f"{package.__file__} is not the wheel's"
    assert (importlib.resources.files(package) / "py.typed").is_file(), f"{package.__name__} has no py.typed"
PYTHON
"$bin/lockstep" train grpo --recipe tiny --run-dir tiny
"$bin/lockstep" train grpo --recipe demo --steps 2 --eval.num-prompts 8 --run-dir demo
"$bin/lockstep" replay --inputs 20,21 --out replay
"$bin/lockstep" view tiny demo --export view.html
"$bin/lockstep" view tiny demo > view.log &
server=$!
trap 'kill "$server" 2>/dev/null; rm -rf "$folder"' EXIT
timeout 120 bash -c 'until grep -q "^view: http" view.log; do sleep 0.2; done'
"$bin/python" - "$(sed -n 's/^view: \(http[^ ]*\).*/\1/p' view.log)" <<'PYTHON'
import sys, urllib.request

# The token in the URL becomes a cookie at the first load.
opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
page = opener.open(sys.argv[1], timeout=60).read().decode()
assert "smollm2-135m" in page, page[:2000]
PYTHON
echo 'the wheel works'
