"""Prompts from Hugging Face hub data sets, and the ShareGPT download. Uses the network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput, first_line
from .custom import DEFAULT_OUTPUT_LEN
from .workload import Tokenizer, Workload, numbered

SHAREGPT_REPOSITORY = "anon8231489123/ShareGPT_Vicuna_unfiltered"
SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
TURNS = ("conversations", "conversation", "messages")
PROMPTS = ("prompt", "question", "instruction", "input", "query", "text")
ANSWERS = ("output", "response", "completion", "answer", "chosen")
SHUFFLE_BUFFER = 1000


def download_sharegpt() -> Path:
    """Download ShareGPT's usual file (640 MB), or take it from the hub's cache.

    Raises:
        BadInput: the download failed.
    """
    from huggingface_hub import hf_hub_download

    try:
        found = hf_hub_download(SHAREGPT_REPOSITORY, SHAREGPT_FILE, repo_type="dataset")
    except Exception as error:  # any network or hub failure becomes a one-line message
        raise BadInput(
            f"cannot get {SHAREGPT_FILE} from the hub's {SHAREGPT_REPOSITORY}: "
            f"{first_line(error)}; give a local file with --dataset-path"
        ) from error
    return Path(found)


def hub_rows(
    name: str, *, subset: str | None, split: str, seed: int, shuffle: bool
) -> Iterator[Mapping[str, Any]]:
    """Stream the rows of a data set, loading only what is read.

    With `shuffle` they come through a buffer of 1,000 rows that the seed shuffles.

    Raises:
        BadInput: the package `datasets`, the data set, the subset or the split is missing.
    """
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise BadInput(
            "--dataset hf needs the package datasets: pip install 'llmopt[hub]'"
        ) from error
    try:
        rows = datasets.load_dataset(name, name=subset, split=split, streaming=True)
        if shuffle:
            rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        yield from rows
    except Exception as error:  # the library raises many exception types; report one line
        raise BadInput(
            f"data set {name!r} (subset {subset or 'default'}, split {split}) cannot be read: "
            f"{first_line(error)}"
        ) from error


def hub_workload(
    tokenizer: Tokenizer,
    rows: Iterable[Mapping[str, Any]],
    *,
    source: str,
    num_prompts: int,
    max_model_len: int,
    output_len: int | None = None,
) -> Workload:
    """The first `num_prompts` rows with a prompt that fits the context.

    The prompt is the first turn of a conversation (`conversations`, `conversation`, `messages`), or
    a column such as `prompt`, `question`, `instruction` or `text`. The output length is
    `output_len`, else that of the row's response (the second turn, or `output`, `response`,
    `completion`, `answer`), else 256; it is cut to the context.

    Raises:
        BadInput: no such column, or no row that fits.
    """
    pairs: list[tuple[list[int], int]] = []
    left_out = cut = without = 0
    for row in rows:
        found = prompt_and_answer(row, source)
        if found is None:
            without += 1
            continue
        prompt, answer = found
        ids = list(tokenizer.encode(prompt))
        max_output_len = max_model_len - len(ids)
        if max_output_len < 1:
            left_out += 1
            continue
        length = output_len
        if length is None:
            length = len(tokenizer.encode(answer)) if answer else DEFAULT_OUTPUT_LEN
        cut += length > max_output_len
        pairs.append((ids, max(1, min(length, max_output_len))))
        if len(pairs) == num_prompts:
            break
    if not pairs:
        raise BadInput(
            f"{source}: no row gives a prompt ({left_out} longer than the context of "
            f"{max_model_len}, {without} without text)"
        )
    notes = []
    if left_out:
        notes.append(f"{left_out} prompts left out: longer than the context of {max_model_len}")
    if without:
        notes.append(f"{without} rows left out: no text in them")
    if cut:
        notes.append(f"{cut} output lengths cut to the context of {max_model_len}")
    if len(pairs) < num_prompts:
        notes.append(f"{len(pairs)} of {num_prompts} prompts: the data set has no more")
    return Workload("hf", source, numbered(pairs), tuple(notes))


def prompt_and_answer(row: Mapping[str, Any], source: str) -> tuple[str, str | None] | None:
    """(prompt, response or None) of a row; None for an empty row.

    Raises:
        BadInput: no column that could hold a prompt.
    """
    for column in TURNS:
        if isinstance(turns := row.get(column), list):
            said = [said_in(turn) for turn in turns]
            if not said or not said[0]:
                return None
            return said[0], said[1] if len(said) > 1 else None
    for column in PROMPTS:
        if column in row:
            prompt = row[column]
            if not isinstance(prompt, str) or not prompt:
                return None
            answers = (row.get(name) for name in ANSWERS)
            return prompt, next((one for one in answers if isinstance(one, str) and one), None)
    raise BadInput(
        f"{source} has the columns {', '.join(row)}: none of "
        f"{', '.join((*TURNS, *PROMPTS))} is there to take prompts from"
    )


def said_in(turn: Any) -> str:
    """The text of one turn, in ShareGPT's form or in that of chat messages."""
    if isinstance(turn, str):
        return turn
    if isinstance(turn, Mapping):
        text = turn.get("value", turn.get("content"))
        return text if isinstance(text, str) else ""
    return ""
