"""Parts of the keys put together: equal to attention over all of them, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memeff_attn import attn_bias as ab
from memeff_attn import masked, reference
from memeff_attn.merge import Partial, merge_attentions, merge_attentions_autograd

B, M, N, K, KV = 2, 5, 12, 8, 6
HEADS: dict[str, tuple[int, ...]] = {
    "bmk": (),
    "one head": (1,),
    "bmhk": (3,),
    "bmghk": (2, 3),
    "one group": (1, 4),
    "groups of one": (4, 1),
}
CUTS = [[12], [5, 7], [1, 3, 0, 8]]
CLOSE = {"atol": 1e-12, "rtol": 1e-11}


def qkv(heads: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((B, M, *heads, K), (B, N, *heads, K), (B, N, *heads, KV))
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def parts_of(tensors: list[Tensor], cuts: list[int]) -> list[Partial]:
    query, key, value = tensors
    pairs = zip(key.split(cuts, 1), value.split(cuts, 1), strict=True)
    return [Partial(*reference.attention(query, k, v)) for k, v in pairs]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("layout", HEADS)
def test_equals_attention_over_all_keys(layout: str, cuts: list[int], stacked: bool) -> None:
    tensors = qkv(HEADS[layout])
    exact, exact_lse = reference.attention(*tensors)
    parts = parts_of(tensors, cuts)
    attns, sums = zip(*parts, strict=True)
    if stacked:
        out, lse = merge_attentions(torch.stack(attns), torch.stack(sums))
    else:
        out, lse = merge_attentions(attns, sums)
    assert lse is not None and out.shape == exact.shape and lse.shape == exact_lse.shape
    torch.testing.assert_close(out, exact, **CLOSE)
    torch.testing.assert_close(lse, exact_lse, **CLOSE)
    again, none = merge_attentions(list(attns), list(sums), write_lse=False)
    assert none is None and torch.equal(again, out)
    assert torch.equal(merge_attentions_autograd(*parts), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    tensors = qkv((3,), dtype)
    exact, exact_lse = reference.attention(*tensors)
    attns, sums = zip(*parts_of(tensors, [5, 7]), strict=True)
    rounded = [x.to(dtype) for x in attns]
    out, lse = merge_attentions(rounded, [x.float() for x in sums])
    assert lse is not None and out.dtype == dtype and lse.dtype == torch.float32
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, atol=2 * unit, rtol=2 * unit)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
    wide, _ = merge_attentions(rounded, [x.float() for x in sums], output_dtype=torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), out)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, _ = merge_attentions(rounded, [x.float() for x in sums])
    assert torch.equal(again, out)


def test_memory_may_be_shared() -> None:
    """Lists of views of any strides."""
    tensors = qkv((3,))
    parts = parts_of(tensors, [5, 7])
    attn = torch.stack([x.attn for x in parts], -1)
    lse = torch.stack([x.lse for x in parts], 1)
    out, sums = merge_attentions(attn.unbind(-1), lse.unbind(1))
    expected, expected_sums = merge_attentions(*map(list, zip(*parts, strict=True)))
    assert sums is not None and expected_sums is not None
    assert torch.equal(out, expected) and torch.equal(sums, expected_sums)


def test_a_part_of_weight_zero() -> None:
    """-inf: not looked at, NaN or not; other queries are not touched."""
    parts = parts_of(qkv((3,)), [5, 7])
    attn, lse = parts[1].attn.clone(), parts[1].lse.clone()
    attn[0, 2, 1], lse[0, 1, 2] = math.nan, -math.inf
    out, merged = merge_attentions([parts[0].attn, attn], [parts[0].lse, lse])
    whole, whole_lse = merge_attentions(*map(list, zip(*parts, strict=True)))
    assert merged is not None and whole_lse is not None
    assert torch.equal(out[0, 2, 1], parts[0].attn[0, 2, 1])
    assert torch.equal(merged[0, 1, 2], parts[0].lse[0, 1, 2])
    out[0, 2, 1], merged[0, 1, 2] = whole[0, 2, 1], whole_lse[0, 1, 2]
    assert torch.equal(out, whole) and torch.equal(merged, whole_lse)


def test_no_part_sees_a_key() -> None:
    attn = torch.randn(2, B, M, 3, KV, requires_grad=True)
    lse = torch.randn(2, B, 3, M).index_fill(-1, torch.tensor([1, 4]), -math.inf)
    lse.requires_grad_()
    out, merged = merge_attentions(attn, lse)
    assert merged is not None
    assert bool((out[:, [1, 4]] == 0).all()) and bool((merged[..., [1, 4]] == -math.inf).all())
    assert bool(merged[..., [0, 2, 3]].isfinite().all())
    alive = merged > -math.inf
    total = out.square().sum() + merged[alive].sum()
    grads = torch.autograd.grad(total, (attn, lse))
    assert all(bool(x.isfinite().all()) for x in grads)
    assert bool((grads[0][:, :, [1, 4]] == 0).all()) and bool((grads[1][..., [1, 4]] == 0).all())
    assert bool((grads[0][:, :, 0] != 0).any()) and bool((grads[1][..., 0] != 0).any())


def test_large_sums() -> None:
    """Only differences count: exp of the sums themselves would overflow, or vanish."""
    attn = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64)
    for base in (-3e4, 3e4):
        lse = torch.tensor([0.0, math.log(3)], dtype=torch.float64).view(2, 1, 1, 1) + base
        out, merged = merge_attentions(attn, lse)
        assert merged is not None
        torch.testing.assert_close(out, 0.25 * attn[0] + 0.75 * attn[1], **CLOSE)
        torch.testing.assert_close(merged.item(), base + math.log(4))


@pytest.mark.parametrize("layout", HEADS)
def test_gradients_are_those_of_the_formula(layout: str) -> None:
    parts = parts_of(qkv(HEADS[layout]), [5, 7])
    attn = torch.stack([x.attn for x in parts])
    lse = torch.stack([x.lse for x in parts])
    own = [x.detach().requires_grad_() for x in (attn, lse)]
    assert torch.autograd.gradcheck(lambda a, b: merge_attentions(a, b), own)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("layout", HEADS)
def test_training_through_parts(layout: str, cuts: list[int]) -> None:
    """Gradients of query, key and value through out and lse of every part equal those of one
    call."""
    tensors = [x.requires_grad_() for x in qkv(HEADS[layout], torch.float32)]
    query, key, value = tensors
    pairs = zip(key.split(cuts, 1), value.split(cuts, 1), strict=True)
    out = merge_attentions_autograd(*(Partial(*masked.attention(query, k, v)) for k, v in pairs))
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad_out)
    wanted = reference.attention_backward(grad_out, *(x.detach() for x in tensors))
    for got, want in zip(grads, wanted, strict=False):
        assert want is not None
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


def test_training_over_packed_parts() -> None:
    """A causal sequence in two: the past whole, the present causal (chunked prefill)."""
    q, past, now = [3, 2], [4, 1], [3, 2]
    query = torch.randn(1, 5, 2, K, requires_grad=True)
    keys = [torch.randn(2, 1, n, 2, K, requires_grad=True) for n in (5, 5)]
    first = ab.BlockDiagonalMask.from_seqlens(q, past, device="cpu")
    second = ab.BlockDiagonalMask.from_seqlens(q, now, device="cpu").make_causal()
    parts = [
        Partial(*masked.attention(query, *kv.unbind(), mask))
        for kv, mask in zip(keys, (first, second), strict=True)
    ]
    out = merge_attentions_autograd(*parts)
    whole = torch.cat([x.split(n, 2)[s] for s in range(2) for x, n in zip(keys, (past, now))], 2)  # noqa: B905
    both = ab.BlockDiagonalMask.from_seqlens(q, [7, 3], device="cpu")
    exact, _ = masked.attention(query, *whole.unbind(), both.make_causal_from_bottomright())
    torch.testing.assert_close(out, exact, atol=1e-6, rtol=1e-5)
    grads = torch.autograd.grad(out.square().sum(), [query, *keys])
    wanted = torch.autograd.grad(exact.square().sum(), [query, *keys])
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_refused() -> None:
    attn, lse = torch.zeros(2, B, M, 3, KV), torch.zeros(2, B, 3, M)
    with pytest.raises(ValueError, match="at least one Partial"):
        merge_attentions_autograd()
    with pytest.raises(ValueError, match="attn_split holds no part"):
        merge_attentions([], [])
    with pytest.raises(ValueError, match="2 parts of attn_split, 1 of lse_split"):
        merge_attentions(attn, lse[:1])
    with pytest.raises(ValueError, match="part 0: expected attn"):
        merge_attentions(attn, lse.transpose(-1, -2))
    with pytest.raises(ValueError, match="part 1: expected attn"):
        merge_attentions([attn[0], attn[1, :, :4]], list(lse))
    with pytest.raises(ValueError, match="a part must be"):
        merge_attentions(torch.zeros(2, 3, 4), torch.zeros(2, 3))
