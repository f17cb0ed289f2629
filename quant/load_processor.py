"""Earlier path of `llmopt.quant.source.load_processor`, kept for one release."""

from .source.load_processor import load_processor, load_tokenizer

__all__ = ["load_processor", "load_tokenizer"]
