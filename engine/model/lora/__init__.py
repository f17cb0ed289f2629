"""LoRA adapters: loading of PEFT checkpoints, and application per row of a batch (multi-LoRA)."""
