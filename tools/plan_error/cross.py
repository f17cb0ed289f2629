"""Left-out predictions: folds of deployments, one model at a time, one GPU at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from .columns import Column, Columns, Predicted
from .fit import fit
from .rows import Row

FOLDS = 5


def deployment_fold(row: Row) -> str:
    """The fold of a row: all rows of a model on one arrangement of GPUs are in one."""
    key = f"{row.model}|{row.device.name}|{row.parallel}"
    return str(int(hashlib.sha256(key.encode()).hexdigest(), 16) % FOLDS)


def left_out(columns: Columns, part: Callable[[Row], str], judged: Column) -> Predicted:
    """Predictions of the judged rows, each by a fit of the rows to be fitted that are of other parts."""
    parts = np.array([part(row) for row in columns.rows])
    fitted = np.array([row.fitted for row in columns.rows])
    found = [np.full(len(parts), np.nan) for _ in Predicted._fields]
    for name in sorted(set(parts[judged])):
        mine = judged & (parts == name)
        predicted = fit(columns.take(fitted & (parts != name))).predict(columns.take(mine))
        for column, values in zip(found, predicted, strict=True):
            column[mine] = values
    return Predicted(*(column[judged] for column in found))
