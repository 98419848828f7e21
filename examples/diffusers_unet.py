"""A small diffusion UNet (random weights) from diffusers, run through its xFormers switch, which
finds compat/xformers: K = 40 and 80, and a padding mask over the prompt.

    pip install diffusers && pip install ./compat/xformers
    python examples/diffusers_unet.py [--steps 4]
"""

from __future__ import annotations

import argparse
import time

import torch
import xformers
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor, XFormersAttnProcessor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(80, 160), layers_per_block=1, norm_num_groups=8,
        attention_head_dim=2, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).to(device, dtype).eval()  # fmt: skip
    sample = torch.randn(2, 4, 16, 16, device=device, dtype=dtype)
    prompt = torch.randn(2, 77, 32, device=device, dtype=dtype)
    padding = torch.arange(77, device=device) < torch.tensor([[77], [20]], device=device)
    results = {}
    for name, processor in (("eager", AttnProcessor()), ("memeff_attn", XFormersAttnProcessor())):
        if name == "memeff_attn" and device == "cuda":
            unet.enable_xformers_memory_efficient_attention()
        else:  # diffusers' switch asks for a GPU
            unet.set_attn_processor(processor)
        began, x = time.perf_counter(), sample
        with torch.no_grad():
            for step in range(steps):
                x = unet(x, step, prompt, encoder_attention_mask=padding).sample
        results[name] = x.float()
        print(f"{name:12} {steps} steps in {time.perf_counter() - began:.2f} s on {device}")
    difference = (results["eager"] - results["memeff_attn"]).abs().max().item()
    print(f"xformers {xformers.__version__}; largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
