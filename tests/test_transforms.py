"""Gradients where more than autograd is at work: torch.func, vmap, checkpointing, counters; and
what has no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import memeff_attn
from memeff_attn import ops

attention = memeff_attn.memory_efficient_attention


def make(device: str, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(2, 9, 3, 16, device=device)
    key = torch.randn(2, 12, 3, 16, device=device)
    return query, key, torch.randn(2, 12, 3, width, device=device)


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="this torch loops itself, and warns"
)
@pytest.mark.filterwarnings("error")
def test_vmap_of_gradients(device: str) -> None:
    """Per-sample gradients, through torch.func and through autograd, equal a loop."""
    q, k, v = make(device)
    stacked = torch.stack([q, q * 2, q - 1])
    bias = torch.randn(3, 1, 1, 9, 12, device=device)

    def loss(q: Tensor, bias: Tensor) -> Tensor:
        return attention(q, k, v, bias).sin().sum()

    per_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(stacked, bias)
    for i in range(3):
        one = (stacked[i].clone().requires_grad_(), bias[i].clone().requires_grad_())
        expected = torch.autograd.grad(loss(*one), one)
        assert all(torch.equal(a[i], b) for a, b in zip(per_sample, expected, strict=True))
    stacked.requires_grad_()
    total = torch.vmap(lambda q: attention(q, k, v, None, 0.3), randomness="different")(stacked)
    total.sum().backward()
    assert stacked.grad is not None and stacked.grad.shape == stacked.shape


def test_what_is_not_differentiable_says_so(device: str) -> None:
    """Never zeros in silence (B48g)."""
    q, k, v = make(device)
    q.requires_grad_()
    (grad,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        grad.square().sum().backward()

    def loss(q: Tensor) -> Tensor:
        return attention(q, k, v).sum()

    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        torch.func.jacrev(torch.func.grad(loss))(q.detach())
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(loss, (q.detach(),), (q.detach(),))


@pytest.mark.skipif(
    ops.forward.overloadpacket not in flop_registry,
    reason="FlopCounterMode of this torch does not see formulas of other operators",
)
def test_operations_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (x.requires_grad_() for x in make("cpu", width=5))
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v).sum().backward()
    scores = 2 * 2 * 3 * 9 * 12  # twice B H M N
    assert counter.get_total_flops() == scores * (16 + 5) + scores * (3 * 16 + 2 * 5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device: str, reentrant: bool) -> None:
    """The mask of the recomputed forward pass is that of the first (B48k)."""
    q, k, v = (x.requires_grad_() for x in make(device))
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(
                attention, q, k, v, None, 0.3, use_reentrant=reentrant
            )
        else:
            out = attention(q, k, v, None, 0.3)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))) if not reentrant else out)
    if reentrant:  # which allows backward() only
        plain, out = results
        expected = torch.autograd.grad(plain.sum(), (q, k, v))
        out.sum().backward()
        results = [(plain, *expected), (out, q.grad, k.grad, v.grad)]
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)
