"""LoRA adapters as PEFT writes them: settings, weights, and merging into a checkpoint."""
