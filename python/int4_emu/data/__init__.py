"""Data that ships with the package: the embedded bard language model."""

from __future__ import annotations

from pathlib import Path

BARD = Path(__file__).resolve().parent / "bard"
"""Folder of the embedded checkpoint: a 7.6 M-parameter Qwen3-MoE, int4 asymmetric in groups of 32."""

BARD_PROMPT = "ROMEO.\nBut soft, what light"
"""The prompt whose greedy continuation `reference/reference.json` holds (prompt included, 12 of its ids)."""
