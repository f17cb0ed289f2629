"""Recipe execution: quantize, verify, bench, compare, report."""
