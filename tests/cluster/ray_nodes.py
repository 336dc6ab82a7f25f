"""A Ray cluster on this machine, with a token, until stdin closes: ray_nodes.py FOLDER two|head.

two     two nodes of one CPU; FOLDER/address is that of the cluster
head    one node of two CPUs with a dashboard on loopback; FOLDER/address is that of the dashboard
"""

import os
import secrets
import socket
import sys
from pathlib import Path

folder, two = Path(sys.argv[1]), sys.argv[2] == "two"
token = folder / "token"
with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
    file.write(secrets.token_hex(32))
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"RAY_raylet_start_wait_time_s": "120", "RAY_TMPDIR": str(folder)}
# Jobs run "python", which must be this one.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# Ray notes its newest cluster there, and a job joins the one that is noted in its node's own folder.
(folder / "ray").mkdir()

from ray.cluster_utils import Cluster  # noqa: E402 - reads the environment


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


common = {"num_cpus": 1 if two else 2, "object_store_memory": 80_000_000}
args = {**common, "temp_dir": str(folder / "ray"), "include_dashboard": not two, "dashboard_port": None}
if not two:
    args |= {"dashboard_host": "127.0.0.1", "dashboard_port": free_port()}
    args |= {"dashboard_agent_listen_port": free_port()}  # of itself one number for all clusters of a machine
cluster = Cluster(initialize_head=True, head_node_args=args)
if two:
    cluster.add_node(**common)
(folder / "new").write_text(cluster.address if two else f"http://127.0.0.1:{args['dashboard_port']}")
(folder / "new").rename(folder / "address")
sys.stdin.read()
cluster.shutdown()
