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
    assert "no threat is given" in refused(predict(*common, "--method", "masking"))


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
