"""A Ray cluster on this machine, with a token, until stdin closes: ray_nodes.py FOLDER two|spare|head.

two     two nodes of one CPU; FOLDER/address is that of the cluster
spare   three nodes of one CPU beside the head, which has none: each of them may die
head    one node of two CPUs with a dashboard on loopback; FOLDER/address is that of the dashboard
"""

import os
import secrets
import socket
import sys
from pathlib import Path

folder, kind = Path(sys.argv[1]), sys.argv[2]
head = kind == "head"
token = folder / "token"
with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
    file.write(secrets.token_hex(32))
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"RAY_raylet_start_wait_time_s": "380", "RAY_TMPDIR": str(folder)}
# Jobs run "python", which must be this one.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# Ray notes its newest cluster there, and a job joins the one that is noted in its node's own folder.
(folder / "ray").mkdir()

from ray.cluster_utils import Cluster  # noqa: E402 - reads the environment


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


common = {"num_cpus": 1, "object_store_memory": 80_000_000}
args = {**common, "num_cpus": {"two": 1, "spare": 0, "head": 2}[kind]}
args |= {"temp_dir": str(folder / "ray"), "include_dashboard": head, "dashboard_port": None}
if head:
    args |= {"dashboard_host": "127.0.0.1", "dashboard_port": free_port()}
    args |= {"dashboard_agent_listen_port": free_port()}  # of itself one number for all clusters of a machine
cluster = Cluster(initialize_head=True, head_node_args=args)
for _ in range({"two": 1, "spare": 3, "head": 0}[kind]):
    cluster.add_node(**common)
(folder / "new").write_text(f"http://127.0.0.1:{args['dashboard_port']}" if head else cluster.address)
(folder / "new").rename(folder / "address")
sys.stdin.read()
cluster.shutdown()
