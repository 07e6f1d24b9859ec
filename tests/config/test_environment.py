"""The record of the software and hardware that a run had."""

import importlib.metadata
import json
import re
import socket
import subprocess
from pathlib import Path

import stepgraph
from stepgraph.config.environment import environment, git_state


def test_the_environment_names_no_machine():
    found = environment()
    text = json.dumps(found)
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["cpu_count"] >= 1
    assert socket.gethostname() not in re.split(r"[^\w.-]+", text)
    assert str(Path(stepgraph.__file__).parent) not in text and str(Path.home()) + "/" not in text


def test_the_state_of_a_git_checkout(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=t", "-c", "user.email=t@t")
        done = subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-q")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}
