"""`make train`: a small causal language model learns characters through memory_efficient_attention.

The text is the reference manual that Python itself ships (pydoc_data.topics). A transformer with a
causal mask and dropout in its attention trains on it, is measured on text it has not seen, and
writes a few lines. `--p 0 --compare` trains twice from equal seeds, once through PyTorch's
scaled_dot_product_attention, and exits with 1 where the losses differ by more than 1e-3.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Threads that spin at the end of each small operation stall a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.append(str(Path(__file__).resolve().parents[1]))  # bench; last, an install wins

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memeff_attn import LowerTriangularMask, memory_efficient_attention

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # [B, M, H, K] three times, p

LARGEST_DIFFERENCE = 1e-3  # of two training losses, relative, with --compare
HELD_OUT = 0.1  # share of the text, its end
COMPARED_STEPS = 200
WRITTEN = 240  # characters that the trained model writes


@dataclasses.dataclass
class Size:
    """What the device decides unless asked otherwise."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int


SIZES = {
    "cpu": Size(width=96, layers=2, heads=4, context=96, batch=16, steps=500),
    "cuda": Size(width=512, layers=6, heads=8, context=1024, batch=32, steps=2000),
}


def ours(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask(), p=p)


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """Attention and a perceptron, each added to its normed input."""

    def __init__(self, size: Size, p: float, attention: Attention) -> None:
        super().__init__()
        self.heads, self.p, self.attention = size.heads, p, attention
        self.before_attention, self.before_mlp = (nn.LayerNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(p),
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, M, width]
        packed = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = packed.unbind(2)  # views [B, M, H, K]: no copy
        out = self.attention(q, k, v, self.p if self.training else 0.0)
        x = x + self.out(out.flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, characters: int, size: Size, p: float, attention: Attention) -> None:
        super().__init__()
        self.context = size.context
        self.characters = nn.Embedding(characters, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size, p, attention) for _ in range(size.layers)))
        self.norm, self.scores = nn.LayerNorm(size.width), nn.Linear(size.width, characters)
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:  # [B, M] -> [B, M, characters]
        places = torch.arange(text.shape[1], device=text.device)
        return self.scores(self.norm(self.blocks(self.characters(text) + self.positions(places))))

    def loss(self, text: Tensor) -> Tensor:  # [B, M + 1]
        scores = self(text[:, :-1]).flatten(0, 1).float()
        return F.cross_entropy(scores, text[:, 1:].flatten())


def manual() -> str:
    """Python's reference manual, about half a million characters; other files of the standard
    library where a distribution leaves it out. Spaces that only align are taken out."""
    try:
        from pydoc_data.topics import topics

        parts = list(topics.values())
    except ImportError:
        files = sorted(Path(argparse.__file__).parent.glob("[a-h]*.py"))
        parts = [f.read_text(encoding="utf-8", errors="ignore") for f in files]
    random.Random(0).shuffle(parts)  # what is held out is then like the rest
    return re.sub(r"[ \t]+", " ", re.sub(r"[-=*+|]{3,}", "", "\n\n".join(parts)))


class Text:
    """The text as numbers, on a device, its end held out."""

    def __init__(self, text: str, device: torch.device) -> None:
        text = "".join(c if c.isascii() else "?" for c in text)
        self.alphabet = sorted(set(text))
        numbers = {c: i for i, c in enumerate(self.alphabet)}
        data = torch.tensor([numbers[c] for c in text], device=device)
        cut = int(len(data) * (1 - HELD_OUT))
        self.seen, self.held_out = data[:cut], data[cut:]

    def batch(self, data: Tensor, size: Size, generator: torch.Generator) -> Tensor:
        """[batch, context + 1], from anywhere."""
        starts = torch.randint(len(data) - size.context, (size.batch, 1), generator=generator)
        offsets = torch.arange(size.context + 1)
        return data[(starts + offsets).to(data.device)]

    def decoded(self, numbers: list[int]) -> str:
        return "".join(self.alphabet[n] for n in numbers)


@contextlib.contextmanager
def progress(steps: int, label: str) -> Iterator[Callable[[str], None]]:
    """Calls it yields advance one line by a step: tqdm's where it is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        from bench.timing import Progress

        yield Progress(steps, label).step
        return
    with tqdm(total=steps, desc=label) as bar:

        def step(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        yield step


def train(
    model: Model, text: Text, size: Size, steps: int, rate: float, seed: int, cast: bool, label: str
) -> list[float]:
    """The loss of each step."""
    chosen = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    losses: list[Tensor] = []
    shown = ""
    model.train()
    with progress(steps, label) as advance:
        for step in range(steps):
            with autocast(text.seen.device, cast):
                loss = model.loss(text.batch(text.seen, size, chosen))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            losses.append(loss.detach())
            if step % 10 == 0:  # reading a loss waits for the GPU
                shown = f"loss {float(losses[-1]):.3f}"
            advance(shown)
    return [float(x) for x in losses]


def autocast(device: torch.device, cast: bool) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if cast else contextlib.nullcontext()


@torch.no_grad()
def held_out_loss(model: Model, text: Text, size: Size, cast: bool) -> float:
    model.eval()
    chosen = torch.Generator().manual_seed(0)
    with autocast(text.seen.device, cast):
        found = [model.loss(text.batch(text.held_out, size, chosen)) for _ in range(4)]
    return float(torch.stack(found).mean())


@torch.no_grad()
def write(model: Model, text: Text, cast: bool) -> str:
    """What the model writes after the first words of the text it has not seen."""
    model.eval()
    numbers = text.held_out[:20].tolist()
    for _ in range(WRITTEN):
        seen = torch.tensor(numbers[-model.context :], device=text.seen.device)[None]
        with autocast(seen.device, cast):
            scores = model(seen)[0, -1].float()
        numbers.append(int(torch.multinomial(torch.softmax(scores / 0.7, -1), 1)))
    return text.decoded(numbers)


def build(text: Text, size: Size, p: float, attention: Attention, seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(len(text.alphabet), size, p, attention).to(text.seen.device)


def compare(text: Text, size: Size, options: argparse.Namespace) -> int:
    """Two runs in fp32 that differ in nothing but the attention; 1 where their losses differ."""
    losses = {}
    for label, attention in (("memeff_attn", ours), ("torch SDPA", torch_sdpa)):
        model = build(text, size, 0.0, attention, options.seed)
        losses[label] = train(
            model, text, size, size.steps, options.rate, options.seed, False, label
        )
    first, second = losses.values()
    differences = [abs(a - b) / abs(b) for a, b in zip(first, second, strict=True)]
    print(f"loss, first and last of {size.steps} steps:")
    for label, of in losses.items():
        print(f"  {label:12} {of[0]:.6f} {of[-1]:.6f}")
    right = max(differences) <= LARGEST_DIFFERENCE
    print(
        f"largest relative difference {max(differences):.1e}, at most {LARGEST_DIFFERENCE:.0e} "
        f"allowed: {'passed' if right else 'FAILED'}"
    )
    return int(not right)


def show(text: Text, size: Size, options: argparse.Namespace) -> int:
    """One run, in bf16 (autocast) on a GPU; 1 where nothing was learned."""
    cast = options.device == "cuda" and not options.fp32
    model = build(text, size, options.p, ours, options.seed)
    before = held_out_loss(model, text, size, cast)
    begin = time.perf_counter()
    losses = train(model, text, size, size.steps, options.rate, options.seed, cast, "training")
    seconds = time.perf_counter() - begin
    after = held_out_loss(model, text, size, cast)
    rate = size.steps * size.batch * size.context / seconds
    print(f"{seconds:.0f} s, {rate:,.0f} characters a second; last training loss {losses[-1]:.3f}")
    print(f"loss on text not seen: {before:.3f} before, {after:.3f} after")
    print(f"\nIt writes:\n{write(model, text, cast)}")
    if not after < before:
        print("FAILED: nothing was learned")
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    from memeff_attn import dispatch

    can = torch.cuda.is_available() and getattr(dispatch.native()[0], "is_cuda_build", False)
    top = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    top.add_argument("--device", choices=SIZES, default="cuda" if can else "cpu")
    top.add_argument("--p", type=float, default=0.1, help="dropout, in attention too")
    top.add_argument(
        "--compare", action="store_true", help="against torch's attention; needs --p 0"
    )
    top.add_argument("--fp32", action="store_true", help="on a GPU: no autocast to bf16")
    top.add_argument("--rate", type=float, default=2e-3, help="of learning")
    top.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(Size):
        text = ", ".join(f"{getattr(s, field.name)} on {d}" for d, s in SIZES.items())
        top.add_argument(f"--{field.name}", type=int, help=f"default: {text}")
    return top


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.compare and options.p:
        raise SystemExit("train: --compare needs --p 0: two generators draw different masks")
    asked = {f.name: getattr(options, f.name) for f in dataclasses.fields(Size)}
    size = dataclasses.replace(
        SIZES[options.device], **{k: v for k, v in asked.items() if v is not None}
    )
    if options.compare and options.steps is None:
        size.steps = COMPARED_STEPS
    text = Text(manual(), torch.device(options.device))
    print(
        f"{len(text.seen):,} characters to learn from, {len(text.held_out):,} held out, "
        f"{len(text.alphabet)} different; {options.device}, dropout {options.p}, {size}"
    )
    return (compare if options.compare else show)(text, size, options)


if __name__ == "__main__":
    sys.exit(main())
