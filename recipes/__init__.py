"""Bundled recipes, models, texts and workloads."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent
MODELS = ROOT / "models"
DATA = ROOT / "data"
DEFAULT_MODEL = "stories3M"
