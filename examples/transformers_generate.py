"""A quantised checkpoint as a transformers model, in one line, and text from it.

Run: python examples/transformers_generate.py

A folder may follow, for another checkpoint.
"""

from __future__ import annotations

import sys
from importlib.resources import files

import torch
from transformers import AutoTokenizer

import int4_emu

PROMPT = "HAMLET.\nTo be, or not to be"


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else str(files("int4_emu") / "data" / "bard")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = int4_emu.from_pretrained(folder, weights="auto", dtype="auto", device=device, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt").to(device)
    out = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    print(tokenizer.decode(out[0], skip_special_tokens=True))
    layers = [m for m in model.modules() if isinstance(m, int4_emu.Experts)]
    packed = sum(layer.is_packed for layer in layers)
    print(f"\n{len(layers)} MoE layers, {packed} of them packed, {layers[0].selection} on {device}")


if __name__ == "__main__":
    main()
