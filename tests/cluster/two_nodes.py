"""Two Ray nodes of one CPU each on this machine, with a token, until stdin closes: two_nodes.py FOLDER."""

import os
import secrets
import sys
from pathlib import Path

folder = Path(sys.argv[1])
token = folder / "token"
with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
    file.write(secrets.token_hex(32))
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"RAY_raylet_start_wait_time_s": "120", "RAY_TMPDIR": str(folder)}
(folder / "ray").mkdir()  # Ray writes there which cluster is the newest

from ray.cluster_utils import Cluster  # noqa: E402 - reads the environment

common = {"num_cpus": 1, "object_store_memory": 80_000_000}
head = {**common, "include_dashboard": False, "temp_dir": str(folder), "dashboard_port": None}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(**common)
(folder / "new").write_text(cluster.address)
(folder / "new").rename(folder / "address")
sys.stdin.read()
cluster.shutdown()
