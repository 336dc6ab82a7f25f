"""Row-invariant ops: a row's result does not depend on how many other rows there are, nor on its place.

`convert` swaps the parts of a causal LM for such ops, in place; `self_test` proves them on the machine at
hand, and lets stock ops stay where they pass. Then a token's logprob is one number, to the bit, whether it is
computed in a training pack, in a prefill, or one token at a time.
"""

from lockstep.invariant.checks import dependence
from lockstep.invariant.converter import Report, convert, is_converted, kernels_of
from lockstep.invariant.head import head_kernels
from lockstep.invariant.selftest import Verdict, self_test
from lockstep.invariant.settings import configure_cuda, configured, inductor_options

__all__ = [
    "Report",
    "Verdict",
    "configure_cuda",
    "configured",
    "convert",
    "dependence",
    "head_kernels",
    "inductor_options",
    "is_converted",
    "kernels_of",
    "self_test",
]
