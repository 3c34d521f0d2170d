import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["narrowcast.config", "narrowcast.runs"])
def test_a_package_is_imported_without_what_makes_a_start_slow(package):
    heavy = {"torch", "numpy", "ruamel.yaml", "click", "rich", "jinja2", "plotly"}
    code = f"import {package}, sys; print(*{heavy!r} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert answer.stdout.split() == []


def test_the_run_folder_needs_the_standard_library_only():
    code = (
        "import sys; before = set(sys.modules); import narrowcast.runs;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "sys.exit(', '.join(sorted(new - {'narrowcast'} - set(sys.stdlib_module_names))))"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert answer.stderr.decode().strip() == ""


def test_public_modules_are_there_after_one_import():
    code = (
        "import narrowcast as nc; print(nc.numerics.FP16.largest, nc.errors.ConfigError.exit_code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["65504.0", "2"]
