"""GPTQ's error feedback: the feedback matrix, and the loop over columns that rounds to any grid."""
