"""Rewrites the evidence in results/ to version 2: one format, named by the questions that it answers. Run once.

    python scripts/convert_results.py results sums.json

`sums.json` gets the new path and the new SHA-256 sum of every file by the old ones.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcert.evidence.record import VERSION, Evidence
from patchcert.files import sha256
from patchcert.threats import threat_from_dict
from patchcert.train.read import read_spec

IMAGE = {"mnist": [1, 28, 28], "cifar10": [3, 32, 32], "imagenet": [3, 224, 224]}
RENAMED = {"verdict": "certified"}
RESTRUCTURED = ("kind", "threat", "data", "plan", "settings", "seed", "defense", "adaptive", "certified_only", "retained", "confidence")
Meta = dict[str, Any]
Columns = dict[str, NDArray[Any]]


def main(results: Path, sums: Path) -> None:
    """Convert every file below the folder, and note what became of each."""
    moved: dict[str, dict[str, str]] = {"sha256": {}, "path": {}}
    for file in sorted(results.rglob("*.npz")):
        before = sha256(file)
        written = convert_trials(file) if file.name.startswith("tune-") else convert(file)
        file.unlink()
        moved["sha256"][before] = sha256(written)
        moved["path"][str(file)] = str(written)
    for folder in sorted(path.parent for path in results.glob("*/summary.json")):
        convert_summary(folder)
    sums.write_text(json.dumps(moved, indent=1) + "\n", encoding="utf-8")


def convert(file: Path) -> Path:
    """The same rows in the new format; not one number differs."""
    columns, meta = read(file)
    question = asked(meta)
    facts = {key: value for key, value in meta.items() if key not in RESTRUCTURED}
    new = {RENAMED.get(name, name): column for name, column in columns.items()}
    new.setdefault("index", np.arange(len(columns["label"]), dtype=np.int16))
    if question["kind"] == "certify" and "votes" in columns:
        right = columns["prediction"] == columns["label"]
        new["certified"] = (columns["radius"] >= threat_from_dict(question["threat"]).pixels) & right
    if question["classifier"].get("verdicts_only"):
        assert np.isnan(columns["margin"]).all()
        assert (columns["worst_top"] == -1).all()
        assert (columns["worst_left"] == -1).all()
        for name in ("margin", "worst_top", "worst_left"):
            del new[name]
    evidence = Evidence(new, {"version": VERSION, **question, **facts, **more_facts(file, meta)})
    target = file.with_name(f"{evidence.question.name}.npz")
    assert not target.exists(), f"{file} and another file answer one question"
    evidence.write(target)
    check(file, target)
    return target


def check(old: Path, new: Path) -> None:
    """No row may be lost or changed."""
    before, meta = read(old)
    after = Evidence.read(new)
    for name, column in before.items():
        renamed = RENAMED.get(name, name)
        if renamed in after.columns:
            np.testing.assert_array_equal(after.columns[renamed], column, strict=True)
        else:
            assert name in ("margin", "worst_top", "worst_left"), f"{old} loses {name}"
    assert after.weights == meta["weights_sha256"]
    assert after.meta["data"]["sha256"] == meta["data"]["sha256"]
    for key in ("device", "versions", "seconds"):
        assert after.meta[key] == meta[key], f"{old} loses {key}"
    assert meta.get("command", after.meta["command"]) == after.meta["command"]


def read(file: Path) -> tuple[Columns, Meta]:
    """The columns of an old file, and how they came about."""
    with np.load(file, allow_pickle=False) as stored:
        columns = {name: stored[name] for name in stored.files}
    return columns, json.loads(str(columns.pop("meta")))


def asked(meta: Meta) -> Meta:
    """The question that an old file answers."""
    if meta["kind"] in ("certify", "votes"):
        threat = meta.get("threat", {"kind": "sparse", "pixels": 1, "bound": "tight"})
        return {"kind": "certify", "threat": threat, "data": data(meta), "classifier": classifier(meta)}
    return {
        "kind": "attack",
        "threat": meta["threat"],
        "data": data(meta),
        "classifier": {"name": "Defended", "defense": meta["defense"]} if meta["defense"] else {"name": "Model"},
        "attack": attack(meta),
        "certified_only": meta.get("certified_only", False),
    }


def data(meta: Meta) -> Meta:
    """Which images. The folder of ImageNet has one split, of validation images, which `patchcert` calls test."""
    old = meta["data"]
    assert old.get("limit") is None
    split = "test" if old["name"] == "imagenet" else old["split"]
    drawn = old.get("images")
    seed = meta["plan"]["seed"] if "plan" in meta else meta.get("seed", 0)
    which = {} if drawn is None else {"drawn": drawn, "seed": seed}
    return {"name": old["name"], "split": split, **which, "image": IMAGE[old["name"]], "sha256": old["sha256"]}


def classifier(meta: Meta) -> Meta:
    if meta["kind"] == "certify":
        settings = meta["settings"]
        assert settings["memory_budget"] is None
        bare = {"verdicts_only": True} if settings.get("verdicts_only") else {}
        return {"name": "IntervalBounds", "dtype": settings["dtype"], **bare}
    plan = meta["plan"]
    return {
        "name": "RandomAblation",
        "retained": meta["retained"],
        "selection_samples": plan["selection"],
        "estimation_samples": plan["estimation"],
        "error_rate": plan["error_rate"],
        "precision": plan["precision"],
        "seed": plan["seed"],
    }


def attack(meta: Meta) -> Meta:
    if "plan" not in meta:
        return {**meta["settings"], "seed": meta["seed"]}
    plan = meta["plan"]
    if meta["kind"] == "attack-corners":
        assert (plan["steps"], plan["restarts"], plan["step_size"]) == (150, 4, 0.05)
        settings = meta["settings"]
        inner = patch_attack(4, "random", settings["batch_size"], check_every=settings["check_every"])
        return {"kind": "CornerAttack", "adaptive": meta["adaptive"], "attack": inner, "seed": plan["seed"]}
    assert (plan["steps"], plan["settings"]) == (150, None)
    batch_size = 16384 if meta["device"].startswith("NVIDIA") else 512
    unaware = patch_attack(plan["restarts"], plan["search"], batch_size)
    if not plan["defense"]:
        return {**unaware, "seed": plan["seed"]}
    if not plan["adaptive"]:
        return {"kind": "TransferAttack", "attack": unaware, "seed": plan["seed"]}
    assert (plan["sweep_vertices"], plan["both_losses"]) == (16, True)
    series = [{**unaware, "sweep_vertices": 16}, {**unaware, "loss": "margin"}]
    aware = {"kind": "AttackSeries", "attacks": series}
    return {"kind": "AdaptiveAfterTransfer", "first": unaware, "attack": aware, "seed": plan["seed"]}


def patch_attack(restarts: int, search: str, batch_size: int, check_every: int = 25) -> Meta:
    return {
        "kind": "PatchAttack",
        "steps": 150,
        "step_size": 0.05,
        "restarts": restarts,
        "loss": "cross-entropy",
        "search": search,
        "sweep_steps": 5,
        "sweep_vertices": 0,
        "batch_size": batch_size,
        "check_every": check_every,
        "early_stop": True,
    }


def more_facts(file: Path, meta: Meta) -> Meta:
    """What old files said elsewhere, or left to their plan; and the command for those that named none."""
    facts: Meta = {}
    plan = meta.get("plan", {})
    if meta["kind"] in ("certify", "votes"):
        facts["guarantee"] = {"promise": "recovery", "confidence": meta.get("confidence", 1.0)}
    if meta["kind"] in ("votes", "attack-corners"):
        facts["settings"] = meta["settings"]
    if "tuning" in meta:
        facts["tuning"] = {"images": plan["tuned_on"], "largest_drop": plan["largest_drop"], **meta["tuning"]}
    if "command" not in meta:
        facts["command"] = command(file, meta)
    return facts


def command(file: Path, meta: Meta) -> str:
    plan = meta["plan"]
    if meta["kind"] == "attack":
        options = (f"--{option} {plan[option]}" for option in ("images", "restarts", "steps", "seed", "search"))
        is_own = read_spec(file.parent / "spec.toml").threat == threat_from_dict(meta["threat"])
        shape = "" if is_own else f"--shape {meta['threat']['stamp']} "
        return f"patchcert attack {file.parent.name} {shape}{' '.join(options)}"
    if meta["kind"] == "votes":
        return "patchcert reproduce sparse-vs-ablation --rows " + shlex.quote(f"{meta['data']['name']} ablation")
    if meta["kind"] == "attack-corners":
        words = f"{plan['patch']}x{plan['patch']} {meta['defense_name']}"
        return f"patchcert reproduce break-imagenet --rows {shlex.quote(words)}"
    words = f"{meta['data']['name'].removesuffix('10')} {plan['patch']} {plan['defense']}"
    return f"patchcert reproduce compare-defenses --rows {shlex.quote(words)}"


def convert_trials(file: Path) -> Path:
    """Trials of a defense's settings have one row per setting, not per image: a plain document."""
    columns, meta = read(file)
    plan = meta["plan"]
    target = file.with_name(f"tuning-{plan['patch']}-{plan['defense']}.json")
    assert not target.exists()
    rows = list(zip(*(columns[name].tolist() for name in ("setting", "clean", "weak")), strict=True))
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({**meta, "columns": ["setting", "clean", "weak"]}, indent=1).removesuffix("\n}")
    target.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    again = json.loads(target.read_text(encoding="utf-8"))
    assert [tuple(row) for row in again["rows"]] == rows
    assert {key: again[key] for key in meta} == meta
    return target


def convert_summary(folder: Path) -> None:
    """Accuracies by the new names; everything else stays."""
    file = folder / "summary.json"
    summary = json.loads(file.read_text(encoding="utf-8"))
    found = [Evidence.read(path) for path in sorted(folder.glob("*.npz"))]
    if "cells" in summary:
        old = {(cell.split("-")[1], cell.endswith("adaptive")): value for cell, value in summary["cells"].items()}
        summary["cells"] = {
            stem(each): old[each.meta["defense_name"], each.meta["attack"]["adaptive"]] for each in found
        }
        assert len(summary["cells"]) == len(old)
    else:
        proven = [each for each in found if each.kind == "certify"]
        attacked = [each for each in found if each.kind == "attack" and not each.question.certified_only]
        summary.pop("voted_accuracy", None)
        old_clean = summary["clean_accuracy"]
        summary["certified_accuracy"] = {stem(each): each.certified / each.total for each in proven}
        summary["attacked_accuracy"] = {stem(each): each.withstood / each.total for each in attacked}
        assert old_clean is None or old_clean == proven[0].correct / proven[0].total
    file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def stem(evidence: Evidence) -> str:
    assert evidence.path is not None
    return evidence.path.stem


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
