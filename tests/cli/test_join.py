"""`patchcert join`: trained networks side by side in one file."""

import torch

from patchcert.cli.app import run
from patchcert.files import sha256
from patchcert.models import load
from patchcert.zoo import load as load_from_zoo

MEMBERS = ["zoo:mnist-5x5-mlp", "zoo:mnist-2x2-mlp"]


def test_a_joined_file_is_the_mean_and_can_be_certified(tmp_path, answered):
    out = tmp_path / "joined.safetensors"
    shown = answered(run(["join", *MEMBERS, "--out", str(out)]))
    joined, spec = load(out)
    members = [load_from_zoo(target.removeprefix("zoo:")) for target in MEMBERS]
    images = torch.rand(5, 1, 28, 28)
    torch.testing.assert_close(joined(images), (members[0](images) + members[1](images)) / 2)
    assert shown["widths"] == list(spec.widths)
    assert shown["weights_sha256"] == sha256(out)
    assert [member["target"] for member in shown["members"]] == MEMBERS
    options = ["--data", "mnist-mini", "--patch", "2", "--limit", "20", "--device", "cpu"]
    assert answered(run(["certify", str(out), *options]))["images"] == 20


def test_mistakes_are_told_before_anything_is_written(tmp_path, refused):
    out = tmp_path / "joined.safetensors"
    assert "expected a file whose name ends in .safetensors" in refused(
        run(["join", *MEMBERS, "--out", str(tmp_path / "joined")])
    )
    assert "expected two networks at least to join, got 1" in refused(
        run(["join", MEMBERS[0], "--out", str(out)])
    )
    assert "differ in more than their widths" in refused(
        run(["join", MEMBERS[0], "zoo:mnist-5x5-cnn2", "--out", str(out)])
    )
    assert "does not say which architecture its network is of" in refused(
        run(["join", MEMBERS[0], "torch.nn:Identity", "--out", str(out)])
    )
    assert not any(tmp_path.iterdir())
    out.write_bytes(b"kept")
    assert "is there already" in refused(run(["join", *MEMBERS, "--out", str(out)]))
    assert out.read_bytes() == b"kept"
