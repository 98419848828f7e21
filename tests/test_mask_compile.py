"""Windows and sequences in the operators' own arguments: opcheck, FakeTensor, torch.compile, vmap,
flops; on the CPU and, where there is one, on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mask_cases import EVERY, Case
from test_mask_reference import inputs_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import memeff_attn
from memeff_attn import attn_bias as ab
from memeff_attn import autograd, ops
from memeff_attn.mask_arguments import lowered
from memeff_attn.mask_rule import mask_rule

attention = memeff_attn.memory_efficient_attention
FORWARD = torch.ops.memeff_attn.forward.default
BACKWARD = torch.ops.memeff_attn.backward.default


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def masks(device: str) -> dict[str, ab.AttentionBias]:
    """For 9 queries, and 9 keys or 12 rows of them."""
    blocks = ab.BlockDiagonalMask.from_seqlens([4, 0, 5], device=device)
    return {
        "window": ab.LocalAttentionFromBottomRightMask(2, 1),
        "causal bias": ab.LowerTriangularMask().add_bias(torch.randn(2, 9, 9, device=device)),
        "blocks": blocks,
        "local": blocks.make_local_attention(3),
        "own bias": blocks.make_causal().add_bias(torch.randn(5, 5, device=device), True),
        "all bias": blocks.add_bias(torch.randn(1, 2, 1, 9, device=device)),
        "padded": ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            [4, 5], 6, [3, 6], device=device
        ),
        "gappy": ab.BlockDiagonalGappyKeysMask.from_seqlens(
            [4, 5], [1, 6, 12], [3, 2], device=device
        ),
    }


def inputs(mask: ab.AttentionBias, device: str) -> tuple[Tensor, Tensor, Tensor]:
    rows = 12 if hasattr(mask, "k_seqinfo") and mask.k_seqinfo.seqstart_py[-1] == 12 else 9
    key = torch.randn(1, rows, 1, 16, device=device)
    return torch.randn(1, 9, 2, 16, device=device), key, torch.randn_like(key)


def operator_arguments(device: str) -> Iterator[tuple[Any, ...]]:
    for mask in masks(device).values():
        query, key, value = inputs(mask, device)
        rule = mask_rule(mask, query, key)
        key, value, bias, causal, extra = lowered(rule, query, key, value, bias_grad=True)
        settings = 0.25, causal, False, True, "", 0.0, None
        yield (query, key, value, bias, *settings, *(extra or ()))


def test_opcheck(device: str) -> None:
    for given in operator_arguments(device):
        torch.library.opcheck(FORWARD, given)


def test_opcheck_of_backward(device: str) -> None:
    for given in operator_arguments(device):
        query, key, value, bias, scale, causal = given[:6]
        out, lse = FORWARD(*given)
        needs = [True, True, True, bias is not None]
        for grad_lse in (None, torch.randn_like(lse[0])):
            first = torch.randn_like(out), query, key, value, bias, out, lse, scale, causal
            rest = False, needs, "", 0.0, None, grad_lse, *given[11:]
            torch.library.opcheck(BACKWARD, (*first, *rest))


def test_fake_refuses_what_the_operator_refuses() -> None:
    """Shapes, dtypes and devices of the mask's tensors."""
    x = torch.zeros(1, 6, 2, 8)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    tables = torch.zeros(2, 1, dtype=torch.int32)
    plain = x, x, x, None, 1.0, 0, False, True, ""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"query_starts": starts}, "need key_starts"),
        ({"key_starts": starts}, "query_starts is missing"),
        ({"bias_per_sequence": True, "window_left": 1}, "query_starts is missing"),
        ({"window_left": -2}, "must be -1"),
        ({"window_right": -3}, "must be -1"),
        ({"query_starts": starts.long(), "key_starts": starts}, "query_starts must be int32"),
        ({"query_starts": starts[None], "key_starts": starts}, "query_starts must be int32"),
        ({"query_starts": starts, "key_starts": starts[:2]}, r"key_starts must be .*\(3,\)"),
        (
            {"query_starts": starts, "key_starts": starts, "key_lengths": starts},
            r"key_lengths must be .*\(2,\)",
        ),
        (
            {"query_starts": starts, "key_starts": starts.repeat_interleave(2)[::2]},
            "key_starts must have a last stride of 1",
        ),
        ({"query_starts": starts, "key_starts": starts.to("meta")}, "key_starts must be .*meta"),
        ({"query_starts": starts, "block_tables": tables, "page_size": 3}, "need key_lengths"),
        (
            {
                "query_starts": starts,
                "block_tables": tables,
                "key_lengths": starts[1:],
                "page_size": 4,
            },
            "whole pages of 4 rows, got 6",
        ),
        (
            {"query_starts": starts, "block_tables": tables[0], "key_lengths": starts[1:]},
            "block_tables must be int32",
        ),
        ({"query_starts": starts, "key_starts": starts, "page_size": 6}, "need key_starts"),
    ]
    for named, text in wrong:
        with pytest.raises(ValueError, match=text):
            ops.forward(*plain, **named)
    bias = torch.zeros(3, 2, 4, 4)
    with pytest.raises(ValueError, match=r"broadcast to \(2, 2, 'M', 'N'\), got \(3, 2, 4, 4\)"):
        ops.forward(
            *(x, x, x, bias, *plain[4:]),
            query_starts=starts,
            key_starts=starts,
            bias_per_sequence=True,
        )
    two = torch.zeros(2, 6, 2, 8)
    with pytest.raises(ValueError, match="batch size is 1, got 2"):
        ops.forward(two, two, two, *plain[3:], query_starts=starts, key_starts=starts)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="must be -1"):
        ops.forward(*plain, window_left=-2)


def whole(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("name", masks("cpu"))
def test_one_graph(device: str, name: str) -> None:
    """Each mask is an argument of a whole graph, forward and backward."""
    mask = masks(device)[name]
    tensors = [x.requires_grad_() for x in inputs(mask, device)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, mask) + 1

    mine, other = whole(function)(*tensors), function(*tensors)
    torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)
    grads = [torch.autograd.grad(x.sin().sum(), tensors) for x in (mine, other)]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_vmap(device: str) -> None:
    """One call an entry, whose dimension is not the batch's."""
    mask = masks(device)["local"]
    stacked = [torch.stack([x, x + 1]) for x in inputs(mask, device)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rule = mask_rule(mask, q, k)
        k, v, bias, causal, extra = lowered(rule, q, k, v)
        call = autograd.differentiable
        return call(q, k, v, bias, 0.25, causal, False, "", "", 0.0, None, *(extra or ()))[0]

    got = torch.vmap(function)(*stacked)
    for i in range(2):
        want = function(*(x[i] for x in stacked))
        torch.testing.assert_close(got[i], want, atol=1e-6, rtol=1e-6)
    grads = torch.vmap(torch.func.grad(lambda *x: function(*x).sin().sum(), (0, 1, 2)))(*stacked)
    for i in range(2):
        alone = [x[i].clone().requires_grad_() for x in stacked]
        wanted = torch.autograd.grad(function(*alone).sin().sum(), alone)
        for x, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(x[i], want, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(
    ops.forward.overloadpacket not in flop_registry,
    reason="FlopCounterMode of this torch does not see formulas of other operators",
)
def test_flops_count_mean_lengths() -> None:
    """Lengths are on the device: n sequences count as n of the mean length."""
    mask = ab.BlockDiagonalMask.from_seqlens([2, 6], device="cpu")
    x = torch.randn(1, 8, 2, 16)
    given = ops.forward, (x, x, x, None, 0.25, 0, False, True, "", 0.0, None)
    starts = mask.q_seqinfo.seqstart
    with FlopCounterMode(display=False) as counter:
        given[0](*given[1], -1, 0, starts, starts)
    assert counter.get_total_flops() == 2 * (2 * 2 * 4 * 4 * (16 + 16))
    with FlopCounterMode(display=False) as counter:
        given[0](*given[1], query_starts=starts, key_starts=starts)
    assert counter.get_total_flops() == 2 * (2 * 2 * 4 * 4 * (16 + 16))


@pytest.mark.parametrize("layout", ["bmk", "gqa", "bmghk"])
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_operators_on_the_cpu(case: Case, layout: str) -> None:
    """The bits of masked.py, through the operators' arguments."""
    tensors = [x.requires_grad_() for x in inputs_of(case, layout, torch.float32)]
    want = attention(*tensors, case.mask)
    rule = mask_rule(case.mask, *tensors[:2])
    key, value, bias, causal, extra = lowered(rule, *tensors)
    scale = tensors[0].shape[-1] ** -0.5
    out, _ = autograd.differentiable(
        tensors[0], key, value, bias, scale, causal, False, "", "", 0.0, None, *(extra or ())
    )
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6)
    grad_out = torch.randn_like(out)
    grads = [torch.autograd.grad(x, tensors, grad_out) for x in (out, want)]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
