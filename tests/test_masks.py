"""Mask classes: what they mean, what they look like, that they travel."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import memeff_attn
from memeff_attn import attn_bias, reference
from memeff_attn.attn_bias import (
    AttentionBias,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    bias_of_rank,
)

SHAPES = [(1, 1), (4, 4), (3, 5), (5, 3), (1, 6), (6, 1)]


def rule(mask: AttentionBias, rows: int, columns: int) -> torch.Tensor:
    offset = columns - rows if isinstance(mask, LowerTriangularFromBottomRightMask) else 0
    return torch.tensor([[j <= i + offset for j in range(columns)] for i in range(rows)])


@pytest.mark.parametrize("mask", [LowerTriangularMask(), LowerTriangularFromBottomRightMask()])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool])
def test_materialize(mask: AttentionBias, shape: tuple[int, int], dtype: torch.dtype) -> None:
    visible = rule(mask, *shape)
    seen = mask.materialize((2, 3, *shape), dtype=dtype)
    assert seen.dtype == dtype and seen.shape == (2, 3, *shape)
    expected = visible if dtype == torch.bool else torch.where(visible, 0.0, -math.inf).to(dtype)
    assert torch.equal(seen, expected.expand_as(seen))


def test_materialize_window() -> None:
    seen = attn_bias._materialize_causal_mask((4, 6), torch.bool, window_size=2)
    assert seen.sum(1).tolist() == [1, 2, 2, 2]
    seen = attn_bias._materialize_causal_mask(
        (4, 6), torch.bool, window_size=3, from_bottomright=True
    )
    assert seen.sum(1).tolist() == [3, 3, 3, 3] and bool(seen[3, 5])


@pytest.mark.parametrize("mask", [LowerTriangularMask(), LowerTriangularFromBottomRightMask()])
@pytest.mark.parametrize("shape", [*SHAPES, (37, 70), (70, 37)])
def test_attention_sees_what_the_mask_shows(
    mask: AttentionBias, shape: tuple[int, int], device: str
) -> None:
    """The object and its picture give the same result (B04, B44)."""
    rows, columns = shape
    dtype = torch.float32 if device == "cpu" else torch.float16
    query = torch.randn(2, rows, 3, 16, device=device, dtype=dtype)
    key, value = torch.randn(2, 2, columns, 3, 16, device=device, dtype=dtype).unbind()
    call = memeff_attn.memory_efficient_attention_forward_requires_grad
    out, lse = call(query, key, value, mask)
    picture = mask.materialize((rows, columns), dtype=dtype, device=device)
    other, other_lse = call(query, key, value, picture)
    tolerance = 1e-5 if device == "cpu" else 2e-3
    torch.testing.assert_close(out, other, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, other_lse, atol=2e-4, rtol=1e-5)
    hidden = ~rule(mask, rows, columns).any(1).to(device)
    assert torch.equal(lse == -math.inf, hidden.expand_as(lse))
    assert bool((out[:, hidden] == 0).all())


@pytest.mark.parametrize("mask", [LowerTriangularMask(), LowerTriangularFromBottomRightMask()])
def test_travels(mask: AttentionBias) -> None:
    for other in (
        pickle.loads(pickle.dumps(mask)),
        copy.deepcopy(mask),
        mask.to("cpu"),
        mask.to(torch.device("meta")),
    ):
        assert type(other) is type(mask)
    assert repr(mask) == f"{type(mask).__name__}()"
    assert isinstance(hash(mask), int)


def test_device_is_accepted_as_in_xformers() -> None:
    assert type(LowerTriangularMask(device="cuda")) is LowerTriangularMask


def test_base_class_has_no_picture() -> None:
    with pytest.raises(NotImplementedError, match="AttentionBias"):
        AttentionBias().materialize((2, 2))


def test_names_that_do_not_exist() -> None:
    with pytest.raises(AttributeError):
        attn_bias.NoSuchMask  # noqa: B018


# ---- tensor biases: every rank that is accepted means what it says ----

B, H, M, N = 2, 3, 5, 7


def full_bias(bias: torch.Tensor) -> torch.Tensor:
    """Loops, so that no broadcasting rule is taken on trust."""
    full = torch.empty(B, H, M, N)
    for b in range(B):
        for h in range(H):
            part = bias
            if bias.dim() == 4:
                part = bias[b % bias.shape[0], h % bias.shape[1]]
            elif bias.dim() == 3 and bias.shape[0] == B * H:
                part = bias[b * H + h]
            elif bias.dim() == 3:
                part = bias[b % bias.shape[0]]
            full[b, h] = part.expand(M, N)
    return full


SHAPES_4D = [
    (b, h, m, n) for b in (1, B) for h in (1, H) for m in (1, M) for n in (1, N)
]  # every broadcast
FEWER = [(M, N), (1, N), (M, 1), (1, M, N), (1, 1, N), (B * H, M, N), (B * H, 1, N), (B, M, N)]


@pytest.mark.parametrize("shape", SHAPES_4D + FEWER)
@pytest.mark.parametrize("heads", [H, 1])
def test_bias_broadcasts(shape: tuple[int, ...], heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(B, M, H, 8)
    key, value = torch.randn(2, B, N, heads, 8).unbind()
    bias = torch.randn(shape)
    out = memeff_attn.memory_efficient_attention(query, key, value, bias)
    exact, _ = reference.attention(query, key, value, full_bias(bias))
    torch.testing.assert_close(out, exact.float(), atol=2e-6, rtol=1e-5)
    again, _ = reference.attention(query, key, value, bias)
    torch.testing.assert_close(again, exact, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("shape", [(g, h, m) for g in (1, 2) for h in (1, 3) for m in (1, M)])
def test_bias_of_grouped_inputs(shape: tuple[int, int, int]) -> None:
    g, h, m = shape
    query = torch.randn(B, M, 2, 3, 8)
    key, value = torch.randn(2, B, N, 2, 3, 8).unbind()
    bias = torch.randn(B, g, h, m, N)
    out = memeff_attn.memory_efficient_attention(query, key, value, bias)
    flat = bias.expand(B, 2, 3, M, N).flatten(1, 2)
    exact, _ = reference.attention(*(x.flatten(2, 3) for x in (query, key, value)), flat)
    torch.testing.assert_close(out.flatten(2, 3), exact.float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(
        memeff_attn.memory_efficient_attention(query, key, value, bias[0, 0, 0]),
        reference.attention(query, key, value, bias[0, 0, 0])[0].float(),
        atol=2e-6,
        rtol=1e-5,
    )


def test_bias_views_cost_nothing() -> None:
    query = torch.empty(B, M, H, 8)
    for shape in [(M, N), (1, M, N), (B * H, M, N), (B, M, N), (B, H, M, N)]:
        bias = torch.randn(shape)
        assert bias_of_rank(bias, query).data_ptr() == bias.data_ptr()
    wide = torch.randn(B * H, M, 16)[:, :, :N]  # a padded buffer, as clients slice it
    assert bias_of_rank(wide, query).stride() == (H * M * 16, M * 16, 16, 1)


@pytest.mark.parametrize(
    ("bias", "query"),
    [
        ((2, M, N), (2, M, 2, 8)),  # batch or heads?
        ((3, M, N), (2, M, 3, 8)),  # heads: must be said with unsqueeze(0)
        ((5, M, N), (2, M, 3, 8)),
        ((N,), (2, M, 3, 8)),
        ((2, 3, M, N), (2, M, 8)),
        ((2, 3, M, N), (2, M, 1, 3, 8)),
        ((1, 2, 3, M, N), (2, M, 3, 8)),
    ],
)
def test_ambiguous_ranks_are_refused(bias: tuple[int, ...], query: tuple[int, ...]) -> None:
    q = torch.randn(query)
    k = torch.randn(query[0], N, *query[2:])
    with pytest.raises(ValueError, match=r"attn_bias has .*unsqueeze"):
        memeff_attn.memory_efficient_attention(q, k, k, torch.zeros(bias))
