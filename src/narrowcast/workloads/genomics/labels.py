"""The classes each task has by default, by the names its users know."""

from collections.abc import Mapping
from types import MappingProxyType

MOST_CLASSES = 10_000

TASK_LABELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "annotation": (
            "intergenic", "gene", "exon", "intron", "promoter", "enhancer", "silencer",
            "transcription_start_site", "transcription_end_site", "splice_site",
        ),
        "variant_effect": (
            "benign", "likely_benign", "uncertain_significance", "likely_pathogenic", "pathogenic",
        ),
        "protein_function_go": (
            "molecular_function", "biological_process", "cellular_component", "catalytic_activity",
            "binding", "transporter_activity", "enzyme_regulator_activity",
        ),
        "protein_function_ec": (
            "oxidoreductase", "transferase", "hydrolase", "lyase", "isomerase", "ligase",
            "translocase",
        ),
    }
)  # fmt: skip
