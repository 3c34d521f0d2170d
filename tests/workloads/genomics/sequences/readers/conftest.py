import gzip

import pytest


@pytest.fixture
def write(tmp_path):
    """Write a file and return its path; `packed` by gzip, whatever its name says."""

    def written(content, name="file", *, packed=False):
        path = tmp_path / name
        content = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(gzip.compress(content) if packed else content)
        return path

    return written
