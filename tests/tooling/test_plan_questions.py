"""The questions of the page of kv-plan are those of the tool that answers them."""

from __future__ import annotations

import re

from tools.document_part import ROOT, part_of
from tools.plan_questions import PAGE, PART, QUESTIONS, answer_of, lines_of


def test_the_page_has_the_questions_and_an_answer_to_each() -> None:
    part = part_of(ROOT / PAGE, PART)
    assert len(QUESTIONS) == 12
    assert re.findall(r"^\*\*(.+)\*\*$", part, re.MULTILINE) == [q.text for q in QUESTIONS]
    answers = re.findall(r"^```\n\$ (.+)\n((?:.+\n)+)```$", part, re.MULTILINE)
    assert [command for command, _ in answers] == [q.command for q in QUESTIONS]


def test_the_first_answer_is_that_of_the_command() -> None:
    assert answer_of(QUESTIONS[0]) in part_of(ROOT / PAGE, PART)


def test_lines_of_a_label_go_on_until_the_next_one() -> None:
    output = "fits   yes\n       also\nusers  12\n\nmodel  a\n"
    assert list(lines_of(output, ("fits", "model"))) == ["fits   yes", "       also", "model  a"]
