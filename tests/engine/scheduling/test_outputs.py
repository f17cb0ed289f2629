"""Completions, whole and step by step."""

from __future__ import annotations

from llmopt.engine.scheduling.outputs import Completion, RequestOutput
from llmopt.engine.scheduling.request import RequestTimes


def output(text: str, token_id: int, finish_reason: str | None = None) -> RequestOutput:
    times = RequestTimes(0.0)
    return RequestOutput(
        "a", 0, (token_id,), text, None, None, finish_reason, None, 1, 0, token_id, times
    )


def test_a_part_of_a_completion_has_its_text_and_the_whole_has_all_of_it() -> None:
    outputs = [output("Once", 1), output(" upon", 2), output(" a", 3, "length")]
    parts = [Completion.part(4, each) for each in outputs]
    assert [part.text for part in parts] == ["Once", " upon", " a"]
    assert [part.finish_reason for part in parts] == [None, None, "length"]
    whole = Completion(4)
    for each in outputs:
        whole.extend(each)
    assert (whole.text, whole.token_ids) == ("Once upon a", [1, 2, 3])
    assert (whole.index, whole.finish_reason) == (parts[-1].index, "length")
