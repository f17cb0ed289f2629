"""Scores of a plain checkpoint beside the plain model's: one program for the weights of every package.

Both run in transformers in float32; the reference's last hidden states are kept in a file, so that its layers
run once.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llmopt.bench.quality.passage import Passage
from llmopt.bench.quality.positions import SCORES, PositionScores, SeriesWriter
from llmopt.bench.quality.scoring import reduce_slice
from llmopt.bench.quality.summary import Quality, summarize
from llmopt.engine.sampling.sampler import rows_per_slice
from safetensors.torch import load_file, save_file


def load(folder: Path) -> Any:
    """The checkpoint in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()


@cache
def key_of(folder: Path) -> str:
    """Name and digest of a plain model, for files that are kept: two folders may have one name."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return f"{folder.name}-{digest.hexdigest()[:8]}"


class Scorer:
    """Scores candidates on a passage beside one reference.

    Args:
        kept: folder of the references' hidden states, by model and passage.
    """

    def __init__(self, folder: Path, passage: Passage, kept: Path) -> None:
        self.name = folder.name
        self._passage = passage
        path = kept / f"{key_of(folder)}-{passage.sha256[:16]}.safetensors"
        if not path.exists():
            model = load(folder)
            hidden = [self._run(model, window.token_ids) for window in passage.windows]
            parts = {
                "head": model.get_output_embeddings().weight.detach(),
                "hidden": torch.stack(hidden),
            }
            kept.mkdir(parents=True, exist_ok=True)
            save_file(parts, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)
        parts = load_file(path)
        self._head, self._hidden = parts["head"], list(parts["hidden"])

    def score(self, folder: Path) -> Quality:
        """A candidate's."""
        model = load(folder)
        hidden = [self._run(model, window.token_ids) for window in self._passage.windows]
        return self._score(model.get_output_embeddings().weight.detach(), hidden)

    @torch.inference_mode()
    def _run(self, model: Any, token_ids: tuple[int, ...]) -> torch.Tensor:
        """Normalized hidden states [tokens - 1, hidden]; the last token predicts nothing."""
        tokens = torch.tensor([token_ids[:-1]])
        return model.model(tokens, use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def _score(self, head: torch.Tensor, hidden: list[torch.Tensor]) -> Quality:
        with SeriesWriter() as writer:
            for number, window in enumerate(self._passage.windows):
                first = window.first_scored
                ids = torch.tensor(window.token_ids)[first:]
                ours, theirs = hidden[number][first - 1 :], self._hidden[number][first - 1 :]
                rows = rows_per_slice(len(head))
                parts = [
                    reduce_slice(a @ head.T, of_part, b @ self._head.T)
                    for a, of_part, b in zip(
                        ours.split(rows), ids.split(rows), theirs.split(rows), strict=True
                    )
                ]
                table = torch.cat(parts).T.numpy()
                writer.add(
                    PositionScores(
                        document=np.full(len(ids), window.document),
                        window=np.full(len(ids), number),
                        position=np.arange(first, first + len(ids)),
                        token_id=ids.numpy(),
                        **dict(zip(SCORES, table, strict=True)),
                    )
                )
            series = writer.finish()
        return summarize(self._passage, series, reference=self.name)
