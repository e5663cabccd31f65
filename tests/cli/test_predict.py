import numpy as np
import pytest
from PIL import Image

import patchcert as pc
from patchcert.cli.app import run
from patchcert.data import load_dataset
from patchcert.models import load


def predict(*arguments):
    return run(["predict", *map(str, arguments), "--device", "cpu"])


def test_predictions_are_those_of_the_classifier(answered, model_file):
    common = (model_file, "--data", "mnist-mini", "--patch", 2, "--limit", 12)
    answer = answered(predict(*common, "--method", "masking", "--masks", "3"))
    images = load_dataset("mnist-mini").test.take(12)
    masking = pc.DoubleMasking(load(model_file)[0], pc.Patch(2), masks=3)
    expected = masking.predict(images.floats())
    assert list(answer["predictions"].values()) == expected.tolist()
    assert answer["correct"] == int((expected == images.labels).sum())
    assert answer["classifier"] == masking.describe()


def test_only_masks_need_a_threat(answered, refused, model_file):
    common = (model_file, "--data", "mnist-mini", "--limit", 12)
    images = load_dataset("mnist-mini").test.take(12)
    expected = load(model_file)[0](images.floats()).argmax(dim=1)
    assert list(answered(predict(*common))["predictions"].values()) == expected.tolist()
    said = refused(predict(*common, "--method", "masking"))
    assert "no threat is given, and masks are made for one" in said
    assert "--sparse" not in said  # no option of predict, and nothing that masks hide


def test_alerts_are_null(answered, model_file):
    common = (model_file, "--data", "mnist-mini", "--patch", 2, "--limit", 12)
    answer = answered(predict(*common, "--method", "detection", "--setting", "masks=3"))
    assert answer["abstained"] == list(answer["predictions"].values()).count(None)
    assert 0 < answer["abstained"] < 12


def test_pictures_of_the_models_size_are_read_as_they_are(answered, model_file, tmp_path):
    pixels = load_dataset("mnist-mini").test.images[0, 0].numpy()
    Image.fromarray(pixels).save(tmp_path / "digit.png")
    answer = answered(predict(model_file, tmp_path / "digit.png", "--patch", 2))
    model, _ = load(model_file)
    image = load_dataset("mnist-mini").test.take(1).floats()
    assert answer["predictions"] == {str(tmp_path / "digit.png"): int(model(image).argmax())}
    assert "correct" not in answer


def test_pictures_of_more_than_8_bits_are_refused(refused, model_file, tmp_path):
    Image.fromarray(np.full((28, 28), 3000, np.uint16)).save(tmp_path / "deep.png")
    said = refused(predict(model_file, tmp_path / "deep.png", "--patch", 2))
    assert "deep.png has pixels of mode I;16, which do not fit into 8 bits" in said


def test_a_model_of_ones_own_has_the_size_that_is_given(answered, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "anywhere.py").write_text(
        "import torch\n"
        "def net(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(20, 3)).eval()\n"
    )
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save("photos/cat/a.png")
    Image.fromarray(np.zeros((4, 5), np.uint8)).save("b.png")
    own = ("./anywhere.py:net", "--patch", "1", "--image-size")
    assert answered(run(["certify", *own, "1x4x5", "--data", "folder:photos"]))["data"]["image"] == [1, 4, 5]
    assert list(answered(predict(*own, "1x4x5", "b.png"))["predictions"]) == ["b.png"]
    assert "b.png is 4x5 pixels; expected 5x4" in refused(predict(*own, "1x5x4", "b.png"))
    for size in ("4x5", "1x0x5", "1x4x5x6", "axbxc"):
        assert "expected channels x height x width" in refused(predict(*own, size, "b.png"))


def test_that_no_size_is_known_is_said(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "anywhere.py").write_text(
        "import torch\n"
        "def net(): return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()\n"
    )
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save("photos/cat/a.png")
    run(["predict", "./anywhere.py:net", "photos/cat/a.png", "--patch", "1"])
    assert "pictures are taken as they are, 3x9x9" in capsys.readouterr().err
    run(["predict", "./anywhere.py:net", "--data", "folder:photos", "--patch", "1"])
    said = capsys.readouterr().err
    assert "images are brought to 3x224x224; --image-size" in said
    assert "is a model for 3 classes" in said


def test_a_model_that_knows_its_size_takes_no_other(refused, model_file):
    said = refused(predict(model_file, "--data", "mnist-mini", "--patch", 2, "--image-size", "1x28x28"))
    assert "says what images it is for" in said


def test_pictures_of_a_model_without_a_size_are_all_of_one(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "anywhere.py").write_text("import torch\ndef net(): return torch.nn.Identity()\n")
    for name, size in (("a.png", (4, 4)), ("b.png", (4, 5))):
        Image.fromarray(np.zeros((*size, 3), np.uint8)).save(name)
    assert predict("./anywhere.py:net", "a.png", "b.png", "--patch", 2) == 2
    assert "b.png is 4x5 pixels; expected 4x4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"), [("size", "expected 28x28"), ("text", "cannot be read as a picture")]
)
def test_other_files_are_refused(refused, model_file, tmp_path, content, message):
    picture = tmp_path / "picture.png"
    if content == "size":
        Image.fromarray(np.zeros((20, 28), np.uint8)).save(picture)
    else:
        picture.write_text("no picture")
    assert message in refused(predict(model_file, picture, "--patch", 2))
