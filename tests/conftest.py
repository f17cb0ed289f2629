"""Where no GPU is, Triton interprets its kernels. It must know before anybody imports it first."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
