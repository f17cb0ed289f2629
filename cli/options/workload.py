"""The options that say what is sent and when, shared by the commands that make a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DATA, LOAD = "Data", "Load"


def _data(help_text: str, *names: str) -> object:
    return typer.Option(*names, help=help_text, rich_help_panel=DATA)


def _load(help_text: str, *names: str) -> object:
    return typer.Option(*names, help=help_text, rich_help_panel=LOAD)


Dataset = Annotated[
    str,
    _data(
        "sharegpt, random, prefix_repetition, sonnet, custom, hf, azure, burstgpt, mooncake, or a "
        "file. sharegpt without a path is a bundled stand-in; azure and mooncake have bundled slices.",
        "--dataset",
        "--dataset-name",
    ),
]
DatasetPath = Annotated[
    Path | None,
    _data("The data set's file; with hf OWNER/NAME; hub fetches ShareGPT's own file."),
]
NumPrompts = Annotated[
    int | None, _data("Requests in a pass. Default: 48, or all of a frozen workload.")
]
OutputLen = Annotated[
    int | None,
    _data(
        "Tokens to generate. Default: as the data set says.",
        "--output-len",
        "--sharegpt-output-len",
        "--custom-output-len",
        "--hf-output-len",
    ),
]
RandomInputLen = Annotated[int | None, _data("Prompt tokens of random. Default: 1024.")]
RandomOutputLen = Annotated[int | None, _data("Output tokens of random. Default: 128.")]
RandomPrefixLen = Annotated[int, _data("Common first tokens of random.")]
RandomRangeRatio = Annotated[float, _data("Lengths vary by ± this share.")]
PrefixLen = Annotated[
    int | None, _data("Tokens of each prefix. Default: 256.", "--prefix-repetition-prefix-len")
]
SuffixLen = Annotated[
    int | None, _data("Tokens behind the prefix. Default: 256.", "--prefix-repetition-suffix-len")
]
NumPrefixes = Annotated[int, _data("Different prefixes.", "--prefix-repetition-num-prefixes")]
PrefixOutputLen = Annotated[
    int | None, _data("Tokens to generate. Default: 128.", "--prefix-repetition-output-len")
]
SonnetInputLen = Annotated[int | None, _data("Prompt tokens of sonnet. Default: 550.")]
SonnetOutputLen = Annotated[int | None, _data("Output tokens of sonnet. Default: 150.")]
SonnetPrefixLen = Annotated[int | None, _data("Common first tokens of sonnet. Default: 200.")]
HfSubset = Annotated[str | None, _data("Configuration of a hub data set.")]
HfSplit = Annotated[str, _data("Split of a hub data set.")]
TraceStart = Annotated[float, _data("Seconds into the trace to begin at.")]
TraceSpeed = Annotated[float, _data("Replay this many times as fast as it was recorded.")]
TraceLengths = Annotated[
    str | None,
    _data(
        "clip or scale requests that the context cannot hold. Default: clip; scale for mooncake."
    ),
]
DisableShuffle = Annotated[bool, _data("Keep the file's order.", "--disable-shuffle")]
NoOversample = Annotated[
    bool, _data("Do not repeat prompts when the file has too few.", "--no-oversample")
]
RequestRate = Annotated[
    float | None, _load("Requests a second, or inf for all at once. Default: closed loop.")
]
Burstiness = Annotated[float, _load("Shape of the gamma gaps: 1 is Poisson, inf is constant.")]
RampUpStrategy = Annotated[str | None, _load("linear or exponential: the rate climbs.")]
RampUpStartRps = Annotated[float | None, _load("Requests a second at the start of the ramp.")]
RampUpEndRps = Annotated[float | None, _load("Requests a second at its end.")]
Seed = Annotated[int, _load("Of the prompts, their order and the gaps.")]
