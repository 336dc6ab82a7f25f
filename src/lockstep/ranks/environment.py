"""Environment variables of ranks. No torch: the launcher has none."""

LAUNCHER_PID = "LOCKSTEP_LAUNCHER_PID"
"""In the environment of ranks that `launch_ranks` started: the process that started them."""
SECRET = "LOCKSTEP_RANKS_SECRET"
"""In the environment of ranks, never in an argument, which everybody on the machine can read: the secret that
ranks prove to each other to know. `launch_ranks` draws one; under torchrun the user may set one on every
node."""
