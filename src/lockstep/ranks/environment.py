"""Environment variables of ranks. No torch: the launcher has none."""

LAUNCHER_PID = "LOCKSTEP_LAUNCHER_PID"
"""In the environment of ranks that `launch_ranks` started: the process that started them."""
SECRET = "LOCKSTEP_RANKS_SECRET"
"""In the environment of ranks, never in an argument, which everybody on the machine can read: the secret that
ranks prove to each other to know. `launch_ranks` draws one; under torchrun the user may set one on every
node."""
FLIGHT_DIR = "LOCKSTEP_FLIGHT_DIR"
"""In the environment of ranks that are watched: the folder for their flight records. Who starts them ends
them when none makes progress for the deadline, so their own deadlines are later (BACKSTOP_SECONDS)."""
BACKSTOP_SECONDS = 30.0
"""How much later than the watchdog a watched rank gives up by itself."""
WAIT_SECONDS = 1800.0
"""How long a rank of a training run waits for another unless set otherwise; long enough for slow rewards."""
COPIES = "LOCKSTEP_COPIES"
"""In the environment of ranks that are healed (cluster.peer_copy): the folder for copies of their state
(lockstep.ranks.copy_folder)."""
COPY_PLACE = "LOCKSTEP_COPY_PLACE"
"""In the environment of ranks on several nodes that are healed, until their node's host has seen it: where it
makes such a folder in the node's own memory (lockstep.loop.copy_keeper)."""
COPY_KEEPER = "LOCKSTEP_COPY_KEEPER"
"""In the environment of those ranks: address, port and token, as JSON, of the process that keeps the folder
of their node. Taken from there at the start, so that nothing that a rank starts inherits it."""
RESERVE = "LOCKSTEP_RESERVE"
"""In the environment of ranks on a cluster that are healed, until their node's host has seen it: processes
are to wait there to take the ranks' places (lockstep.ranks.reserve)."""
TURN = "LOCKSTEP_TURN"
"""In the environment of a process that waits so: the named pipe on which it hears that it is a rank."""
RESTART = "LOCKSTEP_RESTART"
"""In the environment of ranks that were started again after a death: lockstep.ranks.recovery.Recovery."""
