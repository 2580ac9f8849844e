"""Images as they are shown, against what transformers reads from the same file."""

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from apbv.errors import PromptError
from apbv.input.media.images import Picture

from apbv_tests import families
from apbv_tests.pairs import each_choice

ORIENTATION = 0x0112
HEIGHT = 24
WIDTH = 40


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
    assert expected.size == ((WIDTH, HEIGHT) if orientation < 5 else (HEIGHT, WIDTH)), (
        "the reader follows the tag"
    )
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


def test_what_is_transparent_lies_on_white(tmp_path):
    """As vLLM and Qwen's own tools show it; transformers takes the colour that nobody sees, here
    black."""
    opaque = families.synthetic_image(HEIGHT, WIDTH).convert("RGB")
    shape = Image.new("L", opaque.size, 0)
    shape.paste(255, (4, 4, 20, 20))
    expected = Image.new("RGB", opaque.size, "white")
    expected.paste(opaque, mask=shape)
    black = Image.new("RGB", opaque.size)
    black.paste(opaque, mask=shape)
    black.putalpha(shape)
    for name, options in (("a.png", {}), ("a.webp", {"lossless": True}), ("a.tiff", {})):
        black.save(tmp_path / name, **options)
        shown = np.asarray(Picture.of(tmp_path / name).load())
        assert np.abs(shown.astype(int) - np.asarray(expected)).max() <= 1
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([9, 9, 9, 80, 90, 100])
    indexed.putpixel((1, 0), 1)
    indexed.save(tmp_path / "p.png", transparency=0)
    assert np.asarray(Picture.of(tmp_path / "p.png").load()).tolist() == [
        [[255] * 3, [80, 90, 100]]
    ]
    gray = Image.fromarray(np.array([[[0, 0], [7, 255]]], np.uint8), "LA")
    assert np.asarray(Picture.of(gray).load()).tolist() == [[[255] * 3, [7] * 3]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 257, 32896, 65535]], np.uint16), [0, 1, 128, 255]),
        (np.array([[0, 40, 255]], np.uint16), [0, 0, 1]),
        (np.array([[0, 40, 255]], np.int32), [0, 40, 255]),
        (np.array([[0, 40 * 257, 65535]], np.int32), [0, 40, 255]),
        (np.array([[-1000, 0, 1000]], np.int32), [0, 128, 255]),
        (np.array([[0, 0.5, 1]], np.float32), [0, 128, 255]),
        (np.array([[0, 1, 4]], np.float32), [0, 64, 255]),
        (np.array([[0, 0.25, 200]], np.float32), [0, 0, 200]),
        (np.array([[-2, 0, 2, np.nan, np.inf]], np.float32), [0, 128, 255, 0, 255]),
    ],
)
def test_deep_pictures_keep_their_shades(tmp_path, values, expected):
    """Pillow itself cuts them off at 255."""
    image = Image.fromarray(values)
    image.save(tmp_path / "a.tiff")
    for source in (image, tmp_path / "a.tiff"):
        assert np.asarray(Picture.of(source).load())[0].tolist() == [
            [shade] * 3 for shade in expected
        ]


def test_the_hidden_value_of_a_deep_gray_picture(tmp_path):
    from PIL import PngImagePlugin

    image = Image.fromarray(np.array([[0, 257, 65535]], np.uint16))
    image.save(tmp_path / "a.png")
    opened = Image.open(tmp_path / "a.png")
    opened.info["transparency"] = 257
    assert isinstance(opened, PngImagePlugin.PngImageFile)
    assert np.asarray(Picture.of(opened).load())[0].tolist() == [[0] * 3, [255] * 3, [255] * 3]
