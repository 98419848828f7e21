"""Masks on their way to the kernels, on CPU tensors: the GPU's implementation of both operators
with a pretended compiled module that computes what it is asked for through `MaskRule`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mask_cases import EVERY, KV, PAGE, POOL, Case, Q
from test_mask_reference import inputs_of
from torch import Tensor

import memeff_attn
from memeff_attn import attention as calls
from memeff_attn import attn_bias as ab
from memeff_attn import backward, cpu, dispatch, dropout, ops, reference
from memeff_attn.mask_arguments import MaskArguments, is_copied, rule_of, unpaged
from memeff_attn.mask_rule import mask_rule

attention = memeff_attn.memory_efficient_attention
with_lse = memeff_attn.memory_efficient_attention_forward_requires_grad


class Module:
    """Computes on the CPU what the compiled module would; keeps the masks it was asked for."""

    is_cuda_build = True

    def __init__(self) -> None:
        self.masks: list[MaskArguments | None] = []
        self.biases: list[Tensor | None] = []

    def rule(self, query: Tensor, key: Tensor, bias: Tensor | None, causal: int, mask: Any) -> Any:
        self.masks.append(mask)
        self.biases.append(bias)
        if mask is None:
            return None
        assert type(mask) is MaskArguments and (
            mask.page_size % 128 == 0 and (mask.page_size == 0 or mask.key_starts is None)
        )
        return rule_of(query, key, bias, causal, mask)

    def forward(self, *arguments: Any) -> ops.Failure | None:
        query, key, value, bias, out, lse, seed, scale, p, causal, _, _, mask, _ = arguments
        if 0 in out.shape or 0 in key.shape:
            return ops.INVALID, "a tensor is empty"
        rule = self.rule(query, key, bias, causal, mask)
        result = cpu.forward(query, key, value, bias, scale, causal, p, seed, rule)
        out.copy_(result[0])
        if lse is not None:
            lse[0].copy_(result[1])
            lse[1].zero_()
        return None

    def backward(self, *arguments: Any) -> ops.Failure | None:
        grad_out, query, key, value, bias, out, lse, seed, delta, *wanted = arguments[:13]
        _, scale, p, causal, _, _, mask, _ = arguments[13:]
        if 0 in out.shape or 0 in key.shape:
            return ops.INVALID, "a tensor is empty"
        rule = self.rule(query, key, bias, causal, mask)
        needs = [x is not None for x in wanted]
        given = grad_out, query, key, value, bias, out, lse[0]
        grad_lse = None
        if delta is not None:
            assert delta.is_contiguous() and delta.isfinite().all()
            total = (grad_out.float() * out.float()).sum(-1)
            total = total.unsqueeze(1) if out.dim() == 3 else total.movedim(1, -1)
            grad_lse = total - delta
        grads = cpu.backward(*given, scale, causal, needs, p, seed, rule, grad_lse)
        if wanted[3] is not None and rule is not None and rule.varlen:
            assert wanted[3].count_nonzero() == 0  # kernels write only within the sequences
        for into, grad in zip(wanted, grads, strict=True):
            if into is not None:
                assert grad is not None and into.is_contiguous() and into.shape == grad.shape
                into.copy_(grad)
        return None


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    pretended = Module()
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "native", lambda: (pretended, ""))
        patch.setattr(ops, "has_exchange", lambda: True)
        monkeypatch.setattr(ops, "_launch", ops.launcher())
        monkeypatch.setattr(backward, "_launch", backward.launcher())
    monkeypatch.setattr(ops, "_current_stream", None)
    monkeypatch.setattr(calls, "_on_cpu", lambda query: False)
    library = torch.library.Library("memeff_mask_test", "DEF")
    for name, file in (("forward", ops), ("backward", backward)):
        library.define(file._SCHEMA)
        library.impl(name, getattr(file, f"_{name}_cuda"), "CPU")
        fake = getattr(file, f"_{name}_fake")
        torch.library.register_fake(f"memeff_mask_test::{name}", fake, lib=library)
        monkeypatch.setattr(file, name, getattr(torch.ops.memeff_mask_test, name).default)
    yield pretended
    library._destroy()


@pytest.mark.parametrize("layout", ["bmk", "gqa", "bmghk"])
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_mask(module: Module, case: Case, layout: str) -> None:
    tensors = inputs_of(case, layout, torch.float32)
    exact, exact_lse = reference.attention(*tensors, case.mask)
    out, lse = with_lse(*tensors, case.mask)
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)
    assert lse.shape == exact_lse.shape
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
    if mask_rule(case.mask, *tensors[:2]).shared_keys:
        return  # test_rows_that_sequences_share
    inputs = [x.clone().requires_grad_() for x in tensors]
    result = attention(*inputs, case.mask)
    assert torch.equal(result, out)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(result, inputs, grad_out)
    wanted = reference.attention_backward(grad_out, *tensors, case.mask)
    for got, want in zip(grads, wanted, strict=False):
        assert want is not None
        torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-5)
    by_hand = memeff_attn.memory_efficient_attention_backward(
        grad_out, out, lse, *tensors, case.mask
    )
    for got, hand in zip(grads, by_hand, strict=True):
        torch.testing.assert_close(hand, got, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layout", ["bmk", "gqa", "bmghk"])
@pytest.mark.parametrize("case", [None, *EVERY], ids=str)
def test_parts_with_a_gradient_of_the_log_sum_exp(
    module: Module, case: Case | None, layout: str
) -> None:
    mask = case.mask if case else None
    case = case or EVERY[1]
    inputs = [x.requires_grad_() for x in inputs_of(case, layout, torch.float32)]
    plain = [x.detach() for x in inputs]
    if mask_rule(mask, *inputs[:2]).shared_keys:
        return  # test_rows_that_sequences_share
    out, lse = memeff_attn.memory_efficient_attention_partial(*inputs, mask)
    exact, exact_lse = reference.attention(*plain, mask)
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    for g in (grad_out, None):
        outputs = [(out, g), (lse, grad_lse)][g is None :]
        grads = torch.autograd.grad(
            [x for x, _ in outputs], inputs, [y for _, y in outputs], retain_graph=True
        )
        zero = torch.zeros_like(out)
        wanted = reference.attention_backward(
            zero if g is None else g, *plain, mask, grad_lse=grad_lse
        )
        for got, want in zip(grads, wanted, strict=False):
            assert want is not None
            torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-5)
