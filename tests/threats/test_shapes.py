import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from patchcert.errors import InvalidThreat
from patchcert.threats import shapes

DRAWN = {
    "diamond:4": ".#.\n#.#\n.#.",
    "diamond:16": ".#..\n.##.\n###.\n####\n###.\n.##.\n.#..",
    "diamond:25": "...#...\n..###..\n.#####.\n#######\n.#####.\n..###..\n...#...",
    "diamond:5": ".#.\n###\n.#.",
    "diamond:1": "#",
    "parallelogram:4": "##.\n.##",
    "parallelogram:4:mirrored": ".##\n##.",
    "parallelogram:4:transposed": "#.\n##\n.#",
    "parallelogram:4:mirrored:transposed": ".#\n##\n#.",
    "parallelogram:16": "####...\n.####..\n..####.\n...####",
    "line:4": "####",
    "line:4:vertical": "#\n#\n#\n#",
    "square:4": "##\n##",
    "2": "##\n##",
    "2x3": "###\n###",
    "3x2": "##\n##\n##",
}


@pytest.mark.parametrize(("name", "drawing"), DRAWN.items())
def test_named_shapes_are_drawn_as_specified(name, drawing):
    stamp = shapes.parse(name)
    assert "\n".join(shapes.to_rows(stamp)) == drawing
    assert stamp.dtype == torch.bool
    assert torch.equal(shapes.from_text(drawing), stamp)


@pytest.mark.parametrize("side", range(1, 9))
def test_diamonds_and_parallelograms_have_exactly_the_pixels_asked_for(side):
    for stamp in (shapes.diamond(side**2), shapes.parallelogram(side**2)):
        assert stamp.sum() == side**2
        assert torch.equal(shapes.trim(stamp), stamp)
    assert shapes.parallelogram(side**2).shape == (side, 2 * side - 1)


@pytest.mark.parametrize("radius", range(5))
def test_city_block_balls_are_diamonds(radius):
    pixels = 2 * radius * (radius + 1) + 1
    stamp = shapes.diamond(pixels)
    assert stamp.shape == (2 * radius + 1, 2 * radius + 1)
    assert stamp.sum() == pixels
    assert torch.equal(stamp, stamp.flip(0))
    assert torch.equal(stamp, stamp.T)


def test_the_transfer_shapes_are_those_of_the_specification():
    sizes = {name: [tuple(s.shape) for s in found] for name, found in shapes.transfer_shapes(25).items()}
    assert sizes == {
        "square": [(5, 5)],
        "line": [(1, 25), (25, 1)],
        "rectangle": [(2, 13), (13, 2), (3, 9), (9, 3), (4, 7), (7, 4)],
        "parallelogram": [(5, 9), (5, 9), (9, 5), (9, 5)],
        "diamond": [(7, 7)],
    }
    rectangles = [tuple(stamp.shape) for stamp in shapes.transfer_shapes(16)["rectangle"]]
    assert rectangles == [(2, 8), (8, 2), (3, 6), (6, 3)]
    assert "rectangle" not in shapes.transfer_shapes(4)


@pytest.mark.parametrize("pixels", [4, 16, 25])
def test_no_transfer_shape_is_listed_twice(pixels):
    for stamps in shapes.transfer_shapes(pixels).values():
        assert len({shapes.to_rows(stamp) for stamp in stamps}) == len(stamps)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4))
def test_rendered_stamps_read_back_as_the_same_pixels(rows):
    stamp = torch.tensor(rows)
    if stamp.any():
        assert torch.equal(shapes.from_text("\n".join(shapes.to_rows(stamp))), shapes.trim(stamp))


@pytest.mark.parametrize("pixels", [4, 16, 25])
def test_every_transfer_shape_has_words_that_name_it(pixels):
    stamps = [stamp for variants in shapes.transfer_shapes(pixels).values() for stamp in variants]
    assert all(torch.equal(shapes.parse(shapes.name_of(stamp)), stamp) for stamp in stamps)
    assert shapes.name_of(shapes.parallelogram(16, mirrored=True)) == "parallelogram:16:mirrored"


def test_other_stamps_have_no_words():
    assert shapes.name_of(shapes.from_text("##.\n.##\n#..")) is None


def test_stamps_are_read_from_text_files(tmp_path):
    path = tmp_path / "corner.txt"
    path.write_text("\n  ##.\n  #..\n  ...\n")
    assert shapes.to_rows(shapes.from_file(path)) == ("##", "#.")
    assert shapes.to_rows(shapes.parse(str(path))) == ("##", "#.")


@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_stamps_are_read_from_pictures_as_white_on_black(tmp_path, mode):
    picture = Image.new(mode, (4, 3))
    for place in ((1, 1), (2, 1), (1, 2)):
        picture.putpixel(place, (255, 255, 255) if mode == "RGB" else 255)
    picture.save(tmp_path / "stamp.PNG")
    assert shapes.to_rows(shapes.from_file(tmp_path / "stamp.PNG")) == ("##", "#.")


def test_grey_pictures_are_refused(tmp_path):
    Image.new("L", (2, 3), 100).save(tmp_path / "grey.png")
    with pytest.raises(InvalidThreat, match="6 pixels that are neither black nor white"):
        shapes.from_file(tmp_path / "grey.png")


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "broken.png", tmp_path / "binary.txt", tmp_path / "missing.txt"):
        with pytest.raises(InvalidThreat, match="cannot read a stamp from"):
            shapes.from_file(path)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_text_is_refused(text):
    with pytest.raises(InvalidThreat, match="text of the stamp is empty"):
        shapes.from_text(text)


def test_text_with_other_letters_or_ragged_rows_is_refused():
    with pytest.raises(InvalidThreat, match=r"only '#' and '\.', found 'x'"):
        shapes.from_text("#x")
    with pytest.raises(InvalidThreat, match=r"rows of one length, got lengths \[2, 1\]"):
        shapes.from_text("##\n#")
    with pytest.raises(InvalidThreat, match="covers no pixel"):
        shapes.from_text("..\n..")


@pytest.mark.parametrize("pixels", [2, 7, 24, 0, -4])
def test_impossible_pixel_counts_are_refused(pixels):
    with pytest.raises(
        InvalidThreat, match=f"a parallelogram needs a square number of pixels .*, got {pixels}"
    ):
        shapes.parallelogram(pixels)
    with pytest.raises(InvalidThreat, match=f"a diamond needs .* city-block ball .*, got {pixels}"):
        shapes.diamond(pixels)


def test_stamps_larger_than_any_image_are_refused():
    draws = shapes.line, shapes.square, shapes.diamond, shapes.parallelogram
    for draw in draws:
        with pytest.raises(InvalidThreat, match="pixels is larger than any image: at most 67,108,864"):
            draw(10**10)


def test_misspelt_shapes_are_refused_with_advice():
    with pytest.raises(
        InvalidThreat, match="unknown shape 'dimond'\nhint: known shapes are square, line, diamond"
    ):
        shapes.parse("dimond:25")
    with pytest.raises(
        InvalidThreat, match="shape 'line' has no variant 'mirrored'\nhint: its variants are vertical"
    ):
        shapes.parse("line:4:mirrored")
    with pytest.raises(InvalidThreat, match="shape 'diamond' has no variant 'large'"):
        shapes.parse("diamond:4:large")
    with pytest.raises(InvalidThreat, match="'5 by 5' is neither a size, a shape nor a file"):
        shapes.parse("5 by 5")
    with pytest.raises(InvalidThreat, match="height and width of at least 1, got 0x5"):
        shapes.parse("0x5")
