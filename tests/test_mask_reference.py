"""The reference, and the CPU path built on it, under every mask: against dense attention in fp64
with torch's autograd, whose visibility comes from the loops of mask_cases.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from mask_cases import EVERY, SEQUENCES, Case
from torch import Tensor

from memeff_attn import attn_bias as ab
from memeff_attn import masked, reference
from memeff_attn.dropout import dropout_mask, keep_scale, new_seed

H, K, KV_DIM = 4, 6, 5
CLOSE = {"atol": 1e-12, "rtol": 1e-11}
LAYOUTS = ["bmhk", "gqa", "bmk", "bmghk"]


def inputs_of(case: Case, layout: str = "bmhk", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    heads = {"bmhk": (H,), "gqa": (H,), "bmk": (), "bmghk": (2, 2)}[layout]
    kv_heads = (2,) if layout == "gqa" else heads
    shapes = (
        (1, case.total, *heads, K),
        (1, case.rows, *kv_heads, K),
        (1, case.rows, *kv_heads, KV_DIM),
    )
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def by_head(x: Tensor, heads: int) -> Tensor:
    """Any layout as [H, L, D]; shared key heads repeated."""
    x = x[0].flatten(1, -2) if x.dim() > 3 else x[0].unsqueeze(1)
    return x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)


def dense(
    case: Case, tensors: Sequence[Tensor], bias: Tensor | None = None, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out [H, M, Kv], lse [H, M]) of the textbook formula; bias, kept: [1 or H, M, N]."""
    heads = math.prod(tensors[0].shape[2:-1])
    query, key, value = (by_head(x, heads) for x in tensors)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~case.visible(), -math.inf)
    alive = (scores > -math.inf).any(-1, keepdim=True)
    scores = scores.masked_fill(~alive, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(~alive, 0.0) if case.rows else scores
    lse = torch.logsumexp(scores, -1).masked_fill(~alive[..., 0], -math.inf)
    return (weights if kept is None else weights * kept) @ value, lse


def as_out(out: Tensor, like: Tensor) -> Tensor:
    """[H, M, Kv] in the layout of a result."""
    return out.transpose(0, 1).reshape(like.shape)


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def expected_gradients(
    case: Case,
    tensors: Sequence[Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    kept: Tensor | None = None,
) -> list[Tensor]:
    own = leaves(tensors)
    out, lse = dense(case, own, kept=kept)
    total = (as_out(out, grad_out) * grad_out).sum()
    if grad_lse is not None:
        alive = lse > -math.inf
        total = total + (lse * grad_lse.view(lse.shape))[alive].sum()
    grads = torch.autograd.grad(total, own, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, own, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_forward_and_backward(case: Case, layout: str) -> None:
    tensors = inputs_of(case, layout)
    out, lse = reference.attention(*tensors, case.mask)
    exact, exact_lse = dense(case, tensors)
    torch.testing.assert_close(out, as_out(exact, out), **CLOSE)
    assert lse.shape == (1, *(tensors[0].shape[2:-1] or (1,)), case.total)
    torch.testing.assert_close(lse.view(exact_lse.shape), exact_lse, **CLOSE)
    alone = ~case.visible().any(1)
    assert torch.equal(lse == -math.inf, alone.expand_as(lse))
    assert bool((out[:, alone] == 0).all())
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = reference.attention_backward(grad_out, *tensors, case.mask)
    expected = expected_gradients(case, tensors, grad_out)
    for got, want in zip(grads, expected, strict=False):
        assert got is not None
        torch.testing.assert_close(got, want, **CLOSE)
    unseen = ~case.visible().any(0)
    assert bool((grads[1][:, unseen] == 0).all()) and bool((grads[2][:, unseen] == 0).all())
    assert bool((grads[0][:, alone] == 0).all()) and grads[3] is None
    both = reference.attention_backward(grad_out, *tensors, case.mask, grad_lse=grad_lse)
    expected = expected_gradients(case, tensors, grad_out, grad_lse)
    for got, want in zip(both, expected, strict=False):
        assert got is not None
        torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(reference.eager(*tensors, case.mask), out, **CLOSE)


@pytest.mark.parametrize("size", [1, 7, 40])
def test_blocks_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, cut anywhere: rows of a block that see different keys, blocks that see none."""
    for case in EVERY:
        tensors = inputs_of(case)
        out, lse = reference.attention(*tensors, case.mask)
        grads = reference.attention_backward(out, *tensors, case.mask)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "SCORES_PER_BLOCK", size)
            again = reference.attention(*tensors, case.mask)
            grads_again = reference.attention_backward(out, *tensors, case.mask)
        pairs = zip((out, lse, *grads[:3]), (*again, *grads_again[:3]), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (5, 2), (0, 0), (70, -1), (-1, 4)])
@pytest.mark.parametrize("shape", [(64, 64), (50, 90), (90, 50)])
def test_longer_windows(
    window: tuple[int, int], shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules that no class has, with no limit on one side, over many blocks."""
    monkeypatch.setattr(reference, "SCORES_PER_BLOCK", 500)
    m, n = shape
    left, right = window
    rule = ab.MaskRule(ab.ANCHOR_BOTTOM_RIGHT, left, right)

    def see(i: int, j: int, m: int, n: int) -> bool:
        distance = j - (i + n - m)
        return (left < 0 or distance >= -left) and (right < 0 or distance <= right)

    case = Case("", ab.AttentionBias(), see, [m], [list(range(n))], n)
    tensors = inputs_of(case, "gqa")
    out, lse = reference.attention(*tensors, rule)
    exact, exact_lse = dense(case, tensors)
    torch.testing.assert_close(out, as_out(exact, out), **CLOSE)
    torch.testing.assert_close(lse[0], exact_lse, **CLOSE)
    grads = reference.attention_backward(out, *tensors, rule)
    for got, want in zip(grads, expected_gradients(case, tensors, out), strict=False):
        assert got is not None
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("case", SEQUENCES, ids=str)
def test_rows_of_no_sequence_are_not_read(case: Case) -> None:
    """NaN in padding, gaps and other pages changes no bit; their gradient is 0."""
    tensors = inputs_of(case)
    used = torch.zeros(case.rows, dtype=torch.bool)
    used[[row for rows in case.keys for row in rows]] = True
    poisoned = [tensors[0], *(x.clone() for x in tensors[1:])]
    for x in poisoned[1:]:
        x[:, ~used] = math.nan
    out, lse = reference.attention(*tensors, case.mask)
    again = reference.attention(*poisoned, case.mask)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    grads = reference.attention_backward(out, *poisoned, case.mask)
    for got, want in zip(
        grads, reference.attention_backward(out, *tensors, case.mask), strict=True
    ):
        assert (got is None and want is None) or torch.equal(got, want)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["gqa", "bmghk"])
@pytest.mark.parametrize("case", SEQUENCES, ids=str)
def test_dropout_counts_within_the_sequence(case: Case, layout: str) -> None:
    """Sequence s drops what batch entry s of a padded batch would."""
    p, seed = 0.4, new_seed("cpu")
    kept = torch.zeros(H, case.total, case.rows, dtype=torch.float64)
    longest = max(len(rows) for rows in case.keys)
    mask = dropout_mask(seed, p, len(case.queries), H, max(case.queries), longest)
    for s, (start, m) in enumerate(zip(case.starts, case.queries, strict=False)):
        for i in range(m):
            for j, row in enumerate(case.keys[s]):
                kept[:, start + i, row] = mask[s, :, i, j].double() * keep_scale(p)
    tensors = inputs_of(case, layout)
    out, lse = reference.attention(*tensors, case.mask, p=p, seed=seed)
    exact, exact_lse = dense(case, tensors, kept=kept)
    torch.testing.assert_close(out, as_out(exact, out), **CLOSE)
    torch.testing.assert_close(lse.view(exact_lse.shape), exact_lse, **CLOSE)
    grads = reference.attention_backward(out, *tensors, case.mask, p=p, seed=seed)
    expected = expected_gradients(case, tensors, out, kept=kept)
    for got, want in zip(grads, expected, strict=False):
        assert got is not None
        torch.testing.assert_close(got, want, **CLOSE)
    with pytest.raises(ValueError, match="needs seed"):
        reference.attention(
            *tensors,
            ab.BlockDiagonalMask.from_seqlens([case.total], [case.rows], device="cpu"),
            p=p,
        )


# ---- a tensor beside the mask ----


def biased(case: Case, local: bool, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(a bias as it is given, a function of it by loops: [H, M, N])."""
    longest = max(len(rows) for rows in case.keys)
    shape = (1, heads, max(case.queries), longest) if local else (1, heads, case.total, case.rows)
    bias = torch.randn(shape, dtype=dtype, requires_grad=True)
    if not local:
        return bias, bias[0]
    whole = torch.zeros(heads, case.total, case.rows, dtype=dtype)
    for s, (start, m) in enumerate(zip(case.starts, case.queries, strict=False)):
        for i in range(m):
            columns = case.keys[s]
            if columns:
                index = (torch.tensor(start + i), torch.tensor(columns))
                row = torch.zeros_like(whole).transpose(0, 1)  # [M, H, N]
                filled = row.index_put(
                    (index[0], torch.arange(heads)[:, None], index[1]),
                    bias[0, :, i, : len(columns)],
                )
                whole = whole + filled.transpose(0, 1)
    return bias, whole


@pytest.mark.parametrize("heads", [1, H])
# Paged keys take a bias within the sequence only.
@pytest.mark.parametrize(
    ("case", "local"),
    [(x, local) for x in SEQUENCES for local in (False, True) if local or "Paged" not in x.name],
    ids=str,
)
def test_bias_and_its_gradient(case: Case, local: bool, heads: int) -> None:
    """One tensor for all sequences (ALiBi, T5), or one over all tokens (B48p)."""
    bias, whole = biased(case, local, heads, torch.float64)
    mask: Any = case.mask
    joined = mask.add_bias(bias, per_sequence=local)
    tensors = leaves(inputs_of(case, "gqa"))
    plain = [x.detach() for x in tensors]
    out, lse = reference.attention(*plain, joined)
    exact, exact_lse = dense(case, tensors, whole)
    torch.testing.assert_close(out, as_out(exact, out), **CLOSE)
    torch.testing.assert_close(lse[0], exact_lse, **CLOSE)
    grad_out = torch.randn_like(out)
    grads = reference.attention_backward(grad_out, *plain, joined)
    wanted = torch.autograd.grad((as_out(exact, out) * grad_out).sum(), [*tensors, bias])
    for got, want in zip(grads, wanted, strict=True):
        assert got is not None
        torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(reference.eager(*plain, joined), out, **CLOSE)


@pytest.mark.parametrize("case", SEQUENCES, ids=str)
def test_bias_of_each_sequence(case: Case) -> None:
    """[sequences, H, ...]: sequence s has the numbers that it has alone."""
    longest = max(len(rows) for rows in case.keys)
    bias = torch.randn(len(case.queries), H, max(case.queries), longest, dtype=torch.float64)
    mask: Any = case.mask
    tensors = inputs_of(case)
    joined = mask.add_bias(bias, per_sequence=True)
    out, _ = reference.attention(*tensors, joined)
    grads = reference.attention_backward(out, *tensors, joined)
    assert grads[3] is not None and grads[3].shape == bias.shape
    for s, (start, m) in enumerate(zip(case.starts, case.queries, strict=False)):
        n = len(case.keys[s])
        own = [tensors[0][:, start : start + m], *(x[:, case.keys[s]] for x in tensors[1:])]
        seen = torch.tensor([[case.see(i, j, m, n) for j in range(n)] for i in range(m)])
        part = bias[s : s + 1, :, :m, :n].masked_fill(~seen.view(m, n).bool(), -math.inf)
        alone, _ = reference.attention(*own, part)
        torch.testing.assert_close(out[:, start : start + m], alone, **CLOSE)
        grad = reference.attention_backward(out[:, start : start + m], *own, part)[3]
        assert grad is not None
        torch.testing.assert_close(grads[3][s : s + 1, :, :m, :n], grad, **CLOSE)
        rest = grads[3][s].clone()
        rest[:, :m, :n] = 0
        assert bool((rest == 0).all())


def test_bias_gradient_has_the_shape_that_was_given() -> None:
    query = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    for shape in [(3, 3), (1, 3, 3), (8, 3, 3), (2, 1, 1, 3)]:
        bias = torch.randn(shape, dtype=torch.float64)
        for mask in (bias, ab.LowerTriangularMask().add_bias(bias)):
            grad = reference.attention_backward(query, query, query, query, mask)[3]
            assert grad is not None and grad.shape == shape
    bool_bias = ab.LowerTriangularMask().add_bias(torch.ones(3, 3).bool())
    assert reference.attention_backward(query, query, query, query, bool_bias)[3] is None


def test_pages_that_do_not_exist() -> None:
    tables = torch.tensor([[0, 5]], dtype=torch.int32)
    mask = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [4], tables, 3)
    key = torch.zeros(1, 6, 1, 4)
    with pytest.raises(ValueError, match=r"block_tables\[0\] names a page"):
        reference.attention(torch.zeros(1, 1, 1, 4), key, key, mask)


def test_pages_of_many_sequences_sum_their_gradients() -> None:
    """A shared prefix: both sequences read page 1."""
    tables = torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
    mask = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([2, 1], [5, 6], tables, 3)
    pages = [[3, 4, 5, 0, 1], [3, 4, 5, 6, 7, 8]]
    case = Case("", mask, lambda i, j, m, n: True, [2, 1], pages, 9)
    tensors = inputs_of(case)
    grad_out = torch.randn(1, 3, H, KV_DIM, dtype=torch.float64)
    grads = reference.attention_backward(grad_out, *tensors, mask)
    for got, want in zip(grads, expected_gradients(case, tensors, grad_out), strict=False):
        assert got is not None
        torch.testing.assert_close(got, want, **CLOSE)


def test_every_device(device: str) -> None:
    """Masks that were moved, and masks made there: the reference reads them as on the CPU."""
    for case in EVERY:
        tensors = inputs_of(case)
        moved = [x.to(device) for x in tensors]
        out, lse = reference.attention(*tensors, case.mask)
        there, sums = reference.attention(*moved, case.mask.to(device))
        torch.testing.assert_close(there.cpu(), out, **CLOSE)
        torch.testing.assert_close(sums.cpu(), lse, **CLOSE)
    mask = ab.BlockDiagonalMask.from_seqlens([2, 3], device=device)
    assert mask.q_seqinfo.seqstart.device.type == device
    mask.q_seqinfo.from_seqlens_inplace([4, 1])
    assert mask.q_seqinfo.seqstart.tolist() == [0, 4, 5]
    shape = (5, 5)
    assert mask.materialize(shape, device=device).device.type == device
    assert torch.equal(mask.materialize(shape, device=device).cpu(), mask.materialize(shape))


# ---- the CPU path ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_cpu_path(case: Case, dtype: torch.dtype) -> None:
    tensors = [x.requires_grad_() for x in inputs_of(case, "gqa", dtype)]
    out, lse = masked.attention(*tensors, case.mask)
    assert out.dtype == dtype and lse.dtype == torch.float32
    exact, exact_lse = reference.attention(*tensors, case.mask)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact.detach(), atol=4 * unit, rtol=2 * unit)
    torch.testing.assert_close(lse.double(), exact_lse.detach(), atol=1e-5, rtol=1e-5)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    alive = lse > -math.inf
    total = (out * grad_out).sum() + (lse * grad_lse)[alive].sum()
    grads = torch.autograd.grad(total, tensors)
    wanted = reference.attention_backward(
        grad_out, *(x.detach() for x in tensors), case.mask, grad_lse=grad_lse
    )
    for got, want in zip(grads, wanted, strict=False):
        assert want is not None and got.dtype == dtype
        scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want, atol=8 * unit * scale, rtol=4 * unit)
    by_hand = masked.attention_backward(grad_out, out, lse, *tensors, case.mask)
    plain = torch.autograd.grad(masked.attention(*tensors, case.mask)[0], tensors, grad_out)
    assert all(torch.equal(a, b) for a, b in zip(by_hand, plain, strict=True))


def test_cpu_path_trains_a_bias() -> None:
    """T5: one Parameter for all sequences; only what wants a gradient gets one."""
    bias = torch.nn.Parameter(torch.randn(1, 2, 4, 4))
    mask = ab.BlockDiagonalMask.from_seqlens([4, 2, 3], device="cpu").add_bias(bias, True)
    query = torch.randn(1, 9, 2, 8)
    out, _ = masked.attention(query, query, query, mask)
    out.square().sum().backward()
    wanted = reference.attention_backward(2 * out.detach(), query, query, query, mask)[3]
    assert bias.grad is not None and wanted is not None and query.grad is None
    torch.testing.assert_close(bias.grad, wanted.detach().float(), atol=1e-5, rtol=1e-5)


def test_cpu_path_drops_with_a_seed() -> None:
    mask = ab.BlockDiagonalMask.from_seqlens([4, 5], device="cpu").make_causal()
    tensors = [torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3)]
    seed = new_seed("cpu")
    out, _ = masked.attention(*tensors, mask, p=0.3, seed=seed)
    exact, _ = reference.attention(*tensors, mask, p=0.3, seed=seed)
    torch.testing.assert_close(out, exact.float(), atol=1e-6, rtol=1e-5)
    grads = torch.autograd.grad(out.sum(), tensors)
    plain = [x.detach() for x in tensors]
    wanted = reference.attention_backward(torch.ones_like(out), *plain, mask, p=0.3, seed=seed)
    for got, want in zip(grads, wanted, strict=False):
        torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-5)  # type: ignore[union-attr]


def test_cpu_path_refuses() -> None:
    mask = ab.BlockDiagonalMask.from_seqlens([3], device="cpu")
    x = torch.zeros(1, 3, 2, 4)
    with pytest.raises(ValueError, match="one dtype"):
        masked.attention(x, x.half(), x, mask)
    with pytest.raises(ValueError, match="batch size 1"):
        masked.attention(*(x.expand(2, -1, -1, -1),) * 3, mask)
    with pytest.raises(ValueError, match=r"attn_bias must be torch\.float32"):
        masked.attention(x, x, x, mask.add_bias(torch.zeros(3, 3).half()))
    with pytest.raises(NotImplementedError, match="for the CPU"):
        masked.attention(*(x.to("meta"),) * 3, mask.to("meta"))
    y = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(
        masked.attention(y, y, y, mask)[0].square().sum(), y, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
