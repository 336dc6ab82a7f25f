"""Pieces of the standalone reproduction script: plain torch, nothing else is imported.

A script is HEADER, the facts (META), READER, the formulas that its kind needs, and MAIN. A formula is
`compute(side)`, which gives [B, L, ...] or [rows, ...] from the saved tensors of one side.
"""

from __future__ import annotations

HEADER = '''#!/usr/bin/env python3
"""{title}

{body}

Needs torch; reads repro.safetensors beside it. Exit status 1: the difference is reproduced, 0: it is not.
"""

import json
import os
import struct
import sys

import torch
import torch.nn.functional as F

META = json.loads(r"""{meta}""")
'''

READER = '''

def read_safetensors(path):
    """Tensors by name: 8 bytes with the length of a JSON header, the header, then raw little-endian bytes."""
    kinds = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool,
    }
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(size))
        data = bytearray(file.read())
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            kind, raw = kinds[entry["dtype"]], data[start:end]
            flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
            found[name] = flat.reshape(entry["shape"])
    return found


DEVICE = META["device"] if META["device"] == "cpu" or torch.cuda.is_available() else "cpu"
FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "repro.safetensors")
SAVED = {name: tensor.to(DEVICE) for name, tensor in read_safetensors(FILE).items()}


def t(side, name):
    """A saved tensor of one side; what both sides share is stored once. None: there is none."""
    found = SAVED.get(f"{side}/{name}")
    return SAVED.get(f"both/{name}") if found is None else found


def group(side, prefix):
    """Saved tensors by what follows the prefix."""
    return {
        name.split("/", 1)[1][len(prefix):]: tensor
        for name, tensor in SAVED.items()
        if name.split("/", 1)[0] in (side, "both") and name.split("/", 1)[1].startswith(prefix)
    }
'''

LINEAR = """

def compute(side):
    return F.linear(t(side, "x"), t(side, "weight"), t(side, "bias"))
"""

NORM = '''

def norm(x, weight, m):
    """RMSNorm; Gemma multiplies by 1 + weight, in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + m["eps"])
    if m["norm"] == "gemma":
        return (wide * (1.0 + weight.float())).type_as(x)
    return weight * wide.to(x.dtype)
'''

RMSNORM = """

def compute(side):
    return norm(t(side, "x"), t(side, "weight"), META)
"""

EMBEDDING = """

def compute(side):
    weight = t(side, "weight")
    rows = F.embedding(t(side, "x"), weight)
    scale = META["scale"]
    return rows if scale is None else rows * torch.tensor(scale, device=rows.device).to(weight.dtype)
"""

ACTIVATION = """

def activation(x):
    if META["activation"] == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if META["activation"] == "gelu_tanh" else "none")
"""

ACTIVATION_ONLY = """

def compute(side):
    return activation(t(side, "x"))
"""

MLP = """

def mlp(x, p, prefix=""):
    def linear(name, x):
        return F.linear(x, p[f"{prefix}{name}.weight"], p.get(f"{prefix}{name}.bias"))

    return linear("down_proj", activation(linear("gate_proj", x)) * linear("up_proj", x))
"""

MLP_ONLY = """

def compute(side):
    return mlp(t(side, "x"), group(side, "p/"))
"""

ROPE = '''

def rope(x, cos, sin):
    """x [B, L, N, H], cos and sin [B, L, H]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, :, None] + turned * sin[:, :, None]
'''

ROPE_ONLY = """

def compute(side):
    x = t(side, "x")
    x = x.view(*x.shape[:2], -1, META["head_dim"])
    return rope(x, t(side, "cos"), t(side, "sin"))
"""

ROTARY = """

def compute(side):
    angles = t(side, "x")[..., None].float() * t(side, "inv_freq").float()
    angles = torch.cat((angles, angles), dim=-1)
    angles = angles.cos() if META["which"] == 0 else angles.sin()
    return (angles * META["scaling"]).to(getattr(torch, META["dtype"]))
"""

ATTENTION = '''

def document_mask(cu_seqlens, slots, window):
    """[T, T]: which key (column) each query (row) may see."""
    index = torch.arange(slots, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), index.to(cu_seqlens.dtype), right=True)
    distance = index[:, None] - index[None, :]
    visible = (distance >= 0) & (document[:, None] == document[None, :])
    return visible if window is None else visible & (distance < window)


def dense(q, k, v, mask, scale):
    """[B, N, S, H], k and v with fewer heads; mask None: causal."""
    if mask is not None:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)


def reference(q, k, v, cu_seqlens, scale, window):
    """The formula of the CPU reference kernel, [T, N, H], in float32: softmax(q k' scale) v."""
    dtype, wide = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1).to(wide), v.repeat_interleave(repeats, dim=1).to(wide)
    scores = torch.einsum("qnh,snh->nqs", q.to(wide), k) * scale
    scores = scores.masked_fill(~document_mask(cu_seqlens, q.shape[0], window), float("-inf"))
    return torch.einsum("nqs,snh->qnh", scores.softmax(-1), v).to(dtype)


def per_document(q, k, v, lengths, scale, window):
    dtype = q.dtype
    if q.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()
    outputs = []
    for rows in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        length, mask = rows[0].shape[0], None
        if window is not None and window < length:
            distance = torch.arange(length, device=q.device)
            distance = distance[:, None] - distance[None, :]
            mask = (distance >= 0) & (distance < window)
        outputs.append(dense(*(x.transpose(0, 1)[None] for x in rows), mask, scale)[0].transpose(0, 1))
    return torch.cat(outputs).to(dtype)


def varlen(q, k, v, cu_seqlens, m):
    if q.device.type == "cpu":
        return reference(q, k, v, cu_seqlens, m["scale"], m["window"])
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    size = (-1, 0) if m["window"] is None else (m["window"] - 1, 0)
    return varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, m["max_seqlen"], m["max_seqlen"],
        scale=m["scale"], window_size=size, **gqa,
    )


def flex(q, k, v, block_mask, m):
    from torch.nn.attention.flex_attention import flex_attention

    run = flex_attention
    if q.device.type != "cpu" and not torch.compiler.is_compiling():
        run = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    return run(q, k, v, block_mask=block_mask, scale=m["scale"], enable_gqa=gqa)[0].transpose(0, 1)


def mask_of(side, m, slots):
    """What a kernel is given beside q, k and v; made outside of compiled code."""
    if m["variant"] != "flex":
        return t(side, "mask")
    from torch.nn.attention.flex_attention import create_block_mask

    visible = document_mask(t(side, "cu_seqlens"), slots, m["window"])
    return create_block_mask(lambda b, h, i, j: visible[i, j], None, None, slots, slots, device=DEVICE)


def attend(q, k, v, m, cu_seqlens, mask):
    """q [B, N, L, H], k and v [B, K, L, H] -> [B, L, N, H], by the kernel that the side used."""
    variant, (batch, _, length, _) = m["variant"], q.shape
    if variant == "dense":
        return dense(q, k, v, mask, m["scale"]).transpose(1, 2)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if variant == "per_document":
        out = per_document(q, k, v, m["lengths"], m["scale"], m["window"])
    elif variant == "masked":
        if mask is None:
            mask = document_mask(cu_seqlens, q.shape[0], m["window"])[None, None]
        out = dense(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask, m["scale"])[0].transpose(0, 1)
    elif variant == "varlen":
        out = varlen(q, k, v, cu_seqlens, m)
    else:
        out = flex(q, k, v, mask, m)
    return out.unflatten(0, (batch, length))
'''

KERNEL_ONLY = """

def compute(side):
    m, q = META["sides"][side], t(side, "q")
    mask = mask_of(side, m, q.shape[0] * q.shape[2])
    return attend(q, t(side, "k"), t(side, "v"), m, t(side, "cu_seqlens"), mask)
"""

BLOCK = '''

def block(x, p, cos, sin, m, cu_seqlens, mask):
    """One decoder layer of the Llama family (Llama, Qwen, Mistral, Gemma 3)."""

    def linear(name, x):
        return F.linear(x, p[f"self_attn.{name}.weight"], p.get(f"self_attn.{name}.bias"))

    def heads(name, x):
        x = linear(f"{name}_proj", x).view(*x.shape[:2], -1, META["head_dim"])
        weight = p.get(f"self_attn.{name}_norm.weight")
        return x if weight is None else norm(x, weight, META)

    h = norm(x, p["input_layernorm.weight"], META)
    q, k = (rope(heads(name, h), cos, sin).transpose(1, 2) for name in "qk")
    v = heads("v", h).transpose(1, 2)
    h = linear("o_proj", attend(q, k, v, m, cu_seqlens, mask).flatten(2))
    if "pre_feedforward_layernorm.weight" in p:
        x = x + norm(h, p["post_attention_layernorm.weight"], META)
        h = mlp(norm(x, p["pre_feedforward_layernorm.weight"], META), p, "mlp.")
        return x + norm(h, p["post_feedforward_layernorm.weight"], META)
    x = x + h
    return x + mlp(norm(x, p["post_attention_layernorm.weight"], META), p, "mlp.")


def compute(side):
    m, x = META["sides"][side], t(side, "x")
    run = torch.compile(block, fullgraph=True, dynamic=False) if m["compiled"] else block
    mask = mask_of(side, m, x.shape[0] * x.shape[1])
    return run(x, group(side, "p/"), t(side, "cos"), t(side, "sin"), m, t(side, "cu_seqlens"), mask)
'''

HEAD = '''

def compute(side):
    """[rows]: logprobs of the labels."""
    logits = F.linear(t(side, "x"), t(side, "weight"), t(side, "bias")).float() * META["scale"]
    if META["softcap"] is not None:
        logits = META["softcap"] * torch.tanh(logits / META["softcap"])
    logits = logits / META["temperature"]
    return logits.log_softmax(-1).gather(1, t(side, "labels")[:, None])
'''

NOTHING = """

compute = None  # no formula in plain torch for this module: only what was recorded is compared
"""

MAIN = '''

def tokens(side, value):
    """Rows of real tokens, in the order of the documents, [tokens, features]; a parameter's as they are."""
    rows = t(side, "rows")
    if rows is None or META["wrt"] in META["parameters"]:
        return value.reshape(value.shape[0], -1)
    if META["wrt"] in ("q", "k", "v"):
        value = value.transpose(1, 2)
    return value.flatten(0, 1).index_select(0, rows).flatten(1)


def result(side):
    """What this machine makes of a side's inputs: an output, or a gradient."""
    if META["wrt"] is None:
        with torch.no_grad():
            return tokens(side, compute(side))
    name = "p/" + META["wrt"] if f"{side}/p/" + META["wrt"] in SAVED else META["wrt"]
    where = f"{side}/{name}" if f"{side}/{name}" in SAVED else f"both/{name}"
    SAVED[where] = leaf = SAVED[where].detach().clone().requires_grad_()
    out = compute(side)
    return tokens(side, torch.autograd.grad(out, leaf, t(side, "grad_out").view_as(out))[0])


def gap(x, y):
    if x.shape != y.shape:
        sys.exit(f"shapes differ: {list(x.shape)} and {list(y.shape)}")
    largest = (x.double() - y.double()).abs().nan_to_num(nan=float("inf"))
    return float(largest.max()) if largest.numel() else 0.0


def main():
    reported = float(META["reported"])
    names = list(META["sides"])
    recorded = {side: t(side, "recorded") for side in names}
    between = gap(*recorded.values())
    print(f"{META['what']}: {META['sides'][names[0]]['label']} against {META['sides'][names[1]]['label']}")
    print(f"bisect reported   {names[0]} - {names[1]}   max difference {reported:.6e}")
    print(f"recorded          {names[0]} - {names[1]}   max difference {between:.6e}")
    if compute is None:
        print("there is no formula in plain torch for this module; the recorded tensors show the difference")
        print(f"max difference {between:.6e}: shown by the recorded tensors only")
        return 1
    made = {side: result(side) for side in names}
    here = gap(*made.values())
    off = {side: gap(made[side], recorded[side]) for side in names}
    print(f"computed here     {names[0]} - {names[1]}   max difference {here:.6e}")
    for side in names:
        print(f"{side}: recorded - computed here   max difference {off[side]:.6e}")
    largest = max(float(x.abs().max()) for x in recorded.values())
    rounding = 0.05 * reported + 4 * torch.finfo(recorded[names[0]].dtype).eps * largest
    if here == reported or (reported < float("inf") and abs(here - reported) <= rounding):
        print(f"max difference {here:.6e}: reproduced from the inputs of both sides")
        return 1
    worst = max(off, key=off.get)
    if off[worst] == reported or off[worst] > 0.5 * reported:
        print(f"max difference {off[worst]:.6e}: {worst}'s recorded result is not what torch makes of it")
        return 1
    print(f"max difference {here:.6e}: not reproduced")
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''

PARTS: dict[str, tuple[str, ...]] = {
    "linear": (LINEAR,),
    "rmsnorm": (NORM, RMSNORM),
    "embedding": (EMBEDDING,),
    "activation": (ACTIVATION, ACTIVATION_ONLY),
    "mlp": (ACTIVATION, MLP, MLP_ONLY),
    "rope": (ROPE, ROPE_ONLY),
    "rotary": (ROTARY,),
    "kernel": (ATTENTION, KERNEL_ONLY),
    "block": (NORM, ACTIVATION, MLP, ROPE, ATTENTION, BLOCK),
    "head": (HEAD,),
    "recorded": (NOTHING,),
}
"""Kind -> its formulas, in order."""


def script(kind: str, *, title: str, body: str, meta: str) -> str:
    """The whole script.

    Args:
        meta: JSON text.
    """
    header = HEADER.replace("{title}", title).replace("{body}", body).replace("{meta}", meta)
    return "".join([header, READER, *PARTS[kind], MAIN])
