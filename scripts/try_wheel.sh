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
# "$bin/lockstep" view ...  joins this list with the command.
echo 'the wheel works'
