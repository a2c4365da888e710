"""The checkpoints that other projects' tools wrote, with their references: the full set, or the part that is
committed.

The full set is looked for in $INT4_EMU_CHECKPOINTS, then in `shared/checkpoints` beside the checkout. Without
it, one checkpoint of each kind is in `tests/data/checkpoints`, and bard in the package.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

_ROOT = Path(__file__).resolve().parents[1]
_FULL = [Path(os.environ.get("INT4_EMU_CHECKPOINTS", "")), _ROOT.parent / "shared" / "checkpoints"]
_COMMITTED = _ROOT / "tests" / "data" / "checkpoints"
BARD = "bard-moe-w4a16-asym-g32"

CHECKPOINT_NAMES = [
    "autoround-qwen3moe-asym-g32-autogptq",
    "autoround-qwen3moe-sym-g128-autogptq",
    "awq-autoawq-qwen3moe-gemm-g128",
    BARD,
    "ct-mixtral-mixed-int4asym-gateup-int8-down",
    "ct-mixtral-w4a16-asym-g32-actorder-group-gidx",
    "ct-mixtral-w4a16-sym-g128-gptq-actorder-weight",
    "ct-mixtral-w4a16-sym-g32-awq",
    "ct-mixtral-w8a16-sym-channel",
    "ct-qwen3moe-mixed-int4exp-int8attn-layer0ignored",
    "ct-qwen3moe-w4a16-asym-channel",
    "ct-qwen3moe-w4a16-asym-g32",
    "ct-qwen3moe-w4a16-sym-channel",
    "ct-qwen3moe-w4a16-sym-g128",
    "ct-qwen3moe-w8a16-sym-g128",
    "gptq-mixtral-asym-g32-v1",
    "gptq-mixtral-asym-g64-v2",
    "gptq-mixtral-int8-sym-channel-v1",
    "gptq-mixtral-int8-sym-g32-descact-v1",
    "gptq-mixtral-sym-channel-v1",
    "gptq-qwen3moe-dynamic-mixed-v1",
    "gptq-qwen3moe-int8-sym-g128-v1",
    "gptq-qwen3moe-sym-g128-v1",
    "gptq-qwen3moe-sym-g32-descact-v1",
    "quark-mixtral-int4-sym-channel-reorder",
    "quark-mixtral-int4-sym-g32-reorder",
    "quark-mixtral-int8-sym-channel-order",
    "quark-qwen3moe-int4-sym-g128-order",
    "quark-qwen3moe-int8-sym-g128-reorder",
    "quark-qwen3moe-uint4-asym-g32-order",
]

# Below `families/`, and never committed: one checkpoint of each model family.
FAMILY_NAMES = [
    "ct-deepseekv3-w4a16-asym-g32",
    "ct-gptoss-w4a16-asym-g32",
    "ct-llama4-w4a16-asym-g32",
    "ct-minimaxm2-w4a16-asym-g32",
    "ct-minimaxm3-w4a16-asym-g32",
    "ct-minimaxm3vl-w4a16-asym-g32",
    "ct-nemotronh-w4a16-asym-g32",
    "ct-olmoe-w4a16-asym-g32",
    "ct-qwen2moe-w4a16-asym-g32",
    "quark-gptoss-uint4-asym-g32-reorder",
    "quark-minimaxm2-int4-sym-g128-reorder",
]


def _full_set() -> Path | None:
    return next((p for p in _FULL if p.name and (p / BARD / "config.json").is_file()), None)


def checkpoint_path(name: str) -> Path | None:
    """The folder of a checkpoint, or None where only the committed part is here and lacks it."""
    full = _full_set()
    places = [full / name] if full else [_COMMITTED / name]
    if name == BARD:
        places.append(_ROOT / "python" / "int4_emu" / "data" / "bard")
    return next((p for p in places if (p / "config.json").is_file()), None)


def require_checkpoint(name: str) -> Path:
    """The folder of a checkpoint; skips the test where it is not here."""
    path = checkpoint_path(name)
    if path is None:
        pytest.skip(f"{name} is in the full set of checkpoints only")
    return path


@pytest.fixture(scope="session")
def checkpoints_dir() -> Path:
    """The folder of the full set, else of the committed part."""
    return _full_set() or _COMMITTED


@pytest.fixture(params=CHECKPOINT_NAMES)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    """Each checkpoint in turn."""
    return require_checkpoint(request.param)


def reference_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's reference file; none where this copy was shipped without it."""
    path = checkpoint / "reference" / "reference.safetensors"
    if not path.is_file():
        return {}
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def dequantized_references(checkpoint: Path) -> dict[tuple[int, int, str], torch.Tensor]:
    """(layer, expert, projection name) to the tool's own dequantised weight [O, I]."""
    pattern = re.compile(r".*layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight_dequant")
    found = {}
    for name, tensor in reference_tensors(checkpoint).items():
        if match := pattern.fullmatch(name):
            found[int(match[1]), int(match[2]), match[3]] = tensor
    return found
