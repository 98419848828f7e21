"""timm's vision transformers on activate_sdpa(): small, random weights.

timm imports torchvision, which must be the one built for this torch: on PyPI torchvision 0.26.0 for
torch 2.11.0, 0.29.1 for 2.14.1. A CPU-only torch has none there."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from tolerance import FORWARD, GRADIENT, Checker
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memeff_attn import integrations


def load() -> tuple[ModuleType | None, str]:
    """(timm, "") or (None, why it does not import)."""
    try:
        return importlib.import_module("timm"), ""
    except ImportError as error:
        return None, f"timm does not import here: {error}"
    except RuntimeError as error:  # a torchvision built for another torch
        return None, f"timm's torchvision does not load beside torch {torch.__version__}: {error}"


timm, WHY_NOT = load()
pytestmark = pytest.mark.skipif(timm is None, reason=WHY_NOT)

# With class token, registers, rotary positions, a relative-position bias, windows with such a bias
# and a mask.
MODELS = {
    "vit_tiny_patch16_224": {"depth": 2},
    "vit_small_patch14_reg4_dinov2": {"depth": 2},
    "eva02_tiny_patch14_224": {"depth": 2},
    "beit_base_patch16_224": {"depth": 2, "embed_dim": 96, "num_heads": 3},
    "swin_tiny_patch4_window7_224": {"depths": (1, 2, 1, 1), "drop_path_rate": 0.0},
}
SIZE = 112


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    """timm asks for SDPA in most models by itself; in Swin where experiments are allowed."""
    layers = importlib.import_module("timm.layers")
    layers.set_fused_attn(True, experimental=True)
    yield
    layers.set_fused_attn(True)


def model_of(name: str, device: str) -> nn.Module:
    assert timm is not None
    torch.manual_seed(0)
    options = MODELS[name] | {"img_size": SIZE, "num_classes": 10}
    return timm.create_model(name, pretrained=False, **options).to(device)


def run(model: nn.Module, x: Tensor, kind: torch.dtype) -> dict[str, Tensor]:
    model = copy.deepcopy(model).to(kind).train()
    out = model(x.to(kind))
    out.square().sum().backward()
    grads = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    return {"out": out.detach()} | grads


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward(device: str, name: str) -> None:
    model = model_of(name, device)
    x = torch.randn(2, 3, SIZE, SIZE, device=device)
    exact = run(model, x, torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        eager = run(model, x, torch.float32)
    integrations.sdpa_calls(reset=True)
    with integrations.activate_sdpa():
        mine = run(model, x, torch.float32)
    depth = sum(MODELS[name].get("depths", (MODELS[name].get("depth", 0),)))
    assert integrations.sdpa_calls(reset=True) == (depth, 0, 0, "")
    checker = Checker()
    assert mine.keys() == exact.keys() and len(mine) > 10
    for key, value in mine.items():
        factors = FORWARD if key == "out" else GRADIENT
        checker.close(f"{name} {key}", value, exact[key], eager[key], eager[key], factors=factors)
    checker.finish()


def test_inference(device: str) -> None:
    model = model_of("vit_tiny_patch16_224", device).eval()
    x = torch.randn(2, 3, SIZE, SIZE, device=device)
    integrations.sdpa_calls(reset=True)
    with torch.inference_mode():
        with sdpa_kernel(SDPBackend.MATH):
            eager = model(x)
        with integrations.activate_sdpa():
            mine = model(x)
    assert integrations.sdpa_calls(reset=True) == (2, 0, 0, "")
    exact = copy.deepcopy(model).double()(x.double()).detach()
    checker = Checker()
    checker.close("inference", mine, exact, eager, eager)
    checker.finish()
