"""What ships with the package: workflows, the bundled models, texts and workload."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent
MODELS = ROOT / "models"
DATA = ROOT / "data"
DEFAULT_MODEL = "stories3M"
