"""Parts of a decode step in words: the largest one, and the reason for a change of its time.

No torch: comparisons and reports of recorded runs import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..page.page import number, percent

PARTS = {
    "scheduling": "scheduling the batch of a step, and processing its outputs",
    "preparing": "input preparation: token ids, positions, slot mapping, block tables",
    "kernels": "the model's forward pass and LM head: kernels and launching them",
    "sampling": "sampling tokens from the logits, and copying them to the host",
    "detokenizing": "tokens to text, and building the outputs",
    "rest": "everything else within the step",
}
DRAFTING = {"drafting": "proposing draft tokens"}
"""The additional phase of steps with speculative decoding."""
FORMULA = (
    "mean over the decode-only steps of a separate pass without async scheduling, in which the engine times "
    "every phase; on a GPU each phase waits for its kernels"
)


def split_sentence(result: Mapping[str, Any]) -> str | None:
    """The largest phase of a step, and whether the forward pass is replayed from a graph."""
    if not (split := result["llmopt"].get("step_split")):
        return None
    part, spent = max(split["parts_ms"].items(), key=lambda pair: pair[1])
    replayed = ""
    if (count := split.get("replayed_steps")) == 0:
        replayed = " The forward pass is eager."
    elif count:
        share = percent(count / split["num_steps"], 0)
        replayed = f" The forward pass is replayed from a captured graph in {share} of the steps."
    return (
        f"Of the {number(split['step_ms'])} ms of a decode step {percent(spent / split['step_ms'], 0)} go to "
        f"{part} ({(PARTS | DRAFTING)[part]}).{replayed}"
    )


def reason_in_words(base: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Explanation of a decode-time change by smaller weights and the phase that changed most; or None."""
    splits = [side["llmopt"].get("step_split") for side in (base, new)]
    bytes_held = [side["llmopt"]["memory"]["weight_bytes"] for side in (base, new)]
    roofline = base["llmopt"].get("roofline")
    if None in (*splits, *bytes_held) or not roofline or bytes_held[1] >= bytes_held[0]:
        return None
    before, after = splits
    saved = 1000 * (bytes_held[0] - bytes_held[1]) / roofline["ceilings"]["bandwidth"]
    change = after["step_ms"] - before["step_ms"]
    tpot_before, tpot_after = (side.get("median_tpot_ms") for side in (base, new))
    if tpot_before and tpot_after and (tpot_after - tpot_before) * change < 0:
        return None
    moves = {
        part: after["parts_ms"].get(part, 0.0) - before["parts_ms"].get(part, 0.0)
        for part in before["parts_ms"] | after["parts_ms"]
    }
    # The phase with the largest change in the direction of the total.
    part = (min if change < 0 else max)(moves, key=lambda name: moves[name])
    share = "most" if abs(moves[part]) >= abs(change) / 2 else "the largest part"
    sentence = (
        f"The bytes saved take {number(saved, 3)} ms to read at the measured bandwidth, "
        f"{percent(saved / before['step_ms'])} of the base's decode step of "
        f"{number(before['step_ms'])} ms: more than that smaller weights alone cannot save. "
        f"The step is {number(abs(change))} ms "
        f"{'shorter' if change < 0 else 'longer'}; {share} of it is {part} ({moves[part]:+.2f} ms)"
    )
    if change >= 0 and part == "kernels":
        if before.get("replayed_steps") and not after.get("replayed_steps", True):
            return f"{sentence}: the base's forward pass is replayed from captured graphs, this one is eager."
        return f"{sentence}: dequantization costs more than the saved bytes gain."
    return f"{sentence}."
