"""From trainer to engine: how weights travel."""

from lockstep.transfer.choose import make_transfer as make_transfer
