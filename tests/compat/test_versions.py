"""Which torch versions are taken, warned of and refused."""

import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.compat import versions

SUFFIX = st.sampled_from(["", ".0", ".1+cpu", ".0+cu130", ".0a0+git0123abc", ".0.dev20261122+cu130", "rc1", "+local"])


@given(major=st.integers(0, 30), minor=st.integers(0, 300), suffix=SUFFIX)
def test_minor_version_of_any_build(major, minor, suffix):
    assert versions.minor_version(f"{major}.{minor}{suffix}") == (major, minor)


@pytest.mark.parametrize("text", ["", "2", "two", "v2.15", "2.x", "Unknown"])
def test_no_version(text):
    with pytest.raises(ValueError, match="is not a version of torch"):
        versions.minor_version(text)


def test_the_torch_that_is_installed():
    release = torch.torch_version.TorchVersion(torch.__version__)  # torch's own comparison
    assert release >= versions.TORCH and release < (versions.TORCH[0], versions.TORCH[1] + 1)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0+cpu", "2.14.0", "2.15.3"])
def test_tested_versions_are_silent(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_version(version)


@pytest.mark.parametrize("version", ["2.16.0.dev20261122", "2.100.0", "3.0.0"])
def test_a_version_that_is_not_known_gets_one_warning(version):
    with pytest.warns(UserWarning) as caught:
        versions.check_version(version)
    (warning,) = caught
    assert str(warning.message).startswith(f"stepgraph is not tested with torch {version}, only with 2.11 to 2.15:")
    assert "\n" not in str(warning.message)


@pytest.mark.parametrize("version", ["2.10.1", "2.9.0", "1.13.1"])
def test_an_older_version_is_refused_in_one_line(version):
    with pytest.raises(ImportError) as caught:
        versions.check_version(version)
    line = f"stepgraph needs torch 2.11 or newer, and torch {version} is installed: pip install 'torch>=2.11'"
    assert str(caught.value) == line


def import_under(version: str) -> subprocess.CompletedProcess[str]:
    program = f"""
        import torch
        torch.__version__ = torch.torch_version.TorchVersion({version!r})
        import stepgraph
        import stepgraph.compat
        """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)


def test_importing_stepgraph_warns_once_and_works():
    done = import_under("9.0.0")
    assert done.returncode == 0 and done.stderr.count("is not tested with torch 9.0.0") == 1


def test_importing_stepgraph_refuses_an_old_torch():
    done = import_under("2.10.0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: stepgraph needs torch 2.11 or newer, and torch 2.10.0")
