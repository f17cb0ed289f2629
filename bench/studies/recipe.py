"""Recipes: the YAML schema of quantize-and-compare and capacity workflows, the journal, and the results.

The journal is written after each stage, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from ...quant.base.option import offer
from ...quant.methods.options import check_group_size
from ...quant.methods.registry import AUTO, METHODS, check_method, formats_asked
from ...quant.model.checkpoint import read_json
from ...quant.plan.request import QuantizeRequest
from ...quant.stream.sources import check_source
from ...recipes import DEFAULT_MODEL, ROOT
from ..gate.compare import Comparison
from ..gate.limits import GateOutcome, parse_share
from ..gate.quality_checks import QualityGate
from ..options.options import BenchOptions, checked, model_of
from ..options.values import parse_loads
from ..record.result import RunData

if TYPE_CHECKING:
    from yaml.nodes import Node

    from ...quant.convert.verify import VerifyReport  # loads torch, which a dry run does not need


BASE_NAME = "original"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_STEP = ("method", "group_size", "symmetric", "format", "calibration", "num_samples", "seq_len")
_STEP += ("ignore", "seed")
# Made when the module is loaded, so opaque to type checkers.
_StepFields: Any = model_of(QuantizeRequest, only=_STEP)


class QuantizeStep(_StepFields, _Strict):
    """Options of `llmopt quantize`, by the same names and with the same defaults."""

    bits: int = 4  # printed by a dry run, so no default that only the method knows

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        check_method(self.method)
        formats_asked(self.format)
        if self.method != AUTO:
            METHODS[self.method].choose_bits(self.bits)
        check_group_size(self.group_size)
        if self.calibration is not None:
            check_source(self.calibration)
        return self


class Variant(_Strict):
    """A checkpoint to create and to measure against the original."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    quantize: QuantizeStep = QuantizeStep()

    @field_validator("name")
    @classmethod
    def _not_base(cls, name: str) -> str:
        if name in (BASE_NAME, "checkpoints"):
            raise ValueError(f"{name!r} is taken")
        return name


class CompareStep(_Strict):
    """How the variants are compared. Without `gate` the verdicts are informational and the exit code is 0."""

    gate: bool = True
    threshold: str | float = "5%"
    max_ppl_increase: str | float | None = None
    max_kl: float | None = None
    min_top1: str | float | None = None

    @property
    def share(self) -> float:
        return parse_share(str(self.threshold))

    @property
    def quality_gate(self) -> QualityGate:
        return QualityGate.parse(self.max_ppl_increase, self.max_kl, self.min_top1)


class CapacityStep(_Strict):
    """Capacity of one model on this machine: a sweep over users, beside the planner's prediction.

    Attributes:
        loads: numbers of users such as `1,2,4,8`, or `auto`.
        context: maximum tokens of a sequence; by default the model's limit.
    """

    loads: str = "auto"
    context: Annotated[int, Field(ge=2)] | None = None

    @field_validator("loads")
    @classmethod
    def _known(cls, text: str) -> str:
        parse_loads(text, "concurrency")
        return text


class Recipe(_Strict):
    """Quantize a model in one or several ways, verify each, bench them beside it, compare, report; or
    find the `capacity` of one model.

    `interleave` loads all models at once and interleaves their passes (paired runs), so that drift of the
    machine affects all alike; without it they run one after another. `num_threads`
    are the CPU threads of every step.
    """

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    model: str | None = None
    interleave: bool = False
    num_threads: Annotated[int, Field(ge=1)] | None = None
    bench: BenchOptions = BenchOptions()
    variants: tuple[Variant, ...] = ()
    capacity: CapacityStep | None = None
    compare: CompareStep = CompareStep()

    @field_validator("bench")
    @classmethod
    def _own_keys(cls, options: BenchOptions) -> BenchOptions:
        for key in ("model", "name", "reference", "num_threads", "base_url", "serve"):
            if key in options.model_fields_set:
                raise ValueError(f"{key!r} is set by the recipe itself")
        return options

    @field_validator("variants")
    @classmethod
    def _distinct(cls, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        names = [variant.name for variant in variants]
        if len(set(names)) < len(names):
            raise ValueError(f"two variants have the same name among {', '.join(names)}")
        return variants

    @model_validator(mode="after")
    def _one_purpose(self) -> Self:
        if bool(self.variants) == (self.capacity is not None):
            raise ValueError("give variants to compare, or a capacity to find")
        return self


def read_recipe(name: str) -> Recipe:
    """A recipe from a YAML file, or the bundled one of that name.

    Raises:
        BadInput: no such recipe, YAML that does not parse (with the line), an unknown key or a value
            that does not fit (naming the key, the file and the line).
    """
    import yaml

    path = Path(name).expanduser()
    if not path.is_file():
        bundled = {file.stem: file for file in ROOT.glob("*.yaml")}
        if name not in bundled:
            raise BadInput(
                f"no recipe {name!r}: give a YAML file, or a bundled recipe: {offer(name, sorted(bundled))}"
            )
        path = bundled[name]
    try:
        text = path.read_text(encoding="utf-8")
        values, root = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadInput(f"{path}{line}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{path}: a recipe is a YAML mapping, not {type(values).__name__}")
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        place = f"{path}, line {line_of(root, error.errors()[0]['loc'])}"
        return checked(Recipe, values, place)  # raises the same error in one line
    try:
        _ = recipe.compare.share, recipe.compare.quality_gate
    except BadInput as error:
        raise BadInput(f"{path}, line {line_of(root, ['compare'])}: compare: {error}") from error
    return recipe


def steps_of(recipe: Recipe) -> list[str]:
    """The steps of a recipe as text, one line per step (dry run). Nothing is loaded."""
    model = recipe.model or DEFAULT_MODEL
    if recipe.capacity is not None:
        return [
            f"bench {model} with 1 user: the ceilings of this machine and the efficiency reached",
            f"plan {model} with those ceilings",
            f"bench {model} with {recipe.capacity.loads} users: {recipe.bench.dataset}, "
            f"{recipe.bench.num_prompts} prompts at each load",
            "write report.html: the plan beside the measured knee",
        ]
    lines = []
    for variant in recipe.variants:
        step = variant.quantize
        lines.append(
            f"quantize {model} to checkpoints/{variant.name}: {step.method}, {step.bits} bits"
        )
        lines.append(f"verify checkpoints/{variant.name}")
    names = ", ".join([BASE_NAME, *(variant.name for variant in recipe.variants)])
    order = "in turns" if recipe.interleave else "one after another"
    bench = recipe.bench
    lines.append(
        f"bench {names} {order}: {bench.dataset}, {bench.num_prompts} prompts, {bench.num_runs} passes"
    )
    for variant in recipe.variants:
        lines.append(
            f"compare {variant.name} with {BASE_NAME}, threshold {recipe.compare.threshold}"
        )
    verdicts = "decide" if recipe.compare.gate else "do not decide"
    return [*lines, f"write report.html; the verdicts {verdicts} the exit code"]


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


@dataclass(frozen=True, slots=True)
class VariantRun:
    """The results of one variant; `manifest` is its checkpoint's."""

    variant: Variant
    manifest: Mapping[str, Any]
    verified: VerifyReport
    data: RunData
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """A finished recipe: the original's run and those of the variants."""

    recipe: Recipe
    folder: Path
    base: RunData
    variants: tuple[VariantRun, ...]

    @property
    def exit_code(self) -> int:
        """1 for a checkpoint that failed its verification; then, if the recipe gates, the worst
        verdict: regression before no verdict before pass."""
        if not all(variant.verified.ok for variant in self.variants):
            return 1
        if not self.recipe.compare.gate:
            return 0
        return GateOutcome.of(variant.comparison.outcome for variant in self.variants).exit_code

    def record(self) -> dict[str, Any]:
        """The recipe's own `result.json`."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "exit_code": self.exit_code,
            "base": BASE_NAME,
            "variants": {
                variant.variant.name: {
                    "verified": {
                        **asdict(variant.verified),
                        "folder": None,
                        "ok": variant.verified.ok,
                    },
                    "comparison": variant.comparison.as_dict(),
                }
                for variant in self.variants
            },
        }


def all_results(run: RecipeRun) -> dict[str, dict[str, Any]]:
    """{name: result} of the original and every variant, in order."""
    named: Sequence[RunData] = [run.base, *(variant.data for variant in run.variants)]
    return {data.name: data.result for data in named}


FORMULAS = {
    "predicted sequences": "tokens that the planned KV cache holds / tokens of a sequence, rounded down",
    "predicted TPOT": "the planner's decode step for that many sequences at the mean context (prompt + "
    "half of the output), with the ceilings measured here and the efficiency that one user reached",
    "predicted tokens/s": "users / predicted TPOT: decode alone, no prompts",
    "residual": "measured / predicted − 1",
}


@dataclass(frozen=True, slots=True)
class CapacityRun:
    """A finished capacity recipe.

    Attributes:
        sweep: the record of the sweep.
        record: the recipe's `result.json`.
    """

    folder: Path
    sweep: Mapping[str, Any]
    record: Mapping[str, Any]
