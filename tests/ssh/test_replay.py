"""A call that failed on a host is run again on the client's computer, with the packages of the host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import skyward as sky
from skyward.pool.replay import Replay

FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')


@sky.compute
def fails() -> None:
    import os
    import sys

    import numpy

    raise ValueError(numpy.__version__, sys.prefix != sys.base_prefix, sky.instance_info().node, os.uname().nodename)


def test_a_call_that_failed_on_a_host_has_its_packages_here(
    pool: sky.ComputePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))
    with sky.ComputePool(provider=pool.provider, image=pool.image, console=False) as mine:
        with pytest.raises(ValueError) as there:
            fails() >> mine
    again = Replay(there.value)
    assert again.pool.packages
    told = again.differences()
    ended = again.run()
    assert isinstance(ended.error, ValueError)
    assert ended.error.args[:3] == there.value.args[:3]
    assert FRAME.findall(ended.text) == FRAME.findall(again.call.error) != []
    assert any(text.startswith("host: ") for text in told) == (ended.error.args[3] != there.value.args[3])
