"""A Ray head with its dashboard on loopback, with a token, until stdin closes: jobs_head.py FOLDER."""

import os
import secrets
import socket
import sys
from pathlib import Path

folder = Path(sys.argv[1])
token = folder / "token"
with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
    file.write(secrets.token_hex(32))
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"RAY_raylet_start_wait_time_s": "120", "RAY_TMPDIR": str(folder)}
# Jobs run "python", which must be this one.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

from ray.cluster_utils import Cluster  # noqa: E402 - reads the environment

# Ray notes its newest cluster there, and a job joins the one that is noted in its node's own folder.
(folder / "ray").mkdir()
ports = []
for _ in range(2):  # the agent's own port is one number for all clusters of a machine
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports.append(server.getsockname()[1])
cluster = Cluster(
    initialize_head=True,
    head_node_args={
        "num_cpus": 2,
        "object_store_memory": 80_000_000,
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": ports[0],
        "dashboard_agent_listen_port": ports[1],
        "temp_dir": str(folder / "ray"),
    },
)
(folder / "new").write_text(f"http://127.0.0.1:{ports[0]}")
(folder / "new").rename(folder / "address")
sys.stdin.read()
cluster.shutdown()
