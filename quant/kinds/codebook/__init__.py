"""4-bit codes into a fixed table of 16 values: bitsandbytes' nf4 and fp4 (QLoRA)."""
