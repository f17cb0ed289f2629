"""The report of `llmopt check`: the engines that load a checkpoint, their kernels, and its faults."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..model.parameters import by_kind
from ..source.models import open_plain
from .contents import Contents, read_contents
from .engines import ENGINES, EngineAnswer, Target
from .findings import Finding
from .kernels import Answer, Codes
from .structure import structure_findings

EXIT_CODES: dict[Answer, int] = {"loads": 0, "does not": 1, "unknown": 3}


@dataclass(frozen=True, slots=True)
class LinearKind:
    """Linears that differ in layer or expert alone, with the label of their codes and a shape."""

    linears: str
    codes: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check. `method` is the config's `quant_method`, empty for a plain checkpoint."""

    path: Path
    method: str
    linears: tuple[LinearKind, ...]
    engines: tuple[EngineAnswer, ...]
    findings: tuple[Finding, ...]

    @property
    def answer(self) -> Answer:
        """The best answer of the engines; `does not` where the checkpoint is broken for all of them."""
        if any(finding.severity == "broken" for finding in self.findings):
            return "does not"
        answers = {engine.answer for engine in self.engines}
        order: tuple[Answer, ...] = ("loads", "unknown", "does not")
        return next(answer for answer in order if answer in answers)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.answer]

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"checkpoint": str(fields.pop("path")), "answer": self.answer} | fields


def check(
    path: Path,
    engines: Collection[str] = tuple(ENGINES),
    target: Target | None = None,
    *,
    values: bool = False,
    reference: Path | None = None,
    trust_remote_code: bool = False,
) -> CheckReport:
    """Check a checkpoint for engines, with `values` or a plain `reference` every number of it too. BadInput:
    there is none, or its config cannot be read."""
    contents = read_contents(path, trust_remote_code=trust_remote_code)
    target = target or Target()
    answers = tuple(ENGINES[name](contents, target) for name in engines)
    findings = structure_findings(contents, target.tensor_parallel)
    if values or reference is not None:
        from .damage import damage

        plain = None if reference is None else open_plain(reference)
        if contents.gguf is not None and contents.refusal:  # of a type that no reader takes
            problem = f"its values are not compared: {contents.refusal}"
            findings += [Finding("not-read", str(path), problem, "note")]
        else:
            findings += damage(contents.checkpoint, plain)
    return CheckReport(path, contents.method, kinds_of(contents), answers, tuple(findings))


def kinds_of(contents: Contents) -> tuple[LinearKind, ...]:
    """The linears by kind, codes and shape, in the order of their names."""
    groups: dict[tuple[Codes, tuple[int, ...] | None], list[str]] = {}
    for linear in contents.linears:
        groups.setdefault((linear.codes, linear.shape), []).append(linear.module)
    return tuple(
        LinearKind(kind, codes.label, shape)
        for (codes, shape), modules in groups.items()
        for kind in by_kind(modules)
    )
