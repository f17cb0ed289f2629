"""`bench --quality-depth` and `--quality-kv` through the command: record, report, refusals."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.session import quality as scoring
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.prompt_pass import PromptPass

from .test_full_quality import llmopt

DEPTHS = ("--quality-depth", "256,512", "--quality-documents", "2")


def quality_of(runs: Path) -> dict[str, Any]:
    (folder,) = runs.iterdir()
    return json.loads((folder / "result.json").read_text())["llmopt"]["quality"]


def test_weights_and_caches_by_depth(tmp_path: Path) -> None:
    words = ("--reference", "stories3M", *DEPTHS, "--quality-kv", "float32,int8")
    assert llmopt(tmp_path, *words) == 0
    quality = quality_of(tmp_path)
    assert [*quality["depth"]] == ["128", "256", "512"]
    assert all(part["kl_nats"] == 0 for part in quality["depth"].values())
    exact, rounded = quality["kv"]["float32"], quality["kv"]["int8"]
    assert exact["512"]["kl_nats"] == 0 < rounded["512"]["kl_nats"] < 0.1
    assert quality["depth_text"]["description"].startswith("2 documents of 512 tokens")
    (report,) = tmp_path.glob("*/report.md")
    text = report.read_text()
    assert "| depth | 128 | 256 | 512 |" in text and "| int8 KV cache | 0.00" in text
    assert "| from the reference | 0.00000 (0.00000 to 0.00000), 100.0 % |" in text
    (figure,) = tmp_path.glob("*/depth.svg")
    assert "int8 KV cache" in figure.read_text()


def test_caches_share_a_pass_without_rounding_and_the_references_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache that rounds nothing is computed once for all types, and the reference is gone by then."""
    references: list[weakref.ref[Engine]] = []
    dtypes: list[str | None] = []
    load, on_cache = scoring.load_reference, Engine.prompt_pass_on

    def loaded(*args: Any) -> Engine:
        engine = load(*args)
        references.append(weakref.ref(engine))
        return engine

    def opened(self: Engine, dtype: str | None, *args: Any) -> PromptPass:
        assert [reference() for reference in references] == [None]
        dtypes.append(dtype)
        return on_cache(self, dtype, *args)

    monkeypatch.setattr(scoring, "load_reference", loaded)
    monkeypatch.setattr(scoring, "_cache_rounding", lambda *_: None)
    monkeypatch.setattr(Engine, "prompt_pass_on", opened)
    words = ("--reference", "stories3M", *DEPTHS, "--quality-kv", "float32,int8")
    assert llmopt(tmp_path, *words) == 0
    assert dtypes == ["float32", "int8", None]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--quality-depth", "4k"), "exceeds the context of 512 tokens"),
        (("--quality-depth", "64"), "256"),
        (("--quality-kv", "int8"), "give one"),
        (("--quality-depth", "512", "--quality-kv", "int3"), "choose auto"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    assert llmopt(tmp_path, *words) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
