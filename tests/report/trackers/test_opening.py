import sys

import pytest

from narrowcast.errors import UnsupportedError
from narrowcast.report.trackers import open_trackers, require_trackers


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_refused_with_what_to_install(monkeypatch, name):
    for module in [m for m in sys.modules if m.split(".")[0] == name or "tensorboard" in m]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=f"pip install {name}"):
        require_trackers([name])


def test_no_trackers_need_nothing(tmp_path, step):
    require_trackers([])
    trackers = open_trackers(
        [], folder=tmp_path, earlier=[], recipe_text="", settings={}, tell=pytest.fail
    )
    trackers.take(step(1))
    trackers.close()
    assert list(tmp_path.iterdir()) == []
