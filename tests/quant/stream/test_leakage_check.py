"""Calibration data checks: duplicates, and leakage of evaluation text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream.calibration import (
    SHARED_WORDS,
    check_leakage,
    deduplicate,
    length_histogram,
)
from llmopt.recipes import DATA

from ...support.quant_support import STORIES


def words(first: int, count: int) -> str:
    return " ".join(f"word{number}" for number in range(first, first + count))


def test_repeats_are_dropped_whatever_space_lies_between_their_words() -> None:
    documents = ["one two", "three", "one  two", "one\ntwo ", "One two", "three"]
    assert deduplicate(documents, str) == ["one two", "three", "One two"]


def test_a_shared_run_of_words_is_refused_with_the_words_and_both_places() -> None:
    shared = words(100, SHARED_WORDS)
    calibration = [words(0, 50), f"before it {shared} and after"]
    evaluation = ["something else altogether", f"elsewhere {shared}"]
    with pytest.raises(BadInput) as caught:
        check_leakage("mine.txt", calibration, "test.txt", evaluation)
    message = str(caught.value)
    assert "calibration data mine.txt overlaps with the evaluation text test.txt" in message
    assert "text 2 and text 2 there both have 'word100 word101 word102" in message
    assert "\n" not in message


def test_a_run_that_is_one_word_shorter_is_an_accident() -> None:
    shared = words(100, SHARED_WORDS - 1)
    check_leakage("a", [f"left {shared} right"], "b", [f"here {shared} there"])


def test_a_short_text_is_refused_whole() -> None:
    with pytest.raises(BadInput, match="overlaps"):
        check_leakage("a", ["The  end."], "b", ["The end."])
    check_leakage("a", ["The end."], "b", ["Not the end."])
    check_leakage("a", ["", "  "], "b", [""])


def test_lengths_are_counted_by_powers_of_two() -> None:
    assert length_histogram([1, 2, 3, 4, 5, 64, 65, 128]) == {
        "0-1": 1,
        "2-2": 1,
        "3-4": 2,
        "5-8": 1,
        "33-64": 1,
        "65-128": 2,
    }
    assert length_histogram([]) == {}


def test_the_evaluation_text_is_refused_as_calibration_and_nothing_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundled one where no other is named, and one that is."""
    mine = tmp_path / "mine.txt"
    mine.write_text("\n\n".join(words(100 * number, 100) for number in range(20)))
    for arguments in (
        ["--calibration", str(DATA / "evaluation.txt")],
        ["--calibration", str(mine), "--evaluation", str(mine)],
    ):
        with pytest.raises(SystemExit) as stop:
            main(["quantize", "-o", str(tmp_path / "out"), "--num-samples", "2", *arguments])
        written = capsys.readouterr()
        assert stop.value.code == 2
        (line,) = written.err.splitlines()
        assert line.startswith("error: calibration data ")
        assert "overlaps with the evaluation text" in line
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_manifest_says_what_the_calibration_texts_are_like(tmp_path: Path) -> None:
    texts = [words(100 * number, 40) for number in range(6)]
    mine = tmp_path / "mine.txt"
    mine.write_text("\n\n".join([*texts, *texts[:2]]))
    asked = QuantizeRequest(STORIES, tmp_path / "out", method="rtn", calibration=str(mine))
    result = quantize(replace(asked, num_samples=2, seq_len=32, held_out=0))
    assert "note: 2 repeated calibration texts were dropped" in result.notes
    record = result.manifest["calibration"]
    assert record["duplicates_dropped"] == 2
    assert record["documents_with_bos"] == record["documents"] > 0
    assert sum(record["tokens_by_document"].values()) == record["documents"]
    assert record["chat_template"] is False
    assert len(record["sha256"]) == 64
