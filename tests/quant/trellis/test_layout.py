"""EXL3's codebooks and tiles against slow decoders, written from their definitions a bit at a time."""

from __future__ import annotations

import struct

import pytest
import torch
from llmopt.quant.kinds.trellis.viterbi import (
    ORDER,
    codebook,
    from_sequences,
    pack_states,
    to_sequences,
    unpack_states,
)


def half(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]


def rounded(value: float) -> float:
    return struct.unpack("<e", struct.pack("<e", value))[0]


def slow_value(state: int, name: str) -> float:
    """The definition, a state at a time; Python's floats are exact for both sums."""
    word = state * {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[name]
    word = (word + (64248484 if name == "3inst" else 0)) % 2**32
    if name == "mul1":
        total = sum(word >> shift & 255 for shift in (0, 8, 16, 24))
        return rounded(half(0x6400 + total) * half(0x1EEE) + half(0xC931))
    word = word & 0x8FFF8FFF ^ 0x3B603B60
    return rounded(half(word) + half(word >> 16))


@pytest.mark.parametrize("name", ["3inst", "mcg", "mul1"])
def test_a_codebook_is_that_of_its_definition(name: str) -> None:
    values = codebook(name)
    states = [*range(0, 65536, 97), 1, 32768, 65535]
    assert [float(values[state]) for state in states] == [slow_value(s, name) for s in states]
    # About normal: the standard deviation that exllamav3 names for the sum of two halves, 1 for the sum of bytes.
    deviation = 1.0 if name == "mul1" else 1.24371088
    assert float(values.astype("float64").std()) == pytest.approx(deviation, rel=1e-3)


def slow_states(words: list[int], bits: int) -> list[int]:
    """The states of a packed tile: 16 bits of the stream up to each weight's own, around its end."""
    swapped = [words[index ^ 1] & 0xFFFF for index in range(len(words))]
    stream = "".join(f"{word:016b}" for word in swapped)
    states = []
    for weight in range(256):
        end = (weight + 1) * bits
        states.append(int("".join(stream[i % len(stream)] for i in range(end - 16, end)), 2))
    return states


@pytest.mark.parametrize("bits", range(1, 9))
def test_states_are_packed_as_the_slow_decoder_reads_them(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(-(2**15), 2**15, (2, 3, 16 * bits), generator=generator).to(torch.int16)
    states = unpack_states(words, bits)
    assert states[1, 2].tolist() == slow_states(words[1, 2].tolist(), bits)
    assert torch.equal(pack_states(states, bits), words)
    assert torch.equal(states >> bits, states.roll(1, -1) & (2 ** (16 - bits) - 1))


def test_weights_of_a_tile_are_in_the_order_of_a_tensor_core() -> None:
    # Lane 5 holds inputs 2, 3, 10 and 11 of outputs 1 and 9.
    expected = [(row, column) for column in (1, 9) for row in (2, 3, 10, 11)]
    assert [divmod(int(place), 16) for place in ORDER[40:48]] == expected
    assert sorted(ORDER.tolist()) == list(range(256))
    values = torch.arange(32 * 48.0).view(32, 48)
    sequences = to_sequences(values)
    assert sequences.shape == (2, 3, 256)
    assert sequences[1, 2, 40] == values[16 + 2, 32 + 1]
    assert torch.equal(from_sequences(sequences), values)
