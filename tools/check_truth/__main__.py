"""Compare `llmopt check` with what loaders really do with checkpoints that other tools wrote.

    python -m tools.check_truth make --environments DIR --truth DIR      # the tools write the checkpoints
    python -m tools.check_truth load --environments DIR --truth DIR      # the loaders try them: LOADER.json
    python -m tools.check_truth table --truth DIR                        # docs/measured/check.json, .md
    python -m tools.check_truth mock --environments DIR --truth DIR      # mocks load where real ones do

DIR of environments has `tf`, `llmcompressor`, `modelopt`, `vllm` and `llamacpp`, virtual environments with
the packages that docs/measured/check.md names. LIBLLAMA is llama.cpp's library, for its quantizer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.check_truth.cases import CASES
from tools.check_truth.load import LOADERS, load_all
from tools.check_truth.mocks import compare_pairs, write_pairs
from tools.check_truth.table import compared, parts, record_of
from tools.document_part import write_part

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "measured" / "check.md"
RECORD = ROOT / "docs" / "measured" / "check.json"
ENVIRONMENTS = {"llmcompressor": "llmc", "modelopt": "modelopt"}
"""Environments of tools; the others are in `tf`."""

AT_A_TIME = 4
"""Checkpoints after which LOADER.json is written."""


def write_plain(environments: Path, truth: Path) -> None:
    """The answers of the models before quantization, by transformers: plain.json."""
    folders = sorted((truth / "plain").iterdir())
    answers = load_all("transformers", environments, folders)
    (truth / "plain.json").write_text(json.dumps(answers))


def make(environments: Path, truth: Path, only: str) -> None:
    """Every tool's checkpoints in its environment; those that are there stay."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for tool in dict.fromkeys(case.tool for case in CASES):
        tasks = truth / f"{tool}.tasks.json"
        cases = [case for case in CASES if case.tool == tool and only in case.folder]
        tasks.write_text(json.dumps([case.task() for case in cases]))
        python = environments / ENVIRONMENTS.get(tool, "tf") / "bin" / "python"
        command = [str(python), "-m", "tools.check_truth.make", str(tasks), str(truth)]
        subprocess.run(command, cwd=ROOT, env=own | {"HF_HUB_OFFLINE": "1"}, check=False)


def load(environments: Path, truth: Path, loaders: list[str], only: str) -> None:
    """Add the answers of loaders to their files, LOADER.json; those that are there stay."""
    names = [case.folder for case in CASES if only in case.folder]
    for loader in loaders:
        path = truth / f"{loader}.json"
        answers: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        folders = [truth / n for n in names if n not in answers and (truth / n).is_dir()]
        for start in range(0, len(folders), AT_A_TIME):
            answers |= load_all(loader, environments, folders[start : start + AT_A_TIME])
            path.write_text(json.dumps(answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("step", choices=("make", "load", "table", "mock"))
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--loaders", default=",".join(LOADERS))
    parser.add_argument("--only", default="", help="checkpoints whose names contain this")
    given = parser.parse_args()
    if given.step == "make":
        make(given.environments, given.truth, given.only)
    elif given.step == "load":
        load(given.environments, given.truth, given.loaders.split(","), given.only)
    elif given.step == "mock":
        names = write_pairs(given.truth / "plain" / "llama", given.truth / "pairs")
        sys.exit(bool(compare_pairs(given.environments, given.truth / "pairs", names)))
    else:
        if not (given.truth / "plain.json").is_file():
            write_plain(given.environments, given.truth)
        record = record_of(compared(given.truth), given.truth)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for name, text in parts(record).items():
            write_part(PAGE, f"check_truth {name}", text)


if __name__ == "__main__":
    main()
