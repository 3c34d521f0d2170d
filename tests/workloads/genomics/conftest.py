from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared():
    """A folder of real data by its name, or a skip that says what it needs."""

    def folder(name):
        for up in Path(__file__).parents:
            if (up / "shared/data" / name).is_dir():
                return up / "shared/data" / name
        return pytest.skip(f"needs the real data in ../shared/data/{name}")

    return folder
