#!/usr/bin/env python3
"""{title}

{body}

Needs torch; reads repro.safetensors beside it. Exit status 1: the difference is reproduced, 0: it is not.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

META: dict[str, Any] = json.loads(r"""{meta}""")


def read_safetensors(path: str) -> dict[str, Tensor]:
    """Tensors by name: 8 bytes with the length of a JSON header, the header, then raw little-endian bytes."""
    kinds = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool,
    }  # fmt: skip
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


def t(side: str, name: str) -> Any:
    """A saved tensor of one side; what both sides share is stored once. None: there is none."""
    found = SAVED.get(f"{side}/{name}")
    return SAVED.get(f"both/{name}") if found is None else found


def group(side: str, prefix: str) -> dict[str, Tensor]:
    """Saved tensors by what follows the prefix."""
    return {
        name.split("/", 1)[1][len(prefix) :]: tensor
        for name, tensor in SAVED.items()
        if name.split("/", 1)[0] in (side, "both") and name.split("/", 1)[1].startswith(prefix)
    }


def compute_linear(side: str) -> Tensor:
    return F.linear(t(side, "x"), t(side, "weight"), t(side, "bias"))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm; Gemma multiplies by 1 + weight, in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + META["eps"])
    if META["norm"] == "gemma":
        return (wide * (1.0 + weight.float())).type_as(x)
    return weight * wide.to(x.dtype)


def compute_rmsnorm(side: str) -> Tensor:
    return norm(t(side, "x"), t(side, "weight"))


def compute_embedding(side: str) -> Tensor:
    weight = t(side, "weight")
    rows = F.embedding(t(side, "x"), weight)
    scale = META["scale"]
    return rows if scale is None else rows * torch.tensor(scale, device=rows.device).to(weight.dtype)


def activation(x: Tensor) -> Tensor:
    if META["activation"] == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if META["activation"] == "gelu_tanh" else "none")


def compute_activation(side: str) -> Tensor:
    return activation(t(side, "x"))


def mlp(x: Tensor, p: dict[str, Tensor], prefix: str = "") -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{prefix}{name}.weight"], p.get(f"{prefix}{name}.bias"))

    return linear("down_proj", activation(linear("gate_proj", x)) * linear("up_proj", x))


def compute_mlp(side: str) -> Tensor:
    return mlp(t(side, "x"), group(side, "p/"))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, L, N, H], cos and sin [B, L, H]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, :, None] + turned * sin[:, :, None]


def compute_rope(side: str) -> Tensor:
    x = t(side, "x")
    x = x.view(*x.shape[:2], -1, META["head_dim"])
    return rope(x, t(side, "cos"), t(side, "sin"))


def compute_rotary(side: str) -> Tensor:
    angles: Tensor = t(side, "x")[..., None].float() * t(side, "inv_freq").float()
    angles = torch.cat((angles, angles), dim=-1)
    angles = angles.cos() if META["which"] == 0 else angles.sin()
    angles = angles * META["scaling"]
    return angles.to(getattr(torch, META["dtype"]))


def document_mask(cu_seqlens: Tensor, slots: int, window: int | None) -> Tensor:
    """[T, T]: which key (column) each query (row) may see."""
    index = torch.arange(slots, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), index.to(cu_seqlens.dtype), right=True)
    distance = index[:, None] - index[None, :]
    visible = (distance >= 0) & (document[:, None] == document[None, :])
    return visible if window is None else visible & (distance < window)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """[B, N, S, H], k and v with fewer heads; mask None: causal."""
    if mask is not None:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)


def reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, m: dict[str, Any]) -> Tensor:
    """The formula of the CPU reference kernel, [T, N, H], in float32: softmax(q k' scale) v."""
    dtype, wide = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5 if m["scale"] is None else m["scale"]
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1).to(wide), v.repeat_interleave(repeats, dim=1).to(wide)
    scores = torch.einsum("qnh,snh->nqs", q.to(wide), k) * scale
    scores = scores.masked_fill(~document_mask(cu_seqlens, q.shape[0], m["window"]), float("-inf"))
    return torch.einsum("nqs,snh->qnh", scores.softmax(-1), v).to(dtype)


def per_document(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Any]) -> Tensor:
    dtype, window, lengths = q.dtype, m["window"], m["lengths"]
    if q.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()
    outputs = []
    for rows in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        length, mask = rows[0].shape[0], None
        if window is not None and window < length:
            distance = torch.arange(length, device=q.device)
            distance = distance[:, None] - distance[None, :]
            mask = (distance >= 0) & (distance < window)
        query, key, value = (x.transpose(0, 1)[None] for x in rows)
        outputs.append(dense(query, key, value, mask, m["scale"])[0].transpose(0, 1))
    return torch.cat(outputs).to(dtype)


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, m: dict[str, Any]) -> Tensor:
    if q.device.type == "cpu":
        return reference(q, k, v, cu_seqlens, m)
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": m["scale"]}
    options["window_size"] = (-1, 0) if m["window"] is None else (m["window"] - 1, 0)
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    longest, kernel = m["max_seqlen"], cast(Any, varlen_attn)
    out: Tensor = kernel(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    return out


def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, m: dict[str, Any]) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = flex_attention
    if q.device.type != "cpu" and not torch.compiler.is_compiling():
        run = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out: Tensor = run(q, k, v, block_mask=block_mask, scale=m["scale"], enable_gqa=gqa)
    return out[0].transpose(0, 1)


def mask_of(side: str, m: dict[str, Any], slots: int) -> Any:
    """What a kernel is given beside q, k and v; made outside of compiled code."""
    if m["variant"] != "flex":
        return t(side, "mask")
    from torch.nn.attention.flex_attention import create_block_mask

    visible = document_mask(t(side, "cu_seqlens"), slots, m["window"])
    return create_block_mask(lambda b, h, i, j: visible[i, j], None, None, slots, slots, device=DEVICE)


def attend(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Any], cu_seqlens: Any, mask: Any) -> Tensor:
    """q [B, N, L, H], k and v [B, K, L, H] -> [B, L, N, H], by the kernel that the side used."""
    variant, (batch, _, length, _) = m["variant"], q.shape
    if variant == "dense":
        return dense(q, k, v, mask, m["scale"]).transpose(1, 2)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if variant == "per_document":
        out = per_document(q, k, v, m)
    elif variant == "masked":
        if mask is None:
            mask = document_mask(cu_seqlens, q.shape[0], m["window"])[None, None]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = dense(q, k, v, mask, m["scale"])[0].transpose(0, 1)
    elif variant == "varlen":
        out = varlen(q, k, v, cu_seqlens, m)
    else:
        out = flex(q, k, v, mask, m)
    rows: Tensor = out.unflatten(0, (batch, length))
    return rows


def compute_kernel(side: str) -> Tensor:
    m, q = META["sides"][side], t(side, "q")
    mask = mask_of(side, m, q.shape[0] * q.shape[2])
    return attend(q, t(side, "k"), t(side, "v"), m, t(side, "cu_seqlens"), mask)


def block(x: Tensor, p: dict[str, Tensor], angles: Any, m: dict[str, Any], cu_seqlens: Any, mask: Any) -> Any:
    """One decoder layer of the Llama family (Llama, Qwen, Mistral, Gemma 3); angles are cos and sin."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"self_attn.{name}.weight"], p.get(f"self_attn.{name}.bias"))

    def heads(name: str, x: Tensor) -> Tensor:
        x = linear(f"{name}_proj", x).view(*x.shape[:2], -1, META["head_dim"])
        weight = p.get(f"self_attn.{name}_norm.weight")
        return x if weight is None else norm(x, weight)

    h = norm(x, p["input_layernorm.weight"])
    q, k = (rope(heads(name, h), *angles).transpose(1, 2) for name in "qk")
    v = heads("v", h).transpose(1, 2)
    h = linear("o_proj", attend(q, k, v, m, cu_seqlens, mask).flatten(2))
    if "pre_feedforward_layernorm.weight" in p:
        x = x + norm(h, p["post_attention_layernorm.weight"])
        h = mlp(norm(x, p["pre_feedforward_layernorm.weight"]), p, "mlp.")
        return x + norm(h, p["post_feedforward_layernorm.weight"])
    x = x + h
    return x + mlp(norm(x, p["post_attention_layernorm.weight"]), p, "mlp.")


def compute_block(side: str) -> Any:
    m, x = META["sides"][side], t(side, "x")
    run = torch.compile(block, fullgraph=True, dynamic=False) if m["compiled"] else block
    mask = mask_of(side, m, x.shape[0] * x.shape[1])
    return run(x, group(side, "p/"), (t(side, "cos"), t(side, "sin")), m, t(side, "cu_seqlens"), mask)


def compute_head(side: str) -> Tensor:
    """[rows]: logprobs of the labels."""
    logits: Tensor = F.linear(t(side, "x"), t(side, "weight"), t(side, "bias")).float() * META["scale"]
    if META["softcap"] is not None:
        logits = META["softcap"] * torch.tanh(logits / META["softcap"])
    logits = logits / META["temperature"]
    return logits.log_softmax(-1).gather(1, t(side, "labels")[:, None])


COMPUTE = globals().get(f"compute_{META['kind']}")
"""The formula, which gives [B, L, ...] or [rows, ...] from a side's tensors; None: there is none in plain
torch for this module, and only what was recorded is compared."""


def tokens(side: str, value: Tensor) -> Tensor:
    """Rows of real tokens, in the order of the documents, [tokens, features]; a parameter's as they are."""
    rows = t(side, "rows")
    if rows is None or META["wrt"] in META["parameters"]:
        return value.reshape(value.shape[0], -1)
    if META["wrt"] in ("q", "k", "v"):
        value = value.transpose(1, 2)
    return value.flatten(0, 1).index_select(0, rows).flatten(1)


def result(side: str) -> Tensor:
    """What this machine makes of a side's inputs: an output, or a gradient."""
    assert COMPUTE is not None
    if META["wrt"] is None:
        with torch.no_grad():
            return tokens(side, COMPUTE(side))
    name = "p/" + META["wrt"] if f"{side}/p/" + META["wrt"] in SAVED else META["wrt"]
    where = f"{side}/{name}" if f"{side}/{name}" in SAVED else f"both/{name}"
    SAVED[where] = leaf = SAVED[where].detach().clone().requires_grad_()
    out = COMPUTE(side)
    return tokens(side, torch.autograd.grad(out, leaf, t(side, "grad_out").view_as(out))[0])


def gap(x: Tensor, y: Tensor) -> float:
    if x.shape != y.shape:
        sys.exit(f"shapes differ: {list(x.shape)} and {list(y.shape)}")
    largest = (x.double() - y.double()).abs().nan_to_num(nan=float("inf"))
    return float(largest.max()) if largest.numel() else 0.0


def main() -> int:
    reported = float(META["reported"])
    names = list(META["sides"])
    recorded = {side: t(side, "recorded") for side in names}
    between = gap(*recorded.values())
    print(f"{META['what']}: {META['sides'][names[0]]['label']} against {META['sides'][names[1]]['label']}")
    print(f"bisect reported   {names[0]} - {names[1]}   max difference {reported:.6e}")
    print(f"recorded          {names[0]} - {names[1]}   max difference {between:.6e}")
    if COMPUTE is None:
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
    worst = max(off, key=lambda side: off[side])
    if off[worst] == reported or off[worst] > 0.5 * reported:
        print(f"max difference {off[worst]:.6e}: {worst}'s recorded result is not what torch makes of it")
        return 1
    print(f"max difference {here:.6e}: not reproduced")
    return 0


if __name__ == "__main__":
    sys.exit(main())
