"""Every mask class x dtype x pass x family against the fp64 oracle: what [masks] promises, class by
class, alone and with a tensor bias. (Sizes, layouts and head dims: test_mask_kernels.py; every
single kernel: test_mask_variants.py.)"""

from __future__ import annotations

import itertools
from typing import Any

import mask_runs
import pytest
import torch
from companions import forward_name
from mask_runs import DENSE, DTYPES, PAGES, SEQUENCES
from test_variants import fits_here
from tolerance import Checker

from memeff_attn import attn_bias as ab
from memeff_attn.dispatch import variant

WINDOWS = ("causal", "bottom_right", "local_65", "band_64_1")  # one of each class
NAMES = (*SEQUENCES, *PAGES, *WINDOWS)
MAKERS = {**SEQUENCES, **PAGES, **DENSE}
SIZES = (130, 190)  # M, N where there are no sequences
GPUS = {"v100": 70, "turing": 75, "ampere": 80}  # whose kernels are forced
LAYOUTS = ("gqa", "bmhk", "bmghk")


def test_every_class_is_here() -> None:
    """add_bias makes those with a tensor; the key padding mask is a bool one of them."""
    made = {type(MAKERS[name]("cpu")) for name in NAMES}
    assert made | {type(run_of(name, "cpu", "f32", True).mask) for name in NAMES} | {
        ab.KeyPaddingMask
    } == set(ab.MASKS)


def run_of(name: str, device: str, dtype: str, biased: bool, layout: str = "bmhk") -> mask_runs.Run:
    mask: Any = MAKERS[name](device)
    sizes = SIZES if name in WINDOWS else None
    run = mask_runs.make(mask, device, dtype, layout, sizes=sizes)
    if sizes is None:
        run = mask_runs.poisoned(run)
    if not biased:
        return run
    heads = run.query.shape[2:-1]
    shape = (1, *heads, *run.visible.shape)
    if sizes is None:
        shape = (1, *heads, mask.q_seqinfo.max_seqlen, mask.k_seqinfo.max_seqlen)
    return mask_runs.with_bias(run, shape, DTYPES[dtype], sizes is None)


def passes(name: str) -> tuple[bool, ...]:
    """Of `backward`: pages have no gradient on a GPU."""
    return (False,) if name in PAGES else (True,)


@pytest.mark.parametrize("name", NAMES)
def test_with_and_without_a_bias(device: str, name: str) -> None:
    """The kernels that dispatch picks. On the CPU one dtype of each, with a bias."""
    checker = Checker()
    dtypes = tuple(DTYPES)
    if device == "cpu":
        dtypes = (dtypes[NAMES.index(name) % 3],)
    for dtype, biased in itertools.product(dtypes, (False, True) if device == "cuda" else (True,)):
        layout = "gqa" if biased else "bmghk"
        label = f"{name} {dtype} bias {biased}"
        with checker.case(label):
            run = run_of(name, device, dtype, biased, layout)
            with torch.set_grad_enabled(passes(name)[0]):
                mask_runs.check(checker, label, run, backward=passes(name)[0])
    checker.finish()


def chosen(sm: int, dtype: str, biased: bool, which: str) -> str:
    """The kernel that such a GPU would run, if this build has it."""
    from memeff_attn import _C

    request = {
        "sm": sm, "dtype": dtype, "B": 2, "M": 512, "N": 512, "H": 16, "K": 64, "Kv": 64,
        "alignment": 16, "has_bias": biased, "bias_grad": biased and which == "bwd",
        "pass": which, "any_build": True,
    }  # fmt: skip
    name = str(_C.select(request))
    rows = {row["name"]: row for row in _C.variants()}
    return name if rows[name]["built"] and not fits_here(rows[name]) else ""


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_families(gpu: str, dtype: str) -> None:
    """Every class on the kernels of other GPUs: sm70, sm75, SIMT (what they have no tensor cores
    for) and sm80."""
    checker, layouts = Checker(), itertools.cycle(LAYOUTS)
    ran = 0
    for name, biased in itertools.product(NAMES, (False, True)):
        if name in PAGES and biased:
            continue  # test_with_and_without_a_bias
        backward = passes(name)[0]
        first = chosen(GPUS[gpu], dtype, biased, "fwd")
        second = chosen(GPUS[gpu], dtype, biased, "bwd") if backward else ""
        if not first or (backward and not second):
            continue
        if backward:  # with the forward kernel of the same scores
            first = forward_name(second, biased, 0.0, 64, 64)
        label = f"{name} {dtype} bias {biased} {first} {second}"
        with checker.case(label):
            run = run_of(name, "cuda", dtype, biased, next(layouts))
            op = (variant(first), variant(second)) if backward else variant(first)
            with torch.set_grad_enabled(backward):
                mask_runs.check(checker, label, run, op, backward)
        ran += 1
    if not ran:
        pytest.skip(f"this build has no {dtype} kernel of sm_{GPUS[gpu]}")
    checker.finish()
