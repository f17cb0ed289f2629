"""Outputs are checked as the command line is read, before any work and before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from llmopt.base.atomic_io import check_output, write_atomically
from llmopt.base.errors import BadInput
from llmopt.cli import main

WORDS = (
    "Write ",
    "Folder to ",
    "The file to write",
    "The file of answers",
    "Parent of run folders",
)
WORDS += ("The HTML file to write", "The run folder to create")


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from commands(inner, *path, name)


def outputs() -> Iterator[tuple[tuple[str, ...], str]]:
    """Every path option that is named as an output, or whose help says that it is written."""
    for path, command in commands(typer.main.get_command(main.application())):
        for option in command.params:
            is_path = option.type_descriptor.annotation is Path and option.opts[0].startswith("--")
            says = option.name in ("output", "result_dir") or (option.help or "").startswith(WORDS)
            if is_path and says:
                yield path, option.opts[0]


EVERY = [*outputs()]


def run(path: tuple[str, ...], option: str, where: Path) -> int | str | None:
    # Arguments that a command requires are read after an option that was given.
    with pytest.raises(SystemExit) as stop:
        main.main([*path, option, str(where)])
    return stop.value.code


def test_folders_that_the_check_takes_for_possible_are_made(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "page.md"
    check_output(path, "--markdown", folder=False)
    assert not path.parent.exists()
    write_atomically(path, "text")
    assert path.read_text() == "text"


@pytest.mark.parametrize(("path", "option"), EVERY, ids=lambda part: "-".join(part) or part)
def test_an_output_that_cannot_be_written_is_refused_first(
    path: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file" / "new", tmp_path / "file" / "new" / "er"):
        assert run(path, option, where) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {option} {where}") and ": cannot write in " in error
        assert error.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


FOLDERS = {"quantize", "convert", "merge", "deploy", "run", "best"}
"""Commands whose `--output` is a folder; `bench` has two kinds, and `compare --run` another than `compare`."""


@pytest.mark.parametrize(("path", "option"), EVERY, ids=lambda part: "-".join(part) or part)
def test_an_output_of_the_other_kind_is_refused_first(
    path: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    is_folder = option == "--result-dir" or (option == "--output" and path[0] in FOLDERS)
    is_folder |= (path, option) in ((("bench",), "--output"), (("quantize",), "--stats"))
    where = tmp_path / "there"
    where.write_text("") if is_folder else where.mkdir()
    if option in ("--stats", "--imatrix") or (path, option) == (("compare",), "--output"):
        pytest.skip("a cache that exists is read; compare makes a file or, with --run, a folder")
    assert run(path, option, where) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option} {where}") and error.count("\n") == 1
    assert (": name a folder" if is_folder else ": name a file in it") in error or (
        option == "--result-dir" and "Not a directory" in error
    )


@pytest.mark.parametrize("kind", [True, False, None])
def test_a_name_that_is_too_long_is_one_line(kind: bool | None, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="File name too long"):
        check_output(tmp_path / ("x" * 300), "--output", folder=kind)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        (("run", "--resume", "WHERE"), "--resume"),
        (("compare", "--resume", "WHERE"), "--resume"),
    ],
    ids=str,
)
def test_a_folder_that_is_gone_on_with_is_an_output(
    line: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    where = str(tmp_path / "file" / "new")
    with pytest.raises(SystemExit) as stop:
        main.main([where if word == "WHERE" else word for word in line])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith(f"error: {option} {where}: cannot write in ") and error.count("\n") == 1


@pytest.mark.parametrize("command", ["quantize", "run quickstart", "best stories3M --max-kl 0.05"])
def test_a_url_is_no_folder(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main([*command.split(), "--output", "s3://bucket/out"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert error.startswith("error: --output s3:/bucket/out: URLs are not supported: name a folder")
    assert not Path("s3:").exists()


def test_every_command_that_writes_is_among_them() -> None:
    named = {path[0] for path, _ in EVERY}
    assert named >= {
        *[
            "quantize",
            "convert",
            "merge",
            "bench",
            "freeze",
            "compare",
            "batch",
            "kv-plan",
            "deploy",
        ]
    }
    assert named >= {*["report", "run"]}


def test_the_check_writes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_output(tmp_path / "a" / "b" / "run", "--output")
    assert not [*tmp_path.iterdir()]

    def read_only(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(BadInput, match=r"--result-dir .*: Read-only file system; name another"):
        check_output(tmp_path / "a", "--result-dir")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_proc_is_refused_before_torch() -> None:
    code = (
        "import sys; from llmopt.cli.main import main\n"
        "try: main(['bench', '--result-dir', '/proc/runs'])\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.startswith("error: --result-dir /proc/runs")


DEFAULTS = {
    ("quantize",): ("--output", "stories3M-awq-4bit"),
    ("quantize", "--method", "trellis"): ("--output", "stories3M-trellis-3bit"),
    ("convert", "stories3M", "--format", "gguf"): ("--output", "stories3M-gguf"),
    ("merge", "stories3M", "adapter"): ("--output", "stories3M-merged"),
    ("batch", "lines.jsonl"): ("--output", "lines.out.jsonl"),
    ("deploy", "llama-3-8b"): ("--output", "deploy-llama-3-8b"),
    ("bench",): ("--result-dir", "runs/run"),
    ("run", "quickstart"): ("--result-dir", "runs/run"),
    ("bench", "freeze"): ("--output", "workload.jsonl"),
}


@pytest.fixture
def read_only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: no file can be made in it."""
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "lines.jsonl").write_text("")

    def read_only(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", DEFAULTS, ids=" ".join)
def test_a_default_output_is_checked_too(
    line: tuple[str, ...], capsys: pytest.CaptureFixture[str], read_only_here: Path
) -> None:
    before = sorted(read_only_here.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        main.main([*line])
    option, name = DEFAULTS[line]
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option} {name}: cannot write in .") and error.count("\n") == 1
    assert sorted(read_only_here.rglob("*")) == before


@pytest.mark.parametrize("option", ["--stats", "--imatrix"])
def test_a_cache_is_an_output_only_where_it_does_not_exist(
    option: str, capsys: pytest.CaptureFixture[str], read_only_here: Path
) -> None:
    assert run(("quantize", "--method", "exl3"), option, Path("new")) == 2
    assert capsys.readouterr().err.startswith(f"error: {option} new: cannot write in .")
    assert run(("quantize", "--method", "exl3"), option, Path("adapter")) == 2
    assert "unknown method 'exl3'" in capsys.readouterr().err


def test_nothing_is_checked_where_nothing_is_written(
    capsys: pytest.CaptureFixture[str], read_only_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(["run", "quickstart", "--dry-run"])
    assert stop.value.code == 0
    assert "verify checkpoints/" in capsys.readouterr().out
    told: list[bool] = []
    monkeypatch.setattr(
        "llmopt.cli.bench._print_client_errors", lambda _, *, as_json: told.append(as_json)
    )
    with pytest.raises(SystemExit) as stop:
        main.main(["bench", "--check-client"])
    assert (stop.value.code, told) == (0, [False])
