# Kill a run, go on from its last checkpoint, and see that no sample was lost.
# Pages: docs/how-to/resume-and-checkpoints.md (checkpoint.every, --resume, status --ledger)
set -eu
lockstep train grpo --recipe tiny --steps 100 --checkpoint.every 1 --checkpoint.keep-last 100 --run-dir runs/killed > killed.log 2>&1 &
for _ in $(seq 600); do
    [ -d runs/killed/checkpoints/step-000002 ] && break
    sleep 0.5
done
kill -9 $!
wait $! || true
lockstep train --resume runs/killed --checkpoint 2 --steps 4
lockstep status runs/killed --ledger
