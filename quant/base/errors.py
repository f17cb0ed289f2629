"""Earlier path of `llmopt.base.errors`, kept for one release."""

from ...base.errors import BadInput, DoesNotFit, Failure, first_line

__all__ = ["BadInput", "DoesNotFit", "Failure", "first_line"]
