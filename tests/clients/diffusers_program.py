"""Small diffusers models through xFormers' processors, in a process where `xformers` is
compat/xformers; prints one JSON line with what tests/test_client_diffusers.py looks at.

Each output is compared with the default processor's in float64 by the project's rule: the largest
error at most twice that of the default processor in the same dtype, plus two units in the last
place; gradients three times.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import diffusers
import torch
import xformers.ops as xops
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention, XFormersAttnProcessor
from torch import Tensor, nn

from memeff_attn import attention

FORWARD, GRADIENT = 2.0, 3.0
device = sys.argv[1]
calls = {"memeff": 0}
report: dict[str, Any] = {"diffusers": diffusers.__version__, "cases": {}}


def counted(*args: Any, **options: Any) -> Any:
    """Every public call of memeff_attn ends here."""
    calls["memeff"] += 1
    return original(*args, **options)


original = attention._attention
attention._attention = counted


@contextlib.contextmanager
def enabling() -> Iterator[None]:
    """diffusers asks for a GPU before it takes xFormers and runs its probe there; without one the
    question is answered for it and the probe runs on the CPU."""
    if device == "cuda":
        yield
        return
    randn = torch.randn

    def on_cpu(*shape: Any, device: Any = None, **options: Any) -> Tensor:
        return randn(*shape, **options)

    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch, "randn", on_cpu),
    ):
        yield


def figures(mine: Tensor, theirs: Tensor, exact: Tensor, factor: float) -> dict[str, Any]:
    largest = float(exact.abs().max())
    unit = torch.finfo(mine.dtype).eps * largest
    errors = [float((x.double() - exact).abs().max()) for x in (mine, theirs)]
    return {
        "error": errors[0],
        "limit": factor * errors[1] + 2 * unit,
        "finite": bool(mine.isfinite().all()),
        "size": largest,
    }


def run(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype, train: bool) -> Any:
    """(output, gradients of all parameters) of one pass."""
    cast = {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    with torch.set_grad_enabled(train):
        out = model(**cast).sample
    if not train:
        return out, []
    out.double().square().mean().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return out.detach(), grads


def case(
    name: str,
    model: nn.Module,
    inputs: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    op: Any = None,
    train: bool = False,
) -> None:
    model = model.to(device).requires_grad_(train)
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    wide = copy.deepcopy(model).double()
    exact, exact_grads = run(wide, inputs, torch.float64, train)
    model.to(dtype)
    before = calls["memeff"]
    theirs, their_grads = run(model, inputs, dtype, train)
    default_calls = calls["memeff"] - before
    probes = calls["memeff"]
    with enabling():
        model.enable_xformers_memory_efficient_attention(attention_op=op)  # type: ignore[operator]
    probes = calls["memeff"] - probes
    assert all(isinstance(m.processor, XFormersAttnProcessor) for m in layers)
    before = calls["memeff"]
    mine, my_grads = run(model, inputs, dtype, train)
    report["cases"][name] = {
        "layers": len(layers),
        "calls": calls["memeff"] - before,
        "default_calls": default_calls,
        "probes": probes,
        "heads": sorted({m.to_q.out_features // m.heads for m in layers}),
        "out": figures(mine, theirs, exact, FORWARD),
        "gradients": [
            figures(*three, GRADIENT)
            for three in zip(my_grads, their_grads, exact_grads, strict=True)
        ],
    }


def unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(80, 160),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=2,  # diffusers' name for the number of heads: K = 40 and 80
        cross_attention_dim=24,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def unet_inputs(masked: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    inputs = {
        "sample": torch.randn(2, 4, 16, 16, device=device),
        "timestep": 7,
        "encoder_hidden_states": torch.randn(2, 77, 24, device=device),
    }
    if masked:
        lengths = torch.tensor([77, 30], device=device)
        inputs["encoder_attention_mask"] = torch.arange(77, device=device) < lengths[:, None]
    return inputs


def autoencoder() -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(32, 512),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )


def dispatched() -> None:
    """The newer models' way: dispatch_attention_fn(backend="xformers")."""
    torch.manual_seed(2)
    found = {}
    for dtype in (torch.float32, *([torch.float16] if device == "cuda" else [])):
        q, k, v = (torch.randn(2, 33, 4, 64, device=device).to(dtype) for _ in range(3))
        shared = [x[:, :, :2] for x in (k, v)]
        padding = torch.arange(33, device=device) < torch.tensor([33, 20], device=device)[:, None]
        bias = torch.randn(2, 1, 33, 33, device=device).to(dtype)
        for name, keys, options in (
            ("plain", (k, v), {}),
            ("causal", (k, v), {"is_causal": True}),
            ("padding", (k, v), {"attn_mask": padding}),
            ("bias", (k, v), {"attn_mask": bias}),
            ("shared heads", shared, {"enable_gqa": True}),
            ("shared heads, bias", shared, {"enable_gqa": True, "attn_mask": bias}),
        ):
            before = calls["memeff"]
            mine = dispatch_attention_fn(q, *keys, backend="xformers", **options)
            mine_calls = calls["memeff"] - before
            native = {**options}
            if name == "padding":
                native["attn_mask"] = padding[:, None, None, :]
            theirs = dispatch_attention_fn(q, *keys, backend="native", **native)
            wide = [x.double() for x in (q, *keys)]
            if name.endswith("bias"):
                native["attn_mask"] = bias.double()
            exact = dispatch_attention_fn(*wide, backend="native", **native)
            found[f"{name} {dtype}"] = {
                "calls": mine_calls,
                **figures(mine, theirs, exact, FORWARD),
            }
    report["dispatch"] = found


def main() -> None:
    case("unet", unet(), unet_inputs(False))
    case("unet masked", unet(), unet_inputs(True))
    case("unet trained", unet(), unet_inputs(True), train=True)
    picture = {"sample": torch.randn(1, 3, 32, 32, device=device)}
    case("autoencoder", autoencoder(), picture)
    if device == "cuda":
        half = torch.float16
        case("unet half", unet(), unet_inputs(True), half)
        case("autoencoder half", autoencoder(), picture, half)
        flash = xops.MemoryEfficientAttentionFlashAttentionOp
        case("unet flash", unet(), unet_inputs(False), half, flash)
    dispatched()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
