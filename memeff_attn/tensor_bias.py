"""A tensor given as attn_bias: its shape, and what fewer dimensions mean."""

from __future__ import annotations

from torch import Tensor


def bias_shape(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """What a tensor bias broadcasts to: [B, M, N], [B, H, M, N] or [B, G, H, M, N]."""
    return (query.shape[0], *query.shape[2:-1], query.shape[1], key.shape[1])


def bias_of_rank(bias: Tensor, query: Tensor) -> Tensor:
    """A view of the bias with as many dimensions as the query; ValueError where the missing ones
    could mean two things.

    [M, N] serves every batch and head. With a 4-D query also [1, M, N], [B * H, M, N] (heads
    fastest) and, where B and H differ, [B, M, N].
    """
    rank = query.dim()
    if bias.dim() == rank:
        return bias
    if bias.dim() == 2:
        return bias[(None,) * (rank - 2)]
    if bias.dim() == 3 and rank == 4:
        batch, heads, first = query.shape[0], query.shape[2], bias.shape[0]
        if first == 1:
            return bias.unsqueeze(0)
        if first == batch * heads:
            return bias.view(batch, heads, *bias.shape[1:])
        if first == batch != heads:
            return bias.unsqueeze(1)
        raise ValueError(
            f"attn_bias has shape {tuple(bias.shape)}, whose first dimension may be meant as batch "
            f"({batch}) or heads "
            f"({heads}); expected [B, H, M, N], any dimension 1. Pass attn_bias.unsqueeze(1) for "
            "one mask a batch "
            "entry, attn_bias.unsqueeze(0) for one a head."
        )
    raise ValueError(
        f"attn_bias has {bias.dim()} dimensions {tuple(bias.shape)}, query {tuple(query.shape)} "
        f"takes {rank} "
        f"({_BIAS_LAYOUT.get(rank, 'none')}, any dimension 1) or 2 ([M, N]). Add the missing ones "
        "with unsqueeze."
    )


_BIAS_LAYOUT = {3: "[B, M, N]", 4: "[B, H, M, N]", 5: "[B, G, H, M, N]"}
