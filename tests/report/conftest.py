"""A made-up run whose every number is known, a reader of pages, and a browser."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from patchcert.report.summary import (
    AttackedImage,
    AttackRows,
    Box,
    CertificateMap,
    CertificateRows,
    RunSummary,
)
from patchcert.threats import Patch

IMAGES = 40
CLEAN, CERTIFIED, ATTACKED, BROKEN = 36, 28, 20, 6


def certificates(side: int = 2, certified: int = CERTIFIED) -> CertificateRows:
    """The last images are wrong, the first ones certified."""
    index = np.arange(IMAGES)
    label = index % 10
    prediction = np.where(index < CLEAN, label, (label + 1) % 10)
    margin = np.where(index < certified, 1.25 + index, -0.5 - index)
    zeros = np.zeros(IMAGES, dtype=np.int64)
    meta = {"command": f"patchcert certify runs/known --patch {side}"}
    return CertificateRows(
        Patch(side), index, label, prediction, index < certified, margin, zeros + 3, zeros + 7, meta
    )


def attacks(rows: CertificateRows) -> AttackRows:
    """Every second image is attacked; those neither certified nor wrong withstand."""
    index = np.arange(0, IMAGES, 2)
    succeeded = index >= CERTIFIED
    label = rows.label[index]
    after = np.where(succeeded, (label + 1) % 10, label)
    meta = {"command": "patchcert attack runs/known --restarts 8"}
    return AttackRows(rows.threat, index, label, after, succeeded, rows.top[index], rows.left[index], meta)


def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (IMAGES, 1, 12, 12), dtype=np.uint8)


@pytest.fixture
def run() -> RunSummary:
    rows, pictures = certificates(), images()
    margins = np.full((11, 11), 2.0)
    margins[3, 7] = -0.75
    changed = pictures[30].copy()
    changed[:, 3:5, 7:9] = 255 - changed[:, 3:5, 7:9]
    return RunSummary(
        name="known run",
        dataset="made-up",
        model="mlp (hidden 8)",
        threat=Patch(2),
        spec_text='[model]\nname = "mlp"\n',
        metrics=[
            {"epoch": 0, "epsilon": 0.0, "loss": 2.25, "learning_rate": 0.01},
            {"epoch": 1, "epsilon": 0.5, "loss": 1.5, "clean_accuracy": 0.8, "certified_accuracy": 0.25},
            {"epoch": 2, "epsilon": 1.0, "loss": 1.0, "clean_accuracy": 0.9, "certified_accuracy": 0.7},
        ],
        certificates=(rows,),
        attacks=(attacks(rows),),
        maps=(CertificateMap(29, pictures[29], 9, 9, False, 2, 2, margins),),
        attacked=(AttackedImage(30, pictures[30], changed, 0, 0, 1, (Box(3, 7, 2, 2),)),),
        thumbnails=pictures,
        classes=tuple(f"class {number}" for number in range(10)),
        environment={"versions": {"torch": "9.9.9"}, "device": "cpu"},
        checksums={"weights.safetensors": "ab" * 32},
    )


@pytest.fixture
def contradictory_run(run: RunSummary) -> RunSummary:
    """An attack broke image 4, which is certified."""
    attack = run.attacks[0]
    return replace(run, attacks=(replace(attack, succeeded=attack.succeeded | (attack.index == 4)),))


VOID = {"meta", "link", "img", "input", "br"}


class Reader(HTMLParser):
    """Fails on tags that do not nest; collects what the page loads and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element, line {self.getpos()[0]}"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def parse():
    def read(path: Path) -> Reader:
        """The page in the file, which must nest."""
        reader = Reader()
        reader.feed(path.read_text(encoding="utf-8"))
        reader.close()
        assert reader.open == []
        return reader

    return read


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
)

PROBE = """<script>(() => {
    let answer;
    try { answer = (() => { SCRIPT })(); } catch (error) { answer = String(error); }
    window.parent.postMessage(JSON.stringify(answer), "*");
})();</script></body>"""

FRAME = """<!DOCTYPE html><html><body><script>
    window.addEventListener("message", event => { document.body.dataset.answer = event.data; });
</script><iframe src="inner.html" style="border: 0; width: WIDTHpx; height: 900px"></iframe></body></html>"""


@pytest.fixture
def evaluate(tmp_path):
    """Runs a script in a page; skips where there is no browser, and fails if the page complains."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: install `chromium`")

    def run_script(page: Path, script: str, width: int = 1200) -> object:
        """What the script returns at the end of the page, in a frame, since windows are never narrow."""
        source = page.read_text(encoding="utf-8").replace("</body>", PROBE.replace("SCRIPT", script))
        (tmp_path / "inner.html").write_text(source, encoding="utf-8")
        outer = tmp_path / "outer.html"
        outer.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [CHROMIUM, *FLAGS, profile, "--virtual-time-budget=5000", "--dump-dom", outer.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "CONSOLE" not in done.stderr, done.stderr
        answer = re.search(r'<body data-answer="([^"]*)"', done.stdout)
        assert answer, done.stdout[:500]
        return json.loads(html.unescape(answer[1]))

    return run_script
