"""Attention kernels with one signature, on packed documents.

    fn(q [T, N, H], k [T, K, H], v [T, K, H],
       *, cu_seqlens, max_seqlen, lengths, scale, window, mask=None, keys=None) -> [T, N, H]

    cu_seqlens   [D_cap + 1] int32; document d is slots cu_seqlens[d] to cu_seqlens[d + 1]
    max_seqlen   no document is longer
    lengths      the host's copy of the non-empty documents' lengths, or None where none may be baked
                 in (compiled code)
    scale        of the scores; None: H ** -0.5
    window       keys visible to a query, itself included (transformers' sliding_window); None: all before it
    mask         what `build_mask` made for this window, so that all layers of a forward share it;
                 None: made here
    keys         None: a document's keys are its rows. Else a `Keys`, in layout `shared` only: k and v are
                 [S, K, H], document d has cu_keys[d] to cu_keys[d + 1] of them, and its last query stands at
                 its last key
    sinks        [N]: a score of each head that counts in its softmax and has no value (GPT-OSS); None: none
    softcap      scores become softcap * tanh(scores / softcap) (Gemma 2); None: they stay

Causal within a document, blind across documents; N is a multiple of K. Rows that no document covers are
undefined. A kernel without one of the last two refuses models that need it.
"""

from lockstep.attention.adapters import (
    KERNELS,
    PREFIX,
    build_mask,
    implementation,
    kernel_of,
    label,
)
from lockstep.attention.ring import Ring, ring_attention
from lockstep.attention.varlen import enable_cpu_reference
from lockstep.ops.masks import Keys, SharedKeys

__all__ = [
    "KERNELS",
    "PREFIX",
    "Keys",
    "Ring",
    "SharedKeys",
    "build_mask",
    "enable_cpu_reference",
    "implementation",
    "kernel_of",
    "label",
    "ring_attention",
]
