"""Images as they are shown, against what transformers reads from the same file."""

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from apbv.input.images import Picture
from apbv.input.visual import PromptError

import families
from pairs import each_choice

ORIENTATION = 0x0112
HEIGHT, WIDTH = 24, 40


def held(path, orientation: int) -> str:
    """An image of a camera that says how it was held."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    families.synthetic_image(HEIGHT, WIDTH).save(path, exif=exif)
    return str(path)


@each_choice(orientation=range(1, 9), suffix=["jpg", "png", "webp", "tiff"], opened=[False, True])
def test_an_image_is_shown_upright(tmp_path, orientation, suffix, opened):
    path = held(tmp_path / f"held.{suffix}", orientation)
    expected = load_image(path)
    assert expected.size == ((WIDTH, HEIGHT) if orientation < 5 else (HEIGHT, WIDTH)), "the reader follows the tag"
    picture = Picture.of(Image.open(path) if opened else path)
    shown = picture.load()
    assert np.array_equal(shown, expected) and shown.mode == "RGB"
    assert (picture.height, picture.width) == (expected.height, expected.width)
    assert picture.without_pixels().shape == (3, expected.height, expected.width)


def test_to_look_at_an_image_decodes_none_of_it(tmp_path):
    """Every host looks at all images of a prompt, and decodes its share of them."""
    families.synthetic_image(HEIGHT, WIDTH).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    picture = Picture.of(tmp_path / "cut.png")
    assert (picture.height, picture.width) == (HEIGHT, WIDTH)
    with pytest.raises(PromptError, match=r"cannot read the image .*cut\.png"):
        picture.load()


def test_an_image_that_became_another_is_refused(tmp_path):
    """Its size decided how many tokens it has."""
    families.synthetic_image(HEIGHT, WIDTH).save(tmp_path / "a.png")
    picture = Picture.of(tmp_path / "a.png")
    families.synthetic_image(WIDTH, HEIGHT).save(tmp_path / "a.png")
    with pytest.raises(PromptError, match=r"a\.png was changed"):
        picture.load()
