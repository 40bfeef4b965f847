"""The bundled pictures: small, of one size, and what they are said to show."""

import io

import pytest
from PIL import Image

from lowbit.convert.texts.pictures import PICTURES, READ, SIZE, PictureQuestion, pictures_sha256
from tests.load_script import load_script


def test_files_are_small_and_of_one_size() -> None:
    contents = [each.content for each in PICTURES]
    assert sum(map(len, contents)) < 32_000
    for content in contents:
        image = Image.open(io.BytesIO(content))
        assert (image.format, image.size) == ("PNG", SIZE)
    assert len({*contents}) == len(PICTURES)
    assert len({each.answer for each in PICTURES}) == len(PICTURES)


@pytest.mark.parametrize("question", PICTURES, ids=lambda each: each.name)
def test_they_show_their_answers(question: PictureQuestion) -> None:
    """Drawn again they are nearly the same; fonts differ a little between releases of Pillow."""
    drawn = load_script("draw_pictures").draw(question).convert("L")
    stored = Image.open(io.BytesIO(question.content)).convert("L")
    pairs = zip(drawn.tobytes(), stored.tobytes(), strict=True)
    assert sum(abs(a - b) > 64 for a, b in pairs) < 0.01 * SIZE[0] * SIZE[1]
    assert len({*stored.tobytes()}) > 1


def test_the_hash_covers_files_questions_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.convert.texts import pictures

    first = pictures_sha256()
    assert first == pictures_sha256()
    monkeypatch.setattr(pictures, "PICTURES", PICTURES[:-1])
    assert pictures_sha256() != first
    assert all(each.question.endswith("nothing else.") for each in PICTURES)
    assert sum(each.question == READ for each in PICTURES) == 11
