"""Protocols: windows and scored ranges, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.quality.passage import (
    Passage,
    ProtocolOptions,
    joined_rows,
    leading_special_tokens,
    read_passage,
)


class Letters:
    """One token a character, with a special token in front."""

    def encode(
        self, text: str, /, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]


def passage(
    tmp_path: Path, text: str, context: int = 4, tokens: int = 100, **options: object
) -> Passage:
    path = tmp_path / "text.txt"
    path.write_text(text)
    return read_passage(
        Letters(),
        max_model_len=context,
        num_tokens=tokens,
        path=path,
        options=ProtocolOptions(**options),  # pyright: ignore[reportArgumentType]
    )


def shown(got: Passage) -> list[tuple[str, int]]:
    """Windows as text, with the first scored index."""
    return [
        ("".join(chr(t) if t else "^" for t in window.token_ids), window.first_scored)
        for window in got.windows
    ]


def test_documents(tmp_path: Path) -> None:
    got = passage(tmp_path, "abcdefgh\n\nij\n\n\n\nklm")
    # 9 tokens in windows of 4: the single one left over has nothing to predict.
    assert shown(got) == [("^abc", 1), ("defg", 1), ("^ij", 1), ("^klm", 1)]
    assert [window.document for window in got.windows] == [0, 0, 1, 2]
    assert got.num_scored == 11 and got.num_tokens == 15 and got.longest == 4
    short = passage(tmp_path, "abcdefgh\n\nij\n\n\n\nklm", tokens=6)
    assert shown(short) == [("^abc", 1), ("de", 1)]
    assert short.sha256 != got.sha256


def test_gptq_joins_rows_and_takes_whole_windows(tmp_path: Path) -> None:
    assert joined_rows("ab\n \ncd\n") == "ab\n\n\n\n\ncd\n"
    got = passage(tmp_path, "abcdefgh", name="gptq")
    assert shown(got) == [("^abc", 1), ("defg", 1)]  # "h" fills no window
    assert got.settings == {"window": 4}
    assert shown(passage(tmp_path, "abcdefgh", name="gptq", window=3)) == [
        ("^ab", 1),
        ("cde", 1),
        ("fgh", 1),
    ]
    assert passage(tmp_path, "a" * 5000, 4096, 5000, name="gptq").longest == 2048


def test_strided_scores_each_token_once(tmp_path: Path) -> None:
    got = passage(tmp_path, "abcdefgh", name="strided")
    assert shown(got) == [("^abc", 1), ("bcde", 2), ("defg", 2), ("fgh", 2)]
    assert got.num_scored == 8
    assert shown(passage(tmp_path, "abcdefg", name="strided", stride=4)) == [
        ("^abc", 1),
        ("defg", 1),
    ]
    assert shown(passage(tmp_path, "abcd", name="strided", stride=1)) == [("^abc", 1), ("abcd", 3)]


def test_llama_cpp_scores_second_halves_behind_bos(tmp_path: Path) -> None:
    got = passage(tmp_path, "abcdefghijk\n", name="llama.cpp")
    # The trailing line break is dropped, and BOS takes the place of each window's first token.
    assert shown(got) == [("^abc", 3), ("^efg", 3), ("^ijk", 3)]
    assert got.settings == {"window": 4, "bos": True}
    assert passage(tmp_path, "a" * 2000, 4096, 5000, name="llama.cpp").longest == 512


def test_same_tokens_of_other_ranges_have_another_hash(tmp_path: Path) -> None:
    hashes = {
        passage(tmp_path, "abcdefg", name=name, **more).sha256  # pyright: ignore[reportArgumentType]
        for name, more in (
            ("documents", {}),
            ("gptq", {}),
            ("strided", {"stride": 4}),
            ("strided", {"stride": 2}),
            ("llama.cpp", {}),
        )
    }
    assert len(hashes) == 5


def test_leading_special_tokens() -> None:
    class Ends(Letters):
        def encode(
            self, text: str, /, *, add_special_tokens: bool = True, verbose: bool = True
        ) -> list[int]:
            return [ord(letter) for letter in text] + [9] * add_special_tokens

    assert leading_special_tokens(Letters()) == [0]
    assert leading_special_tokens(Ends()) == []


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("\n\n", {}, "nothing to score"),
        (
            "ab",
            {"name": "gptq"},
            "gives 3 tokens, and gptq needs one window of 4: raise --quality-tokens",
        ),
        ("abcdef", {"name": "llama.cpp"}, "gives 7 tokens, and llama.cpp needs 2 windows of 4"),
        ("", {"name": "strided"}, "gives 1 tokens"),
        ("abcdef", {"name": "gptq", "window": 5}, "window 5 exceeds the model's context of 4"),
        ("abcdef", {"name": "strided", "stride": 5}, "stride 5 exceeds the window of 4"),
        ("abcdef", {"stride": 2}, "for the protocol strided, not for documents"),
        ("abcdef", {"window": 1}, "window 1: documents needs 2 or more"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    tmp_path: Path, text: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        passage(tmp_path, text, **options)  # pyright: ignore[reportArgumentType]


def test_unreadable_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a file"):
        read_passage(Letters(), max_model_len=4, num_tokens=9, path=tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    with pytest.raises(BadInput, match="is not UTF-8: byte 2"):
        read_passage(Letters(), max_model_len=4, num_tokens=9, path=tmp_path / "binary")
