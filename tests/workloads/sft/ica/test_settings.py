"""The `ica` section of a recipe."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from narrowcast.workloads.sft.ica.settings import IcaSection


def test_by_default_nothing_is_asked_for_and_the_defaults_are_those_of_the_source():
    section = IcaSection()
    assert not section.wanted
    assert (section.ica_components, section.ica_percentile, section.samples) == (5, 98.0, 100)
    assert section.ica_dtype is None
    assert (section.skip_first, section.clip_activations) == (1, None)
    assert section.component_ids == (0,)


@pytest.mark.parametrize(
    ("given", "mode", "freezes"),
    [
        ({"mask_mode": "lesion"}, "lesion", False),
        ({"mask_mode": "key"}, "lesion", False),
        ({"mask_mode": "complement"}, "preserve", False),
        ({"mask_mode": "freeze"}, None, True),
        ({"freeze": True}, None, True),
        ({"mask_mode": "lesion", "freeze": True}, "lesion", True),
        ({"mask_mode": "scale", "scale": 1.5}, "scale", False),
    ],
)
def test_masks_and_freezing_are_switches_of_their_own(given, mode, freezes):
    section = IcaSection(**given)
    assert (section.mode, section.freezes, section.wanted) == (mode, freezes, True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mask_mode": "scale"}, "mask_mode=scale and the factor scale go together"),
        ({"mask_mode": "lesion", "scale": 2.0}, "mask_mode=scale and the factor scale go together"),
        ({"ica_components": 9}, "ica_components without mask_mode or freeze=true has no effect"),
        (
            {"mask_mode": "lesion", "ica_template_path": "n.json", "samples": 5},
            "leave samples or the path out",
        ),
        (
            {"freeze": True, "ica_zscore": 2.0, "ica_top_k": 5},
            "ica_zscore and ica_top_k select channels in different ways; keep one",
        ),
        ({"freeze": True, "ica_two_sided": True}, "ica_two_sided needs ica_zscore"),
        ({"freeze": True, "ica_dtype": "float8"}, "ica_dtype"),
        ({"freeze": True, "ica_component_ids": ()}, "at least 1 item"),
        ({"mask_mode": "lesoin"}, "mask_mode"),
        ({"freeze": True, "clip_activations": 1.0}, "clip_activations"),
        ({"freeze": True, "skip_first": -1}, "skip_first"),
        (
            {"freeze": True, "ica_template_path": "n.json", "skip_first": 2},
            "leave skip_first or the path out",
        ),
    ],
)
def test_what_would_be_without_effect_is_refused(given, said):
    with pytest.raises(ValidationError, match=said):
        IcaSection(**given)


def test_settings_and_the_report_are_read_without_torch():
    code = (
        "import sys; import narrowcast.workloads.sft.ica.settings;"
        "import narrowcast.workloads.sft.ica.page;"
        "import narrowcast.workloads.sft.command;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
