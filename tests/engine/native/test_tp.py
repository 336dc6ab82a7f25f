"""An engine that two ranks run together, each with a part of every matrix; see tp_worker.py. That its bits
are the trainer's is in tests/parity/test_lockstep.py."""

from pathlib import Path

import pytest
from starting import run_ranks


@pytest.mark.slow
def test_two_ranks_sample_what_one_samples():
    """Samples wait, lose their place and go on, so that moves and prefills of the others are seen as well."""
    (found,), _ = run_ranks(Path(__file__).with_name("tp_worker.py"), ranks=2, seconds=200)
    for case in ("plain", "ahead", "shaped"):
        assert found[case]["samples"] == 12 and found[case]["other_tokens"] == 0, (case, found[case])
        # Sums over ranks are rounded in other places than one rank's.
        assert 0 < found[case]["gap"] < 1e-4, (case, found[case])
    assert found["ended"] and found["preemptions"] > 0
    assert found["heads"] == 1 and found["share"] < 0.52
    assert "2 ranks" in found["collectives"]
