"""A rank of test_node_folders.py, on a node of its own whose folders nobody else sees: its working directory.

python node_worker.py FOLDER ARGUMENTS OF lockstep
"""

import os
import sys
from pathlib import Path

from lockstep.cli.main import main

if __name__ == "__main__":
    rank = os.environ["RANK"]
    os.environ |= {"GROUP_RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.chdir(Path(sys.argv[1]) / f"node-{rank}")
    sys.exit(main(sys.argv[2:]))
