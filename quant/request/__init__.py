"""The quantization request, and the selection of linears."""
