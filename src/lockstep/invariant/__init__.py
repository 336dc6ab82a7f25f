"""Row-invariant ops: a row's result depends neither on the number of other rows nor on its position.

`convert` swaps the parts of a causal LM for such ops, in place; `self_test` tests them on this machine, and
keeps stock ops where they pass. Then a token's logprob is bitwise the same whether it is computed in a
training pack, in a prefill, or one token at a time.
"""

from lockstep.invariant.converter import Report, convert, is_converted, kernels_of
from lockstep.invariant.few_rows import MOST_ROWS, MergeProducts
from lockstep.invariant.modules import head_kernels
from lockstep.invariant.selftest import (
    Verdict,
    configure_cuda,
    configured,
    dependence,
    few_rows_test,
    inductor_options,
    self_test,
)

__all__ = [
    "MOST_ROWS",
    "MergeProducts",
    "Report",
    "Verdict",
    "configure_cuda",
    "configured",
    "convert",
    "dependence",
    "few_rows_test",
    "head_kernels",
    "inductor_options",
    "is_converted",
    "kernels_of",
    "self_test",
]
