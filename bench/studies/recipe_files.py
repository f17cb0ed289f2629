"""Recipes on disk: the YAML file, with changes from the command line, and the journal of a recipe's folder.

Every error of the YAML file says where it is. The journal is written after each stage, so that an interrupted
run can be resumed; from it come the results of recipes.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ...base.atomic_io import expanded, write_atomically
from ...base.errors import BadInput
from ...base.option import offer
from ...quant.model.checkpoint import read_json
from ...recipes import ROOT
from ..gate.limits import GateOutcome
from ..options.options import words_of_error
from .recipe import BASE_NAME, Recipe, Variant, bench_of

if TYPE_CHECKING:
    from yaml.nodes import Node

    from ...quant.convert.verify import VerifyReport  # loads torch, which a dry run does not need
    from ..gate.compare import Comparison
    from ..record.result import RunData


Place = tuple[int | str, ...]
"""Keys and indexes that lead to a value of a recipe."""


def read_recipe(name: str, model: str | None = None, changes: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file, or the bundled one of that name. `model` replaces the recipe's, and
    `changes` (`PATH=VALUE`, such as `bench.num_prompts=200`) the file's values. Raises BadInput: no such
    recipe, YAML that does not parse (with the line), an unknown key or a bad value (naming the key, and the
    file and the line, or the change)."""
    path = expanded(name)
    if not path.is_file():
        bundled = {file.stem: file for file in ROOT.glob("*.yaml")}
        if name not in bundled:
            names = offer(name, sorted(bundled))
            raise BadInput(f"no recipe {name!r}: give a YAML file, or a bundled recipe: {names}")
        path = bundled[name]
    values, root = _parsed(path)
    changed: dict[Place, str] = {}
    if model is not None:
        values["model"] = model
        changed[("model",)] = f"--model {model}"
    for change in changes:
        changed[_set(values, change)] = f"--set {change}"

    variants = values.get("variants")
    num_variants = len(variants) if isinstance(variants, list) else 0

    def where(path_in_file: Sequence[int | str]) -> str:
        if path_in_file[:1] == ("variants",) and int((*path_in_file, 0)[1]) >= num_variants:
            path_in_file = ("grid", *path_in_file[2:])  # the variants that were made from it
        at, line = tuple(path_in_file), f"{path}, line {line_of(root, path_in_file)}"
        for changed_at, description in reversed(changed.items()):
            if at[: len(changed_at)] == changed_at:
                return description
            if changed_at[: len(at)] == at:
                return f"{line} with {description}"
        return line

    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        path_in_file = where(error.errors()[0]["loc"])
        raise BadInput(f"{path_in_file}: {words_of_error(Recipe, error)}") from error
    try:
        _ = recipe.compare.options.share, recipe.compare.options.quality
    except BadInput as error:
        raise BadInput(f"{where(('compare',))}: compare: {error}") from error
    for number, variant in enumerate(recipe.variants):
        try:
            bench_of(recipe, variant)
        except BadInput as error:
            raise BadInput(f"{where(('variants', number))}: {error}") from error
    return recipe


def _parsed(path: Path) -> tuple[dict[str, Any], Node | None]:
    """The values of a recipe's file, and its nodes with their lines."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        values, root = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadInput(f"{path}{line}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as a date of month 13
        raise BadInput(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{path}: a recipe is a YAML mapping, not {type(values).__name__}")
    return values, root


def _set(values: dict[str, Any], change: str) -> Place:
    """Put `PATH=VALUE` into the recipe; returns its place. BadInput: no such variant, form or path."""
    import yaml

    path, equals, text = change.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise BadInput(f"--set {change}: write PATH=VALUE, such as bench.num_prompts=200")
    node: Any = values
    path_of_value: list[int | str] = []
    for key in keys[:-1]:
        step = _step(node, key, change)
        path_of_value.append(step)
        if isinstance(node, list):
            node = node[int(step)]
        else:
            if node.get(step) is None:
                node[step] = {}
            node = node[step]
    last = _step(node, keys[-1], change)
    node[last] = text  # the schema converts it
    if text == "null" or text.startswith(("[", "{")):
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            node[last] = yaml.safe_load(text)
    return (*path_of_value, last)


def _step(node: Any, key: str, change: str) -> int | str:
    """A key of a mapping, or the index of the item that has this name or number."""
    if isinstance(node, dict):
        return key
    if not isinstance(node, list):
        raise BadInput(f"--set {change}: {key!r} is below a plain value, which has no keys")
    names = [str(item.get("name")) if isinstance(item, dict) else "" for item in node]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(node):
        return int(key)
    near = get_close_matches(key, names, n=1, cutoff=0.0)
    raise BadInput(f"--set {change}: no item {key!r}: the nearest is {near[0] if near else 'none'}")


def line_of(root: Node | None, path: Sequence[int | str]) -> int:
    """The line, from 1, of the value at `path`, or of its nearest ancestor; of a key, the key's line."""
    import yaml

    line, node = 1, root
    for step in path:
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == str(step)]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            pairs = [(value, value) for value in node.value[step : step + 1]]
        else:
            break
        if not pairs:
            break
        key, node = pairs[-1]
        line = key.start_mark.line + 1
    return line


JOURNAL_NAME, REACH_NAME = "journal.json", "speed-reach.json"
IN_TURNS = "in turns"
"""The stage that measures all models at once is of none of them."""


class Stages:
    """Journal of a recipe's folder, which one process at a time works in."""

    def __init__(self, folder: Path, recipe: Recipe, done: tuple[str, ...] = ()) -> None:
        self.folder, self.recipe = folder, recipe
        self._done = list(done)

    @classmethod
    def begin(cls, folder: Path, recipe: Recipe) -> Stages:
        folder.mkdir(parents=True, exist_ok=True)
        stages = cls(folder, recipe)
        stages._write()
        return stages

    @staticmethod
    def is_at(folder: Path) -> bool:
        return (folder / JOURNAL_NAME).is_file()

    @classmethod
    def resume(cls, folder: Path) -> Stages:
        """Read the journal of an earlier run's folder. Raises BadInput: there is none, or it is damaged."""
        path = folder / JOURNAL_NAME
        if not cls.is_at(folder):
            raise BadInput(f"{folder} holds no {JOURNAL_NAME}: give the folder of a `llmopt run`")
        journal = read_json(path)
        try:
            return cls(folder, Recipe.model_validate(journal["recipe"]), tuple(journal["done"]))
        except (KeyError, TypeError, ValidationError) as error:
            raise BadInput(f"{path} is damaged: run the recipe anew") from error

    def is_done(self, name: str) -> bool:
        return name in self._done

    def finish(self, name: str) -> None:
        if name not in self._done:
            self._done.append(name)
            self._write()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from the folder. Raises BadInput: one is at work in it."""
        path = self.folder / ".lock"
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadInput(
                    f"another process is at work in {self.folder}: let it finish"
                ) from error
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def checkpoint(self, variant: str) -> Path:
        return self.folder / "checkpoints" / variant

    def clear(self, name: str) -> Path:
        """The output folder of an unfinished stage, with partial outputs removed."""
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        return target

    def _write(self) -> None:
        # Unset options are not written: some defaults depend on which options are set.
        recipe = self.recipe.dump(exclude_unset=True)
        journal = {"schema": 1, "recipe": recipe, "done": self._done}
        write_atomically(self.folder / JOURNAL_NAME, json.dumps(journal, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class VariantRun:
    """The results of one variant; `manifest` and `verified` are of a checkpoint that llmopt made."""

    variant: Variant
    manifest: Mapping[str, Any] | None
    verified: VerifyReport | None
    data: RunData
    comparison: Comparison

    @property
    def is_sound(self) -> bool:
        return self.verified is None or self.verified.ok

    def record(self) -> dict[str, Any]:
        report = self.verified
        verified = report and {**asdict(report), "folder": None, "ok": report.ok}
        return {"verified": verified, "comparison": self.comparison.as_dict()}


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """A finished recipe: the original's run and those of the variants."""

    recipe: Recipe
    folder: Path
    base: RunData
    variants: tuple[VariantRun, ...]

    @property
    def runs(self) -> dict[str, RunData]:
        """The runs by name, the original's first."""
        return {data.name: data for data in (self.base, *(v.data for v in self.variants))}

    @property
    def speed_reach(self) -> list[dict[str, Any]]:
        """Reach of this machine under each limit on speed; empty for a recipe without `gate_speed`."""
        path = self.folder / REACH_NAME
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []

    @property
    def exit_code(self) -> int:
        """1 for a checkpoint that failed its verification; then, if the recipe gates, the worst verdict."""
        if not all(variant.is_sound for variant in self.variants):
            return 1
        if not self.recipe.compare.gate:
            return 0
        return GateOutcome.of(variant.comparison.outcome for variant in self.variants).exit_code

    def record(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.dump(),
            "exit_code": self.exit_code,
            "base": BASE_NAME,
            "speed_reach": self.speed_reach,
            "variants": {run.variant.name: run.record() for run in self.variants},
        }


FORMULAS = {
    "predicted sequences": "tokens that the planned KV cache holds / tokens of a sequence, rounded down",
    "predicted TPOT": "the planner's decode step for that many sequences at the mean context (prompt + "
    "half of the output), with the ceilings measured here and the efficiency that one user reached",
    "predicted tokens/s": "users / predicted TPOT: decode alone, no prompts",
    "residual": "measured / predicted − 1",
}


@dataclass(frozen=True, slots=True)
class CapacityRun:
    """A finished capacity recipe: the record of its sweep, and its `result.json`."""

    folder: Path
    sweep: Mapping[str, Any]
    record: Mapping[str, Any]
