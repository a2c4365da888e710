"""The embedded model as transformers' class, and its logits on some text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import int4_emu
from int4_emu.data import BARD

IDS = torch.tensor([[594, 45, 37, 47, 14, 199, 497, 366, 812, 12]])


def load(path: Path = BARD, **options: Any) -> Any:
    return int4_emu.from_pretrained(path, **{"dtype": torch.float32, "progress": False, **options})


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS.to(model.device)).logits
