"""The calls that programs make of xFormers, by memeff_attn.xformers, against the fp64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gradients
import pytest
import torch
from tolerance import NONE, Checker, Drop
from torch import Tensor, nn

from memeff_attn import dropout
from memeff_attn.attn_bias import MaskWithTensorBias, tensor_of
from memeff_attn.xformers import ops as xops
from memeff_attn.xformers.ops import fmha
from memeff_attn.xformers.ops.fmha import merge_training

HALF = torch.float16
DTYPES = {"f16": HALF, "bf16": torch.bfloat16, "f32": torch.float32}


def dense(bias: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """The bias as the oracle takes it: [M, N] of a mask, its tensor where it has one."""
    if isinstance(bias, Tensor) and bias.dim() == 3 and query.dim() == 4:
        return bias.view(query.shape[0], query.shape[2], *bias.shape[1:])
    if bias is None or isinstance(bias, Tensor):
        return bias
    rows, keys = query.shape[1], key.shape[1]
    if isinstance(bias, fmha.attn_bias.LowerTriangularMaskWithTensorBias | MaskWithTensorBias):
        inner = tensor_of(bias)
        assert inner is not None
        return bias.materialize((*inner.shape[:-2], rows, keys), inner.dtype, inner.device)
    return bias.materialize((1,) * (query.dim() - 2) + (rows, keys), torch.bool, query.device)


def check(
    label: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    bias: Any = None,
    scale: float | None = None,
    call: Callable[..., Tensor] | None = None,
    backward: bool = True,
    drop: Drop | None = None,
    **options: Any,
) -> None:
    """One call, and its gradients for all three inputs and a tensor bias that requires one."""
    call = call or xops.memory_efficient_attention
    leaves = [x.detach().requires_grad_(backward) for x in tensors]
    out = call(*leaves, attn_bias=bias, scale=scale, **options)
    plain = [x.detach() for x in leaves]
    picture = dense(bias, *plain[:2])
    picture = None if picture is None else picture.detach()
    checker = Checker()
    checker.attention(label, out.detach(), None, *plain, picture, NONE, scale, drop)
    if backward:
        wants_bias = isinstance(bias, Tensor) and bias.requires_grad
        grad_out = torch.randn_like(out)
        found = torch.autograd.grad(out, [*leaves, bias] if wants_bias else leaves, grad_out)
        four = (*found, None) if len(found) == 3 else found
        arguments = (grad_out, *plain, picture, NONE, scale, drop)
        gradients.check(checker, label, four, *arguments)
    checker.finish()


def randn(*shape: int, device: str, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def three(*shape: int, device: str, dtype: torch.dtype = HALF) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (randn(*shape, device=device, dtype=dtype) for _ in range(3))
    return q, k, v


# ---- diffusers, Stable Diffusion, webui, ComfyUI ----


def test_diffusers_probe(device: str) -> None:
    """What enabling xFormers in diffusers calls first, of which any exception means: not usable."""
    x = torch.randn((1, 2, 40), device=device)
    xops.memory_efficient_attention(x, x, x)
    check("probe", (x, x.clone(), x.clone()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 64, 72, 80, 88, 96, 128, 160])
def test_packed_views(device: str, width: int, dtype: str) -> None:
    """q, k and v as views of one projection, [B, M, 3, H, K]: trained and run."""
    packed = randn(2, 50, 3, 3, width, device=device, dtype=DTYPES[dtype])
    q, k, v = xops.unbind(packed, 2)
    assert not q.is_contiguous()
    check(f"packed K={width}", (q, k, v))


def test_gradient_of_packed_views(device: str) -> None:
    packed = randn(2, 33, 3, 2, 64, device=device).requires_grad_()
    out = xops.memory_efficient_attention(*xops.unbind(packed, 2))
    (grad,) = torch.autograd.grad(out.float().sum(), packed)
    parts = [x.detach().requires_grad_() for x in packed.unbind(2)]
    plain = torch.autograd.grad(xops.memory_efficient_attention(*parts).float().sum(), parts)
    assert torch.equal(grad, torch.stack(plain, 2))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_autoencoder(device: str, dtype: str) -> None:
    """One head of 512 over all pixels: BMK."""
    pixels = 1024 if device == "cpu" else 4096
    check("vae", three(1, pixels, 512, device=device, dtype=DTYPES[dtype]), backward=False)


@pytest.mark.parametrize("keys", [77, 154])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_expanded_float_mask(device: str, keys: int, dtype: str) -> None:
    """diffusers: [B * H, 1, Mk] of 0 and -10000, expanded over the queries: stride 0, unaligned."""
    kind = DTYPES[dtype]
    q = randn(6, 64, 40, device=device, dtype=kind)
    k, v = (randn(6, keys, 40, device=device, dtype=kind) for _ in range(2))
    hidden = torch.rand(6, 1, keys, device=device) < 0.3
    mask = (hidden * -10000.0).to(kind).expand(-1, 64, -1)
    assert mask.stride(1) == 0
    check("expanded mask", (q, k, v), mask, 40**-0.5)


def test_positional_arguments(device: str) -> None:
    """diffusers' attention_dispatch: query, key, value, attn_bias, p, scale by position."""
    q, k, v = three(2, 24, 4, 64, device=device)
    mask = randn(2, 1, 1, 24, device=device).expand(-1, 4, 24, -1)
    out = xops.memory_efficient_attention(q, k, v, mask, 0.0, 0.2)
    assert torch.equal(out, xops.memory_efficient_attention(q, k, v, attn_bias=mask, scale=0.2))


def test_padded_and_sliced_mask(device: str) -> None:
    """ComfyUI: the mask's rows padded to a multiple of 8, sliced, expanded over batch and heads."""
    q = randn(2, 30, 4, 64, device=device)
    k, v = (randn(2, 77, 4, 64, device=device) for _ in range(2))
    buffer = torch.empty(1, 1, 30, 80, dtype=HALF, device=device)
    mask = buffer[..., :77]
    mask.copy_(randn(1, 1, 30, 77, device=device))
    check("sliced mask", (q, k, v), mask.expand(2, 4, -1, -1))


def test_webui_asks_for_flash(device: str) -> None:
    """A1111: the Flash tuple where its operator supports the inputs, else none."""
    q, k, v = (x.transpose(1, 2) for x in three(2, 4, 50, 64, device=device))
    forward, _ = xops.MemoryEfficientAttentionFlashAttentionOp
    takes = forward.supports(fmha.Inputs(query=q, key=k, value=v, attn_bias=None))
    assert takes is (device == "cuda")
    check("webui", (q, k, v), op=xops.MemoryEfficientAttentionFlashAttentionOp if takes else None)


# ---- vision transformers, audio, language models ----


def test_dinov2_nested(device: str) -> None:
    """Crops of two sizes as one sequence; `_batch_sizes` written by the program; split after."""
    crops = [randn(2, 17, 96, device=device), randn(3, 5, 96, device=device)]
    lengths = [x.shape[1] for x in crops for _ in range(x.shape[0])]
    mask = fmha.BlockDiagonalMask.from_seqlens(lengths, device=device)
    mask._batch_sizes = [x.shape[0] for x in crops]
    tokens = xops.index_select_cat(
        [x.flatten(1) for x in crops], [torch.arange(x.shape[0], device=device) for x in crops]
    ).view(1, -1, 96)
    assert torch.equal(tokens, torch.cat([x.reshape(1, -1, 96) for x in crops], 1))
    q, k, v = xops.unbind(tokens.repeat(1, 1, 3).view(1, -1, 3, 3, 32), 2)
    check("nested", (q, k, v), mask)
    out = xops.memory_efficient_attention(q, k, v, attn_bias=mask)
    assert [tuple(x.shape) for x in mask.split(out)] == [(2, 17, 3, 32), (3, 5, 3, 32)]
    other, packed = fmha.BlockDiagonalMask.from_tensor_list([x.unsqueeze(2) for x in crops])
    assert packed.shape == (1, 49, 1, 96) and other.q_seqinfo == mask.q_seqinfo


def test_stochastic_depth(device: str) -> None:
    """DINOv2 adds scaled residuals of some batch entries in place."""
    x = torch.randn(5, 4, 8, device=device)
    index = torch.tensor([3, 0], device=device)
    source = torch.randn(2, 4, 8, device=device, requires_grad=True)
    scaling = torch.randn(8, device=device, requires_grad=True)
    wanted = x.index_add(0, index, source * scaling, alpha=2.5)
    got = xops.scaled_index_add(x.clone(), index, source, scaling, alpha=2.5)
    torch.testing.assert_close(got, wanted)
    mine = torch.autograd.grad(got.square().sum(), (source, scaling))
    theirs = torch.autograd.grad(wanted.square().sum(), (source, scaling))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_swiglu(device: str, pack: bool, bias: bool) -> None:
    module = xops.SwiGLU(12, 20, 7, bias, _pack_weights=pack).to(device).double()
    x = torch.randn(2, 3, 12, dtype=torch.float64, device=device, requires_grad=True)
    w1, b1, w2, b2, w3, b3 = module._ordered_params()
    linear = nn.functional.linear
    wanted = linear(nn.functional.silu(linear(x, w1, b1)) * linear(x, w2, b2), w3, b3)
    torch.testing.assert_close(module(x), wanted)
    leaves = [x, *module.parameters()]
    mine = torch.autograd.grad(module(x).square().sum(), leaves)
    for one, other in zip(mine, torch.autograd.grad(wanted.square().sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)
    names = {"w12.weight", "w3.weight"} if pack else {"w1.weight", "w2.weight", "w3.weight"}
    assert {n for n, _ in module.named_parameters() if n.endswith("weight")} == names
    with pytest.raises(ValueError, match="hidden"):
        xops.swiglu(x, w1, b1, w2[:3], b2, w3, b3)


@pytest.mark.parametrize("masked", [True, False])
def test_audiocraft_dropout(device: str, masked: bool) -> None:
    """Training with p > 0: the mask is that of torch's seed, the same in both passes."""
    q, k, v = three(2, 40, 3, 64, device=device, dtype=torch.float32)
    bias = fmha.LowerTriangularMask() if masked else None
    torch.manual_seed(11)
    seed = dropout.new_seed(device)
    keep = dropout.dropout_mask(seed, 0.3, 2, 3, 40, 40)
    torch.manual_seed(11)
    check("dropout", (q, k, v), bias, drop=Drop(keep, dropout.keep_scale(0.3)), p=0.3)


def test_unsloth(device: str) -> None:
    """Key heads expanded and reshaped to as many as the query's; and 5-D without a copy."""
    q = randn(1, 31, 2, 3, 64, device=device)
    k, v = (randn(1, 31, 2, 1, 64, device=device).expand(-1, -1, 2, 3, -1) for _ in range(2))
    mask = fmha.attn_bias.LowerTriangularMask()
    check("5-D", (q, k, v), mask)
    flat = tuple(x.reshape(1, 31, 6, 64) for x in (q, k, v))
    check("4-D", flat, mask)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["causal", "local", "bottom_right", "padded", "window"])
def test_vllm_and_mistral(device: str, name: str) -> None:
    """Prompts packed along the length, B = 1; heads in groups with stride 0; a cache of keys."""
    q_lens, kv_lens = [7, 30, 1], [20, 41, 13]
    lens = q_lens if name in ("causal", "local") else kv_lens
    blocks = fmha.BlockDiagonalMask.from_seqlens(q_lens, lens, device=device)
    padded = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=q_lens, kv_padding=48, kv_seqlen=kv_lens, device=device
    )
    mask: Any = padded
    if name in ("causal", "local"):  # queries and keys of one length
        mask = blocks.make_causal() if name == "causal" else blocks.make_local_attention(5)
    elif name == "bottom_right":
        mask = blocks.make_causal_from_bottomright()
    elif name == "window":
        mask = blocks.make_local_attention_from_bottomright(9)
    rows = 3 * 48 if name == "padded" else sum(lens)
    q = randn(1, sum(q_lens), 2, 2, 64, device=device)
    k, v = (randn(1, rows, 2, 1, 64, device=device).expand(-1, -1, -1, 2, -1) for _ in range(2))
    call = xops.memory_efficient_attention_forward
    check(name, (q, k, v), mask, 0.1, call, backward=False, p=0.0)
    check(f"{name} trained", (q, k, v), mask, 0.1)


def test_vllm_alibi(device: str) -> None:
    """A causal mask with a bias [1, G, H, M, N], sliced from rows padded to 8; op an instance."""
    q, k, v = three(1, 13, 2, 3, 64, device=device)
    buffer = randn(1, 2, 3, 13, 16, device=device)
    mask = fmha.attn_bias.LowerTriangularMaskWithTensorBias(buffer[..., :13])
    op = fmha.cutlass.FwOp() if device == "cuda" else None
    call = xops.memory_efficient_attention_forward
    check("alibi", (q, k, v), mask, 0.125, call, backward=False, op=op)
    check("alibi trained", (q, k, v), mask, 0.125)


def test_pixart(device: str) -> None:
    """Cross-attention to captions of different lengths; a 3-D bias beside 4-D inputs."""
    blocks = fmha.attn_bias.BlockDiagonalMask.from_seqlens([30] * 2, [5, 17], device=device)
    q = randn(1, 60, 4, 72, device=device)
    k, v = xops.unbind(randn(1, 22, 2, 4, 72, device=device), 2)
    check("captions", (q, k, v), blocks, p=0.0)
    q, k, v = three(3, 20, 2, 40, device=device)
    window = torch.zeros(6, 20, 20, dtype=HALF, device=device)
    window[:, :, 15:] = -math.inf
    window[2:4] = 0
    check("window", (q, k, v), window)


def test_learned_pair_bias(device: str) -> None:
    """A Parameter, and one that is broadcast over the batch; neither works in xFormers."""
    q, k, v = three(3, 33, 2, 32, device=device, dtype=torch.float32)
    for shape in ((3, 2, 33, 33), (1, 2, 33, 33), (3, 1, 1, 33)):
        bias = nn.Parameter(torch.randn(shape, device=device))
        check(f"bias {shape}", (q, k, v), bias)
    alone = nn.Parameter(torch.randn(1, 2, 33, 33, device=device))
    out = xops.memory_efficient_attention(q, k, v, attn_bias=alone)
    (grad,) = torch.autograd.grad(out.sum(), alone)  # xFormers: silently none
    assert grad.shape == alone.shape


def test_bool_mask(device: str) -> None:
    q, k, v = three(2, 20, 2, 32, device=device)
    check("bool", (q, k, v), torch.rand(2, 1, 1, 20, device=device) < 0.7)


def test_autocast(device: str) -> None:
    """Inputs of two dtypes: a ValueError in xFormers, the autocast dtype here."""
    q, k, v = three(1, 9, 2, 16, device=device, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"same dtype[\s\S]*torch.autocast"):
        xops.memory_efficient_attention(q, k.to(torch.bfloat16), v)
    with torch.autocast(device, torch.bfloat16):
        out = xops.memory_efficient_attention(q, k.to(torch.bfloat16), v)
    low = [x.to(torch.bfloat16) for x in (q, k, v)]
    assert torch.equal(out, xops.memory_efficient_attention(*low))


@pytest.mark.parametrize("name", ["none", "causal", "blocks"])
def test_compiled(device: str, name: str) -> None:
    """fullgraph, forward and backward, with masks made outside; causal inside too."""
    q, k, v = (x.requires_grad_() for x in three(1, 40, 2, 64, device=device))
    mask: Any = {
        "none": None,
        "causal": fmha.LowerTriangularMask(),
        "blocks": fmha.BlockDiagonalMask.from_seqlens([25, 15], device=device),
    }[name]

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Any) -> Tensor:
        out: Tensor = fmha.memory_efficient_attention(q, k, v, attn_bias=bias)
        return out * 2

    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        out = call(q, k, v, mask)
        results.append((out, *torch.autograd.grad(out.float().sum(), (q, k, v))))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, atol=4e-3, rtol=4e-3)


def test_checkpointed(device: str) -> None:
    """Both modes, with dropout: the second forward draws the first one's mask."""
    from torch.utils.checkpoint import checkpoint

    q, k, v = (x.requires_grad_() for x in three(1, 30, 2, 32, device=device, dtype=torch.float32))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return xops.memory_efficient_attention(q, k, v, p=0.2)

    results = []
    for mode in (None, False, True):
        torch.manual_seed(3)
        for x in (q, k, v):
            x.grad = None
        out = call(q, k, v) if mode is None else checkpoint(call, q, k, v, use_reentrant=mode)
        out.sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_one_partial_is_the_whole(device: str) -> None:
    """Bit for bit, gradients too: a log-sum-exp that nothing used takes no part in them."""
    tensors = [
        x.requires_grad_() for x in three(1, 50, 1, 128, device=device, dtype=DTYPES["bf16"])
    ]
    part = merge_training.memory_efficient_attention_partial_autograd(*tensors)
    merged = merge_training.merge_attentions_autograd(part)
    whole = xops.memory_efficient_attention(*tensors)
    grad = torch.rand_like(whole)
    assert torch.equal(merged, whole)
    for mine, theirs in zip(
        torch.autograd.grad(merged, tensors, grad),
        torch.autograd.grad(whole, tensors, grad),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_unbind_and_stack(device: str) -> None:
    whole = torch.randn(2, 5, 3, 4, device=device, requires_grad=True)
    parts = xops.unbind(whole, 2)
    assert all(torch.equal(x, y) for x, y in zip(parts, whole.unbind(2), strict=True))
    assert xops.get_stack_strides([x.detach() for x in parts], 2) == whole.stride()
    back = xops.stack_or_none([x.detach() for x in parts], 2)
    assert back is not None and back.data_ptr() == whole.data_ptr() and torch.equal(back, whole)
    apart = [x.detach().clone() for x in parts]
    assert xops.get_stack_strides(apart, 2) is None and xops.stack_or_none(apart, 2) is None
    assert xops.get_stack_strides(apart[:1], 0) is None
    weight = torch.randn_like(whole)
    loss = sum((x * w).sum() for x, w in zip(parts, weight.unbind(2), strict=True))
    (grad,) = torch.autograd.grad(loss, whole)
    assert torch.equal(grad, weight)


def test_unbind_with_gradients_in_another_order(device: str) -> None:
    """Gradients that lie in one tensor backwards: no view of torch runs backwards, so they are
    copied."""
    whole = randn(3, 4, device=device).requires_grad_()
    grad = randn(3, 4, device=device)
    torch.autograd.backward(xops.unbind(whole, 0), grad.unbind(0)[::-1])
    assert whole.grad is not None and torch.equal(whole.grad, grad.flip(0))
    assert xops.stack_or_none(grad.unbind(0)[::-1], 0) is None


def test_masked_matmul() -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    seen = torch.rand(3, 5) < 0.5
    wanted = (a @ b).masked_fill(~seen, -math.inf)
    assert torch.equal(xops.masked_matmul(a, b, seen), wanted)
    assert torch.equal(xops.masked_matmul(a, b, b[:, :3] * 2), a @ b + b[:, :3] * 2)
    assert torch.equal(xops.masked_matmul(a, b), a @ b)


def test_picture_of_a_mask_with_a_tensor() -> None:
    """Asked for as [1, 1, M, N] it keeps the tensor's batch and heads, as in xFormers."""
    bias = torch.randn(3, 2, 4, 4)
    picture = fmha.attn_bias.LowerTriangularMaskWithTensorBias(bias).materialize((1, 1, 4, 4))
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.equal(picture, bias.masked_fill(~seen, -math.inf))


class Mine(fmha.memeff.FwOp):
    """An operator of a program, around ours."""

    @classmethod
    def apply(cls, inp: Any, needs_gradient: bool) -> Any:
        return super().apply(inp, needs_gradient)


def test_own_operator_loses_no_gradient(device: str) -> None:
    """That of a tensor bias comes; that of one within a mask is refused, not dropped."""
    q = randn(1, 6, 2, 16, device=device)
    bias = randn(1, 2, 6, 6, device=device).requires_grad_()
    own, usual = (
        torch.autograd.grad(xops.memory_efficient_attention(q, q, q, bias, op=op).sum(), bias)[0]
        for op in ((Mine, None), None)
    )
    assert usual.abs().max() > 0
    torch.testing.assert_close(own, usual)  # another kernel where fewer gradients are asked for
    mask = fmha.attn_bias.LowerTriangularMaskWithTensorBias(bias)
    with pytest.raises(NotImplementedError, match="Leave op out, or detach the bias"):
        xops.memory_efficient_attention(q, q, q, mask, op=(Mine, None))
    mask = fmha.attn_bias.LowerTriangularMaskWithTensorBias(bias.detach())
    query = q.clone().requires_grad_()
    xops.memory_efficient_attention(query, q, q, mask, op=(Mine, None)).sum().backward()
    assert query.grad is not None
