"""Stop strings and incremental text."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.scheduling.outputs import (
    CompletionText,
    IncrementalDetokenizer,
    StopStrings,
    text_decoder,
)
from llmopt.recipes import MODELS
from transformers import AutoTokenizer


def show(
    pieces: list[str], stop: tuple[str, ...], include: bool = False
) -> tuple[list[str], str | None]:
    strings = StopStrings(stop, include=include)
    shown = []
    for piece in pieces:
        text, met = strings.feed(piece)
        shown.append(text)
        if met is not None:
            return shown, met
    return [*shown, strings.flush()], None


def test_a_possible_beginning_is_held_back():
    assert show(["ab", "c", "d"], ("cd",)) == (["ab", "", ""], "cd")
    assert show(["ab", "c", "e"], ("cd",)) == (["ab", "", "ce", ""], None)
    assert show(["ab", "c"], ("cd",)) == (["ab", "", "c"], None)


def test_the_earliest_stop_wins_and_may_be_shown():
    assert show(["one two"], ("two", "one")) == ([""], "one")
    assert show(["x one"], ("one",), include=True) == (["x one"], "one")


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_deltas_give_what_the_whole_gives(text, stops, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    shown, met = show(pieces, tuple(stops))
    # One character at a time a stop string is met where its end is: the whole text's shortest such prefix.
    ends = [(text.find(s) + len(s), s) for s in stops if s in text]
    assert (met is None) == (not ends)
    if met is None:
        assert "".join(shown) == text
    else:
        assert text.startswith("".join(shown) + met)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODELS / "stories3M")


@given(
    data=st.data(),
    text=st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40),
)
def test_text_is_whole_characters_and_adds_up(tokenizer, data, text):
    """Every character that is not in the small vocabulary becomes two to four byte tokens."""
    ids = tokenizer("Once upon a time").input_ids
    out = tokenizer(text, add_special_tokens=False).input_ids
    detokenizer = IncrementalDetokenizer(text_decoder(tokenizer), ids)
    pieces = []
    while out:
        count = data.draw(st.integers(1, len(out)))
        pieces.append(detokenizer.feed(out[:count]))
        out = out[count:]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    pieces.append(detokenizer.flush())
    whole = tokenizer.decode(
        ids + tokenizer(text, add_special_tokens=False).input_ids, skip_special_tokens=True
    )
    assert "Once upon a time" + "".join(pieces) == whole


def test_a_tokenizer_that_changes_the_text_decodes_itself(tokenizer):
    assert text_decoder(tokenizer) is tokenizer.backend_tokenizer
    changing = AutoTokenizer.from_pretrained(
        MODELS / "stories3M", clean_up_tokenization_spaces=True
    )
    assert text_decoder(changing) is changing

    class Own(type(tokenizer)):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    own = Own.from_pretrained(MODELS / "stories3M")
    assert text_decoder(own) is own


def test_an_unfinished_character_shows_at_the_end(tokenizer):
    ids = tokenizer("漢", add_special_tokens=False).input_ids
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer("a").input_ids)
    assert detokenizer.feed(ids[:-1]).strip() == ""
    assert "\ufffd" in detokenizer.flush()


def test_the_first_word_after_the_prompt_keeps_its_space(tokenizer):
    prompt, more = tokenizer("Once").input_ids, tokenizer("Once upon").input_ids
    assert more[: len(prompt)] == prompt
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    assert "".join(detokenizer.feed([token]) for token in more[len(prompt) :]) == " upon"


def test_deferred_text_is_read_in_any_order_and_by_any_thread(tokenizer):
    """As the deltas that each token gives at once, though outputs are read late and out of order."""
    params = SamplingParams()
    prompt = tokenizer("Once upon a time").input_ids
    token_ids = tokenizer("there was a café, naïve 😀 and small. The end 😀").input_ids
    at_once = CompletionText(text_decoder(tokenizer), prompt, params)
    runs = [token_ids[:1], *(token_ids[at : at + 2] for at in range(1, len(token_ids), 2))]
    expected = [
        "".join(
            at_once.feed(token, is_last=run is runs[-1] and place == len(run) - 1)[0]
            for place, token in enumerate(run)
        )
        for run in runs
    ]
    assert "".join(expected)
    deferred = CompletionText(text_decoder(tokenizer), prompt, params)
    assert (
        deferred.is_deferred
        and not CompletionText(
            text_decoder(tokenizer), prompt, SamplingParams(stop=("x",))
        ).is_deferred
    )
    ends = list(accumulate(map(len, runs)))
    for run, end in zip(runs, ends, strict=True):
        deferred.add(run, end, is_last=run is runs[-1])
    order = random.Random(3).sample(range(len(runs)), len(runs))
    with ThreadPoolExecutor(4) as threads:
        read = dict(
            zip(order, threads.map(lambda at: deferred.delta(ends[at]), order), strict=True)
        )
    assert [read[at] for at in range(len(runs))] == expected
