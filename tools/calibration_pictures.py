"""Draw the bundled calibration pictures: shapes, charts, tables, text, scenes; each with what is to see.

    python tools/calibration_pictures.py

Writes `recipes/data/pictures`: PNG files of a few colours, and `pairs.jsonl` with a question and an answer
for each.
The same command draws the same bytes with the same Pillow.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "data" / "pictures"
COLOURS = {
    "red": "#d03030", "blue": "#2858c8", "green": "#2c9048", "yellow": "#e8c020", "purple": "#7838a8",
    "orange": "#e87820", "black": "#181818", "brown": "#805020",
}  # fmt: skip
PALETTE = 32  # colours of a file
Drawn = tuple[Image.Image, str, str]
"""A picture, a question, and the answer."""


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.png"):
        old.unlink()
    rows = []
    for name, (picture, question, answer) in pictures():
        path = FOLDER / f"{name}.png"
        picture.quantize(PALETTE).save(path, optimize=True)
        turns = [("user", question), ("assistant", answer)]
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append({"messages": messages, "images": [path.name]})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (FOLDER / "pairs.jsonl").write_text(lines, encoding="utf-8")
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"{len(rows)} pictures, {size:,} bytes in {FOLDER.name}")


def pictures() -> Iterator[tuple[str, Drawn]]:
    kinds: tuple[tuple[str, Callable[[random.Random], Drawn], int], ...] = (
        ("shapes", shapes, 8), ("bars", bars, 6), ("lines", lines, 5), ("pie", pie, 3),
        ("table", table, 4), ("sign", sign, 5), ("scene", scene, 5), ("grid", grid, 4),
    )  # fmt: skip
    for name, draw, count in kinds:
        for number in range(count):
            yield f"{name}-{number}", draw(random.Random(f"{name} {number}"))


def canvas(
    width: int, height: int, colour: str = "white"
) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    picture = Image.new("RGB", (width, height), colour)
    return picture, ImageDraw.Draw(picture)


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def shapes(chance: random.Random) -> Drawn:
    picture, draw = canvas(chance.choice((224, 320)), 224)
    said = []
    for place in range(picture.width // 96):
        colour, kind = chance.choice(list(COLOURS)), chance.choice(("circle", "square", "triangle"))
        size, top = chance.randint(44, 84), chance.randint(10, 120)
        left = 8 + 100 * place
        box = (left, top, left + size, top + size)
        if kind == "circle":
            draw.ellipse(box, fill=COLOURS[colour])
        elif kind == "square":
            draw.rectangle(box, fill=COLOURS[colour])
        else:
            corners = [(left, top + size), (left + size, top + size), (left + size // 2, top)]
            draw.polygon(corners, fill=COLOURS[colour])
        said.append(f"a {colour} {kind}")
    listed = ", ".join(said[:-1]) + f" and {said[-1]}"
    return picture, "Which shapes are there, from left to right?", f"From left to right: {listed}."


def bars(chance: random.Random) -> Drawn:
    picture, draw = canvas(320, 240)
    names = chance.sample(["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"], 5)
    values = [chance.randint(5, 95) for _ in names]
    title = chance.choice(("Visitors", "Litres sold", "Points", "Hours"))
    draw.text((110, 6), title, "black", font(18))
    draw.line([(34, 30), (34, 206), (312, 206)], "black", 2)
    for tick in range(0, 101, 25):
        draw.text((6, 198 - 1.6 * tick), str(tick), "black", font(11))
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        left = 46 + 53 * place
        colour = list(COLOURS.values())[place]
        draw.rectangle((left, 205 - 1.6 * value, left + 36, 205), fill=colour)
        draw.text((left + 4, 212), name, "black", font(14))
    best = max(zip(values, names, strict=True))
    every = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
    answer = f"The bar chart '{title}' shows {every}. The highest is {best[1]} with {best[0]}."
    return picture, "Read the values of this chart. Which one is the highest?", answer


def lines(chance: random.Random) -> Drawn:
    picture, draw = canvas(320, 224)
    draw.line([(24, 12), (24, 200), (310, 200)], "black", 2)
    said = []
    for colour in chance.sample(list(COLOURS), 2):
        slope, start, wave = chance.uniform(-70, 70), chance.uniform(80, 130), chance.uniform(0, 16)
        points = [
            (24 + x, 200 - start - slope * x / 280 - wave * math.sin(x / 22))
            for x in range(0, 281, 4)
        ]
        draw.line(points, COLOURS[colour], 3)
        trend = "rises" if slope > 12 else "falls" if slope < -12 else "stays about level"
        said.append(f"the {colour} line {trend}")
    draw.text((150, 204), "time", "black", font(14))
    return picture, "Describe the trend of each line.", f"Over time {said[0]}, and {said[1]}."


def pie(chance: random.Random) -> Drawn:
    picture, draw = canvas(256, 224)
    shares = [chance.randint(1, 9) for _ in range(4)]
    colours, begin, said = chance.sample(list(COLOURS), 4), 0.0, []
    for colour, share in zip(colours, shares, strict=True):
        end = begin + 360 * share / sum(shares)
        draw.pieslice((28, 12, 228, 212), begin, end, fill=COLOURS[colour], outline="white")
        said.append(f"{colour} {100 * share / sum(shares):.0f} %")
        begin = end
    return picture, "How large is each slice of the pie?", f"About {', '.join(said)}."


def table(chance: random.Random) -> Drawn:
    picture, draw = canvas(300, 200)
    goods = chance.sample(["apples", "bread", "milk", "rice", "tea", "salt", "eggs"], 4)
    rows = [(name, chance.randint(1, 12), chance.randint(50, 999) / 100) for name in goods]
    for number, cells in enumerate([("item", "count", "price"), *rows]):
        top = 14 + 34 * number
        for left, cell in zip((16, 130, 210), cells, strict=True):
            text = f"{cell:.2f}" if isinstance(cell, float) else str(cell)
            draw.text((left, top), text, "black", font(18))
        draw.line([(10, top + 28), (290, top + 28)], "#808080", 2 if number == 0 else 1)
    total = sum(count * price for _, count, price in rows)
    every = "; ".join(f"{count} {name} at {price:.2f}" for name, count, price in rows)
    return (
        picture,
        "What does the table list, and what is the sum?",
        f"{every}. In all {total:.2f}.",
    )


def sign(chance: random.Random) -> Drawn:
    colour = chance.choice(("blue", "green", "red", "black", "brown"))
    picture, draw = canvas(288, 160, COLOURS[colour])
    place = chance.choice(("Platform", "Gate", "Room", "Exit", "Aisle"))
    words = f"{place} {chance.randint(1, 48)}"
    second = chance.choice(
        ("please keep clear", "open 9:00 to 17:30", "mind the step", "staff only")
    )
    draw.text((24, 30), words, "white", font(40))
    draw.text((26, 100), second, "white", font(22))
    answer = f"It is a {colour} sign with white letters: '{words}', and below it '{second}'."
    return picture, "What is written on the sign?", answer


def scene(chance: random.Random) -> Drawn:
    night = chance.random() < 0.4
    picture, draw = canvas(288, 224, "#182048" if night else "#a8d8f0")
    draw.rectangle((0, 150, 288, 224), fill="#205028" if night else "#58a848")
    x = chance.randint(20, 230)
    draw.ellipse((x, 14, x + 36, 50), fill="#f0f0d0" if night else "#f8d820")
    roof, wall = chance.sample(list(COLOURS), 2)
    left = chance.randint(30, 130)
    draw.rectangle((left, 100, left + 90, 170), fill=COLOURS[wall])
    draw.polygon([(left - 10, 100), (left + 100, 100), (left + 45, 60)], fill=COLOURS[roof])
    draw.rectangle((left + 36, 130, left + 56, 170), fill="#604020")
    trees = chance.randint(1, 3)
    for number in range(trees):
        at = (left + 120 + 34 * number) % 260
        draw.rectangle((at + 9, 140, at + 15, 172), fill="#604020")
        draw.ellipse((at, 108, at + 24, 148), fill="#187030")
    sky = "the moon in a dark sky" if night else "the sun in a clear sky"
    count = {1: "one tree", 2: "two trees", 3: "three trees"}[trees]
    return (
        picture,
        "Describe the picture.",
        f"A {wall} house with a {roof} roof and {count}, {sky}.",
    )


def grid(chance: random.Random) -> Drawn:
    side = chance.choice((4, 5, 6))
    picture, draw = canvas(224, 224)
    step, count, colour = 200 // side, 0, chance.choice(list(COLOURS))
    for row in range(side):
        for column in range(side):
            box = (
                12 + step * column,
                12 + step * row,
                10 + step * (column + 1),
                10 + step * (row + 1),
            )
            filled = chance.random() < 0.4
            draw.rectangle(box, fill=COLOURS[colour] if filled else "#e8e8e8")
            count += filled
    question = f"How many cells of the {side} by {side} grid are {colour}?"
    return picture, question, f"{count} of the {side * side} cells are {colour}."


if __name__ == "__main__":
    main()
