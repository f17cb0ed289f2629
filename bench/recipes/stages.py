"""Journal of finished recipe stages, written after each one so that an interrupted run can be resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pydantic import ValidationError

from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from ...quant.model.checkpoint import read_json
from .recipe import Recipe

JOURNAL_NAME = "journal.json"


class Stages:
    """The journal of a recipe's folder: the recipe, and the names of finished stages."""

    def __init__(self, folder: Path, recipe: Recipe, done: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.recipe = recipe
        self._done = list(done)

    @classmethod
    def begin(cls, folder: Path, recipe: Recipe) -> Stages:
        """A new folder with nothing finished."""
        folder.mkdir(parents=True)
        stages = cls(folder, recipe)
        stages._write()
        return stages

    @classmethod
    def resume(cls, folder: Path) -> Stages:
        """Read the journal of an earlier run's folder.

        Raises:
            BadInput: there is none, or it is damaged.
        """
        path = folder / JOURNAL_NAME
        if not path.is_file():
            raise BadInput(f"{folder} holds no {JOURNAL_NAME}: give the folder of a `llmopt run`")
        journal = read_json(path)
        try:
            return cls(folder, Recipe.model_validate(journal["recipe"]), tuple(journal["done"]))
        except (KeyError, TypeError, ValidationError) as error:
            raise BadInput(f"{path} is damaged: run the recipe anew") from error

    def is_done(self, name: str) -> bool:
        return name in self._done

    def finish(self, name: str) -> None:
        """Record that a stage's outputs are complete."""
        self._done.append(name)
        self._write()

    def clear(self, name: str) -> Path:
        """The output folder of an unfinished stage, with partial outputs removed."""
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        return target

    def _write(self) -> None:
        # Unset options are not written: some defaults depend on which options are set.
        recipe = self.recipe.model_dump(mode="json", exclude_unset=True)
        journal = {"schema": 1, "recipe": recipe, "done": self._done}
        write_atomically(self.folder / JOURNAL_NAME, json.dumps(journal, indent=2) + "\n")
