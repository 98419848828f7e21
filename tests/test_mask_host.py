"""Masks on their way to the kernels, on CPU tensors: the GPU's implementation of both operators
with a pretended compiled module that computes what it is asked for through `MaskRule`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mask_cases import EVERY, Case
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
        if 0 in out.shape or 0 in key.shape or key.shape[1] != value.shape[1]:
            return ops.INVALID, "a tensor is empty, or has another length"
        rule = self.rule(query, key, bias, causal, mask)
        result = cpu.forward(query, key, value, bias, scale, causal, p, seed, rule)
        out.copy_(result[0])
        if lse is not None:
            lse[0].copy_(result[1])
            lse[1].zero_()
        return None

    def backward(self, *arguments: Any) -> ops.Failure | None:
        grad_out, query, key, value, bias, out, lse, seed, delta, *wanted = arguments[:13]
        _, _, scale, p, causal, _, _, mask, _ = arguments[13:]
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


def test_what_is_launched(module: Module) -> None:
    """Of each kind of mask: the anchor, the windows, the very tensors of the mask."""
    x = torch.randn(1, 6, 2, 8)
    bias = torch.randn(2, 6, 6)
    blocks = ab.BlockDiagonalMask.from_seqlens([2, 4], device="cpu")
    starts = blocks.q_seqinfo.seqstart
    local = ab.LocalAttentionFromBottomRightMask(3, 0)
    seen = {
        "plain": (ab.LowerTriangularMask(), None),
        "bias": (ab.LowerTriangularMask().add_bias(bias), None),
        "keys": (ab.KeyPaddingMask(torch.ones(1, 6, dtype=torch.bool)), None),
        "window": (local, MaskArguments(3, 0)),
        "window and bias": (local.add_bias(bias), MaskArguments(3, 0)),
        "blocks": (blocks, MaskArguments(-1, -1, starts, starts)),
        "local": (blocks.make_local_attention(2), MaskArguments(1, 0, starts, starts)),
        "own": (
            blocks.add_bias(bias[0, :4, :4], True),
            MaskArguments(-1, -1, starts, starts, bias_per_sequence=True),
        ),
    }
    for name, (mask, wanted) in seen.items():
        attention(x, x, x, mask)
        got = module.masks.pop()
        if wanted is None:
            assert got is None, name
        else:
            assert got is not None
            assert all(a is b or a == b for a, b in zip(got, wanted, strict=True)), name
        given = module.biases.pop()
        assert (given is None) == (name in ("plain", "window", "blocks", "local")), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(3, 2, 5, 6), (1, 2, 5, 6), (5, 6), (1, 2, 1, 6), (3, 1, 5, 1), "all", "heads"]
)
def test_a_gradient_of_a_bias_over_sequences(
    module: Module, shape: Any, dtype: torch.dtype
) -> None:
    """Within each sequence or over all tokens, summed in fp32 over what it is broadcast along."""
    blocks = ab.BlockDiagonalMask.from_seqlens([4, 0, 5], [6, 2, 1], device="cpu").make_causal()
    tensors = [torch.randn(1, n, 2, 8).to(dtype) for n in (9, 9, 9)]
    own = not isinstance(shape, str)
    sizes = shape if own else {"all": (1, 2, 9, 9), "heads": (1, 1, 9, 1)}[shape]
    bias = torch.randn(sizes).to(dtype).requires_grad_()
    mask = blocks.add_bias(bias, own)
    out = attention(*tensors, mask)
    grad_out = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, bias, grad_out)
    want = reference.attention_backward(grad_out, *tensors, mask)[3]
    assert want is not None and got.shape == bias.shape and got.dtype == dtype
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    torch.testing.assert_close(got.double(), want, **close)
    full = module.biases[-1]
    assert full is not None and full.shape == ((3, 2, 5, 6) if own else (1, 2, 9, 9))
    assert full.dtype == (dtype if full.shape == bias.shape else torch.float32)


def test_without_a_gradient_the_bias_stays_as_it_is(module: Module) -> None:
    blocks = ab.BlockDiagonalMask.from_seqlens([4, 5], device="cpu")
    x = torch.randn(1, 9, 2, 8, dtype=torch.bfloat16)
    for bias in (torch.randn(5, 5).bfloat16(), torch.rand(5, 5) > 0.3):
        attention(x.clone().requires_grad_(), x, x, blocks.add_bias(bias, True)).sum().backward()
        for given in module.biases:
            assert given is not None and given.data_ptr() == bias.data_ptr()
            assert given.shape == (1, 1, 5, 5)
        module.biases.clear()


def page_mask(page: int, kind: str = "padded") -> tuple[ab.AttentionBias, int]:
    """3 sequences in a pool of 6 pages; (mask, rows of the pool)."""
    tables = torch.tensor([[4, 1], [0, 4], [99, -5]], dtype=torch.int32)
    lengths = [page + 2, 3, 0]
    if kind == "padded":
        make = ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens
        return make([3, 1, 2], lengths, tables, page), 6 * page
    gappy = ab.PagedBlockDiagonalGappyKeysMask.from_seqlens
    return gappy([3, 1, 2], [1, page - 1, 0], lengths, tables, page), 6 * page


@pytest.mark.parametrize("kind, page", [("padded", 128), ("padded", 16), ("gappy", 128)])
def test_pages(module: Module, kind: str, page: int) -> None:
    """Read where they lie where kernels can, else copied: shared heads once."""
    mask, rows = page_mask(page, kind)
    query = torch.randn(1, 6, 2, 3, 8)
    key = torch.randn(1, rows, 2, 1, 8).expand(1, rows, 2, 3, 8)
    out, lse = with_lse(query, key, key, mask)
    exact, exact_lse = reference.attention(query, key, key, mask)
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
    given = module.masks[-1]
    native = kind == "padded" and page == 128
    assert given is not None and (given.block_tables is not None) == native
    rule = mask_rule(mask, query, key)
    assert is_copied(rule) != native
    if not native:
        copy, _, padded = unpaged(rule, key, key)
        assert copy.shape == (1, 3 * 2 * page, 2, 3, 8) and copy.stride(3) == 0
        assert padded.key_starts is not None and padded.key_starts.dtype == torch.int32
        assert padded.key_starts.tolist() == [0, 2 * page, 4 * page, 6 * page]


def test_no_page_at_all(module: Module) -> None:
    mask = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [2], [0], torch.zeros(1, 0, dtype=torch.int32), 16
    )
    query, key = torch.randn(1, 2, 2, 8), torch.randn(1, 0, 2, 8)
    out, lse = with_lse(query, key, key, mask)
    assert out.count_nonzero() == 0 and bool((lse == -torch.inf).all())


def test_rows_that_sequences_share() -> None:
    """No gradient on a GPU, said before any launch; forward alone is fine. On the meta device: it
    has no masked.py either."""
    paged, rows = page_mask(128)
    overlapping = ab.BlockDiagonalGappyKeysMask.from_seqlens(
        [3, 3], [0, 2, 6], [3, 4], device="cpu"
    )
    unordered = ab.BlockDiagonalGappyKeysMask.from_seqlens([3, 3], [3, 0, 6], [3, 3], device="cpu")
    for mask, length in ((paged, rows), (overlapping, 6), (unordered, 6)):
        mask = mask.to("meta")
        query = torch.empty(1, 6, 2, 8, device="meta")
        key = torch.empty(1, length, 2, 8, device="meta")
        assert mask_rule(mask, query, key).shared_keys
        assert attention(query, key, key, mask).shape == query.shape
        text = r"(?s)cuda_bwd is not supported because:.*share rows of key and value"
        with pytest.raises(NotImplementedError, match=text):
            attention(query.requires_grad_(), key, key, mask)
        with torch.no_grad():
            out, lse = with_lse(query, key, key, mask)
        with pytest.raises(NotImplementedError, match=text):
            memeff_attn.memory_efficient_attention_backward(out, out, lse, query, key, key, mask)
        said = memeff_attn.explain(query, key, key, mask, device="sm_80", backward=True)
        assert said.startswith("chosen: none") and "share rows" in said
    apart = ab.BlockDiagonalGappyKeysMask.from_seqlens([3, 3], [1, 4, 6], [3, 2], device="cpu")
    x = torch.empty(1, 6, 2, 8)
    assert not mask_rule(apart, x, x).shared_keys


def test_dropout_counts_within_each_sequence(module: Module) -> None:
    """Sequence s of a batch drops as batch entry s of a call of its own."""
    lengths = [5, 3, 7]
    mask = ab.BlockDiagonalMask.from_seqlens(lengths, device="cpu").make_causal()
    seed = dropout.new_seed("cpu")
    x = torch.randn(1, sum(lengths), 2, 8)
    out, lse = with_lse(x, x, x, mask, p=0.4, seed=seed)
    exact, _ = reference.attention(x, x, x, mask, p=0.4, seed=seed)
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)
    grad_out = torch.randn_like(out)
    grads = memeff_attn.memory_efficient_attention_backward(
        grad_out, out, lse, x, x, x, mask, 0.4, seed=seed
    )
    wanted = reference.attention_backward(grad_out, x, x, x, mask, p=0.4, seed=seed)
    for got, want in zip(grads, wanted, strict=False):
        assert want is not None
        torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-5)


def test_autocast_and_errors(module: Module) -> None:
    blocks = ab.BlockDiagonalMask.from_seqlens([2, 4], device="cpu")
    x = torch.randn(1, 6, 2, 8)
    mask = blocks.add_bias(torch.randn(6, 6).double())
    with pytest.raises(ValueError, match=r"attn_bias must be torch.float32"):
        attention(x, x, x, mask)
    with pytest.raises(ValueError, match=r"one dtype, got torch.float32, torch.float16"):
        attention(x, x.half(), x, blocks)
    with pytest.raises(ValueError, match=r"one length N, got 6 and 5"):
        attention(x, x, x[:, :5], blocks)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(x, x.bfloat16(), x, blocks).dtype == torch.bfloat16
    for index in (0, 1):
        tensors = [x.clone(), x.clone(), x.clone()]
        tensors[index] = torch.randn(1, 5, 2, 8)
        with pytest.raises(ValueError, match=r"is for 6 (queries|keys) in all"):
            attention(*tensors, blocks)


def test_failures_name_the_mask(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = ab.BlockDiagonalMask.from_seqlens([2, 4], device="cpu").make_local_attention(3)
    x = torch.randn(1, 6, 2, 8, requires_grad=True)
    out = attention(x, x, x, blocks)
    monkeypatch.setattr(ops, "_launch", lambda *given: (ops.UNSUPPORTED, "no code for sm_90"))
    monkeypatch.setattr(backward, "_launch", lambda *given: (ops.CUDA_ERROR, "grid (1, 2, 3)"))
    with pytest.raises(
        NotImplementedError, match=r"attn_bias: MaskRule\(anchor 1, window 2 and 0, 2"
    ):
        attention(x, x, x, blocks)
    with pytest.raises(RuntimeError, match=r"(?s)backward kernel.*grid.*MaskRule\(anchor 1"):
        out.sum().backward()


def test_a_named_operator(module: Module) -> None:
    """The kernels named by op= reach the launch of masks too."""
    blocks = ab.BlockDiagonalMask.from_seqlens([2, 4], device="cpu")
    x = torch.randn(1, 6, 2, 8)
    for op in (dispatch.CpuFwOp, (dispatch.CpuFwOp, dispatch.CpuBwOp)):
        assert torch.equal(attention(x, x, x, blocks, op=op), attention(x, x, x, blocks))
    with pytest.raises(ValueError, match="chained was asked for"):
        attention(x, x, x, blocks, op=dispatch.ChainedFwOp)


def test_scalars_of_a_mask() -> None:
    """Where torch has no exchange the mask's tensors too are described; devices are compared."""
    seen: list[Any] = []
    launch = ops.by_scalars(lambda *arguments: seen.append(arguments), 2)
    x, starts = torch.zeros(2, 3), torch.zeros(4, dtype=torch.int32)
    mask = MaskArguments(1, 2, starts, starts, page_size=128, bias_per_sequence=True)
    assert launch(x, None, 0.5, mask, 7) is None
    described = (starts.data_ptr(), 5, (4,), (1,))
    assert seen[0][2:] == (0.5, (1, 2, described, described, None, None, 128, True), 7, -1)
    elsewhere = mask._replace(key_starts=starts.to("meta"))
    refused = launch(x, None, 0.5, elsewhere, 7)
    assert refused == (ops.INVALID, "the tensors are on different devices")
