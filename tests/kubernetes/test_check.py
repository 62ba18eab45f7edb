"""The program for the first user with a cluster, and a template as people write it: a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from tests.kubernetes.conftest import USER
from tests.support.kubernetes.cluster import Cluster

CHECK = Path(__file__).parents[2] / "examples" / "kubernetes_check.py"


def test_the_check_opens_a_pool_and_reports(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", **USER}))
    argv = [sys.executable, str(CHECK), "--nodes", "1", "--template", str(template)]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "opened 1 pods" in done.stdout
    assert "20 MB" in done.stdout
    assert "is deleted" in done.stdout
