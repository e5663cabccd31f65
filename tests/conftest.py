"""What tests share: one thread, reproducible examples, the real data where there are any, runs that somebody seems to
have finished, a reader of pages, and a browser."""

import html
import itertools
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from shape_checks import check_shapes_on_import

# Before any other module of the package is imported, so that every call in every test is checked.
check_shapes_on_import("patchcert")

from patchcert.evidence import Evidence, EvidenceFolder, Question, Selection  # noqa: E402
from patchcert.evidence.record import VERSION  # noqa: E402
from patchcert.evidence.results import Circumstances, collect  # noqa: E402
from patchcert.files import sha256  # noqa: E402
from patchcert.models import ModelSpec, build, save  # noqa: E402
from patchcert.train.run_folder import EVIDENCE, Run  # noqa: E402
from patchcert.train.spec import read_spec  # noqa: E402

CHECKSUMS = {"file": "0" * 64}
INTERVALS = {"name": "IntervalBounds", "dtype": "float32"}

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("deep", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_draws():
    """A test that draws without a generator draws the same every time, in whatever order tests run."""
    torch.manual_seed(0)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def real_data():
    """Where official data files are: $PATCHCERT_DATA, or a folder of data beside the checkout."""
    beside = Path(__file__).parents[2]
    named = os.environ.get("PATCHCERT_DATA")
    for folder in [Path(named)] if named else [beside / "data", beside / "shared" / "data"]:
        if folder.is_dir():
            return folder
    pytest.skip("no official data files: set $PATCHCERT_DATA to their folder")


class FinishedRuns:
    """Run folders as they are once they are trained and measured, without the training and the measuring."""

    def __init__(self, folder):
        self.folder = folder

    def run(
        self,
        spec,
        counts,
        limit=None,
        seconds=10.0,
        weights_seed=0,
        loss=1.0,
        trimmed=False,
        scale=1.0,
        classifier=INTERVALS,
    ):
        """A finished run, or one of its trimmed model, from a spec and {threat: (correct, certified)} of 100 images."""
        name = spec.fingerprint(CHECKSUMS)
        run = Run.create(self.folder / ("trimmed" if trimmed else "made") / name, spec)
        tiny = ModelSpec("mlp", 1, 4, 4, **({"widths": (1,)} if trimmed else {"hidden": 2}))
        save(build(tiny, torch.Generator().manual_seed(weights_seed)), tiny, run.weights)
        run.append_metrics({"epoch": spec.schedule.epochs - 1, "loss": loss, "seconds": seconds})
        run.write_environment({"device": "NVIDIA H200", "data": {"checksums": CHECKSUMS}, "commit": "abc"})
        Circumstances(scale).write(run.path)
        for threat, (correct, certified) in counts.items():
            question = Question("certify", threat, Selection(spec.data.name, limit=limit), classifier)
            self.write(run, question, certificates(correct, certified))
        return run

    def write(self, run, question, columns, image=(1, 28, 28), **facts):
        """Evidence of the run's weights; the file."""
        asked = question.to_dict()
        data = {**asked["data"], "sha256": CHECKSUMS, "image": image}
        circumstances = {"weights_sha256": sha256(run.weights), "device": "NVIDIA H200", "seconds": 1.0}
        evidence = Evidence(columns, {"version": VERSION, **asked, "data": data, **circumstances, **facts})
        return evidence.write(EvidenceFolder(run.path / EVIDENCE).file(question)).path

    def collect(self, spec, counts, **options):
        """A finished run that is brought to the results."""
        return collect(self.run(spec, counts, **options), self.folder / "results")


def certificates(correct, certified, total=100):
    """Rows of which the first are right and, of those, the first are proven."""
    index = np.arange(total)
    return {
        "index": index,
        "label": np.zeros(total, np.int8),
        "prediction": np.where(index < correct, 0, 1).astype(np.int8),
        "certified": index < certified,
        "margin": np.where(index < certified, 0.5, -0.5).astype(np.float32),
    }


@pytest.fixture
def attack_rows():
    """Makes the rows of an attack on the images of an index, of which the first ones withstand it."""

    def make(index, withstood, correct=None):
        index, place = np.asarray(index), np.arange(len(index))
        return {
            "index": index,
            "label": np.zeros(len(index), np.int64),
            "prediction": np.where(place < (len(index) if correct is None else correct), 0, 1),
            "prediction_after": np.where(place < withstood, 0, 1),
            "succeeded": place >= withstood,
            "top": np.zeros(len(index), np.int64),
            "left": np.zeros(len(index), np.int64),
            "steps": np.full(len(index), 7),
        }

    return make


@pytest.fixture
def finished(tmp_path):
    return FinishedRuns(tmp_path)


@pytest.fixture
def mlp():
    """The paper's mlp on MNIST, all placements of a 5x5 patch."""
    return read_spec("paper-mnist")


@pytest.fixture
def check_outline():
    """Checks that the headings of a page leave no level out, and that every figure and drawing has a label."""

    def check(path):
        source = path.read_text(encoding="utf-8")
        levels = [int(level) for level in re.findall(r"<h([1-6])", source)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        figures = re.findall(r"<figure.*?</figure>", source, re.S)
        assert all("<figcaption" in figure for figure in figures)
        for drawing in re.findall(r"<svg[^>]*>|<img[^>]*>", source):
            assert "aria-label" in drawing or "hidden" in drawing, drawing

    return check


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
