"""Recovery from a failed step: its requests end with an error, and the engine goes on with the others."""

from __future__ import annotations

import logging

import torch

from ....quant.base.errors import Failure
from ...engine import Engine
from ...multimodal.encoder import EncodingError
from ...scheduling.outputs import RequestOutput

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row, but for an image. With more, the cause is hardly one request."""

MAX_NAMED = 32
"""Request ids in the log line of a failed step; each begins with the id of its response."""

_FATAL = (Failure, AssertionError, torch.AcceleratorError)
"""A lost process, contradicting state, and a device error, after which a CUDA context is unusable."""

_log = logging.getLogger(__name__)


class RecoveringSteps:
    """Runs an engine's steps, and aborts the requests of a step that fails.

    Attributes:
        failed_requests: ids of the requests that the last step ended by failing, which may be none: those
            that wait stay in the queue. None: it did not fail.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_in_a_row = 0
        self.failed_requests: list[str] | None = None

    def step(self) -> list[RequestOutput]:
        """The outputs of a step; none after a failure.

        Raises:
            Exception: the engine cannot go on: the step's own error.
        """
        self.failed_requests = None
        try:
            outputs = self._engine.step()
        except _FATAL:
            raise
        except Exception as error:
            self._num_in_a_row += not isinstance(error, EncodingError)
            if self._num_in_a_row >= MAX_FAILED_STEPS:
                raise
            self.failed_requests = failed = self._engine.abort_failed()
            named = ", ".join(failed[:MAX_NAMED])
            _log.exception("a step failed, and with it %d requests: %s", len(failed), named)
            return []
        self._num_in_a_row = 0
        return outputs
