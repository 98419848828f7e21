"""memory_efficient_attention_partial and merge_attentions: attention over parts of the keys, put
together, is attention over all of them; gradients through both results."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import memeff_attn
from memeff_attn import Partial, merge_attentions, merge_attentions_autograd, reference
from memeff_attn import attn_bias as ab

partial = memeff_attn.memory_efficient_attention_partial
SHAPES = {"bmhk": (4,), "gqa": (4,), "bmghk": (2, 2), "bmk": ()}


def inputs(layout: str, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    heads = SHAPES[layout]
    kv_heads = (2,) if layout == "gqa" else heads
    sizes = ((2, 33, *heads, 16), (2, 90, *kv_heads, 16), (2, 90, *kv_heads, 24))
    return [torch.randn(x, device=device).to(dtype).requires_grad_() for x in sizes]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", SHAPES)
def test_parts_are_the_whole(device: str, layout: str, masked: bool) -> None:
    """Keys in three parts, of which the bias hides one from every query; all gradients."""
    query, key, value = inputs(layout, device)
    bias = torch.randn(33, 90, device=device)
    if masked:
        bias[:, 40:60] = -math.inf
        bias[5] = -math.inf
    bias.requires_grad_()
    cuts = (0, 40, 60, 90)
    parts = [
        Partial(*partial(query, key[:, a:b], value[:, a:b], bias[:, a:b]))
        for a, b in itertools.pairwise(cuts)
    ]
    out = merge_attentions_autograd(*parts)
    exact, exact_lse = reference.attention(query, key, value, bias.detach())
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    _, lse = merge_attentions([x.attn for x in parts], [x.lse for x in parts])
    assert lse is not None
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
    leaves = [query, key, value, bias]
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, grad_out)
    wanted = reference.attention_backward(grad_out, query, key, value, bias.detach())
    for got, want in zip(grads, wanted, strict=True):
        assert want is not None
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["none", "causal", "window", "blocks"])
def test_gradients_of_the_log_sum_exp(device: str, name: str) -> None:
    """Of both results, of one alone, of half-precision inputs."""
    mask: Any = {
        "none": None,
        "causal": ab.LowerTriangularFromBottomRightMask(),
        "window": ab.LocalAttentionFromBottomRightMask(3, 2),
        "blocks": ab.BlockDiagonalMask.from_seqlens([20, 0, 13], [50, 30, 10], device=device),
    }[name]
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 4e-3)):
        given = [x.detach()[:1].requires_grad_() for x in inputs("gqa", device, dtype)]
        out, lse = partial(*given, mask)
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        plain = [x.detach() for x in given]
        zero = torch.zeros_like(out)
        for outputs, dout in (((out, lse), grad_out), ((lse,), zero)):
            grads = torch.autograd.grad(
                outputs, given, (grad_out, grad_lse)[-len(outputs) :], retain_graph=True
            )
            wanted = reference.attention_backward(dout, *plain, mask, grad_lse=grad_lse)
            for got, want in zip(grads, wanted, strict=False):
                assert want is not None and got.dtype == dtype
                torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=1e-2)


def test_queries_that_see_nothing(device: str) -> None:
    """Their log-sum-exp has no gradient, whatever is handed back for it."""
    query, key, value = (x.detach().requires_grad_() for x in inputs("bmhk", device))
    hidden = torch.zeros(33, 90, dtype=torch.bool, device=device)
    hidden[1:] = True
    out, lse = partial(query, key, value, hidden)
    assert bool((lse[..., 0] == -math.inf).all()) and bool((out[:, 0] == 0).all())
    grad = torch.full_like(lse, math.nan)
    grad[..., 1:] = 1.0
    for x in torch.autograd.grad(lse, (query, key, value), grad, allow_unused=True):
        assert x is not None and bool(x.isfinite().all())


def test_compiled(device: str) -> None:
    given = inputs("bmhk", device)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = (partial(q, k[:, a], v[:, a]) for a in (slice(0, 30), slice(30, 90)))
        merged = merge_attentions([first[0], second[0]], [first[1], second[1]], write_lse=False)
        return merged[0].sin()

    torch._dynamo.reset()
    whole = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for call in (function, whole):
        out = call(*given)
        results.append((out, *torch.autograd.grad(out.sum(), given)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_refused() -> None:
    query, key, value = (x.detach() for x in inputs("bmhk", "cpu"))
    with pytest.raises(NotImplementedError, match="no dropout state"):
        partial(query, key, value, p=0.5)
    with pytest.raises(NotImplementedError, match="output_dtype"):
        partial(query, key, value, output_dtype=torch.float64)
    query.requires_grad_()
    out, _ = partial(query, key, value)
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        grad.sum().backward()
