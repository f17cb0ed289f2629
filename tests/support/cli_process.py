"""`llmopt` as a process of its own, forked from one that has imported torch and transformers already.

A fresh interpreter imports for three seconds of CPU time before a command begins. Here multiprocessing's fork
server imports once a test session; each command is a process with its own pid, signals and exit code.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Self

PRELOADED = [
    "torch",
    "transformers.models.llama.modeling_llama",
    "llmopt.cli.main",
    "llmopt.engine.core.engine",
    "llmopt.engine.server.app",
    "llmopt.quant.pipeline.pipeline",
    "llmopt.bench.session.run_sessions",
    "llmopt.bench.report.run_report",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class _Inherited:
    """A file descriptor that the forked process gets a duplicate of."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.fd),)


def _received(duplicate: Any) -> _Inherited:
    return _Inherited(duplicate.detach())


def _main(
    run: Callable[..., None],
    args: tuple[Any, ...],
    pipes: list[_Inherited],
    cwd: str,
    env: dict[str, str],
) -> None:
    """The forked process: its streams, folder and environment, then `run`."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, pipe in enumerate(pipes, start=1):
        os.dup2(pipe.fd, stream)
        os.close(pipe.fd)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "COVERAGE_PROCESS_START" in env:  # `python -m tools.suite_coverage record`
        from tools.coverage_contexts import measure_forked_process

        measure_forked_process()
    run(*args)


def llmopt(*words: str) -> None:
    """The command, in the forked process."""
    from llmopt.cli.main import main

    sys.argv = ["llmopt", *words]
    main()


class ForkedProcess:
    """`run(*args)` in a process, with what the tests need of `subprocess.Popen`; its streams are text."""

    def __init__(
        self,
        run: Callable[..., None],
        *args: Any,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        ends = [os.pipe() for _ in range(2)]
        self._process = _context.Process(
            target=_main,
            args=(
                run,
                args,
                [_Inherited(write) for _, write in ends],
                str(cwd or Path.cwd()),
                environment,
            ),
        )
        self._process.start()
        for _, write in ends:
            os.close(write)
        self.stdout, self.stderr = (os.fdopen(read, encoding="utf-8") for read, _ in ends)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"llmopt still runs after {timeout} s")
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of stdout and stderr, and the end."""
        with ThreadPoolExecutor(2) as readers:
            rests = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                out, err = (rest.result(timeout) for rest in rests)
                self.wait(timeout)
            except TimeoutError:
                self.kill()  # which ends the streams, and with them the readers
                raise
        return out, err


class LlmoptProcess(ForkedProcess):
    """A running command."""

    def __init__(
        self,
        *words: str | Path,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(llmopt, *map(str, words), cwd=cwd, env=env)


def run_llmopt(
    *words: str | Path,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    with LlmoptProcess(*words, cwd=cwd, env=env) as process:
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(list(words), process.wait(), out, err)
