"""Joint graphs under the wrappers of two gloo ranks, and with weights that are DTensors."""

import joint_ranks
import pytest


@pytest.mark.slow
def test_two_ranks(tmp_path):
    joint_ranks.launch(tmp_path)
    done = {path.name for path in tmp_path.iterdir()} - {"store"}
    assert done == {"ddp", "fsdp2_whole", "fsdp2_by_layer", "dtensors"}
