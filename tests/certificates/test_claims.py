"""What is exported of a model can be checked by others, and an independent computation agrees with it."""

import csv
import re

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import patchcert as pc
from patchcert.certificates.claims import claims_of, vnnlib_property, write_properties
from patchcert.models import save_onnx


def read(text):
    """The box of a property, the classes that are compared with the label, and the label, by regular expressions."""
    ends = {}
    for sign, place, number in re.findall(r"\(assert \(([<>])= X_(\d+) (-?[\d.]+)\)\)", text):
        ends[sign, int(place)] = float(number)
    count = len(re.findall(r"\(declare-const X_\d+ Real\)", text))
    lower, upper = (np.array([ends[sign, place] for place in range(count)]) for sign in "><")
    (alternatives,) = re.findall(r"\(assert \(or (.*)\)\)", text)
    others, labels = zip(*re.findall(r"\(and \(>= Y_(\d+) Y_(\d+)\)\)", alternatives), strict=True)
    (label,) = set(labels)
    return lower, upper, list(map(int, others)), int(label)


def least_margin(file, lower, upper, label):
    """Interval bounds of a chain of Gemm and Relu, in plain NumPy, the last layer merged with the difference."""
    graph = onnx.load(file).graph
    weights = {each.name: numpy_helper.to_array(each).astype(np.float64) for each in graph.initializer}
    *hidden, last = [node for node in graph.node if node.op_type != "Flatten"]
    for node in hidden:
        if node.op_type == "Relu":
            lower, upper = np.maximum(lower, 0), np.maximum(upper, 0)
        else:
            weight, bias = weights[node.input[1]], weights[node.input[2]]
            rising, falling = np.maximum(weight, 0), np.minimum(weight, 0)
            lower, upper = rising @ lower + falling @ upper + bias, rising @ upper + falling @ lower + bias
    weight, bias = weights[last.input[1]], weights[last.input[2]]
    difference, offset = weight[label] - weight, bias[label] - bias
    margins = np.maximum(difference, 0) @ lower + np.minimum(difference, 0) @ upper + offset
    return np.delete(margins, label).min()


def written(folder, count):
    model, digits = pc.load("mnist-1-pixel-mlp"), pc.load_dataset("mnist-mini").test.take(count)
    threat = pc.Patch(2, "corners")
    claims = claims_of(model, digits.floats(), digits.labels, [10 + each for each in range(count)], threat)
    save_onnx(model, folder / "model.onnx", (1, 28, 28))
    write_properties(folder, claims, digits.floats(), 10, threat, "model.onnx")
    return model, digits, threat, claims


def test_an_independent_computation_gives_the_claimed_margins(tmp_path):
    model, digits, threat, claims = written(tmp_path, 3)
    assert len(claims) == 12
    for claim in claims:
        lower, upper, _, label = read((tmp_path / claim.file).read_text())
        assert (upper - lower).sum() == 4.0
        theirs = least_margin(tmp_path / "model.onnx", lower, upper, label)
        assert claim.margin <= theirs
        assert theirs - claim.margin < 1e-3 * max(1.0, abs(theirs))
        assert claim.is_proven == (claim.margin > 0)
    expected = pc.certify(model, digits.floats(), digits.labels, threat)
    proven = torch.tensor([claim.is_proven for claim in claims]).reshape(3, 4)
    assert torch.equal(proven.all(dim=1), expected.certified)


def test_members_of_a_property_are_members_of_the_threat(tmp_path):
    _, digits, threat, claims = written(tmp_path, 2)
    for claim in claims:
        lower, upper, *_ = read((tmp_path / claim.file).read_text())
        image = digits.floats()[claim.row : claim.row + 1]
        member = torch.tensor(np.where(np.random.default_rng(0).random(784) < 0.5, lower, upper))
        assert threat.contains(image, member.float().reshape(image.shape)).all()


def test_tables_list_every_property(tmp_path):
    _, _, _, claims = written(tmp_path, 2)
    rows = list(csv.DictReader((tmp_path / "claims.csv").read_text().splitlines()))
    assert [row["property"] for row in rows] == [claim.file for claim in claims]
    assert {row["image"] for row in rows} == {"10", "11"}
    assert all(float(row["margin"]) == claim.margin for row, claim in zip(rows, claims, strict=True))
    instances = list(csv.reader((tmp_path / "instances.csv").read_text().splitlines()))
    assert [[model, (tmp_path / name).is_file()] for model, name, _ in instances] == [
        ["model.onnx", True]
    ] * 8


def test_pixels_are_free_inside_the_patch_and_fixed_outside():
    image = torch.rand(2, 4, 3)
    text = vnnlib_property(image, 1, 4, pc.Patch((2, 1)), (2, 1), "image 7")
    lower, upper, others, label = read(text)
    assert (others, label) == ([0, 2, 3], 1)
    is_free = torch.zeros(2, 4, 3, dtype=torch.bool)
    is_free[:, 2:, 1] = True
    assert np.array_equal(lower.reshape(2, 4, 3), torch.where(is_free, 0.0, image))
    assert np.array_equal(upper.reshape(2, 4, 3), torch.where(is_free, 1.0, image))
    assert text.startswith("; image 7, label 1, with a patch at top 2 and left 1\n")
    assert text.count("(declare-const Y_") == 4


@pytest.mark.parametrize("number", [1e-7, 1e-40, 1 / 255, 2**-149, 0.0, 1.0])
def test_numbers_are_read_back_exactly_and_without_exponents(number):
    image = torch.full((1, 2, 2), number)
    text = vnnlib_property(image, 0, 2, pc.Patch(1), (0, 0), "image")
    lower, upper, *_ = read(text)
    assert lower[3] == upper[3] == float(image[0, 1, 1])
    assert not re.search(r"\de-?\d", text)
