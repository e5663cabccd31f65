import numpy as np
import pytest
import torch
from PIL import Image

from patchcert.data import ImageShape, folder, load_dataset
from patchcert.errors import DataError

SMALL = ImageShape(3, 8, 8)


def paint(path, value, size=(8, 8), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = value if mode == "L" else (value, 0, 0)
    Image.new(mode, size, colour).save(path)


def test_subfolders_are_classes_in_sorted_order(tmp_path):
    paint(tmp_path / "dog" / "b.png", 2)
    paint(tmp_path / "dog" / "a.png", 1)
    paint(tmp_path / "cat" / "z.png", 3)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    dataset = load_dataset(f"folder:{tmp_path}", image_shape=SMALL)
    assert dataset.classes == ("cat", "dog")
    assert dataset.test.labels.tolist() == [0, 1, 1]
    assert dataset.test.images[:, 0, 0, 0].tolist() == [3, 1, 2]
    assert len(dataset.train) == 0
    assert dataset.train.images.shape == (0, 3, 8, 8)


@pytest.mark.parametrize("name", ["test", "val"])
def test_train_and_test_folders_are_kept_apart(tmp_path, name):
    paint(tmp_path / "train" / "cat" / "a.png", 1)
    paint(tmp_path / name / "cat" / "a.png", 2)
    dataset = load_dataset(f"folder:{tmp_path}", image_shape=SMALL)
    assert dataset.train.images.amax() == 1
    assert dataset.test.images.amax() == 2


def test_a_table_names_files_and_whole_number_labels(tmp_path):
    paint(tmp_path / "images" / "a.png", 1)
    paint(tmp_path / "b.png", 2)
    (tmp_path / "labels.csv").write_text("file,label,name\na.png,2,owl\nb.png,0,eel\n")
    dataset = load_dataset(f"folder:{tmp_path}", image_shape=SMALL)
    assert dataset.classes == ("eel", "1", "owl")
    assert dataset.test.labels.tolist() == [2, 0]


def test_a_table_may_name_classes(tmp_path):
    paint(tmp_path / "a.png", 1)
    (tmp_path / "labels.csv").write_text("file,label\na.png,owl\na.png,eel\n")
    dataset = load_dataset(f"folder:{tmp_path}", image_shape=SMALL)
    assert dataset.classes == ("eel", "owl")
    assert dataset.test.labels.tolist() == [1, 0]


def test_only_the_images_asked_for_are_decoded(tmp_path, monkeypatch):
    for number in range(5):
        paint(tmp_path / "cat" / f"{number}.png", number)
    decoded = []
    original = folder.decode
    monkeypatch.setattr(
        folder, "decode", lambda path, shape: decoded.append(path.name) or original(path, shape)
    )
    test = load_dataset(f"folder:{tmp_path}", image_shape=SMALL).test
    part = test[1:4].take(2)
    assert decoded == []
    assert part.floats().shape == (2, 3, 8, 8)
    assert part.images[:, 0, 0, 0].tolist() == [1, 2]
    assert decoded == ["1.png", "2.png"]
    assert test[torch.tensor([4, 0])].to("cpu").images[:, 0, 0, 0].tolist() == [4, 0]


def test_an_image_of_the_wanted_size_is_taken_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.array_equal(folder.decode(tmp_path / "a.png", SMALL).permute(1, 2, 0).numpy(), pixels)


def test_a_larger_image_is_cropped_to_its_centre(tmp_path):
    pixels = np.zeros((256, 300, 3), dtype=np.uint8)
    pixels[16:240, 38:262] = 200
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert (folder.decode(tmp_path / "a.png", ImageShape()) == 200).all()


def test_one_channel_and_unequal_sides(tmp_path):
    paint(tmp_path / "a.png", 9, size=(50, 20), mode="L")
    image = folder.decode(tmp_path / "a.png", ImageShape(1, 4, 6))
    assert image.shape == (1, 4, 6)
    assert (image == 9).all()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "holds no images"),
        (lambda path: (path / "labels.csv").write_text("path,class\n"), "lacks the columns file,label"),
        (
            lambda path: (path / "labels.csv").write_text("file,label\ngone.png,1\n"),
            "names gone.png, which is neither",
        ),
    ],
)
def test_other_layouts_are_refused(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(DataError, match=message):
        load_dataset(f"folder:{tmp_path}")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no image folder .*gone"):
        load_dataset(f"folder:{tmp_path / 'gone'}")


@pytest.mark.parametrize("damage", [lambda content: b"no image", lambda content: content[:60]])
def test_a_damaged_image_is_named(tmp_path, damage):
    path = tmp_path / "cat" / "a.png"
    paint(path, 1, size=(64, 64))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"a.png cannot be read as an image"):
        _ = load_dataset(f"folder:{tmp_path}", image_shape=SMALL).test.images


def test_pixels_of_more_than_8_bits_are_refused(tmp_path):
    """They would be clipped, so that nearly all of them were white."""
    (tmp_path / "cat").mkdir()
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(tmp_path / "cat" / "a.png")
    with pytest.raises(DataError, match="a.png has pixels of mode I;16, which do not fit into 8 bits"):
        folder.decode(tmp_path / "cat" / "a.png", ImageShape(1, 8, 8))


def test_the_imagenet_sample_is_read(real_data):
    if not (real_data / "imagenet" / "labels.csv").is_file():
        pytest.skip("no ImageNet sample")
    dataset = load_dataset(f"folder:{real_data / 'imagenet'}")
    assert len(dataset.test) == 400
    assert dataset.test.take(2).images.shape == (2, 3, 224, 224)
    assert dataset.classes[370] == "guenon"
