import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.cli.app import run
from patchcert.cli.options import (
    parse_bytes,
    parse_camera,
    parse_device,
    parse_dtype,
    parse_placements,
    parse_threat,
)
from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.threats import Patch, Patches, SparsePixels, shapes
from patchcert.threats.resizing import resized_patch


def threat(patch=None, shape=None, sparse=None, bound=None, placements=None, trained=None):
    return parse_threat(patch, shape, sparse, bound, placements, trained)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"patch": "5x5"}, Patch(5)),
        ({"patch": "2x8", "placements": "corners"}, Patch((2, 8), "corners")),
        ({"patch": "5", "placements": "0,0; 3,4"}, Patch(5, [(0, 0), (3, 4)])),
        ({"shape": "diamond:25"}, Patch(shapes.diamond(25))),
        ({"sparse": 4}, SparsePixels(4)),
        ({"sparse": 4, "bound": "per-value"}, SparsePixels(4, "per-value")),
        ({"trained": Patch(3)}, Patch(3)),
        ({"trained": Patch(3), "placements": "corners"}, Patch(3, "corners")),
        ({"trained": Patch(3), "patch": "2"}, Patch(2)),
        ({"trained": Patch(3), "sparse": 1}, SparsePixels(1)),
    ],
)
def test_options_name_one_threat(options, expected):
    assert threat(**options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no threat is given"),
        ({"patch": "5x5", "sparse": 4}, "--patch and --sparse name two threats"),
        ({"patch": "5x5", "shape": "diamond:25"}, "--patch and --shape name two threats"),
        ({"patch": "5x5", "bound": "tight"}, "--bound tight needs --sparse"),
        ({"sparse": 4, "placements": "corners"}, "--placements corners needs a patch"),
        ({"trained": SparsePixels(1), "placements": "corners"}, "--placements corners needs a patch"),
        ({"sparse": 4, "bound": "loose"}, "unknown bound 'loose'"),
        ({"patch": "5x5", "placements": "somewhere"}, "'somewhere' gives no placements"),
        ({"patch": "5x5", "placements": "1,2;3"}, "gives no placements"),
    ],
)
def test_bad_combinations_are_refused(options, message):
    with pytest.raises(InvalidThreat, match=message):
        threat(**options)


def test_placements_come_from_a_file_of_corners(tmp_path):
    path = tmp_path / "corners.txt"
    path.write_text("0,0\n12, 3\n")
    assert parse_placements(str(path)) == [(0, 0), (12, 3)]


def test_placements_come_from_a_file_with_a_map(tmp_path):
    path = tmp_path / "map.txt"
    path.write_text("...\n.##\n")
    allowed = torch.as_tensor(parse_placements(str(path)))
    assert allowed.tolist() == [[False, False, False], [False, True, True]]


def test_a_file_that_holds_no_placements_is_refused(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(InvalidThreat, match="cannot read placements from .*picture.png"):
        parse_placements(str(path))


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=1, max_size=5))
def test_a_list_of_corners_survives_being_written_down(corners):
    assert parse_placements(";".join(f"{top},{left}" for top, left in corners)) == corners


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("500MB", 500_000_000), ("1.5 kib", 1536), ("1000", 1000), ("7B", 7), (None, None)],
)
def test_sizes_are_in_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "2TiBs"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidInput, match="is not a size in bytes"):
        parse_bytes(text)


def test_devices_and_types():
    assert parse_device("cpu") == torch.device("cpu")
    assert parse_device("auto").type in ("cpu", "cuda")
    assert parse_dtype("float64") == torch.float64
    with pytest.raises(InvalidInput, match="the device 'toaster' cannot be used"):
        parse_device("toaster")
    with pytest.raises(InvalidInput, match="--dtype bfloat16 is unknown"):
        parse_dtype("bfloat16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(InvalidInput, match="the device 'cuda' cannot be used"):
        parse_device("cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["certify", "x", "--limit", "0"], "'0' is not a whole number of at least 1."),
        (["certify", "x", "--limit", "1.5"], "'1.5' is not a whole number of at least 1."),
        (["report", "x", "--maps", "-1"], "'-1' is not a whole number of at least 0."),
        (["bench", "--spend", "-1"], "'-1' is not a number of at least 0."),
        (["attack", "x", "--largest-drop", "2"], "'2' is not a number from 0 to 1."),
        (["attack", "x", "--largest-drop", "nan"], "'nan' is not a number from 0 to 1."),
    ],
)
def test_numbers_beyond_their_limits_are_refused_in_words(arguments, message, refused):
    assert message in refused(run(arguments))


def test_several_patches_are_a_threat_of_their_own():
    assert parse_threat("2", None, None, None, None, None, 3) == Patches(Patch(2), 3)
    assert parse_threat(None, None, None, None, "corners", Patch(4), 2) == Patches(Patch(4, "corners"))
    assert parse_threat(None, None, None, None, None, Patch(4), 2) == Patches(Patch(4))
    with pytest.raises(InvalidThreat, match="--patches 2 needs a patch, not SparsePixels"):
        parse_threat(None, None, 4, None, None, None, 2)
    with pytest.raises(InvalidThreat, match="--patches 2 needs a patch, not SparsePixels"):
        parse_threat(None, None, None, None, None, SparsePixels(4), 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1080x1920:bilinear-antialias", ((1080, 1920), "bilinear", True)),
        ("480x640:nearest-exact", ((480, 640), "nearest-exact", False)),
        ("480x640:area", ((480, 640), "area", False)),
    ],
)
def test_a_camera_has_a_size_and_a_filter(text, expected):
    assert parse_camera(text) == expected


@pytest.mark.parametrize("text", ["480x640", "480:area", "480x640:", "area:480x640", "480x640:bilinear-"])
def test_a_camera_without_size_or_filter_is_refused(text):
    with pytest.raises(InvalidInput, match=f"--camera {text} is not SIZE:FILTER"):
        parse_camera(text)


def test_a_patch_of_a_camera_is_resized_and_no_other_threat():
    def resized(patch):
        return Patch((patch.height // 2, patch.width // 2))

    assert parse_threat("8x4", None, None, None, None, None, resized=resized) == Patch((4, 2))
    assert parse_threat("8", None, None, None, None, None, 2, resized) == Patches(Patch(4), 2)
    for threat in ({"sparse": 4}, {"trained": Patch(3)}, {"trained": Patch(3), "placements": "corners"}):
        given_options = {"patch": None, "shape": None, "sparse": None, "bound": None, "placements": None}
        with pytest.raises(InvalidThreat, match="--camera needs a patch in the camera's pixels"):
            parse_threat(**{"trained": None, **given_options, **threat}, resized=resized)


def test_what_a_camera_sees_is_certified_attacked_and_explained(capsys, tmp_path):
    shared = ["zoo:mnist-2x2-cnn2", "--data", "mnist-mini", "--device", "cpu", "--patch", "40"]
    camera = ["--camera", "560x560:bilinear-antialias"]
    for words in (
        ["certify", "--limit", "3"],
        ["attack", "--limit", "1", "--steps", "1", "--restarts", "1"],
        ["explain", "0", "--out", str(tmp_path / "why.html")],
    ):
        command, *rest = words
        assert run([command, shared[0], *rest, *shared[1:], *camera]) == 0
        printed = capsys.readouterr()
        assert "Patch(40x40 square, everywhere) of 560x560 pixels is covered by Patch(" in printed.err
        expected = resized_patch(Patch(40), (560, 560), (28, 28), "bilinear", antialias=True)
        assert json.loads(printed.out)["threat"]["stamp"] == f"{expected.height}x{expected.width}"
    assert run(["certify", *shared, "--camera", "560x560:bicubic"]) == 2
    assert "through the filter 'bicubic' is not known" in capsys.readouterr().err
