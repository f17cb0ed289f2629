"""The journal of answers: kills, changes, other runs, order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.server.batch import AnswerJournal, BatchAnswer, BatchRequest

A, B, C = (BatchRequest(name * 32, name, "/v1/completions", 0, 0) for name in "abc")
FINE = BatchAnswer(200, {"choices": []})
WRONG = BatchAnswer(
    400, {"error": {"message": "no", "type": "invalid_request_error", "code": None}}
)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_written_in_the_order_of_the_requests(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with AnswerJournal(output, [A, B, C], restart=False) as answers:
        for request, answer in ((C, FINE), (A, WRONG), (B, FINE)):
            answers.append(request, answer)
        assert not output.exists() and answers.num_failed == 1
        answers.finish()
    assert [line["custom_id"] for line in lines(output)] == ["a", "b", "c"]
    assert lines(output)[0] == {
        "id": "batch_req_" + "a" * 32,
        "custom_id": "a",
        "response": {"status_code": 400, "request_id": "a" * 32, "body": WRONG.body},
        "error": {"code": "invalid_request_error", "message": "no"},
    }
    assert lines(output)[1]["error"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_line_that_a_kill_cut_off_is_not_an_answer(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with AnswerJournal(output, [A, B], restart=False) as answers:
        answers.append(A, FINE)
        answers.append(B, FINE)
    whole = answers.journal.read_bytes()
    first = whole.index(b"\n")
    for size in (0, 1, first // 2, first, first + 1, first + 2, len(whole) - 2, len(whole) - 1):
        answers.journal.write_bytes(whole[:size])
        with AnswerJournal(output, [A, B], restart=False) as resumed:
            num_whole = whole[:size].count(b"\n")
            assert (A in resumed, B in resumed) == (num_whole > 0, False)
            assert len(resumed) == num_whole
            for request in (A, B)[num_whole:]:
                resumed.append(request, FINE)
        assert answers.journal.read_bytes() == whole


def test_a_finished_output_is_added_to(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with AnswerJournal(output, [A], restart=False) as answers:
        answers.append(A, FINE)
        answers.finish()
    with AnswerJournal(output, [B, A], restart=False) as answers:
        assert A in answers and B not in answers
        answers.append(B, FINE)
        answers.finish()
    assert [line["custom_id"] for line in lines(output)] == ["b", "a"]
    with AnswerJournal(output, [A, C], restart=False) as answers:
        assert answers.notes == ["1 earlier answers are to requests that have changed"]
    with AnswerJournal(output, [A], restart=True) as answers:
        answers.append(A, WRONG)
        answers.finish()
    assert [line["response"]["status_code"] for line in lines(output)] == [400]


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("notes of mine\n")
    with pytest.raises(BadInput, match="--restart"):
        AnswerJournal(output, [A], restart=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert output.read_text() == "notes of mine\n"
    with pytest.raises(BadInput, match="No such file"):
        AnswerJournal(tmp_path / "none" / "out.jsonl", [A], restart=False)


def test_two_runs_do_not_write_one_journal(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with (
        AnswerJournal(output, [A], restart=False),
        pytest.raises(BadInput, match="another process"),
    ):
        AnswerJournal(output, [A], restart=False)
