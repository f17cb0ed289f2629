"""Earlier path of `llmopt.quant.source.models`, kept for one release."""

from .source.models import bundled_models, open_checkpoint, resolve_model, short_name

__all__ = ["bundled_models", "open_checkpoint", "resolve_model", "short_name"]
