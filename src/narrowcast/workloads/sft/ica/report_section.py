"""What the report of a run says of functional networks: a pure function of its folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from narrowcast.runs import Record, ReportSection
from narrowcast.workloads.sft.ica.networks_file import load_networks
from narrowcast.workloads.sft.ica.page.sections import (
    ablation_section,
    masked_section,
    networks_section,
)
from narrowcast.workloads.sft.ica.study.ablation import load_ablation

NETWORKS, MASKED, ABLATION = "networks.json", "masked.json", "ablation.json"
"""Files of the run folder: its networks, how the model does with masks and without, an ablation."""


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return what there is to draw; nothing of a run without networks."""
    result = []
    if (folder / NETWORKS).exists():
        result.append(networks_section(load_networks(folder / NETWORKS)))
    if (folder / MASKED).exists():
        result.append(masked_section(json.loads((folder / MASKED).read_text(encoding="utf-8"))))
    if (folder / ABLATION).exists():
        result.append(ablation_section(load_ablation(folder / ABLATION)))
    return result
