import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from patchcert.data import ImageShape, class_names, folder, load_dataset
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


@pytest.mark.parametrize("name", ["test", "val"])
def test_a_folder_may_have_test_images_alone(tmp_path, name):
    paint(tmp_path / name / "cat" / "a.png", 2)
    dataset = load_dataset(f"folder:{tmp_path}", image_shape=SMALL)
    assert dataset.classes == ("cat",)
    assert dataset.test.images.amax() == 2
    assert len(dataset.train) == 0


def test_hidden_folders_are_no_classes(tmp_path):
    paint(tmp_path / "cat" / "a.png", 2)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert load_dataset(f"folder:{tmp_path}", image_shape=SMALL).classes == ("cat",)


@pytest.mark.parametrize("label", ["7.0", "-3", "nan"])
def test_labels_that_are_odd_numbers_are_refused(tmp_path, label):
    paint(tmp_path / "a.png", 1)
    (tmp_path / "labels.csv").write_text(f"file,label\na.png,0\na.png,{label}\n")
    with pytest.raises(DataError, match=f"the label {label}, which is a number but not one of 0, 1, 2"):
        load_dataset(f"folder:{tmp_path}", image_shape=SMALL)


def test_a_table_names_files_and_whole_number_labels(tmp_path):
    paint(tmp_path / "images" / "a.png", 1)
    paint(tmp_path / "b.png", 2)
    (tmp_path / "labels.csv").write_text("file,label,name\na.png,2,owl\nb.png,0,eel\n")
    dataset = load_dataset(f"folder:{tmp_path}", image_shape=SMALL)
    assert dataset.classes == ("eel", "1", "owl")
    assert dataset.test.labels.tolist() == [2, 0]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_table_may_name_classes(tmp_path, encoding):
    paint(tmp_path / "a.png", 1)
    (tmp_path / "labels.csv").write_text("file,label\na.png,owl\na.png,eel\n", encoding)
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


@pytest.fixture
def photos(tmp_path):
    """Three training and two test images of two classes."""
    for number, name in enumerate(("train/cat/a", "train/cat/b", "train/dog/a", "test/cat/a", "test/dog/a")):
        paint(tmp_path / f"{name}.png", 10 * number)
    return tmp_path


def sums(path):
    return load_dataset(f"folder:{path}", image_shape=SMALL).checksums


def test_every_split_has_a_sum_of_its_files_names_and_labels(photos):
    before = sums(photos)
    assert sorted(before) == ["test", "train"]
    assert sums(photos) == before
    paint(photos / "train" / "dog" / "a.png", 99)
    assert sums(photos)["train"] != before["train"]
    assert sums(photos)["test"] == before["test"]
    paint(photos / "train" / "dog" / "a.png", 20)
    assert sums(photos) == before
    (photos / "train" / "dog" / "a.png").rename(photos / "train" / "dog" / "b.png")
    assert sums(photos)["train"] != before["train"]


def test_sums_do_not_hang_on_where_the_folder_lies(photos, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "moved"
    before = sums(photos)
    assert sums(photos.rename(elsewhere)) == before


def test_other_labels_of_the_same_files_have_another_sum(tmp_path):
    for name in ("a", "b"):
        paint(tmp_path / f"{name}.png", 1)
    (tmp_path / "labels.csv").write_text("file,label\na.png,0\nb.png,1\n")
    before = sums(tmp_path)
    (tmp_path / "labels.csv").write_text("file,label\na.png,1\nb.png,0\n")
    assert list(before) == list(sums(tmp_path)) == ["test"]
    assert before != sums(tmp_path)


def test_files_are_summed_when_that_is_asked_for_and_never_decoded(photos, monkeypatch):
    summed = []
    original = folder.sha256
    monkeypatch.setattr(folder, "sha256", lambda path: summed.append(path) or original(path))
    monkeypatch.setattr(folder, "decode", lambda path, shape: pytest.fail(f"{path} was decoded"))
    dataset = load_dataset(f"folder:{photos}", image_shape=SMALL)
    assert repr(dataset) == (
        f"FolderDataset('folder:{photos}', 3 training and 2 test images of 3x8x8, 2 classes: cat, dog)"
    )
    assert repr(dataset.train) == "FolderSplit(3 images of 3x8x8)"
    assert summed == []
    assert dataset.checksums == dataset.checksums
    assert len(summed) == 5


def test_known_sums_can_be_put_in_place_of_those_of_the_files(photos, monkeypatch):
    monkeypatch.setattr(folder, "sha256", lambda path: pytest.fail(f"{path} was summed"))
    dataset = dataclasses.replace(load_dataset(f"folder:{photos}"), name="mine", checksums={"all": "ab"})
    assert (dataset.name, dataset.checksums) == ("mine", {"all": "ab"})


def test_a_file_that_went_away_is_named(photos):
    dataset = load_dataset(f"folder:{photos}")
    (photos / "test" / "cat" / "a.png").unlink()
    with pytest.raises(DataError, match=r"test/cat/a.png cannot be read: No such file"):
        _ = dataset.checksums


def test_a_folder_keeps_the_name_it_was_asked_for_by(photos, monkeypatch):
    monkeypatch.setenv("HOME", str(photos.parent))
    assert load_dataset(f"folder:~/{photos.name}").name == f"folder:~/{photos.name}"


def test_images_that_are_decoded_are_not_decoded_again(photos, monkeypatch):
    train = load_dataset(f"folder:{photos}", image_shape=SMALL).train
    whole = train.images
    monkeypatch.setattr(folder, "decode", lambda path, shape: pytest.fail(f"{path} was decoded"))
    assert torch.equal(train[1:].images, whole[1:])
    assert torch.equal(train[torch.tensor([2, 0])].images, whole[[2, 0]])


def test_models_normalise_by_what_is_measured_on_the_training_images(photos):
    dataset = load_dataset(f"folder:{photos}", image_shape=SMALL)
    reds = np.array([0, 10, 20]) / 255
    assert dataset.normalisation() == (
        (round(reds.mean(), 4), 0.0, 0.0),
        (round(reds.std(), 4), 1.0, 1.0),
    )


@given(st.integers(1, 5), st.integers(0, 2**16))
def test_what_is_measured_is_the_mean_and_deviation_of_all_pixels(count, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 2, 3, 5), dtype=np.uint8)
    mean, std = folder.measure(torch.from_numpy(pixels))
    assert mean == pytest.approx((pixels / 255).mean(axis=(0, 2, 3)), abs=6e-5)
    assert std == pytest.approx((pixels / 255).std(axis=(0, 2, 3)), abs=6e-5)


def test_without_training_images_nothing_is_measured(tmp_path):
    paint(tmp_path / "cat" / "a.png", 200)
    assert load_dataset(f"folder:{tmp_path}").normalisation() == ((0.0,) * 3, (1.0,) * 3)


def test_class_names_are_known_without_images(photos):
    assert class_names("cifar10")[3] == "cat"
    assert class_names("mnist") == class_names("mnist-mini") == load_dataset("mnist-mini").classes
    assert class_names(f"folder:{photos}") == ("cat", "dog")
    assert class_names(f"folder:{photos / 'gone'}") is None
    assert class_names("cifar100") is None


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
        (
            lambda path: (path / "labels.csv").write_text("file,label\na.png,1\nb.png\n"),
            r"line 3 of .*labels.csv lacks a file or a label",
        ),
        (
            lambda path: (path / "labels.csv").write_bytes(b"file,label\n\xff.png,1\n"),
            "cannot be read: 'utf-8'",
        ),
    ],
)
def test_other_layouts_are_refused(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(DataError, match=message):
        load_dataset(f"folder:{tmp_path}")


def test_images_have_no_two_channels(photos):
    with pytest.raises(DataError, match="images of a folder have 1 or 3 channels, but 2 are asked for"):
        load_dataset(f"folder:{photos}", image_shape=ImageShape(2, 8, 8))


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
