"""LoRA adapters: read from PEFT's folders, applied to rows of one batch."""
