"""Every compiled variant under a window and over sequences, forced by name: each kernel honours
them, whatever its family, tile and features."""

from __future__ import annotations

import itertools
from typing import Any

import mask_runs
import pytest
import torch
from companions import forward_name, keys_within
from mask_runs import DTYPES
from test_variants import each_row, fits_here, head_dims, math_mode
from tolerance import Checker

import memeff_attn
from memeff_attn import attn_bias as ab
from memeff_attn.dispatch import variant
from memeff_attn.dropout import new_seed


def masks_for(row: dict[str, Any]) -> list[tuple[str, ab.AttentionBias, tuple[int, int] | None]]:
    """(label, mask, M and N where it has no sequences): windows and sequences that end within,
    at and behind the row's tiles."""
    m, n = row["tile_m"], row["tile_n"]
    longest_m = row["max_n"] if row["kind"] == "bwd" and row["max_n"] else 4 * m
    queries = [m + 1, 0, 1, 2 * m, 7, m - 1]
    keys = [n - 1, 3, n, 2 * n + 1, 0, 5]
    both = [max(x, y) for x, y in zip(queries, keys, strict=True)]
    blocks = ab.BlockDiagonalMask.from_seqlens
    padded = ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local
    starts = [n, 2 * n + 3, 3 * n, 5 * n, 8 * n, 8 * n + 1, 9 * n]
    gappy = ab.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens

    def sizes(queries: int, keys: int) -> tuple[int, int]:
        if row["bias_alignment"]:  # of the bias' rows
            keys = -(-keys // 8) * 8
        return min(queries, longest_m), keys_within(row, keys)

    return [
        ("window", ab.LocalAttentionFromBottomRightMask(n // 2, 1), sizes(2 * m + 1, 3 * n + 1)),
        ("narrow", ab.LocalAttentionFromBottomRightMask(0, 0), sizes(m + 1, 2 * n)),
        ("wide", ab.LocalAttentionFromBottomRightMask(3 * n, 0), sizes(m, 4 * n)),
        ("blocks", blocks(queries, keys, device="cuda"), None),
        ("causal", blocks(queries, keys, device="cuda").make_causal(), None),
        ("local", blocks(both, both, device="cuda").make_local_attention(n), None),
        ("padded", padded(queries, 3 * n, keys, n, 2, device="cuda"), None),
        ("gappy", gappy(queries, starts, [*keys[:3], 2 * n, 0, 5], device="cuda"), None),
    ]


def features(row: dict[str, Any]) -> list[tuple[bool, float]]:
    """(with a bias, p) of the calls that the row serves."""
    if row["bias"] and row["dropout"]:
        found = [(True, 0.3), (False, 0.3)]
        return [*found, (True, 0.0)] if row["kind"] == "bwd" else found
    return [(row["bias"], 0.3 if row["dropout"] else 0.0)]


def one_run(
    row: dict[str, Any],
    mask: ab.AttentionBias,
    sizes: tuple[int, int] | None,
    layout: str,
    feature: tuple[bool, float],
) -> mask_runs.Run:
    _, _, k, kv = head_dims(row)
    run = mask_runs.make(mask, "cuda", row["dtype"], layout, (k, kv), sizes)
    if sizes is None:
        run = mask_runs.poisoned(run)
    biased, p = feature
    if biased:
        heads = run.query.shape[2]
        own = sizes is None
        shape = (1, heads, *run.visible.shape)
        if own:
            shape = (1, heads, mask.q_seqinfo.max_seqlen, mask.k_seqinfo.max_seqlen)  # type: ignore[attr-defined]
        run = mask_runs.with_bias(run, shape, DTYPES[row["dtype"]], own)
    if p:
        run.p, run.seed = p, new_seed(torch.device("cuda"))
    return run


def refusal(row: dict[str, Any], biased: bool, paged: bool = False) -> str:
    """What a row says of packed sequences that it does not take; empty where it takes them."""
    if not row["sequences"]:
        return "takes no packed sequences"
    if paged and not row["pages"]:
        return "reads no keys through a block table"
    return "takes a bias of the query's dtype" if biased and row["bias_alignment"] else ""


def refuses(run: mask_runs.Run, op: Any, backward: bool, reason: str) -> None:
    inputs = [x.detach().requires_grad_(backward) for x in run.inputs]
    with pytest.raises((NotImplementedError, ValueError), match=reason):
        out = memeff_attn.memory_efficient_attention(*inputs, run.mask, run.p, op=op)
        if backward:
            out.sum().backward()


@pytest.mark.gpu
@each_row()
def test_variant_under_masks(row: dict[str, Any]) -> None:
    """Forward rows forward; backward rows every gradient, after the forward row that computes the
    same scores."""
    if reason := fits_here(row):
        pytest.skip(reason)
    backward = row["kind"] == "bwd"
    own_keys = backward and row["max_n"]  # takes a key head for each query head
    checker, layouts = Checker(), itertools.cycle(("bmhk",) if own_keys else ("gqa", "bmhk"))
    _, _, k, kv = head_dims(row)
    with math_mode(row):
        for (label, mask, sizes), feature in itertools.product(masks_for(row), features(row)):
            with checker.case(label):
                run = one_run(row, mask, sizes, next(layouts), feature)
                name = row["name"]
                if backward:
                    first = variant(forward_name(name, *feature, k, kv))
                    op: Any = (first, variant(name))
                else:
                    op = variant(name)
                if sizes is None and (reason := refusal(row, feature[0])):
                    refuses(run, op, backward, reason)
                    continue
                mask_runs.check(checker, f"{label} {feature}", run, op, backward)
    checker.finish()


@pytest.mark.gpu
@each_row("fwd")
def test_variant_over_pages(row: dict[str, Any]) -> None:
    """Tiles that lie within one page, at its end and in the next one."""
    if reason := fits_here(row):
        pytest.skip(reason)
    checker = Checker()
    with math_mode(row), torch.no_grad():
        for (name, make), feature in itertools.product(
            ((x, mask_runs.PAGES[x]) for x in ("paged_128", "paged_causal_128", "paged_256")),
            features(row),
        ):
            with checker.case(name):
                run = one_run(row, make("cuda"), None, "gqa", feature)
                if reason := refusal(row, feature[0], paged=True):
                    refuses(run, variant(row["name"]), False, reason)
                    continue
                mask_runs.check(checker, f"{name} {feature}", run, variant(row["name"]), False)
    checker.finish()
