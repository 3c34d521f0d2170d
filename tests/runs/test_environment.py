import json
import os
import platform
import subprocess
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

import torch

from narrowcast.runs import describe_environment
from narrowcast.runs.environment import git_commit


def test_the_environment_is_json_and_says_what_the_run_ran_on():
    found = describe_environment()
    assert json.loads(json.dumps(found)) == found
    assert found["python"] == platform.python_version()
    assert found["torch"] == str(torch.__version__)
    assert found["narrowcast"] == version("narrowcast")
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory_bytes"] > 2**20
    assert len(found["gpus"]) == torch.cuda.device_count()
    started = datetime.fromisoformat(found["started"])
    assert timedelta(0) <= datetime.now(UTC) - started < timedelta(minutes=1)


def test_the_commit_is_that_of_the_checkout(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_commit(tmp_path) is None
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    answer = subprocess.run([*git, "log", "--format=%H"], check=True, capture_output=True)
    assert git_commit(tmp_path) == answer.stdout.decode().strip()


def test_there_is_no_commit_outside_a_checkout_or_without_git(tmp_path, monkeypatch):
    assert git_commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit(tmp_path) is None
