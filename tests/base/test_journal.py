from __future__ import annotations

from pathlib import Path

import pytest
from llmopt.base.journal import LineJournal


def test_a_journal_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    first = LineJournal(path, {"run": 1})
    first.append({"b": 2, "a": 1})
    with pytest.raises(BlockingIOError):
        LineJournal(path, {"run": 1})
    first.close()
    with path.open("ab") as file:
        file.write(b'{"half')
    again = LineJournal(path, {"run": 2})
    assert again.header == {"run": 1}  # of the run that began it
    assert again.records == [{"a": 1, "b": 2}]
    again.append({"c": 3})
    again.close()
    assert path.read_bytes() == b'{"run": 1}\n{"a": 1, "b": 2}\n{"c": 3}\n'


@pytest.mark.parametrize("content", [b"", b"no json\n", b'{"half'])
def test_a_damaged_journal_is_told_and_let_go(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "work.jsonl"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ValueError):
            LineJournal(path, {})
