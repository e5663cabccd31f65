"""What is exported of a model can be checked by others, and an independent computation agrees with it."""

import csv
import re

import numpy as np
import onnx
import torch
from onnx import numpy_helper

import patchcert as pc
from patchcert.certificates.claims import claims_of, write_properties
from patchcert.models import save_onnx


def intervals(path):
    """The box of a property, and its label, read by regular expressions."""
    text = path.read_text()
    ends = {">": {}, "<": {}}
    for sign, place, number in re.findall(r"\(([<>])= X_(\d+) ([\d.]+)\)", text):
        ends[sign][int(place)] = float(number)
    lower, upper = (np.array([ends[sign][place] for place in range(len(ends[sign]))]) for sign in "><")
    (label,) = set(re.findall(r"\(>= Y_\d+ Y_(\d+)\)", text))
    return lower, upper, int(label)


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
        lower, upper, label = intervals(tmp_path / claim.file)
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
        lower, upper, _ = intervals(tmp_path / claim.file)
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
