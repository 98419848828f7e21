"""The public calls under every mask, on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from mask_cases import EVERY, Case
from test_mask_reference import inputs_of

import memeff_attn
from memeff_attn import attn_bias as ab
from memeff_attn import dispatch, dropout, masked, reference

CPU_OPS = (dispatch.CpuFwOp, dispatch.CpuBwOp)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_mask(case: Case) -> None:
    tensors = [x.requires_grad_() for x in inputs_of(case, "gqa", torch.float32)]
    out = memeff_attn.memory_efficient_attention(*tensors, case.mask)
    plain = [x.detach() for x in tensors]
    exact, exact_lse = reference.attention(*plain, case.mask)
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)
    named = memeff_attn.memory_efficient_attention(*tensors, case.mask, op=CPU_OPS)
    assert torch.equal(named, out)
    again, lse = memeff_attn.memory_efficient_attention_forward_requires_grad(*plain, case.mask)
    assert torch.equal(again, out) and lse.shape == exact_lse.shape
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad_out)
    wanted = reference.attention_backward(grad_out, *plain, case.mask)
    by_hand = memeff_attn.memory_efficient_attention_backward(
        grad_out, again, lse, *plain, case.mask
    )
    for got, hand, want in zip(grads, by_hand, wanted, strict=False):
        assert want is not None
        torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-5)
        torch.testing.assert_close(hand, got, atol=1e-6, rtol=1e-6)


def test_explain_names_the_path() -> None:
    x = torch.zeros(1, 5, 2, 4)
    mask = ab.BlockDiagonalMask.from_seqlens([2, 3], device="cpu")
    for backward in (False, True):
        text = memeff_attn.explain(x, x, x, mask, backward=backward)
        assert text.startswith("chosen: cpu") and "knows no such mask" in text
    with pytest.raises(ValueError, match="5 queries"):
        memeff_attn.explain(x[:, :4], x, x, mask)
    text = memeff_attn.explain(x, x, x, mask, device="sm_80")
    # by this build, or by one with code for that GPU; a batch entry a sequence
    assert "\nchosen: chained" in text or "would run chained" in text
    assert "B 2, M 2, N 2" in text


def test_autocast_dropout_and_compile() -> None:
    mask = ab.BlockDiagonalMask.from_seqlens([4, 5], device="cpu").make_causal()
    query = torch.randn(1, 9, 2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = memeff_attn.memory_efficient_attention(query, query.bfloat16(), query, mask)
    assert out.dtype == torch.bfloat16
    torch.manual_seed(3)
    seed = dropout.new_seed("cpu")
    torch.manual_seed(3)
    dropped = memeff_attn.memory_efficient_attention(query, query, query, mask, p=0.3)
    assert torch.equal(dropped, masked.attention(query, query, query, mask, 0.3, seed=seed)[0])
    call = torch.compile(lambda q: memeff_attn.memory_efficient_attention(q, q, q, mask) * 2)
    eager = memeff_attn.memory_efficient_attention(query, query, query, mask)
    torch.testing.assert_close(call(query), eager * 2)


def test_refused() -> None:
    mask = ab.BlockDiagonalMask.from_seqlens([3], device="cpu")
    x = torch.zeros(1, 3, 2, 4)
    call = memeff_attn.memory_efficient_attention
    with pytest.raises(ValueError, match="chained was asked for"):
        call(x, x, x, mask, op=dispatch.ChainedFwOp)
    with pytest.raises(NotImplementedError, match="output_dtype"):
        call(x, x, x, mask, output_dtype=torch.float64)
    with pytest.raises(ValueError, match="batch size 1"):
        call(*(x.expand(2, -1, -1, -1),) * 3, mask)
    with pytest.raises(ValueError, match="finite"):
        call(x, x, x, mask, scale=math.inf)
    with pytest.raises(ValueError, match=r"Did you mean LocalAttentionFromBottomRightMask\(\)"):
        call(x, x, x, ab.LocalAttentionFromBottomRightMask)
