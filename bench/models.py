"""Two small client models whose attention can be exchanged: a decoder like Llama, and a ViT.

Each calls `attention(q, k, v, causal)` on BMHK tensors in every layer and gives (output, loss).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Batch = tuple[Tensor, Tensor]  # what goes in, and the targets of the loss
ROTARY_BASE = 10000.0


def memeff(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Ours: fewer key heads are read as they are."""
    from memeff_attn import LowerTriangularMask, memory_efficient_attention

    return memory_efficient_attention(q, k, v, LowerTriangularMask() if causal else None)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """scaled_dot_product_attention with whichever kernel PyTorch chooses."""
    grouped: dict[str, Any] = {"enable_gqa": True} if k.shape[2] != q.shape[2] else {}
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped)
    return out.transpose(1, 2)


def efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The same, held to PyTorch's memory-efficient kernel, for which clients copy shared heads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    k, v = (_for_each_query_head(x, q) for x in (k, v))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        return sdpa(q, k, v, causal)


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(Q K^T) V as it is written, in the tensors' dtype, with all scores in memory."""
    k, v = (_for_each_query_head(x, q) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def _for_each_query_head(x: Tensor, query: Tensor) -> Tensor:
    shared = query.shape[2] // x.shape[2]
    return x if shared == 1 else x.repeat_interleave(shared, dim=2)


ATTENTION: dict[str, Attention] = {"memeff": memeff, "efficient": efficient, "sdpa": sdpa}


@dataclasses.dataclass(frozen=True)
class Size:
    """batch sequences or images; tokens of each; layers of `heads` heads of head_dim, kv_heads of
    them for keys; inner: width of the MLP; classes: words or image classes; patch: of an image."""

    batch: int
    tokens: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    classes: int
    patch: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def text(self) -> str:
        heads = f"H{self.heads}"
        heads += f"/{self.kv_heads}" if self.kv_heads != self.heads else ""
        return f"B{self.batch} M{self.tokens} {heads} K{self.head_dim}, {self.layers} layers"


class Model(nn.Module):
    """What both have in common; `attention` may be exchanged at any time."""

    unit = ""  # what its speed counts

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.attention: Attention = sdpa

    def units(self, batch: Batch) -> int:
        """How many of its units a batch holds."""
        raise NotImplementedError

    def batch(self, size: Size, device: torch.device, seed: int) -> Batch:
        """Random inputs of `batch` times `tokens` of the size."""
        raise NotImplementedError


class Heads(nn.Module):
    """The projections around attention."""

    def __init__(self, size: Size, bias: bool) -> None:
        super().__init__()
        self.split = [size.heads, size.kv_heads, size.kv_heads]
        self.head_dim = size.head_dim
        self.qkv = nn.Linear(size.width, sum(self.split) * size.head_dim, bias=bias)
        self.out = nn.Linear(size.width, size.width, bias=bias)

    def forward(self, x: Tensor, attention: Attention, angles: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.split, dim=2)
        if angles is not None:
            q, k = (rotated(y, angles) for y in (q, k))
        return self.out(attention(q, k, v, angles is not None).flatten(2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: pairs (first half, second half) of a head turned by angles [M, K / 2]."""
    cos, sin = (f(angles).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class DecoderLayer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.heads = Heads(size, bias=False)
        self.gate_up = nn.Linear(size.width, 2 * size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor, attention: Attention, angles: Tensor) -> Tensor:
        x = x + self.heads(self.norms[0](x), attention, angles)
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Decoder(Model):
    """Causal, RMSNorm, rotary positions, shared key heads, SwiGLU; learns to tell the next word."""

    unit = "tokens/s"

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.words = nn.Embedding(size.classes, size.width)
        self.layers = nn.ModuleList(DecoderLayer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        half = self.size.head_dim // 2
        steps = torch.arange(half, device=tokens.device, dtype=torch.float64) / half
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float64)
        angles = places[:, None] * ROTARY_BASE**-steps
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.attention, angles)
        out = functional.linear(self.norm(x), self.words.weight) * self.size.width**-0.5
        return out, functional.cross_entropy(out.flatten(0, 1), targets.flatten())

    def units(self, batch: Batch) -> int:
        return batch[0].numel()

    def batch(self, size: Size, device: torch.device, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(size.classes, (size.batch, size.tokens + 1), generator=generator)
        words = words.to(device)
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()


class ViTLayer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.heads = Heads(size, bias=True)
        self.up, self.down = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        x = x + self.heads(self.norms[0](x), attention)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class ViT(Model):
    """Images as patches behind one token for the class; tokens - 1 is the square of a number."""

    unit = "images/s"

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.patches = nn.Conv2d(3, size.width, size.patch, size.patch)
        self.first = nn.Parameter(torch.zeros(1, 1, size.width))
        self.places = nn.Parameter(torch.randn(1, size.tokens, size.width) * 0.02)
        self.layers = nn.ModuleList(ViTLayer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.classes)

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(images.to(self.first.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1)
        x = x + self.places[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x, self.attention)
        out = self.head(self.norm(x[:, 0]))
        return out, functional.cross_entropy(out, targets)

    def units(self, batch: Batch) -> int:
        return len(batch[0])

    def batch(self, size: Size, device: torch.device, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        side = round((size.tokens - 1) ** 0.5) * size.patch
        images = torch.randn(size.batch, 3, side, side, generator=generator)
        targets = torch.randint(size.classes, (size.batch,), generator=generator)
        return images.to(device), targets.to(device)


MODELS: dict[str, type[Model]] = {"llama": Decoder, "vit": ViT}
# full: what an H200 runs in seconds. tiny: the same code on a CPU, for tests and first looks.
SIZES: dict[str, dict[str, Size]] = {
    "full": {
        "llama": Size(4, 4096, 12, 16, 4, 128, 5632, 32000),
        "vit": Size(32, 1370, 24, 16, 16, 64, 4096, 1000, patch=14),  # ViT-L/14 at 518 x 518
    },
    "tiny": {
        "llama": Size(2, 48, 2, 4, 2, 16, 96, 50),
        "vit": Size(2, 17, 2, 2, 2, 16, 64, 10, patch=4),
    },
}
# What is compared with fp64: fewer and shorter sequences, fewer layers, all else alike.
CHECKED = {
    "full": {"llama": (1, 512, 2), "vit": (2, 1370, 2)},
    "tiny": {"llama": (1, 33, 2), "vit": (2, 17, 2)},
}
