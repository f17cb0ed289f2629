"""The three skills for coding agents: their form, and a transcript of a scripted agent that follows them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..support.cli_process import run_llmopt
from .test_answers import LITTLE, ROOT

SKILLS = {path.parent.name: path for path in sorted((ROOT / "skills").glob("*/SKILL.md"))}
COMMAND = re.compile(r"^ {7}(llmopt .+)$", re.MULTILINE)
# In the names that a skill leaves open: files of the agent, and 2 bits as the candidate that is worse.
NAMES = {"MODEL": "stories3M", "CANDIDATE": "CHECKPOINT"}


@pytest.mark.parametrize("name", SKILLS)
def test_a_skill_has_the_form_that_agents_read(name: str) -> None:
    """agentskills.io/specification: a name as the folder's, of 64 characters, and a description of 1,024."""
    text = SKILLS[name].read_text(encoding="utf-8")
    _, head, body = text.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert set(fields) == {"name", "description"} and fields["name"] == name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", name) and len(fields["description"]) <= 1024
    assert "Use when" in fields["description"] and body.count("\n") < 60
    commands = COMMAND.findall(body)
    assert commands and all(command.endswith(" --json") for command in commands)


def test_the_skills_are_the_three_jobs() -> None:
    assert set(SKILLS) == {"bench-and-gate", "plan-and-choose", "quantize-and-prove"}
    guide = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert all(name in guide for name in SKILLS)


@dataclass
class ScriptedAgent:
    """Runs the commands of a skill as they stand there, and knows nothing but exit codes and stdout."""

    folder: Path
    transcript: list[str] = field(default_factory=list)

    def follow(self, skill: str) -> list[tuple[int, Mapping[str, Any]]]:
        """(exit code, JSON) of each command of the skill, in order."""
        lines = COMMAND.findall(SKILLS[skill].read_text(encoding="utf-8"))
        return [self.call(shlex.split(line)[1:]) for line in lines]

    def call(self, words: list[str]) -> tuple[int, Mapping[str, Any]]:
        words = [NAMES.get(word, word) for word in words]
        little = shlex.split(LITTLE.get(words[0], ""))
        done = run_llmopt(*words, *little, cwd=self.folder)
        self.transcript.append(f"$ llmopt {shlex.join(words)}\n{done.returncode}")
        assert done.returncode in (0, 1, 3), (words, done.stderr)
        return done.returncode, json.loads(done.stdout)


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_scripted_agent_plans_quantizes_proves_and_gates(tmp_path: Path) -> None:
    agent = ScriptedAgent(tmp_path)
    (fits, with_promise, in_int4, front) = (found for _, found in agent.follow("plan-and-choose"))
    assert fits["answer"]["fits"] and fits["gpus"][0]["gpu"] == "L40S"
    assert fits["gpus_needed"] > in_int4["gpus_needed"]
    assert with_promise["answer"]["highest_load_within_slo"] and with_promise["loaded"]["error"]
    assert front

    steps = agent.follow("quantize-and-prove")
    assert [code for code, _ in steps[:3]] == [0, 0, 0]
    assert {"name", "loads", "reason"} <= set(steps[0][1]["loaders"][0])
    quality = steps[3][1]["llmopt"]["quality"]
    assert min(quality["perplexity"], quality["kl_nats"], quality["top1_agreement"]) > 0

    code, verdict = agent.follow("bench-and-gate")[2]
    assert code == verdict["exit_code"] and verdict["outcome"] in (
        "pass",
        "regression",
        "no verdict",
    )
    assert [aspect["aspect"] for aspect in verdict["aspects"]] == ["speed", "quality", "memory"]
    assert verdict["decided_by"] or verdict["outcome"] == "pass"
    assert len(agent.transcript) == 12
