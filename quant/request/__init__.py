"""What was asked for, and which linears it selects."""
