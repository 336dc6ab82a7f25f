import sys
from pathlib import Path

# joint_tools, and the tiny models of the parity tests.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "parity")]
