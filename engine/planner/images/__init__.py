"""What images cost: tokens by resolution, encoder memory and time."""
