"""Recipes from YAML files, with changes from the command line; every error says where it is."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ...quant.base.errors import BadInput
from ...quant.base.option import offer
from ...recipes import ROOT
from ..options.options import words_of_error
from .recipe import Recipe, bench_of

if TYPE_CHECKING:
    from yaml.nodes import Node

Place = tuple[int | str, ...]
"""Keys and indexes that lead to a value of a recipe."""


def read_recipe(name: str, model: str | None = None, changes: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file, or the bundled one of that name.

    Args:
        model: in place of the recipe's.
        changes: `PATH=VALUE` in place of the file's, such as `bench.num_prompts=200`.

    Raises:
        BadInput: no such recipe, YAML that does not parse (with the line), an unknown key or a value
            that does not fit (naming the key, and the file and the line, or the change).
    """
    path = _path_of(name)
    values, root = _parsed(path)
    changed: dict[Place, str] = {}
    if model is not None:
        values["model"] = model
        changed[("model",)] = f"--model {model}"
    for change in changes:
        changed[_set(values, change)] = f"--set {change}"

    def where(place: Sequence[int | str]) -> str:
        at, line = tuple(place), f"{path}, line {line_of(root, place)}"
        for changed_at, words in reversed(changed.items()):
            if at[: len(changed_at)] == changed_at:
                return words
            if changed_at[: len(at)] == at:
                return f"{line} with {words}"
        return line

    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        place = where(error.errors()[0]["loc"])
        raise BadInput(f"{place}: {words_of_error(Recipe, error)}") from error
    try:
        _ = recipe.compare.share, recipe.compare.quality_gate
    except BadInput as error:
        raise BadInput(f"{where(['compare'])}: compare: {error}") from error
    for number, variant in enumerate(recipe.variants):
        try:
            bench_of(recipe, variant)
        except BadInput as error:
            raise BadInput(f"{where(['variants', number])}: {error}") from error
    return recipe


def _path_of(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    bundled = {file.stem: file for file in ROOT.glob("*.yaml")}
    if name not in bundled:
        raise BadInput(
            f"no recipe {name!r}: give a YAML file, or a bundled recipe: {offer(name, sorted(bundled))}"
        )
    return bundled[name]


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
    """Put the value of `PATH=VALUE` into the recipe; returns its place.

    Raises:
        BadInput: another form, a variant that there is none of, or a path through a plain value.
    """
    path, equals, text = change.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise BadInput(f"--set {change}: write PATH=VALUE, such as bench.num_prompts=200")
    node: Any = values
    place: list[int | str] = []
    for key in keys[:-1]:
        step = _step(node, key, change)
        place.append(step)
        if isinstance(node, list):
            node = node[int(step)]
        else:
            if node.get(step) is None:
                node[step] = {}
            node = node[step]
    last = _step(node, keys[-1], change)
    node[last] = _value(text)
    return (*place, last)


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


def _value(text: str) -> Any:
    """A list or mapping as YAML, null, or a text, which the schema converts."""
    import yaml

    if text == "null" or text.startswith(("[", "{")):
        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            return text
    return text


def line_of(root: Node | None, path: Sequence[int | str]) -> int:
    """The line, from 1, of the value at `path` (keys and indexes), or of its nearest existing ancestor;
    for a key, the line of the key."""
    import yaml

    line, node = 1, root
    for step in path:
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == str(step)]
            if not pairs:
                break
            key, node = pairs[-1]
            line = key.start_mark.line + 1
        elif (
            isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value)
        ):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            break
    return line
