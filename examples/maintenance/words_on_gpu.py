"""Batches of pictures with words and small charts, composed from drawn letters where they train.

A batch has one size of picture, one kind of question and one length of each word, so that all of
it is made by a few operations on whole tensors. Fonts, sizes, places, colors and letters are those
of each picture alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from draw_words import BASELINE, BOX, CHARACTERS, LEFT
from torch import Tensor
from torch.nn import functional

SPACE = CHARACTERS.index(" ")
MARKS = tuple(CHARACTERS.index(each) for each in ".,-:/")
DIGIT, UPPER, LETTERS = 52, 26, 26
TALLEST = 0.95, 1.25  # of a line above its baseline and in all, in sizes of the font
SQUARE = 32  # pixels along a side of a token
SLOT_ROWS, SLOT_COLUMNS = 4, 16  # places in a token where a letter's center may lie
SLOTS = SLOT_ROWS * SLOT_COLUMNS
MOST_PLACES = 16  # of letters in a word that are told apart
Piece = Tensor | Sequence[int]  # letters [B, n] or token ids that all pictures share

READ = ("What does it say?", "Read it.", "Read the text.", "What is written here?")
ALL = ("Read all words.",)
SIDES = {"left": (0, -1), "right": (0, 1), "above": (-1, 0), "below": (1, 0)}
WORD_AT = {
    "left": 'Which word is left of "',
    "right": 'Which word is right of "',
    "above": 'Which word is above "',
    "below": 'Which word is below "',
}
END_OF_NAME = '"?'
CHART = {"highest": "Which bar is highest?", "lowest": "Which bar is lowest?"}
VALUE = 'What is the value of "'
QUESTIONS = (*READ, *ALL, *(f"{each}{END_OF_NAME}" for each in (*WORD_AT.values(), VALUE)))
QUESTIONS += tuple(CHART.values())


@dataclass(frozen=True)
class Letters:
    """Drawn letters of all fonts and sizes; R = fonts times sizes."""

    squares: Tensor  # [R, characters, BOX, BOX] uint8
    advances: Tensor  # [R, characters] float32
    sizes: Tensor  # [R] int64
    shares: Tensor  # [R], how often a font and size is drawn


@dataclass(frozen=True)
class Batch:
    """Pictures, and what to say of them."""

    pixels: Tensor  # [B, 3, height, width], 0 to 1
    question: list[Piece]
    answer: list[Piece]
    characters: Tensor  # [B, tokens * SLOTS] int64: 1 + the character whose center lies there, or 0
    places: Tensor  # [B, tokens * SLOTS] int64: its place in its word


@dataclass(frozen=True)
class Words:
    """Letters on a picture: [B, n] each."""

    tallest: int  # size that no font exceeds
    codes: Tensor  # letters
    rows: Tensor  # fonts and sizes
    left: Tensor  # origins
    baseline: Tensor
    places: Tensor  # of letters in their words

    @property
    def each(self) -> tuple[Tensor, ...]:
        """Values of letters, in the order of the fields."""
        return self.codes, self.rows, self.left, self.baseline, self.places


def joined(words: Sequence[Words]) -> Words:
    """Letters of several words together."""
    parts = (torch.cat(part, dim=1) for part in zip(*(each.each for each in words), strict=True))
    return Words(max(each.tallest for each in words), *parts)


def read_letters(path: Path, device: str, fonts: int, sizes: tuple[int, int]) -> Letters:
    """Letters of the first `fonts` fonts between two sizes; small ones are drawn more often."""
    with numpy.load(path) as found:
        parts = [torch.from_numpy(found[name]) for name in ("squares", "advances", "sizes")]
    squares, advances, heights = parts
    kept = (heights >= sizes[0]) & (heights <= sizes[1])
    per_font = len(torch.unique(heights))
    kept[fonts * per_font :] = False
    squares, advances, heights = squares[kept], advances[kept], heights[kept]
    shares = torch.where(heights <= 12, 3.0, torch.where(heights <= 16, 1.5, 1.0))
    return Letters(*(part.to(device) for part in (squares, advances, heights, shares)))


class Painter:
    """Makes batches; chance comes from the CPU for what a batch shares, else from the device."""

    def __init__(self, letters: Letters, encode: Any, newline: int, seed: int) -> None:
        """`encode` makes token ids of a question."""
        self.letters, self.encode, self.newline = letters, encode, newline
        self.device = letters.sizes.device
        self.marks = torch.tensor(MARKS, device=self.device)
        self.own = torch.Generator(self.device).manual_seed(seed)
        self.shared = torch.Generator().manual_seed(seed)

    def batch(self, count: int, easy: bool, crowded: float = 0.2, plain: bool = False) -> Batch:
        """A batch: short words alone, while it is easy; of one case and color where plain.

        A share of the batches is `crowded`: with many words, of which one is asked for.
        """
        crowd = self._integer(0, 100) < 100 * crowded
        if plain:
            return (
                self._crowd(count, (2, 2), (32, 96), 4, plain=True)
                if crowd
                else self._one(count, 32, 64, [4], plain=True)
            )
        if crowd:
            shapes = [(2, 2, 32, 128), (3, 2, 64, 128), (4, 2, 64, 128), (4, 3, 64, 192)]
            shapes += [(3, 3, 64, 192), (6, 2, 96, 128), (4, 2, 96, 192)]
            rows, columns, height, width = self._choice(shapes)
            length = self._integer(2, 1 + min(8, width // columns // 10))
            return self._crowd(count, (rows, columns), (height, width), length)
        if easy:
            high, wide = self._choice([(32, 96), (32, 128), (64, 128)])
            return self._one(count, high, wide, [self._integer(3, 7)])
        return self._question(count)

    def _question(self, count: int) -> Batch:
        """A batch of any kind but crowds."""
        kind = self._integer(0, 100)
        if kind < 45:
            shapes = [(32, 96), (32, 128), (64, 128), (64, 128), (64, 192), (96, 128), (128, 128)]
            height, width = self._choice(shapes)
            return self._one(count, height, width, [self._integer(2, 7 if width < 128 else 10)])
        if kind < 55:
            height, width = self._choice([(32, 192), (64, 192), (64, 256)])
            return self._one(count, height, width, [self._integer(2, 7) for _ in "ab"])
        if kind < 90:
            grids = [(1, 2, 64, 192), (1, 3, 64, 256), (2, 1, 64, 128), (3, 1, 96, 128)]
            grids += [(2, 2, 64, 192), (2, 2, 96, 192)]
            rows, columns, height, width = self._choice(grids)
            return self._several(count, (rows, columns), (height, width), kind < 70)
        return self._chart(count)

    def _integer(self, least: int, end: int) -> int:
        return int(torch.randint(least, end, (), generator=self.shared))

    def _choice(self, among: Sequence[Any]) -> Any:
        return among[self._integer(0, len(among))]

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.own, device=self.device)

    def _random(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.own, device=self.device)

    def word(self, count: int, length: int, plain: bool = False) -> Tensor:
        """Words in one case, or numbers: [count, length] characters."""
        letters = self._random(LETTERS, count, length)
        if plain:
            return letters
        kind = self._random(9, count)[:, None]
        upper = letters + UPPER
        cap = letters.clone()
        # A capital I looks like an l in most fonts.
        cap[:, 0] = torch.where(cap[:, 0] == 8, 11, cap[:, 0]) + UPPER
        digits = DIGIT + self._random(10, count, length)
        if length > 3:
            marks = self.marks[self._random(len(MARKS), count, 1)]
            place = 1 + self._random(length - 2, count, 1)
            marked = digits.scatter(1, place, marks)
            digits = torch.where(self._rand(count, 1) < 0.25, marked, digits)
        words = torch.where(kind < 4, letters, torch.where(kind < 5, cap, upper))
        return torch.where(kind >= 6, digits, words)

    def put(self, codes: Tensor, cell: Sequence[float], plain: bool = False) -> Words:
        """Letters somewhere in a cell: left, top, width and height; in a size that fits there."""
        count, n = codes.shape
        rows = torch.multinomial(self.letters.shares, count * 6, True, generator=self.own)
        rows = rows.view(count, 6)
        sizes = self.letters.sizes[rows].float()
        widths = self.letters.advances[rows[:, :, None], codes[:, None]].sum(-1) + 2
        fits = (widths <= cell[2] - 2) & (sizes * TALLEST[1] <= cell[3])
        smaller = sizes + 100 * ~fits + 0.01 * widths
        first = torch.where(fits.any(1), fits.float().argmax(1), smaller.argmin(1))[:, None]
        row, size = rows.gather(1, first)[:, 0], sizes.gather(1, first)[:, 0]
        moves = self.letters.advances[row[:, None], codes]
        if not plain:
            chance = self._rand(count, n)
            moves = moves + (chance < 0.04).float() - (chance > 0.96).float()
            moves = moves + (self._rand(count, 1) < 0.06).float()
        ends = moves.cumsum(1)
        free = (cell[2] - 2 - ends[:, -1]).clamp(min=0, max=8 if plain else None)
        left = cell[0] + 1 + torch.floor(self._rand(count) * free)
        lower = (cell[3] - size * TALLEST[1]).clamp(min=0, max=3 if plain else None)
        top = cell[1] + self._rand(count) * lower
        baseline = torch.round(top + size * TALLEST[0])
        return Words(
            max(11, min(28, int(cell[3] / TALLEST[1]))),
            codes,
            row[:, None].expand_as(codes),
            left[:, None] + ends - moves,
            baseline[:, None].expand(count, n),
            torch.arange(n, device=self.device).expand_as(codes),
        )

    def _one(
        self, count: int, height: int, width: int, lengths: Sequence[int], plain: bool = False
    ) -> Batch:
        parts = [self.word(count, length, plain) for length in lengths]
        space = torch.full((count, 1), SPACE, device=self.device)
        codes = torch.cat([p for part in parts for p in (space, part)][1:], dim=1)
        words = self.put(codes, (0, 0, width, height), plain)
        question: list[Piece] = [self.encode(READ[0] if plain else self._choice(READ))]
        return self._painted([words], (height, width), question, [codes], plain)

    def _several(
        self, count: int, grid: tuple[int, int], shape: tuple[int, int], all_words: bool
    ) -> Batch:
        """Words in the cells of a grid; all are read, or one is asked for by its neighbor."""
        high, wide = shape[0] / grid[0], shape[1] / grid[1]
        most = min(8, int(wide) // 11)
        cells = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
        codes = [self.word(count, self._integer(2, most + 1)) for _ in cells]
        words = [
            self.put(each, (c * wide, r * high, wide, high))
            for each, (r, c) in zip(codes, cells, strict=True)
        ]
        answer: list[Piece] = []
        if all_words:
            question: list[Piece] = [self.encode(ALL[0])]
            for each in codes:
                answer += [[self.newline], each]
            return self._painted(words, shape, question, answer[1:])
        question, answer = self._neighbors(cells, codes)
        return self._painted(words, shape, question, answer)

    def _neighbors(
        self, cells: list[tuple[int, int]], codes: Sequence[Tensor]
    ) -> tuple[list[Piece], list[Piece]]:
        """A question after the neighbor of a word, and its answer."""
        pairs = [
            (side, cells.index((r, c)), cells.index((r + down, c + right)))
            for side, (down, right) in SIDES.items()
            for r, c in cells
            if (r + down, c + right) in cells
        ]
        side, known, wanted = self._choice(pairs)
        question = [self.encode(WORD_AT[side]), codes[known], self.encode(END_OF_NAME)]
        return question, [codes[wanted]]

    def _crowd(
        self,
        count: int,
        grid: tuple[int, int],
        shape: tuple[int, int],
        length: int,
        plain: bool = False,
    ) -> Batch:
        """Words of one length in all cells of a grid; one is asked for by its neighbor."""
        cells = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
        high, wide = shape[0] / grid[0], shape[1] / grid[1]
        codes = self.word(count * len(cells), length, plain)
        put = self.put(codes, (0, 0, wide, high), plain)
        places = torch.arange(len(cells), device=self.device)
        left = torch.floor(places % grid[1] * wide)[:, None]
        top = torch.floor(places // grid[1] * high)[:, None]
        split = [part.reshape(count, len(cells), length) for part in put.each]
        split[2], split[3] = split[2] + left, split[3] + top
        words = Words(put.tallest, *(part.flatten(1) for part in split))
        question, answer = self._neighbors(cells, split[0].unbind(1))
        return self._painted([words], shape, question, answer, plain)

    def _chart(self, count: int) -> Batch:
        """Bars with a letter below each, and a number above."""
        height, width = self._choice([(96, 128), (96, 160), (128, 128)])
        bars = self._integer(3, 6)
        order = self._rand(count, LETTERS).argsort(1)[:, :bars]
        names = order + UPPER
        names = torch.where(names == UPPER + 8, UPPER + 25, names)  # no I, maybe two of Z
        numbers = DIGIT + self._random(10, count, bars, 2)
        space, wide = height - 44, width / bars
        levels = self._rand(count, bars).argsort(1).float()  # all different
        tall = 6 + torch.floor((levels + 0.6 * self._rand(count, bars)) * (space - 6) / bars)
        words, boxes = [], []
        kind = self._choice(["highest", "lowest", "value"])
        for n in range(bars):
            words.append(self.put(names[:, n, None], (n * wide, height - 20, wide, 20)))
            edge = n * wide + wide * 0.2
            boxes.append((edge, edge + wide * 0.6, height - 21 - tall[:, n], height - 21))
            above = self.put(numbers[:, n], (n * wide, 0, wide, 20))
            floor = torch.floor(height - 25 - tall[:, n, None]).expand_as(above.left)
            words.append(replace(above, baseline=floor))
        if kind == "value":
            n = self._integer(0, bars)
            question = [self.encode(VALUE), names[:, n, None], self.encode(END_OF_NAME)]
            return self._painted(words, (height, width), question, [numbers[:, n]], boxes=boxes)
        best = tall.argmax(1) if kind == "highest" else tall.argmin(1)
        question = [self.encode(CHART[kind])]
        answer: list[Piece] = [names.gather(1, best[:, None])]
        return self._painted(words, (height, width), question, answer, boxes=boxes)

    def _painted(
        self,
        words: list[Words],
        shape: tuple[int, int],
        question: list[Piece],
        answer: list[Piece],
        plain: bool = False,
        boxes: Sequence[tuple[float, float, Tensor, int]] = (),
    ) -> Batch:
        letters = joined(words)
        ink = self._ink(letters, shape)
        height, width = shape
        x = torch.arange(width, device=self.device)
        y = torch.arange(height, device=self.device)
        for left, right, top, bottom in boxes:
            inside = (y >= top[:, None]) & (y < bottom)
            ink = torch.maximum(ink, (inside[:, :, None] & (x >= left) & (x < right)).float())
        scale = 1.0, 1.0
        if not plain and self._integer(0, 8) == 0:
            scale = self._integer(95, 108) / 100, self._integer(95, 108) / 100
            ink = self._scaled(ink, scale)
        characters, places = self._slots(letters, shape, scale)
        pixels = ink[:, None].expand(-1, 3, -1, -1)
        return Batch(
            1 - pixels if plain else self._colored(pixels), question, answer, characters, places
        )

    def _ink(self, words: Words, shape: tuple[int, int]) -> Tensor:
        """Coverage of each pixel: [B, height, width] float32."""
        height, width = shape
        count = len(words.codes)
        top, bottom = max(0, BASELINE - words.tallest - 1), BASELINE + words.tallest // 3 + 3
        right = LEFT + words.tallest * 6 // 5 + 2
        rows = torch.arange(top, min(BOX, bottom), device=self.device)
        columns = torch.arange(min(BOX, right), device=self.device)
        squares = self.letters.squares[:, :, top:bottom, :right][words.rows, words.codes]
        x = torch.round(words.left).long()[..., None] - LEFT + columns  # [B, n, columns]
        y = words.baseline.long()[..., None] - BASELINE + rows  # [B, n, rows]
        inside = ((y >= 0) & (y < height))[..., None] & ((x >= 0) & (x < width))[..., None, :]
        index = y.clamp(0, height - 1)[..., None] * width + x.clamp(0, width - 1)[..., None, :]
        values = squares.float().mul_(1 / 255).mul_(inside)
        ink = torch.zeros(count, height * width, device=self.device)
        ink.scatter_add_(1, index.flatten(1), values.flatten(1))
        return ink.clamp_(max=1).view(count, height, width)

    def _scaled(self, ink: Tensor, scale: tuple[float, float]) -> Tensor:
        """Enlarged or reduced a little around its center, as by a resize."""
        matrix = torch.zeros(len(ink), 2, 3, device=self.device)
        matrix[:, 0, 0], matrix[:, 1, 1] = 1 / scale[0], 1 / scale[1]
        grid = functional.affine_grid(matrix, [len(ink), 1, *ink.shape[1:]], align_corners=False)
        moved = functional.grid_sample(
            ink[:, None], grid, mode="bicubic", padding_mode="zeros", align_corners=False
        )
        return moved[:, 0].clamp_(0, 1)

    def _slots(
        self, words: Words, shape: tuple[int, int], scale: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        """Tell which character has its center where, and its place in its word."""
        height, width = shape
        columns = width // SQUARE
        total = height // SQUARE * columns * SLOTS
        half = self.letters.advances[words.rows, words.codes] / 2
        x = (words.left + half) * scale[0] + (1 - scale[0]) * width / 2
        middle = words.baseline - 0.35 * self.letters.sizes[words.rows]
        y = middle * scale[1] + (1 - scale[1]) * height / 2
        x, y = x.clamp(0, width - 1), y.clamp(0, height - 1)
        token = (y // SQUARE).long() * columns + (x // SQUARE).long()
        row = (y % SQUARE * SLOT_ROWS / SQUARE).long()
        column = (x % SQUARE * SLOT_COLUMNS / SQUARE).long()
        slot = (token * SLOT_ROWS + row) * SLOT_COLUMNS + column
        slot = torch.where(words.codes == SPACE, total, slot)
        empty = torch.zeros(len(x), total + 1, dtype=torch.int64, device=self.device)
        characters = empty.scatter(1, slot, words.codes + 1)
        places = empty.scatter(1, slot, words.places.clamp(max=MOST_PLACES - 1))
        return characters[:, :-1], places[:, :-1]

    def _colored(self, ink: Tensor) -> Tensor:
        """Dark on light or the other way about, half of them black on white, some with noise."""
        count = len(ink)
        plain = self._rand(count, 1) < 0.4
        dark = torch.where(plain, 0.0, 0.35 * self._rand(count, 3))
        light = torch.where(plain, 1.0, 1 - 0.25 * self._rand(count, 3))
        swapped = self._rand(count, 1) < 0.3
        front = torch.where(swapped, light, dark)[..., None, None]
        back = torch.where(swapped, dark, light)[..., None, None]
        pixels = back + (front - back) * ink
        noise = torch.randn((count, 1, *ink.shape[2:]), generator=self.own, device=self.device)
        amount = 0.03 * self._rand(count, 1, 1, 1) * (self._rand(count, 1, 1, 1) < 0.3)
        return torch.round((pixels + noise * amount).clamp_(0, 1) * 255) / 255
