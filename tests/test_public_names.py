import subprocess
import sys

import pytest

import patchcert as pc


@pytest.mark.parametrize("name", pc.__all__)
def test_every_public_name_is_there(name):
    assert getattr(pc, name) is not None
    assert name in dir(pc)


def test_certify_stays_a_function_whoever_imports_its_module_first():
    code = "import patchcert.certificates.intervals; import patchcert as pc; assert callable(pc.certify), pc.certify"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert callable(pc.certify)


def test_importing_the_package_is_cheap():
    code = "import sys, patchcert; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(
        AttributeError, match="module 'patchcert' has no attribute 'Sticker'; it has: .*Patch"
    ):
        _ = pc.Sticker
