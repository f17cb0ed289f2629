"""Jobs of a recipe: its stages as one list, for this process or for tasks of Ray.

A job is one process's: to quantize a variant, score windows of a model, or measure one. Jobs of one model
follow each other, others are independent; each is noted in the recipe's journal.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...base.errors import BadInput, first_line
from ...base.extras import import_extra
from ...base.progress import Progress
from ...base.version import VERSION
from ..record.result import RESULT_NAME, RunData
from .recipe import BASE_NAME, Recipe, bench_of
from .recipe_files import IN_TURNS, JOURNAL_NAME, Stages

Kind = Literal["quantize", "score", "bench"]
KINDS: tuple[Kind, ...] = ("quantize", "score", "bench")
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Job:
    """One stage of a recipe.

    Attributes:
        share: share of the windows, `(number, count)` with numbers from 1, where scoring is shared out.
        is_here: True if the job is left to the process that ends the recipe: passes in turns need one
            process, and two that measure one running server disturb each other.
    """

    kind: Kind
    of: str
    share: tuple[int, int] | None = None
    device: str = CPU
    gpus: int = 1
    is_here: bool = False

    @property
    def name(self) -> str:
        share = "" if self.share is None else f" {self.share[0]}/{self.share[1]}"
        return f"{self.kind} {self.of}{share}"

    def after(self, jobs: Sequence[Job]) -> list[Job]:
        earlier = KINDS[: KINDS.index(self.kind)]
        return [job for job in jobs if job.of == self.of and job.kind in earlier]

    def is_whole(self, stages: Stages) -> bool:
        """True if the job has ended and what it made is there."""
        if self.kind == "quantize":  # written atomically: one that exists is complete
            from ...quant.plan.manifest import MANIFEST_NAME  # loads torch

            return (stages.checkpoint(self.of) / MANIFEST_NAME).is_file()
        if not stages.is_done(self.name):
            return False
        has_run = self.kind == "bench" and self.of != IN_TURNS
        return not has_run or (stages.folder / self.of / RESULT_NAME).is_file()


def check_jobs(recipe: Recipe) -> None:
    if recipe.capacity is not None:
        raise BadInput(f"recipe {recipe.name} finds the capacity of one machine: it has no jobs")


def jobs_of(stages: Stages) -> list[Job]:
    """The jobs of a recipe, in an order that one process can follow. BadInput: it finds a capacity."""
    recipe, count = stages.recipe, stages.score_shares
    check_jobs(recipe)
    quantized, scored, measured = [], [], []
    for variant in (None, *recipe.variants):
        name, options = BASE_NAME if variant is None else variant.name, bench_of(recipe, variant)
        if variant is not None and variant.made is not None:
            quantized.append(Job("quantize", name, device=variant.made.device))
        on: dict[str, Any] = {"device": options.device, "gpus": options.tensor_parallel_size}
        is_in_process = options.base_url is None and options.serve is None
        if count > 1 and options.quality and is_in_process and not recipe.interleave:
            scored += [Job("score", name, (number, count), **on) for number in range(1, count + 1)]
        measured.append(Job("bench", name, **on, is_here=options.base_url is not None))
    if recipe.interleave:
        measured = [Job("bench", IN_TURNS, is_here=True)]
    return [*quantized, *scored, *measured]


def job_states(stages: Stages) -> list[dict[str, str]]:
    """A row for each job: its name, `done`, `running` or `left`, and the machine of a finished bench."""
    rows = []
    for job in jobs_of(stages):
        is_whole, machine = job.is_whole(stages), ""
        if is_whole and job.kind == "bench" and job.of != IN_TURNS:
            result = RunData.read(stages.folder / job.of).result
            machine = str(result["llmopt"]["identity"]["machine"])
        state = "done" if is_whole else "running" if stages.is_held(job.name) else "left"
        rows.append({"job": job.name, "state": state, "machine": machine})
    return rows


NODE_MARK = "llmopt"
"""Custom resource of Ray by which nodes are marked for jobs (`ray start --resources='{"llmopt": 1}'`)."""
_SHARED = "put --output on storage that all nodes share, under one path"
_RETRIES = 3
_SMALL = 0.001  # of a resource that only says which kind of node it is


def require_ray() -> Any:
    return import_extra("--on ray", "ray", "ray")


def run_on_ray(stages: Stages, work: Callable[[Path, str], None], progress: Progress) -> None:
    """Do the jobs of a recipe that are left as tasks of the Ray cluster, or of one on this machine.

    A job that fails stops only those that need it. Ray retries a job whose node is gone. `work` does the job
    of a name in a recipe's folder; it must be picklable. Raises BadInput: Ray is not installed, there is no
    cluster at `RAY_ADDRESS`, or a job failed. An interrupt cancels the tasks.
    """
    jobs = [job for job in jobs_of(stages) if not (job.is_here or job.is_whole(stages))]
    ray = require_ray()
    if not jobs:
        return
    if is_ours := not ray.is_initialized():
        _connect(ray)
    refs: dict[str, Any] = {}
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        node = node_kind(nodes, on_gpu=any(job.device != CPU for job in jobs))
        resources = ", ".join(f"{name} {amount:g}" for name, amount in node.items())
        progress.note(f"Ray: {len(nodes)} nodes; jobs on those with {resources}")
        # A node sees by the journal that it shares the folder.
        journal = (stages.folder / JOURNAL_NAME).resolve()
        here = (VERSION, str(Path.cwd()), str(journal))
        for job in jobs:
            task = ray.remote(max_retries=_RETRIES, **job_resources(job, node))(_job_on_node)
            needed = [refs[earlier.name] for earlier in job.after(jobs)]
            refs[job.name] = task.remote(work, *here, job.name, *needed)
        _collect(ray, stages, refs, progress)
    except KeyboardInterrupt:
        for ref in refs.values():
            ray.cancel(ref, force=True)  # changes nothing of a task that has ended
        raise
    finally:
        if is_ours:
            ray.shutdown()


def _connect(ray: Any) -> None:
    # Nothing that is started here reports to anybody; a cluster that runs has its own setting.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself tries for many minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        where = f"no cluster at RAY_ADDRESS={address}" if address else "Ray does not start"
        raise BadInput(f"--on ray: {where}: {first_line(error)}") from error


def node_kind(nodes: Sequence[Mapping[str, float]], *, on_gpu: bool) -> dict[str, float]:
    """Resources of the largest kind of node, by GPUs, if used, then CPUs; those of `NODE_MARK` first."""
    marked = [node for node in nodes if NODE_MARK in node]
    sizes = ("GPU", "CPU") if on_gpu else ("CPU",)
    largest = max(marked or nodes, key=lambda node: [node.get(name, 0) for name in sizes])
    kept = ("CPU", NODE_MARK, *(["GPU"] if on_gpu else []))
    return {
        name: amount
        for name, amount in largest.items()
        if name in kept or (on_gpu and name.startswith("accelerator_type:"))
    }


def job_resources(job: Job, node: Mapping[str, float]) -> dict[str, Any]:
    """Options of a job's task: a whole node for benchmarks and on CPUs, else its GPUs and their CPUs."""
    gpus = 0 if job.device == CPU else int(node.get("GPU", 0))
    share = 1.0
    if gpus and job.kind != "bench":
        share = min(job.gpus, gpus) / gpus
    kinds = [name for name in node if name.startswith("accelerator_type:")] if gpus else []
    marks = {NODE_MARK: node[NODE_MARK] * share} if NODE_MARK in node else {}
    return {
        "num_cpus": max(1, int(node.get("CPU", 1) * share)),
        "num_gpus": round(gpus * share),
        "resources": {**marks, **dict.fromkeys(kinds, _SMALL)},
    }


def _job_on_node(
    work: Callable[[Path, str], None], llmopt: str, cwd: str, journal: str, name: str, *_: object
) -> str:
    """Do a job in Ray, after the jobs whose results are the last arguments; returns its node."""
    node = socket.gethostname()
    if llmopt != VERSION:
        raise BadInput(
            f"node {node} has llmopt {VERSION}, this command is {llmopt}: install one everywhere"
        )
    folder = Path(journal).parent
    if not Path(journal).is_file():
        raise BadInput(f"node {node} does not see {folder}: {_SHARED}")
    try:
        os.chdir(cwd)
    except OSError as error:
        raise BadInput(
            f"node {node} does not see {cwd}, from which paths are taken: start the command "
            "in a folder that all nodes share"
        ) from error
    work(folder, name)
    return node


def _collect(ray: Any, stages: Stages, refs: Mapping[str, Any], progress: Progress) -> None:
    """Wait for tasks, and note how each ended. BadInput: one failed, or its output is not here."""
    names, failures = {ref: name for name, ref in refs.items()}, list[BaseException]()
    progress.start("jobs on Ray", len(names), "jobs")
    while names:
        (ended,), _ = ray.wait([*names], num_returns=1)
        name = names.pop(ended)
        try:
            node = ray.get(ended)
            stages.refresh()
            if not stages.is_done(name):
                raise BadInput(f"done on node {node}, but not seen here: {_SHARED}")
            progress.note(f"{name}: done on node {node}")
        except (BadInput, ray.exceptions.RayError) as error:
            cause = getattr(error, "cause", None)  # the error of the job, or of one that it needs
            is_defect = cause is not None and not isinstance(cause, BadInput)
            # A defect ends with the node's traceback, bad input in one line.
            complaint = BadInput(f"{name}: {first_line(cause or error)}")
            failures.append(error if is_defect else complaint)
            progress.note(f"failed: {first_line(failures[-1])}")
        progress.advance()
    progress.finish()
    if failures:
        raise failures[0]
