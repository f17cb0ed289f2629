"""Model quality on fixed tokens: perplexity, KL divergence and top-1 agreement with a reference model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress, Silent
from ...recipes import DATA
from ..workloads.workload import Tokenizer

if TYPE_CHECKING:
    import torch

EVALUATION_TEXT = DATA / "evaluation.txt"
FORMULAS = {
    "perplexity": "exp of the mean negative log-probability (nats) of every token but the first of "
    "each window, given the tokens before it in the window",
    "kl": "mean over the same positions of Σ p·(ln p − ln q) in nats; p is the reference model's "
    "distribution over the next token, q this model's",
    "top1_agreement": "share of those positions at which both models' likeliest token is the same",
}


class PromptScorer(Protocol):
    """The engine interface needed for scoring."""

    def prompt_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Float32 [tokens, vocabulary]: the logits after each token."""
        ...


@dataclass(frozen=True, slots=True)
class Passage:
    """Fixed tokens in windows, with their source and protocol."""

    windows: tuple[tuple[int, ...], ...]
    source: str
    protocol: str

    @property
    def num_scored(self) -> int:
        """Number of scored positions: all tokens of each window but the first."""
        return sum(len(window) - 1 for window in self.windows)

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256(self.protocol.encode())
        for window in self.windows:
            digest.update(np.asarray([len(window), *window], dtype="<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Quality:
    """Scores of one model on one passage; `kl_nats` and `top1_agreement` only with a reference."""

    protocol: str
    source: str
    token_sha256: str
    num_tokens: int
    perplexity: float
    nll_nats: float
    reference: str | None = None
    reference_perplexity: float | None = None
    kl_nats: float | None = None
    top1_agreement: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_passage(
    tokenizer: Tokenizer, *, max_model_len: int, num_tokens: int, path: Path = EVALUATION_TEXT
) -> Passage:
    """Windows of the documents of a text file (separated by blank lines), at most `num_tokens` in all.

    A document is tokenized with special tokens and cut into windows of at most
    `max_model_len` tokens that do not overlap.

    Raises:
        BadInput: no such file, or fewer than two tokens in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BadInput(f"quality text {path} is not a file") from error
    windows: list[tuple[int, ...]] = []
    left = num_tokens
    for document in filter(str.strip, text.split("\n\n")):
        ids = list(tokenizer.encode(document.strip()))
        for start in range(0, len(ids), max_model_len):
            window = tuple(ids[start : start + min(max_model_len, left)])
            if len(window) < 2:
                continue
            windows.append(window)
            left -= len(window)
        if left < 2:
            break
    if not windows:
        raise BadInput(f"quality text {path} gives no window of two tokens: nothing to score")
    protocol = f"documents by blank line, windows of {max_model_len}, no overlap, v1"
    return Passage(tuple(windows), path.name, protocol)


def log_probabilities(
    engine: PromptScorer, passage: Passage, *, progress: Progress | None = None, what: str = "model"
) -> list[torch.Tensor]:
    """Per window, float32 [tokens − 1, vocabulary] on the CPU: ln of the next token's distribution."""
    progress = progress or Silent()
    progress.start(f"quality of the {what}", passage.num_scored, "tokens")
    logprobs = []
    for window in passage.windows:
        logits = engine.prompt_logits(window)[:-1].float()
        logprobs.append(logits.log_softmax(dim=-1).cpu())
        progress.advance(len(window) - 1)
    progress.finish()
    return logprobs


def nll_nats(logprobs: Sequence[torch.Tensor], passage: Passage) -> float:
    """Mean negative log-likelihood of the actual next tokens, in nats."""
    import torch

    total = 0.0
    for window, table in zip(passage.windows, logprobs, strict=True):
        following = torch.tensor(window[1:]).unsqueeze(-1)
        total -= float(table.gather(-1, following).double().sum())
    return total / passage.num_scored


def distance(
    reference: Sequence[torch.Tensor], model: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """(mean KL(reference ‖ model) in nats, top-1 agreement) over the positions of both.

    Raises:
        BadInput: the models have different vocabularies.
    """
    kl = agree = 0.0
    count = 0
    for p, q in zip(reference, model, strict=True):
        if p.shape != q.shape:
            raise BadInput(
                f"the reference has {p.shape[-1]} tokens in its vocabulary and the model "
                f"{q.shape[-1]}: their distributions cannot be compared"
            )
        kl += float((p.exp() * (p - q)).double().sum())
        agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(p)
    return kl / count, agree / count


def score(
    passage: Passage,
    model: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor] | None = None,
    reference_name: str | None = None,
) -> Quality:
    """Assemble the scores of a model, with KL divergence and top-1 agreement where there is a reference."""
    nll = nll_nats(model, passage)
    kl = top1 = reference_perplexity = None
    if reference is not None:
        kl, top1 = distance(reference, model)
        reference_perplexity = math.exp(nll_nats(reference, passage))
    return Quality(
        protocol=passage.protocol,
        source=passage.source,
        token_sha256=passage.sha256,
        num_tokens=passage.num_scored,
        perplexity=math.exp(nll),
        nll_nats=nll,
        reference=reference_name,
        reference_perplexity=reference_perplexity,
        kl_nats=kl,
        top1_agreement=top1,
    )
