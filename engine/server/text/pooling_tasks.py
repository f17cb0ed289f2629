"""What a served checkpoint can do besides generation: embed texts, score pairs; or why it cannot."""

from __future__ import annotations

from dataclasses import dataclass

from ....quant.base.errors import BadInput
from ...base.pooling_params import POOLING_MODES, PoolingParams
from ...engine import Engine
from ...text.pooling import Pooling, read_pooling
from ...text.scorer import Scorer, read_scorer
from ..protocol.errors import ApiError


@dataclass(frozen=True, slots=True)
class PoolingTasks:
    """The model's pooling and scorer, or the reason why there is none.

    Attributes:
        scored_by: the scorer, or the reason; None: pairs are scored by their embeddings.
    """

    model_name: str = ""
    pooling: Pooling | str = "the checkpoint has no pooling"
    scored_by: Scorer | str | None = None

    def embedder(self) -> Pooling:
        """Raises `ApiError` where the model gives no embeddings."""
        if isinstance(self.pooling, str):
            raise self._cannot(f"gives no embeddings: {self.pooling}")
        return self.pooling

    def scorer(self) -> Scorer | None:
        """The model's own scorer; None where pairs are scored by their embeddings.

        Raises:
            ApiError: there are neither.
        """
        if isinstance(self.scored_by, str):
            raise self._cannot(f"gives no scores: {self.scored_by}")
        if self.scored_by is None and isinstance(self.pooling, str):
            raise self._cannot(f"gives no scores: it is no reranker, and {self.pooling}")
        return self.scored_by

    def check_generates(self) -> None:
        """Raises `ApiError` for a sequence classifier, which has no language head."""
        if isinstance(self.scored_by, Scorer) and self.scored_by.head is not None:
            raise self._cannot("is a sequence classifier and generates no text: ask /v1/score")

    def _cannot(self, reason: str) -> ApiError:
        message = f"{self.model_name} {reason}"
        return ApiError(400, message, param="model", code="unsupported_model")


def pooling_tasks(engine: Engine, model_name: str, pooling_type: str | None) -> PoolingTasks:
    """The tasks of an engine's checkpoint; `pooling_type` takes the place of the checkpoint's pooling."""
    pooling: Pooling | str
    try:
        pooling = _pooling(engine, pooling_type)
    except BadInput as error:
        pooling = str(error)
    try:
        scorer = read_scorer(engine.folder, engine.model_config, engine.tokenizer)
        return PoolingTasks(model_name, pooling, scorer)
    except BadInput as error:
        return PoolingTasks(model_name, pooling, str(error))


def _pooling(engine: Engine, pooling_type: str | None) -> Pooling:
    if engine.runner.decoder.hidden_size is None:
        raise BadInput("it runs through transformers' modules, which give no hidden states to pool")
    if pooling_type is not None:
        return Pooling(PoolingParams(pooling_type.lower()), normalize=True)
    pooling = read_pooling(engine.folder)
    if pooling is None:
        raise BadInput(
            "the checkpoint has no pooling (1_Pooling/config.json); --pooling-type chooses one: "
            + ", ".join(POOLING_MODES)
        )
    return pooling
