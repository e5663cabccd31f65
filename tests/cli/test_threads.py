import os
import subprocess
import sys

import pytest
import torch

from patchcert.cli.app import run
from patchcert.cli.threads import SPINS, using_threads, wait_gently


def test_threads_sleep_unless_the_user_has_chosen():
    environment = {}
    wait_gently(environment)
    assert environment == {"GOMP_SPINCOUNT": SPINS}
    for chosen in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        environment = dict(chosen)
        wait_gently(environment)
        assert environment == chosen


def test_the_choice_is_made_before_torch_is_there():
    code = (
        "import os, sys\n"
        "from patchcert.cli import app\n"
        "app.run = lambda arguments: (os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules) != ('1000', False)\n"
        "app.main([])"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    assert subprocess.run([sys.executable, "-c", code], env=clean).returncode == 0


def test_threads_are_set_while_work_lasts():
    before = torch.get_num_threads()
    with using_threads(1):
        assert torch.get_num_threads() == 1
    with using_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("command", ["certify", "attack", "train"])
def test_a_number_of_threads_is_at_least_1(refused, command):
    assert "'0' is not a whole number of at least 1" in refused(run([command, "anything", "--threads", "0"]))
